//! Allocators that are gone but for memory which a stream may still be using.
//!
//! The last free of an allocator whose keeper is gone must neither wait nor take memory from under running work. Such an allocator is
//! put aside here, and given back to the driver by a later call of any allocator that finds its streams done.

use crate::allocator::Inner;
use leasehold_core::sync::Mutex;

#[cfg(not(loom))]
static GRAVES: Mutex<Option<Box<Inner>>> = Mutex::new(None);

/// Destroys an allocator that nobody holds, now or when its streams are done. Takes no host memory: the graves are a list through
/// the allocators themselves.
#[cfg(not(loom))]
pub(crate) fn bury(mut inner: Box<Inner>) {
    if inner.is_over() {
        drop(inner);
    } else {
        let mut graves = GRAVES.lock();
        inner.next_grave = graves.take();
        *graves = Some(inner);
    }
}

/// Destroys those whose streams are done.
#[cfg(not(loom))]
pub(crate) fn sweep() {
    let Some(mut graves) = GRAVES.try_lock() else { return };
    let mut left = graves.take();
    let mut over = None;
    while let Some(mut inner) = left {
        left = inner.next_grave.take();
        let list = if inner.is_over() { &mut over } else { &mut *graves };
        inner.next_grave = list.take();
        *list = Some(inner);
    }
    drop(graves);
    // One by one: a list would be dropped by recursion.
    while let Some(mut inner) = over {
        over = inner.next_grave.take();
        drop(inner);
    }
}

#[cfg(loom)]
pub(crate) fn bury(inner: Box<Inner>) {
    drop(inner);
}

#[cfg(loom)]
pub(crate) fn sweep() {}
