//! The allocator's state in numbers: what core and magazines count, added up.

use crate::allocator::Inner;
use crate::buffer::Row;
use crate::config::AllocStats;
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
    /// Written under the lock only.
    pub(crate) live_bytes: AtomicU64,
    pub(crate) live_peak: AtomicU64,
    /// Live bytes that magazines lent beyond what the lock's holders counted, as far as they have told.
    pub(crate) told: AtomicI64,
}

impl Counters {
    /// The lock's holder counts live bytes, which may be below zero while magazines are ahead.
    #[inline]
    pub(crate) fn add_live(&self, by: i64) {
        let live = self.live_bytes.load(Ordering::Relaxed).wrapping_add_signed(by);
        self.live_bytes.store(live, Ordering::Relaxed);
        if by > 0 {
            self.note_live(live.wrapping_add_signed(self.ahead()));
        }
    }

    /// As [`add_live`](Self::add_live), for a block that is freed.
    #[inline]
    pub(crate) fn end_live(&self, bytes: u64) {
        self.live_bytes.store(self.live_bytes.load(Ordering::Relaxed).wrapping_sub(bytes), Ordering::Relaxed);
    }

    /// Live bytes, but for what magazines have not told yet.
    #[inline]
    pub(crate) fn live(&self) -> u64 {
        self.live_bytes.load(Ordering::Relaxed).wrapping_add_signed(self.ahead())
    }

    /// What magazines have told.
    #[inline]
    fn ahead(&self) -> i64 {
        self.told.load(Ordering::Relaxed)
    }

    /// Counts live bytes without the lock.
    #[inline]
    pub(crate) fn tell(&self, by: i64) {
        self.told.fetch_add(by, Ordering::Relaxed);
        if by > 0 {
            self.note_live(self.live());
        }
    }

    /// So many bytes are live.
    #[inline]
    pub(crate) fn note_live(&self, live: u64) {
        // (Below zero, it is none.)
        if live.cast_signed() > self.live_peak.load(Ordering::Relaxed).cast_signed() {
            self.live_peak.fetch_max(live, Ordering::Relaxed);
        }
    }
}

impl Inner {
    /// Live bytes, as asked for. Exact when nobody is inside; otherwise a sum of what was not read at one time, and may be below zero.
    pub(crate) fn live_bytes(&self) -> u64 {
        let c = &self.counters;
        let ahead = self.caches.stats().3.wrapping_add(c.ahead());
        let live = c.live_bytes.load(Ordering::Relaxed).wrapping_add_signed(ahead);
        live.cast_signed().max(0).cast_unsigned()
    }

    pub(crate) fn stats(&self) -> AllocStats {
        let watched = self.watch.as_ref().map_or((0, 0), |w| w.numbers());
        let core = self.core.lock();
        let (rows, kept, hits, _) = self.caches.stats();
        let (free_ready, free_not_ready) = core.store.free_bytes();
        let c = &self.counters;
        let live = self.live_bytes();
        let cached = core.store.heap.res.cached.iter();
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
            free_in_magazines: kept,
            cached_pieces: cached
                .map(|&p| core.store.heap.res.bytes(core.store.heap.res.pieces[p as usize].granules))
                .sum(),
            quarantined: core.store.heap.res.quarantined,
            held_back: watched.0,
            findings: watched.1,
            in_graphs: c.in_graphs.load(Ordering::Relaxed),
            allocations: core.allocations + hits,
            magazine_hits: hits,
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
