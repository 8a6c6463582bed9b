//! The rows of freed blocks: how they come back to the heap, and the lock and the live bytes for
//! who gives rows.

use crate::buffer::Row;
use crate::core::Core;
use crate::extent::Placement;
use crate::state::Inner;
use crate::thread_cache::Evicted;
use leasehold_core::sync::MutexGuard;
use leasehold_core::thread_number::thread_number;

impl Inner {
    /// The core. A thread that finds its lock taken notes that for its shard.
    #[inline(always)]
    pub(crate) fn lock_core(&self) -> MutexGuard<'_, Core> {
        self.core.try_lock().unwrap_or_else(|| self.lock_core_slow())
    }

    #[cold]
    #[inline(never)]
    fn lock_core_slow(&self) -> MutexGuard<'_, Core> {
        self.caches.note_contention(thread_number());
        self.core.lock()
    }

    /// Counts live bytes under the lock, and notes a new peak.
    #[inline]
    pub(crate) fn add_live(&self, by: i64) {
        if self.live.add(by) {
            self.note_peak();
        }
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn note_peak(&self) {
        self.live.note_peak(&self.caches);
    }

    /// Frees a block that other timelines than its home may have used. Takes no host memory: while
    /// several timelines may still be using the block, its row stays out of circulation and so
    /// remembers which.
    #[cold]
    pub(crate) fn free_shared_slow(&self, row: &Row) -> u64 {
        let (len, until) = (row.buffer.len(), row.buffer.used_until());
        let mut core = self.core.lock();
        let placement = row.placement();
        self.add_live(-(len as i64));
        if let Some(timepoint) = until {
            row.buffer.reset();
            core.store.free(placement, timepoint);
            self.table.put(&mut core.vacant, row);
        } else {
            if let Placement::Extent(extent) = placement {
                core.store.heap.defer(extent);
            }
            self.table.put_aside(&mut core.vacant, row);
            core.deferred.append(&self.table, row);
        }
        u64::from(core.orphan)
    }

    /// Returns what a thread cache evicted to the heap. The result: the counts that the caller owes
    /// to an orphaned allocator.
    #[inline]
    pub(crate) fn return_evicted(&self, evicted: Evicted) -> u64 {
        if evicted.is_nothing() {
            return 0;
        }
        if evicted.rows.is_empty() {
            if self.live.report(evicted.unreported) {
                self.note_peak();
            }
            return 0;
        }
        let mut core = self.lock_core();
        let n = self.return_evicted_in(&mut core, evicted);
        if core.orphan { n } else { 0 }
    }

    /// As [`return_evicted`](Self::return_evicted), for a caller that holds the allocator: nobody
    /// is owed anything then.
    pub(crate) fn return_evicted_held(&self, evicted: Evicted) {
        let owed = self.return_evicted(evicted);
        debug_assert_eq!(owed, 0);
    }

    /// As [`return_evicted`](Self::return_evicted), under the lock. Returns how many rows.
    #[inline(never)]
    pub(crate) fn return_evicted_in(&self, core: &mut Core, mut evicted: Evicted) -> u64 {
        let mut n = 0;
        // SAFETY: the list has rows of this allocator's own table.
        while let Some(row) = unsafe { evicted.rows.pop() } {
            core.store.free(row.placement(), row.buffer.own_timepoint());
            self.table.put_bumped(&mut core.vacant, row);
            n += 1;
        }
        self.add_live(evicted.unreported);
        n
    }

    /// Brings everything in the thread caches back to the heap.
    pub(crate) fn flush(&self) {
        self.return_evicted_held(self.caches.flush(false));
    }
}
