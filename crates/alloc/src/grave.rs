//! Allocators that are gone but for memory which a stream may still be using.
//!
//! The last free of an allocator whose keeper is gone must neither wait nor take memory from under running work. Such an allocator is
//! put aside here, and given back to the driver by a later call of any allocator that finds its streams done.

use crate::allocator::Inner;
use leasehold_core::sync::Mutex;

#[cfg(not(loom))]
static GRAVES: Mutex<Vec<Inner>> = Mutex::new(Vec::new());

/// Destroys an allocator that nobody holds, now or when its streams are done.
#[cfg(not(loom))]
pub(crate) fn bury(inner: Box<Inner>) {
    if inner.is_over() {
        drop(inner);
    } else {
        GRAVES.lock().push(*inner);
    }
}

/// Destroys those whose streams are done.
#[cfg(not(loom))]
pub(crate) fn sweep() {
    let over: Vec<_> = match GRAVES.try_lock() {
        Some(mut graves) if !graves.is_empty() => graves.extract_if(.., |i| i.is_over()).collect(),
        _ => return,
    };
    drop(over);
}

#[cfg(loom)]
pub(crate) fn bury(inner: Box<Inner>) {
    drop(inner);
}

#[cfg(loom)]
pub(crate) fn sweep() {}
