//! Which threads run a call of a stream.
//!
//! Such a thread never waits for room in a queue, since it may be what the queue waits for.

use std::cell::Cell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Returns whether the thread runs a host or foreign call of some stream.
#[inline]
pub(crate) fn in_host_call() -> bool {
    DEPTH.get() != 0
}

/// Marks the thread as one that runs a call, until it is dropped.
pub(crate) struct InCallback;

impl InCallback {
    pub(crate) fn enter() -> Self {
        DEPTH.with(|n| n.set(n.get() + 1));
        Self
    }
}

impl Drop for InCallback {
    fn drop(&mut self) {
        DEPTH.with(|n| n.set(n.get() - 1));
    }
}
