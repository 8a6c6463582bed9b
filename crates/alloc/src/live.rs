//! The live bytes of one allocator, and the most that they were.
//!
//! The lock's holders count blocks of the heap. Thread caches count what they lend and take back,
//! and report it from time to time.

use crate::thread_cache::ThreadCaches;
use leasehold_core::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Live bytes, as asked for.
#[derive(Default)]
pub(crate) struct Live {
    /// Written under the lock only.
    bytes: AtomicU64,
    peak: AtomicU64,
    /// Live bytes that thread caches lent beyond what the lock's holders counted, as far as they
    /// have reported.
    reported: AtomicI64,
}

impl Live {
    /// Counts live bytes under the lock. Returns whether they may exceed their peak. The count may
    /// be below zero while thread caches are ahead.
    #[inline]
    pub(crate) fn add(&self, by: i64) -> bool {
        let live = self.bytes.load(Ordering::Relaxed).wrapping_add_signed(by);
        self.bytes.store(live, Ordering::Relaxed);
        by > 0 && self.may_be_peak(0)
    }

    /// As [`add`](Self::add), without the lock.
    #[inline]
    pub(crate) fn report(&self, by: i64) -> bool {
        self.reported.fetch_add(by, Ordering::Relaxed);
        by > 0 && self.may_be_peak(0)
    }

    /// Whether the live bytes may exceed their peak, once `ahead` bytes are reported.
    #[inline]
    pub(crate) fn may_be_peak(&self, ahead: i64) -> bool {
        let reported = self.reported.load(Ordering::Relaxed);
        let live = self.bytes.load(Ordering::Relaxed).wrapping_add_signed(reported);
        // (Below zero, it is none.)
        live.wrapping_add_signed(ahead).cast_signed()
            > self.peak.load(Ordering::Relaxed).cast_signed()
    }

    /// The sum of all counts. Exact when nobody is inside; otherwise a sum of what was not read at
    /// one time.
    pub(crate) fn bytes(&self, caches: &ThreadCaches) -> u64 {
        let ahead = caches.stats().3.wrapping_add(self.reported.load(Ordering::Relaxed));
        let live = self.bytes.load(Ordering::Relaxed).wrapping_add_signed(ahead);
        live.cast_signed().max(0).cast_unsigned()
    }

    /// The live bytes may exceed their peak. Thread caches have frees that the counters do not know
    /// yet, so all are added up. Other threads go on meanwhile: the smaller of two sums counts.
    pub(crate) fn note_peak(&self, caches: &ThreadCaches) {
        let live = self.bytes(caches).min(self.bytes(caches));
        self.peak.fetch_max(live, Ordering::Relaxed);
    }

    /// The most live bytes so far.
    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Begins a new peak from what is live now.
    pub(crate) fn reset_peak(&self, caches: &ThreadCaches) {
        self.peak.store(self.bytes(caches), Ordering::Relaxed);
    }
}
