//! Counters of one allocator: what its slow path did, and the bytes that are live.

use leasehold_core::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Counters of the slow path.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) growths: AtomicU64,
    pub(crate) remaps: AtomicU64,
    pub(crate) host_waits: AtomicU64,
    pub(crate) inserted_waits: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) in_graphs: AtomicU64,
    pub(crate) in_executables: AtomicU64,
    /// Written under the lock only.
    pub(crate) live_bytes: AtomicU64,
    pub(crate) live_peak: AtomicU64,
    /// Live bytes that thread caches lent beyond what the lock's holders counted, as far as they
    /// have reported.
    pub(crate) reported: AtomicI64,
}

impl Counters {
    /// The lock's holder counts live bytes, which may be below zero while thread caches are ahead.
    /// Returns whether the live bytes may exceed their peak.
    #[inline]
    pub(crate) fn add_live(&self, by: i64) -> bool {
        let live = self.live_bytes.load(Ordering::Relaxed).wrapping_add_signed(by);
        self.live_bytes.store(live, Ordering::Relaxed);
        by > 0 && self.exceeds_peak(live.wrapping_add_signed(self.reported.load(Ordering::Relaxed)))
    }

    /// As [`add_live`](Self::add_live), for a block that is freed.
    #[inline]
    pub(crate) fn end_live(&self, bytes: u64) {
        self.live_bytes
            .store(self.live_bytes.load(Ordering::Relaxed).wrapping_sub(bytes), Ordering::Relaxed);
    }

    /// Live bytes, but for what thread caches have not reported yet.
    #[inline]
    pub(crate) fn live(&self) -> u64 {
        let reported = self.reported.load(Ordering::Relaxed);
        self.live_bytes.load(Ordering::Relaxed).wrapping_add_signed(reported)
    }

    /// Counts live bytes without the lock. Returns whether they may exceed their peak.
    #[inline]
    pub(crate) fn report(&self, by: i64) -> bool {
        self.reported.fetch_add(by, Ordering::Relaxed);
        by > 0 && self.exceeds_peak(self.live())
    }

    /// Whether so many live bytes would be a new peak.
    #[inline]
    pub(crate) fn exceeds_peak(&self, live: u64) -> bool {
        // (Below zero, it is none.)
        live.cast_signed() > self.live_peak.load(Ordering::Relaxed).cast_signed()
    }
}
