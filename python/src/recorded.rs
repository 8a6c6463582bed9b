//! What a recording was given: for the order of its graph with uses that are not the runtime's, and
//! so that nobody takes what was recorded for done.

use crate::errors::raise;
use crate::memory::{self, Block};
use leasehold::Error;
use leasehold_core::sync::{Arc, Mutex};
use pyo3::prelude::*;
use std::cell::RefCell;
use std::sync::Weak;

thread_local! {
    /// The recordings that the thread began. Those that are over have no blocks.
    static BEGUN: RefCell<Vec<Weak<Recorded>>> = const { RefCell::new(Vec::new()) };
}

/// The memory that a recording was given. The recording itself keeps it, and its graph does.
pub(crate) struct Recorded(Mutex<Vec<Arc<Block>>>);

impl Recorded {
    /// Nothing yet, of a recording of this thread.
    pub(crate) fn begin() -> Arc<Self> {
        let made = Arc::new(Self(Mutex::default()));
        BEGUN.with_borrow_mut(|begun| {
            begun.retain(|recorded| recorded.strong_count() > 0);
            begun.push(Arc::downgrade(&made));
        });
        made
    }

    pub(crate) fn add(&self, blocks: &[Arc<Block>]) {
        self.0.lock().extend(blocks.iter().cloned());
    }

    /// All of the memory, as the recording is over.
    pub(crate) fn take(&self) -> Vec<Arc<Block>> {
        std::mem::take(&mut *self.0.lock())
    }

    fn has(&self, block: &Block) -> bool {
        self.0.lock().iter().any(|recorded| std::ptr::eq(&**recorded, block))
    }
}

/// Refuses to touch memory that a recording of this thread was given and has not run on.
///
/// # Errors
/// `InvalidStateError`.
pub(crate) fn refuse(blocks: &[&Block]) -> PyResult<()> {
    let begun: Vec<_> = BEGUN.with_borrow(|begun| begun.iter().filter_map(Weak::upgrade).collect());
    if begun.iter().any(|recorded| blocks.iter().any(|block| recorded.has(block))) {
        return Err(raise(Error::recording(
            "this thread records work on the buffer, and nothing of it has run; read and write the \
             elements after a launch of the graph, or give that to the stream which records",
        )));
    }
    Ok(())
}

/// Waits until no stream uses any of these blocks of the host, as [`memory::settle`] does.
///
/// # Errors
/// As [`refuse`]; the failure of the work that was to write them.
pub(crate) fn settle(py: Python<'_>, blocks: &[&Block]) -> PyResult<()> {
    refuse(blocks)?;
    memory::settle(py, blocks).map_err(raise)
}
