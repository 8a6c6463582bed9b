//! The end of an allocator, at once or deferred until streams are done with its memory.
//!
//! The last free of an allocator whose keeper is gone must neither wait nor take memory from under
//! running work. Such an allocator is put aside here, and given back to the driver by a later call
//! of any allocator that finds its streams done.

use crate::state::Inner;
use crate::watch::SweepScope;
use leasehold_core::PackedTimepoint;
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
    if inner.is_over() {
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
        left.ask_external();
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

impl Inner {
    /// The keeper is gone: from now on rows that come back count down.
    pub(crate) fn orphan(&self) {
        self.return_evicted_held(self.caches.flush(true));
        let mut core = self.core.lock();
        core.orphan = true;
        self.refs.fetch_add(u64::from(core.vacant.live), Ordering::Relaxed);
    }

    /// Whether every stream is done with the memory.
    pub(crate) fn is_over(&self) -> bool {
        if self.watch.as_ref().is_some_and(|w| !w.is_over()) {
            return false;
        }
        let mut core = self.core.lock();
        self.settle(&mut core);
        let mut over = !core.deferred.any();
        core.store.slabs.pending(|_, s| over &= s.has_passed());
        self.each_aside(core.retired, |row| {
            over &= row.buffer.used_until() == Some(PackedTimepoint::NEVER);
        });
        over && core.ranges.is_over() && core.store.heap.is_over()
    }
}

impl Drop for Inner {
    /// Gives everything back to the driver. Nobody holds a row, and every stream is done with the
    /// memory.
    fn drop(&mut self) {
        let keeps = std::mem::take(&mut self.core.get_mut().keeps);
        drop(keeps);
        if let Some(watch) = &self.watch {
            self.sweep_held(watch, SweepScope::All);
        }
        self.end_ranges();
        // A trim that fails has given back what it could; the rest is the driver's own fault and
        // leaks. (The thread caches were closed when the keeper went.)
        let _ = self.trim_core(0);
        let Some((base, bytes)) = self.reservation.take() else { return };
        let heap = &self.core.get_mut().store.heap;
        // One span, whole again unless the driver kept a part.
        let mut spans = heap.spans.iter().filter(|s| s.live && s.paged);
        if spans.all(|s| heap.extents[s.first].units == s.units) {
            // SAFETY: the reservation is taken out of the allocator; its one span is whole again,
            // so nothing is mapped in it.
            unsafe { self.backing.release(base, bytes) };
        }
    }
}
