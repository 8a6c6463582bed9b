//! A block for a request, with its row and lease: of the heap, or of what the fallback finds. And
//! how the rows of freed blocks come back to the heap.

use crate::buffer::{Buffer, Row};
use crate::core::Core;
use crate::extent::Placement;
use crate::layout::Layout;
use crate::state::Inner;
use crate::store::Need;
use crate::stream::On;
use crate::thread_cache::Evicted;
use leasehold_core::sync::MutexGuard;
use leasehold_core::thread_number::thread_number;
use leasehold_core::{Lease, Result};

/// Deferred rows that one allocation looks at.
const DEFERRED_AT_ONCE: u32 = 4;

impl Inner {
    /// A block of the heap, whatever its alignment.
    pub(crate) fn alloc_block(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        match Need::of(layout.size, layout.align).filter(|_| layout.align <= self.most_align) {
            Some(need) => self.alloc_in_core(need, layout, on, Evicted::NOTHING),
            None => Err(self.refuse(layout)),
        }
    }

    /// A block of the heap, once what a thread cache evicted is there.
    #[inline(always)]
    pub(crate) fn alloc_in_core(
        &self,
        need: Need,
        layout: Layout,
        on: On<'_>,
        evicted: Evicted,
    ) -> Result<Lease<Buffer>> {
        {
            let mut core = self.lock_core();
            if !evicted.is_nothing() {
                self.return_evicted_in(&mut core, evicted);
            }
            if core.deferred.any() {
                core.free_deferred(&self.table, DEFERRED_AT_ONCE);
            }
            // Two branches, so that the block's fields stay in registers.
            if let Some(class) = need.class {
                if let Some(block) = core.store.take_slot(class.into(), on.timeline)? {
                    let row = core.row_of(&self.table, block, layout.size, on.timeline)?;
                    self.add_live(layout.size as i64);
                    return Ok(row.first_lease());
                }
            } else {
                core.store.heap.extents.ensure(2)?;
                let row = self.table.take(&mut core.vacant)?;
                if let Some(extent) =
                    core.store.heap.take_extent(need.units, need.align, on.timeline)
                {
                    self.table.fill(row, core.store.block(extent), layout.size, on.timeline);
                    core.allocations += 1;
                    self.add_live(layout.size as i64);
                    return Ok(row.first_lease());
                }
                self.table.put_bumped(&mut core.vacant, row);
            }
        }
        self.issue_slow(need, layout, on)
    }

    /// As [`alloc_in_core`](Self::alloc_in_core), of what the fallback finds.
    #[cold]
    #[inline(never)]
    fn issue_slow(&self, need: Need, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        let block = self.alloc_slow(need, layout, on)?;
        let mut core = self.core.lock();
        let row = core.row_of(&self.table, block, layout.size, on.timeline);
        let row = row.inspect_err(|_| self.supply.failed.add(1))?;
        self.add_live(layout.size as i64);
        Ok(row.first_lease())
    }

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
