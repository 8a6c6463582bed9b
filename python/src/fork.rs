//! Forks of the process. The number of the process is a question to the system at each call, which
//! costs as much as a launch on some; this is a load.

use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

/// The forks between the process that loaded the module and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process's generation: another number than that of every process it descends from.
pub(crate) fn generation() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Begins to count. Python calls this once for each module that is loaded.
pub(crate) fn watch() -> PyResult<()> {
    static WATCHED: AtomicU32 = AtomicU32::new(0);
    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    if WATCHED.swap(1, Ordering::Relaxed) != 0 {
        return Ok(());
    }
    // SAFETY: the handler does nothing but add to an atomic, which is allowed in a child.
    match unsafe { libc::pthread_atfork(None, None, Some(in_child)) } {
        0 => Ok(()),
        _ => Err(PyImportError::new_err("the host has no memory for a handler of forks")),
    }
}
