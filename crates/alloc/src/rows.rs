//! The rows of blocks: how a block gets a row and its first lease, and how the rows of freed blocks
//! come back to the heap.
//!
//! This module must not know where memory comes from.

use crate::buffer::{ARENA, Buffer, CLASSLESS, EMPTY, Row};
use crate::layout::NO_CLASS;
use crate::state::{Core, Inner, On, kind_bits};
use crate::store::Block;
use crate::thread_cache::Evicted;
use leasehold_core::sync::MutexGuard;
use leasehold_core::thread_number::thread_number;
use leasehold_core::{Header, Lease, Owner, PackedTimepoint, Result, Timeline};
use std::ptr::NonNull;

impl Inner {
    #[inline]
    pub(crate) fn owner_ptr(&self) -> *const Owner {
        // The whole of `Inner`, not the field: `last` reaches the rest through it.
        std::ptr::from_ref(self).cast()
    }

    #[inline]
    pub(crate) fn header_ptr(&self, row: &Row) -> NonNull<Header> {
        // The whole row: `last` reaches the buffer through it.
        NonNull::from(row).cast()
    }

    /// The first lease of a row that nobody holds.
    #[inline]
    pub(crate) fn first_lease(&self, row: &Row) -> Lease<Buffer> {
        row.header.set_live_quietly(false);
        // SAFETY: the count that was just set is the lease's; the value lies in the header's row.
        unsafe { Lease::from_raw(self.header_ptr(row), NonNull::from(&row.buffer)) }
    }

    /// As [`first_lease`](Self::first_lease), but no handle ever leads to the row's buffer.
    pub(crate) fn unlisted_lease(&self, row: &Row) -> Lease<Buffer> {
        row.header.set_live_quietly(true);
        // SAFETY: the count that was just set is the lease's; the value lies in the header's row.
        unsafe { Lease::from_raw(self.header_ptr(row), NonNull::from(&row.buffer)) }
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

    /// A row for a block, under the lock.
    #[inline(always)]
    pub(crate) fn issue(
        &self,
        core: &mut Core,
        block: Block,
        size: u64,
        timeline: &'static Timeline,
    ) -> Result<Lease<Buffer>> {
        let row = match self.table.take(&mut core.vacant, self.owner_ptr()) {
            Ok(row) => row,
            Err(e) => {
                core.store.free(block.placement, block.timepoint);
                return Err(e);
            }
        };
        self.fill(row, block, size, timeline);
        core.allocations += 1;
        self.add_live(size as i64);
        Ok(self.first_lease(row))
    }

    /// Makes a row describe a block.
    #[inline(always)]
    pub(crate) fn fill(&self, row: &Row, block: Block, size: u64, timeline: &'static Timeline) {
        row.set_placement(block.placement, block.class);
        let flags = self.row_flags | if block.class == NO_CLASS { CLASSLESS } else { 0 };
        row.buffer.describe(
            (block.addr, block.native),
            size,
            Some(timeline),
            flags,
            block.timepoint,
        );
    }

    #[cold]
    pub(crate) fn empty(&self, on: On<'_>) -> Result<Lease<Buffer>> {
        let mut core = self.core.lock();
        let row = self.table.take(&mut core.vacant, self.owner_ptr())?;
        row.buffer.describe(
            (0, 0),
            0,
            Some(on.timeline),
            EMPTY | kind_bits(self.config.host_kind),
            PackedTimepoint::NEVER,
        );
        Ok(self.first_lease(row))
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
            core.store.defer(placement);
            self.put_aside(&mut core, row, |core| &mut core.deferred);
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
            if self.counters.report(evicted.unreported) {
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

    /// Calls `f` with the row of every buffer that leases hold, and how many do, except members of
    /// graphs and empty ones.
    pub(crate) fn for_each_live(&self, mut f: impl FnMut(&Row, u32)) {
        for row in (0..self.table.len()).filter_map(|i| self.table.get(i)) {
            let leases = row.header.strong();
            if leases > 0 && row.buffer.flags() & (ARENA | EMPTY) == 0 {
                f(row, leases);
            }
        }
    }
}
