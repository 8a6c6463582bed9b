//! Threads that wait for the interpreter's lock as the interpreter ends, in Python 3.10.
//!
//! An interpreter that ends keeps its lock. A thread that waits for the lock looks each 5 ms, and
//! ends itself once it sees that. From 3.10.8 on such a thread writes to the interpreter's state
//! first (python/cpython#96387), and only 3.10 frees that state. So a thread that looks too late
//! ends the process by a signal. Neither 3.9 nor 3.11 does both.
//!
//! The cure is a wait between the two: the last collection of garbage comes once threads end
//! themselves, and before the state is freed. It keeps the lock until the threads are gone.

use leasehold_core::sync::Mutex;
use leasehold_core::sync::thread;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::path::Path;
use std::time::{Duration, Instant};

/// The system's numbers of the threads that the end may find.
static THREADS: Mutex<Vec<u32>> = Mutex::new(Vec::new());
/// The longest wait. Threads that wait for something else than the lock stay, and do no harm.
const LIMIT: Duration = Duration::from_millis(250);
const NAP: Duration = Duration::from_millis(1);

/// Prepares for the interpreter's end, which is about to begin.
pub(crate) fn prepare(py: Python<'_>) -> PyResult<()> {
    if py.version_info() < (3, 10) || py.version_info() >= (3, 11) {
        return Ok(());
    }
    let threading = py.import("threading")?;
    let own = threading.call_method0("get_native_id")?;
    let mut others = Vec::new();
    for thread in threading.call_method0("enumerate")?.try_iter()? {
        let number = thread?.getattr("native_id")?;
        if !number.is_none() && !number.eq(&own)? {
            others.push(number.extract()?);
        }
    }
    if others.is_empty() {
        return Ok(());
    }
    *THREADS.lock() = others;
    let module = py.import("leasehold._native")?;
    let callback = wrap_pyfunction!(outlast, &module)?;
    py.import("gc")?.getattr("callbacks")?.call_method1("append", (callback,)).map(drop)
}

/// Waits until the threads are gone, and keeps the interpreter's lock. Each collection of garbage
/// calls this, and before the end it does nothing.
#[pyfunction]
#[pyo3(signature = (*_arguments))]
fn outlast(_arguments: &Bound<'_, PyTuple>) {
    // SAFETY: the question may be asked at any time.
    if unsafe { ffi::Py_IsInitialized() } != 0 {
        return;
    }
    let threads = std::mem::take(&mut *THREADS.lock());
    let is_there = |number: &u32| Path::new(&format!("/proc/self/task/{number}")).exists();
    let begin = Instant::now();
    while begin.elapsed() < LIMIT && threads.iter().any(is_there) {
        thread::sleep(NAP);
    }
}
