//! Forks of the process. The number of the process is a question to the system at each call, which
//! costs as much as a launch on some; this is a load.
//!
//! The locks of a parent's pools may be held in its child, by threads that are not there.

use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

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

/// A value that ends in the process that made it. A child leaves it alone.
pub(crate) struct Own<T> {
    value: ManuallyDrop<T>,
    generation: u32,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), generation: generation() }
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.generation == generation() {
            // SAFETY: the value is whole, and nobody uses it after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T> Deref for Own<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Own<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}
