//! The allocator's state in numbers: what heap and thread caches count, added up.

use crate::buffer::Row;
use crate::config::AllocStats;
use crate::state::Inner;
use leasehold_core::sync::atomic::Ordering;

impl Inner {
    /// Live bytes, as asked for. Exact when nobody is inside; otherwise a sum of what was not read
    /// at one time, and may be below zero.
    pub(crate) fn live_bytes(&self) -> u64 {
        let c = &self.counters;
        let ahead = self.caches.stats().3.wrapping_add(c.reported.load(Ordering::Relaxed));
        let live = c.live_bytes.load(Ordering::Relaxed).wrapping_add_signed(ahead);
        live.cast_signed().max(0).cast_unsigned()
    }

    /// Counts live bytes under the lock, and notes a new peak.
    #[inline]
    pub(crate) fn add_live(&self, by: i64) {
        if self.counters.add_live(by) {
            self.note_peak();
        }
    }

    /// The live bytes may exceed their peak. Thread caches have frees that the counters do not know
    /// yet, so all are added up. Other threads go on meanwhile: the smaller of two sums counts.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_peak(&self) {
        let live = self.live_bytes().min(self.live_bytes());
        self.counters.live_peak.fetch_max(live, Ordering::Relaxed);
    }

    pub(crate) fn stats(&self) -> AllocStats {
        let watched = self.watch.as_ref().map_or((0, 0), |w| w.numbers());
        let core = self.core.lock();
        let (rows, kept, hits, _) = self.caches.stats();
        let (free_ready, free_not_ready) = self.free_bytes(&core);
        let c = &self.counters;
        let live = self.live_bytes();
        AllocStats {
            live: u64::from(core.vacant.live).saturating_sub(core.imported + rows),
            live_bytes: live,
            live_peak: c.live_peak.load(Ordering::Relaxed).max(live),
            reserved: self.budget.reserved(),
            reserved_peak: self.budget.peak(),
            imported: core.imported,
            imported_bytes: core.imported_bytes,
            free_ready,
            free_not_ready,
            free_in_slabs: core.store.slabs.bytes().1,
            free_in_thread_caches: kept,
            cached_pieces: core.store.heap.res.cached_bytes(),
            idle_in_growing: core.ranges.idle_bytes(),
            shared_in_growing: core.store.heap.res.shared,
            quarantined: core.store.heap.res.quarantined,
            held_back: watched.0,
            findings: watched.1,
            in_graphs: c.in_graphs.load(Ordering::Relaxed),
            in_executables: c.in_executables.load(Ordering::Relaxed),
            allocations: core.allocations + hits,
            thread_cache_hits: hits,
            growths: c.growths.load(Ordering::Relaxed),
            remaps: c.remaps.load(Ordering::Relaxed),
            host_waits: c.host_waits.load(Ordering::Relaxed),
            inserted_waits: c.inserted_waits.load(Ordering::Relaxed),
            failed: c.failed.load(Ordering::Relaxed),
            retired: self.retired.load(Ordering::Relaxed).into(),
            driver_calls: self.backing.driver_calls(),
            metadata: core.store.heap.host_bytes()
                + core.store.slabs.host_bytes()
                + u64::from(self.table.len()) * size_of::<Row>() as u64,
            limit: self.budget.limit(),
        }
    }
}
