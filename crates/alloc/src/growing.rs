//! The making of growing blocks, their growth, their shrinking and their forks.
//!
//! A growth takes memory in this order: the block's own tail; pieces in hand, pieces from under
//! free memory as the policy says, and new ones; idle memory of other growing blocks and what
//! thread caches have; free granules, whatever the policy; what reclaimers free. It never waits for
//! a device.
//!
//! A fork maps the first pieces of a block in another block too. A piece counts its further
//! mappings, and goes with the last of them. Budget and reserved bytes count it once. From then on
//! nobody writes it: the allocator knows how much of each block is shared, and its caller keeps to
//! that.

use crate::allocator::Allocator;
use crate::buffer::{Buffer, GROWING, READ_ONLY, Row};
use crate::core::{Core, Keep};
use crate::host;
use crate::imports::Protection;
use crate::layout::Layout;
use crate::oom::AttemptLog;
use crate::ranges::{Busy, busy};
use crate::state::Inner;
use crate::stream::On;
use crate::trim::{empty_tail, give_back_idle, release_range, trim_idle, unmap_old};
use leasehold_core::sync::thread::yield_now;
use leasehold_core::{Error, Lease, Result};
use std::any::Any;

impl Allocator {
    /// A growing block: addresses for `most` bytes, rounded up to granules, none of which has
    /// memory. The buffer's length is what has memory and is in use: 0 at first. Its address stays.
    /// A block of the same maximum that was dropped before is used again, with its mappings.
    ///
    /// Without virtual memory management ([`BackingCaps::vmm`](crate::BackingCaps::vmm)) all of the
    /// maximum is taken from the driver at once, and only the length changes.
    ///
    /// # Errors
    /// `InvalidArgument` for a maximum of zero; `OutOfMemory` for addresses and host memory, and
    /// `OverBudget` where all memory is taken at once; the driver's; `DeviceLost`.
    pub fn growing(&self, most: u64) -> Result<Lease<Buffer>> {
        let inner = self.inner();
        let supply = &inner.supply;
        let bytes = inner.most(most)?;
        let adopted = inner.core.lock().ranges.adopt(bytes);
        if let Some(at) = adopted {
            return inner.issue_growing(at, Row::first_lease);
        }
        let (base, chunk) = if supply.caps.vmm && supply.caps.reserve {
            (supply.backing.reserve(bytes)?, None)
        } else {
            let chunk = supply.take_segment(bytes)?;
            (chunk.addr, Some(chunk))
        };
        let at = inner.core.lock().ranges.add((base, bytes), (base, bytes), chunk);
        // SAFETY: just taken for this block, which was not written down.
        let at = at.inspect_err(|_| _ = unsafe { release_range(supply, base, bytes, chunk) })?;
        inner.issue_growing(at, Row::first_lease)
    }

    /// `count` growing blocks of `most` bytes each, rounded up to granules, side by side: a block
    /// begins where the one before it ends. Each grows by itself. No handle leads to them: work
    /// uses the memory by an [import](Self::import_growing), whose record knows all uses.
    ///
    /// # Errors
    /// As [`growing`](Self::growing); `InvalidArgument` for no block, and for more than there are
    /// addresses; `Unsupported` without virtual memory management.
    pub fn growing_parts(&self, count: usize, most: u64) -> Result<Vec<Lease<Buffer>>> {
        let inner = self.inner();
        let supply = &inner.supply;
        let bytes = inner.most(most)?;
        if !(supply.caps.vmm && supply.caps.reserve) {
            return Err(Error::Unsupported(
                "blocks that grow side by side, without virtual memory; make buffers of the maximum".into(),
            ));
        }
        let all = bytes.checked_mul(count as u64).filter(|&b| b > 0).ok_or_else(|| {
            Error::invalid(format!("{count} growing blocks of {most} bytes; want 1 or more, and fewer than there are addresses"))
        })?;
        let mut parts = Vec::new();
        host::room(&mut parts, count)?;
        let base = supply.backing.reserve(all)?;
        for i in 0..count as u64 {
            let at = inner.core.lock().ranges.add((base + i * bytes, bytes), (base, all), None);
            // Later the blocks that there are take the reservation along.
            let first = |_: &Error| {
                if i == 0 {
                    // SAFETY: just reserved for these blocks, none of which was written down.
                    unsafe { release_range(supply, base, all, None) };
                }
            };
            parts.push(inner.issue_growing(at.inspect_err(first)?, Row::unlisted_lease)?);
        }
        Ok(parts)
    }

    /// Makes a growing block at least `bytes` long. Memory comes from what lies free in the
    /// allocator, then from the driver. May block on the driver; does not wait for a device.
    /// All or nothing: after an error the block is as it was. Any thread.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the maximum, and for a buffer that does not grow; `Occupied` while
    /// another thread maps memory for this block; `OverBudget`; `OutOfMemory` with a
    /// report; `DeviceLost` and the driver's.
    pub fn grow(&self, block: &Lease<Buffer>, bytes: u64) -> Result<()> {
        let inner = self.inner();
        let at = self.growing_at(block)?;
        inner.back(at, bytes)?;
        inner.commit(at, block, bytes).map(|_| ())
    }

    /// As [`grow`](Self::grow), but only with memory that is mapped there already, by
    /// [`prepare`](Self::prepare) or by an earlier use. Makes no driver call. `false`: not so much
    /// is mapped, and nothing was changed.
    ///
    /// # Errors
    /// `InvalidArgument` as [`grow`](Self::grow).
    pub fn try_grow(&self, block: &Lease<Buffer>, bytes: u64) -> Result<bool> {
        self.inner().commit(self.growing_at(block)?, block, bytes)
    }

    /// Maps memory for the first `bytes` of a growing block without making it longer, so that
    /// [`try_grow`](Self::try_grow) finds it. Other allocations may take it back meanwhile, before
    /// they fail.
    ///
    /// # Errors
    /// As [`grow`](Self::grow).
    pub fn prepare(&self, block: &Lease<Buffer>, bytes: u64) -> Result<()> {
        self.inner().back(self.growing_at(block)?, bytes)
    }

    /// Makes a growing block at most `bytes` long. The memory beyond stays mapped until the uses
    /// that are recorded on the block now are over, and the allocator needs it. Makes no driver
    /// call.
    ///
    /// # Errors
    /// `InvalidArgument` for a buffer that does not grow; `OutOfMemory` for host memory.
    ///
    /// `record`: the buffer that work uses the memory by, which is `block` unless its memory was
    /// imported elsewhere.
    ///
    /// # Safety
    /// - All work that was submitted with bytes beyond `bytes` is in the record. No such work is
    ///   submitted later.
    pub unsafe fn shrink(&self, block: &Lease<Buffer>, bytes: u64, record: &Buffer) -> Result<()> {
        let inner = self.inner();
        let (at, granule) = (self.growing_at(block)?, inner.supply.caps.granule);
        let mut core = inner.core.lock();
        let Some(range) = core.ranges.get_mut(at) else { return Ok(()) };
        let len = block.len();
        if bytes < len {
            let mut until = record.uses();
            host::room(&mut range.until, until.len())?;
            range.until.clear();
            range.until.append(&mut until);
            range.committed = bytes.next_multiple_of(granule);
            block.set_len(bytes);
            inner.add_live(-((len - bytes) as i64));
        }
        Ok(())
    }

    /// The memory of another allocator's growing block as a buffer of this one: of length 0 at
    /// first. As [`import`](Self::import) otherwise.
    ///
    /// # Errors
    /// `OutOfMemory` for host memory.
    ///
    /// # Safety
    /// - `keep` keeps the growing block. Nobody else uses its memory.
    pub unsafe fn import_growing(
        &self,
        block: &Lease<Buffer>,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Lease<Buffer>> {
        let place = (block.addr(), block.native());
        let first = Row::first_lease;
        // SAFETY: no byte, so nothing that anybody might use.
        let buffer = unsafe { self.inner().import(place, 0, Protection::ReadWrite, keep, first) }?;
        buffer.set_shared(0);
        buffer.set_flag(GROWING, true);
        Ok(buffer)
    }

    /// The length of an [imported](Self::import_growing) growing block from now on.
    ///
    /// # Safety
    /// - The block is at least as long. If the length falls, no work is submitted later with bytes
    ///   beyond it.
    pub unsafe fn set_imported_len(&self, buffer: &Lease<Buffer>, bytes: u64) {
        if self.owns(buffer) && buffer.is_growing() && buffer.is_imported() {
            let mut core = self.inner().core.lock();
            core.imported_bytes = core.imported_bytes - buffer.len() + bytes;
            buffer.set_len(bytes);
        }
    }

    /// As [`alloc`](Self::alloc), but a buffer that users only read
    /// ([`Buffer::is_read_only`]). Who made it may have it written.
    ///
    /// # Errors
    /// As [`alloc_unique`](Self::alloc_unique).
    pub fn alloc_read_only(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        // Nobody finds it by a handle before.
        let buffer = self.alloc_unique(layout, on)?;
        buffer.set_flag(READ_ONLY, true);
        Ok(buffer.share())
    }

    /// Gives `to`, of length 0, the memory at the beginning of `from`: the first pieces that lie
    /// within `bytes`. A piece is what the driver made at once: a granule, or several. Returns the
    /// new length of `to`. Memory that `to` had before goes first. May block on the driver; does
    /// not wait for a device. All or nothing: after an error both blocks are as they were, but
    /// that memory may be gone.
    ///
    /// # Errors
    /// `InvalidArgument` for one block twice, for bytes beyond the length of `from` or the maximum
    /// of `to`, and for a buffer that does not grow; `InvalidState` if `to` has a length;
    /// `Occupied` while another thread maps memory for `to`, and while work may use memory that it
    /// had; `Unsupported` without [`aliases`](crate::BackingCaps::aliases); `DeviceLost` and the
    /// driver's.
    ///
    /// # Safety
    /// - From the call on, no work writes the first [`shared`](Buffer::shared) bytes of a block.
    pub unsafe fn fork(&self, from: &Lease<Buffer>, to: &Lease<Buffer>, bytes: u64) -> Result<u64> {
        let inner = self.inner();
        let (core, supply) = (&inner.core, &inner.supply);
        let places = (self.growing_at(from)?, self.growing_at(to)?);
        supply.check_lost()?;
        if places.0 == places.1 {
            return Err(Error::invalid("a growing block cannot be a fork of itself; name another"));
        }
        if !(supply.caps.vmm && supply.caps.aliases) {
            let name = &self.config().name;
            let text = format!("{name}: memory has one address here; copy instead of a fork");
            return Err(Error::Unsupported(text.into()));
        }
        if bytes > from.len() {
            return Err(Error::invalid(format!(
                "a fork of {bytes} bytes of a growing block that has {}; fork what has memory",
                from.len()
            )));
        }
        if !to.is_empty() {
            return Err(Error::state(format!(
                "the block has {} bytes of its own; shrink it to 0 before it becomes a fork",
                to.len()
            )));
        }
        if let Some(range) = core.lock().ranges.get(places.1) {
            range.within(bytes, supply.caps.granule)?;
        }
        empty_tail(core, supply, places.1)?;
        let (mut plan, before) = {
            let Core { ranges, store, .. } = &mut *core.lock();
            ranges.plan_fork(&mut store.heap, places, (from, to), bytes)?
        };
        let result = supply.run(&mut plan);
        let Core { ranges, store, .. } = &mut *core.lock();
        plan.steps.iter().for_each(|step| _ = store.heap.end_step(step));
        if let Some(range) = ranges.get_mut(places.0) {
            if result.is_err() {
                range.shared = before.max(range.end_of_forks(&store.heap.res));
            }
            from.set_shared(range.shared);
        }
        let Some(range) = ranges.get_mut(places.1) else { return Ok(0) };
        range.take_pieces(&plan.steps, result.is_ok());
        range.busy = Busy::No;
        result.inspect_err(|e| supply.note_failure(e))?;
        (range.committed, range.shared) = (range.mapped, range.mapped);
        to.set_shared(range.shared);
        to.set_len(range.mapped);
        inner.add_live(range.mapped as i64);
        Ok(range.mapped)
    }

    /// The place of a growing block in the table.
    pub(crate) fn growing_at(&self, block: &Lease<Buffer>) -> Result<usize> {
        let row = block.header().index();
        if self.owns(block)
            && block.is_growing()
            && let Some(Some(Keep::Growing(at))) = self.inner().core.lock().keeps.get(row as usize)
        {
            return Ok(*at as usize);
        }
        Err(Error::invalid(format!(
            "a buffer of {} bytes does not grow in {}; make it with `growing`",
            block.len(),
            self.config().name
        )))
    }
}

impl Inner {
    /// The bytes of a new block, in whole granules. What is idle elsewhere goes back first.
    fn most(&self, most: u64) -> Result<u64> {
        self.supply.check_lost()?;
        let bytes = most.checked_next_multiple_of(self.supply.caps.granule).filter(|&b| b > 0);
        let bytes = bytes.ok_or_else(|| {
            Error::invalid(format!("a growing block of {most} bytes at most; want 1 or more"))
        })?;
        self.sweep_retired();
        trim_idle(&self.core, &self.supply);
        Ok(bytes)
    }

    /// The lease of a block that is held from now on; without one it is parked.
    fn issue_growing(
        &self,
        at: usize,
        lease: impl FnOnce(&Row) -> Lease<Buffer>,
    ) -> Result<Lease<Buffer>> {
        let mut core = self.core.lock();
        let row = core.take_keeping_row(&self.table);
        let row = row.inspect_err(|_| core.ranges.park(at as u32))?;
        core.keep(row.header.index(), Keep::Growing(at as u32));
        let range = core.ranges.get(at);
        let place = range.map_or((0, 0), |r| (r.base, r.chunk.map_or(0, |c| c.native)));
        self.table.fill_special(row, place, 0, None, GROWING);
        row.buffer.set_shared(0);
        core.allocations += 1;
        Ok(lease(row))
    }

    /// Lengthens a block by what is mapped there. `false`: not so much is.
    fn commit(&self, at: usize, block: &Lease<Buffer>, bytes: u64) -> Result<bool> {
        let mut core = self.core.lock();
        let Core { ranges, store, .. } = &mut *core;
        let Some(range) = ranges.get_mut(at) else { return Ok(false) };
        let want = range.within(bytes, self.supply.caps.granule)?;
        if want > range.mapped || want > range.committed && !range.own_tail(&store.heap.res) {
            return Ok(false);
        }
        let len = block.len();
        if bytes > len {
            range.committed = range.committed.max(want);
            block.set_shared(range.shared);
            block.set_len(bytes);
            self.add_live((bytes - len) as i64);
        }
        Ok(true)
    }

    /// Maps memory for the first `bytes` of a block.
    fn back(&self, at: usize, bytes: u64) -> Result<()> {
        self.supply.check_lost()?;
        let (want, mapped) = loop {
            let mut core = self.core.lock();
            let Core { ranges, store, .. } = &mut *core;
            let Some(range) = ranges.get_mut(at) else { return Ok(()) };
            let want = range.within(bytes, self.supply.caps.granule)?;
            let own = want <= range.committed || range.own_tail(&store.heap.res);
            if want <= range.mapped && own {
                return Ok(());
            }
            match range.busy {
                Busy::No if !own => {
                    drop(core);
                    empty_tail(&self.core, &self.supply, at)?;
                }
                Busy::No => {
                    range.busy = Busy::Mapping;
                    break (want, range.mapped);
                }
                Busy::Mapping => return Err(busy()),
                Busy::Leaving => {
                    // Another thread takes the tail away, and will be done in a moment.
                    drop(core);
                    yield_now();
                }
            }
        };
        let result = self.map_more(at, want, bytes - mapped);
        if let Some(range) = self.core.lock().ranges.get_mut(at) {
            range.busy = Busy::No;
        }
        result.inspect_err(|e| self.supply.note_failure(e))
    }

    /// The attempts, in order, for a block that this thread has marked busy.
    fn map_more(&self, at: usize, want: u64, missing: u64) -> Result<()> {
        self.sweep_retired();
        trim_idle(&self.core, &self.supply);
        unmap_old(&self.core, &self.supply);
        if missing > self.supply.budget.limit() {
            return Err(self.supply.budget.refusal(missing));
        }
        let mut log = AttemptLog::default();
        if self.map_to(at, want, false, &mut log)? {
            return Ok(());
        }
        give_back_idle(&self.core, &self.supply, missing);
        self.flush();
        if self.map_to(at, want, true, &mut log)? {
            return Ok(());
        }
        let retry = |_| Ok(self.map_to(at, want, true, &mut log)?.then_some(()));
        match self.reclaimers.each(missing, retry)? {
            Some(()) => Ok(()),
            None => Err(self.report(Layout::new(missing), log)),
        }
    }

    /// Maps what lacks up to `want`. `false`: the memory is not to be had, and nothing was changed.
    fn map_to(&self, at: usize, want: u64, forced: bool, log: &mut AttemptLog) -> Result<bool> {
        let (supply, granule) = (&self.supply, self.supply.caps.granule);
        let granules = |bytes: u64| u32::try_from(bytes / granule).unwrap_or(u32::MAX).max(1);
        // Parts share whole pieces (`fork`), so theirs are as small as can be.
        let part = supply.caps.aliases
            && self.core.lock().ranges.get(at).is_some_and(|r| r.reserved.1 > r.bytes);
        let piece = self.growth().piece(supply.budget.committed());
        let mut piece = if forced || part { 1 } else { granules(piece) };
        loop {
            let mut plan = {
                let mut core = self.core.lock();
                core.settle(&self.table);
                let reclaim = forced && !self.config.immovable || self.may_move(&core);
                let Some(range) = core.ranges.get_mut(at).filter(|r| !r.broken) else {
                    log.note(format_args!("the driver did not unmap a place of the block"));
                    return Ok(false);
                };
                let more = granules(want - range.mapped);
                // The places of pieces are noted without host memory.
                host::room(&mut range.pieces, more as usize)?;
                let from = range.base + range.mapped;
                let heap = &mut core.store.heap;
                let plan = heap.plan_pieces(from, more, (reclaim, piece), &supply.budget)?;
                let Some(plan) = plan else {
                    log.refused = true;
                    return Ok(false);
                };
                plan
            };
            let result = supply.run(&mut plan);
            {
                let mut core = self.core.lock();
                core.store.heap.finish_pieces(&plan, &supply.budget);
                if let Some(range) = core.ranges.get_mut(at) {
                    range.take_pieces(&plan.steps, result.is_ok());
                }
            }
            if result.is_ok() {
                return Ok(true);
            }
            self.end_attempt(result, log)?;
            if piece == 1 {
                return Ok(false);
            }
            piece = 1;
        }
    }
}
