//! The end of an allocator, at once or deferred until streams are done with its memory.
//!
//! The last free of an allocator whose keeper is gone must neither wait nor take memory from under
//! running work. Such an allocator is put aside here, and given back to the driver by a later call
//! of any allocator that finds its streams done.

use crate::checks::SweepScope;
use crate::core::ask_external;
use crate::state::Inner;
use crate::trim::give_back_idle;
use crate::trim::trim;
#[cfg(not(loom))]
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::Ordering;
use std::ptr::NonNull;

/// # Safety
/// - The caller owns `n` counts of the allocator and gives them up.
pub(crate) unsafe fn release(inner: NonNull<Inner>, n: u64) {
    // SAFETY: the caller's counts keep it alive up to this subtraction.
    if unsafe { (*inner.as_ptr()).refs.fetch_sub(n, Ordering::AcqRel) } == n {
        // SAFETY: the count is zero: no keeper, no weak lease, no row is out. It was made from a
        // box.
        destroy(unsafe { Box::from_raw(inner.as_ptr()) });
    }
}

#[cfg(not(loom))]
static DEFERRED: Mutex<Option<Box<Inner>>> = Mutex::new(None);

/// Destroys an allocator that nobody holds, now or when its streams are done. Takes no host memory:
/// the deferred ones are a list through the allocators themselves.
#[cfg(not(loom))]
fn destroy(mut inner: Box<Inner>) {
    if inner.checks.is_over() && inner.core.lock().is_over(&inner.table) {
        drop(inner);
    } else {
        let mut deferred = DEFERRED.lock();
        inner.next_deferred = deferred.take();
        *deferred = Some(inner);
    }
}

/// Destroys those whose streams are done. The list's lock is held for a moment only: asking
/// external streams calls the driver.
#[cfg(not(loom))]
pub(crate) fn sweep() {
    let Some(mut left) = DEFERRED.try_lock().and_then(|mut deferred| deferred.take()) else {
        return;
    };
    // One by one: a list would be dropped by recursion.
    loop {
        let next = left.next_deferred.take();
        ask_external(&left.core, &left.table);
        destroy(left);
        match next {
            Some(next) => left = next,
            None => return,
        }
    }
}

#[cfg(loom)]
fn destroy(inner: Box<Inner>) {
    drop(inner);
}

#[cfg(loom)]
pub(crate) fn sweep() {}

/// The keeper is gone: from now on rows that come back count down.
pub(crate) fn orphan(inner: &Inner) {
    inner.return_evicted_held(inner.caches.flush(true));
    let mut core = inner.core.lock();
    core.orphan = true;
    inner.refs.fetch_add(u64::from(core.vacant.live), Ordering::Relaxed);
}

impl Drop for Inner {
    /// Gives everything back to the driver. Nobody holds a row, and every stream is done with the
    /// memory.
    fn drop(&mut self) {
        let keeps = std::mem::take(&mut self.core.get_mut().keeps);
        drop(keeps);
        let (core, supply) = (&self.core, &self.supply);
        self.checks.sweep(core, supply, SweepScope::All);
        core.lock().ranges.park_all();
        give_back_idle(core, supply, u64::MAX);
        // A trim that fails has given back what it could; the rest is the driver's own fault and
        // leaks. (The thread caches were closed when the keeper went.)
        let _ = trim(core, supply, &self.table, 0);
        let Some((base, bytes)) = self.reservation.take() else { return };
        let heap = &self.core.get_mut().store.heap;
        // One span, whole again unless the driver kept a part.
        let mut spans = heap.spans.iter().filter(|s| s.live && s.paged);
        if spans.all(|s| heap.extents[s.first].units == s.units) {
            // SAFETY: the reservation is taken out of the allocator; its one span is whole again,
            // so nothing is mapped in it.
            unsafe { self.supply.backing.release(base, bytes) };
        }
    }
}
