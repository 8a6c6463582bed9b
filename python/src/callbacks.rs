//! Python functions that threads of the runtime call, and the interpreter's end.
//!
//! A thread that waits for the interpreter when it ends is never woken, or is ended inside the
//! runtime. So the end closes this module first: it waits for the functions that run, and no other
//! one begins.

use crate::ending;
use crate::errors::raise;
use crate::fork;
use leasehold::{Error, Result};
use leasehold_core::OutOfMemory;
use leasehold_core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use leasehold_core::sync::thread;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::time::Duration;

/// Twice the functions that run, and 1 once no other may begin.
static GATE: AtomicUsize = AtomicUsize::new(0);
/// The generation of the process in which streams were given functions; [`NONE`] if none was.
static PROCESS: AtomicU32 = AtomicU32::new(NONE);
const NONE: u32 = u32::MAX;

/// Whether work of a stream may wait for the interpreter's lock.
pub(crate) fn are_used() -> bool {
    PROCESS.load(Ordering::Acquire) != NONE
}

/// Notes that a stream of this process is given a function. The thread is attached.
pub(crate) fn note(_: Python<'_>) {
    let own = fork::generation();
    let before = PROCESS.swap(own, Ordering::AcqRel);
    if before != own && before != NONE {
        // Functions that ran in the parent as it forked end there.
        GATE.fetch_and(1, Ordering::SeqCst);
    }
}

/// A copy of host bytes.
pub(crate) fn staged(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut copy = Vec::new();
    let no_memory = |_| Error::from(OutOfMemory::new("the host", bytes.len() as u64));
    copy.try_reserve_exact(bytes.len()).map_err(no_memory)?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

/// A function that runs.
struct Running;

impl Running {
    fn begin() -> Option<Self> {
        let running = Self;
        // Of this one and the end, one sees the other.
        if GATE.fetch_add(2, Ordering::SeqCst) & 1 == 0 { Some(running) } else { None }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        GATE.fetch_sub(2, Ordering::SeqCst);
    }
}

/// Runs code of Python on a thread of the runtime. `None` once the interpreter ends.
pub(crate) fn run<R>(call: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    let running = Running::begin()?;
    let result = Python::try_attach(call);
    drop(running);
    result
}

/// The text of an exception, with its class.
fn text(py: Python<'_>, error: &PyErr) -> String {
    let class = error.get_type(py).name().map_or_else(|_| "an exception".into(), |n| n.to_string());
    let text = error.value(py).str().map(|text| text.to_string_lossy().into_owned());
    match text {
        Ok(text) if !text.is_empty() => format!("{class}: {text}"),
        _ => class,
    }
}

/// Calls a function on a thread of the runtime.
///
/// # Errors
/// The text of what it raised.
pub(crate) fn call(function: &Py<PyAny>, arguments: &Py<PyTuple>) -> Result<()> {
    let called = run(|py| {
        let result = function.bind(py).call1(arguments.bind(py));
        result.map(drop).map_err(|error| {
            let name = function.bind(py).repr().map_or_else(|_| "it".into(), |r| r.to_string());
            Error::other(format!("the host call {name} raised {}", text(py, &error)))
        })
    });
    called.unwrap_or_else(|| Err(Error::state("the interpreter ends: a host call did not run")))
}

/// Tells a function of a result: `None`, or the exception. Nobody hears of what it raises.
pub(crate) fn tell(function: &Py<PyAny>, result: Result<()>) {
    run(|py| {
        let error = result.err().map(|error| raise(error).into_value(py));
        if let Err(error) = function.bind(py).call1((error,)) {
            error.write_unraisable(py, Some(function.bind(py)));
        }
    });
}

/// Lets no further function begin, and waits for those that run. An interpreter calls this as it
/// ends, while its other threads still run.
#[pyfunction]
pub(crate) fn close(py: Python<'_>) -> PyResult<()> {
    GATE.fetch_or(1, Ordering::SeqCst);
    // A call that ran in the parent as it forked ends there.
    let is_own = PROCESS.load(Ordering::Acquire) == fork::generation();
    while is_own && GATE.load(Ordering::SeqCst) > 1 {
        py.check_signals()?;
        py.detach(|| thread::sleep(Duration::from_millis(5)));
    }
    ending::prepare(py)
}
