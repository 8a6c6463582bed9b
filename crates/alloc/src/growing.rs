//! The making of growing blocks, their growth and their shrinking.
//!
//! A growth takes memory in this order: the block's own tail; pieces in hand, pieces from under
//! free memory as the policy says, and new ones; idle memory of other growing blocks and what
//! thread caches have; free granules, whatever the policy; what reclaimers free. It never waits for
//! a device.

use crate::allocator::Allocator;
use crate::backing::Chunk;
use crate::buffer::{Buffer, GROWING, Row};
use crate::host;
use crate::imports::Protection;
use crate::layout::Layout;
use crate::oom::Trail;
use crate::ranges::{Busy, Range, busy};
use crate::state::{Core, Inner, Keep, On, kind_bits, uses};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::sync::thread::yield_now;
use leasehold_core::{Error, Lease, PackedTimepoint, Result};
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
        self.inner().growing(most)
    }

    /// `count` growing blocks of `most` bytes each, rounded up to granules, side by side: a block
    /// begins where the one before it ends. Each grows by itself. No handle leads to them: work
    /// uses the memory by an [import](Self::import_growing), whose record knows all uses.
    ///
    /// # Errors
    /// As [`growing`](Self::growing); `InvalidArgument` for no block, and for more than there are
    /// addresses; `Unsupported` without virtual memory management.
    pub fn growing_parts(&self, count: usize, most: u64) -> Result<Vec<Lease<Buffer>>> {
        self.inner().growing_parts(count, most)
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
        let (at, granule) = (self.growing_at(block)?, inner.caps.granule);
        let mut core = inner.core.lock();
        let Some(range) = core.ranges.0[at].as_mut() else { return Ok(()) };
        let len = block.len();
        if bytes < len {
            let mut until = uses(record);
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
        let first = Inner::first_lease;
        // SAFETY: no byte, so nothing that anybody might use.
        let buffer = unsafe { self.inner().import(place, 0, Protection::ReadWrite, keep, first) }?;
        buffer.set_growing();
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
        buffer.set_read_only(true);
        Ok(buffer.share())
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
    fn growing(&self, most: u64) -> Result<Lease<Buffer>> {
        let bytes = self.most(most)?;
        self.sweep_retired();
        self.trim_idle();
        if let Some(at) = self.adopt(bytes) {
            return self.issue_growing(at, Self::first_lease);
        }
        let vmm = self.caps.vmm && self.caps.reserve;
        let (base, chunk) = if vmm {
            (self.backing.reserve(bytes)?, None)
        } else {
            if !self.budget.take(bytes) {
                return Err(self.over_budget(bytes));
            }
            // SAFETY: at no address in particular.
            let chunk = unsafe { self.backing.commit(None, bytes) }
                .inspect_err(|_| self.budget.undo(bytes))?;
            self.budget.keep(bytes);
            (chunk.addr, Some(chunk))
        };
        let at = self.add_range((base, bytes), (base, bytes), chunk);
        let at = at.inspect_err(|_| _ = self.release_range(base, bytes, chunk))?;
        self.issue_growing(at, Self::first_lease)
    }

    fn growing_parts(&self, count: usize, most: u64) -> Result<Vec<Lease<Buffer>>> {
        let bytes = self.most(most)?;
        if !(self.caps.vmm && self.caps.reserve) {
            return Err(Error::Unsupported(
                "blocks that grow side by side, without virtual memory; make buffers of the maximum".into(),
            ));
        }
        let all = bytes.checked_mul(count as u64).filter(|&b| b > 0).ok_or_else(|| {
            Error::invalid(format!("{count} growing blocks of {most} bytes; want 1 or more, and fewer than there are addresses"))
        })?;
        self.sweep_retired();
        self.trim_idle();
        let mut parts = Vec::new();
        host::room(&mut parts, count)?;
        let base = self.backing.reserve(all)?;
        for i in 0..count as u64 {
            let at = self.add_range((base + i * bytes, bytes), (base, all), None);
            // Later the blocks that there are take the reservation along.
            let first = |_: &Error| {
                if i == 0 {
                    self.release_range(base, all, None);
                }
            };
            parts.push(self.issue_growing(at.inspect_err(first)?, Self::unlisted_lease)?);
        }
        Ok(parts)
    }

    /// The bytes of a new block, in whole granules.
    fn most(&self, most: u64) -> Result<u64> {
        if let Some(e) = self.lost.get() {
            return Err(e.clone());
        }
        let bytes = most.checked_next_multiple_of(self.caps.granule).filter(|&b| b > 0);
        bytes.ok_or_else(|| {
            Error::invalid(format!("a growing block of {most} bytes at most; want 1 or more"))
        })
    }

    /// Writes a new block's addresses down, which lie in a reservation. It is held.
    fn add_range(
        &self,
        (base, bytes): (u64, u64),
        reserved: (u64, u64),
        chunk: Option<Chunk>,
    ) -> Result<usize> {
        let mapped = if chunk.is_some() { bytes } else { 0 };
        let range = Range {
            base,
            bytes,
            reserved,
            committed: 0,
            mapped,
            shared: 0,
            pieces: Vec::new(),
            chunk,
            until: Vec::new(),
            held: true,
            busy: Busy::No,
            broken: false,
        };
        let mut core = self.core.lock();
        let ranges = &mut core.ranges.0;
        let at = ranges.iter().position(Option::is_none).unwrap_or(ranges.len());
        host::room(ranges, 1)?;
        if at == ranges.len() {
            ranges.push(None);
        }
        ranges[at] = Some(range);
        self.grows.store(true, Ordering::Relaxed);
        Ok(at)
    }

    /// The parked block of this maximum that has the most memory, held from now on.
    fn adopt(&self, bytes: u64) -> Option<usize> {
        let mut core = self.core.lock();
        let fits = |r: &Range| {
            !r.held && r.busy == Busy::No && !r.broken && r.shared == 0 && r.bytes == bytes
        };
        let all = core.ranges.0.iter_mut().enumerate();
        let fitting = all.filter_map(|(at, r)| Some((at, r.as_mut().filter(|r| fits(r))?)));
        let (at, range) = fitting.max_by_key(|(_, r)| r.mapped)?;
        range.held = true;
        Some(at)
    }

    /// The lease of a block that is held from now on; without one it is parked.
    fn issue_growing(
        &self,
        at: usize,
        lease: impl FnOnce(&Self, &Row) -> Lease<Buffer>,
    ) -> Result<Lease<Buffer>> {
        let mut core = self.core.lock();
        let made = self.table.take(&mut core.vacant, self.owner_ptr()).and_then(|row| {
            let room = core.room_to_keep(row.header.index());
            room.inspect_err(|_| self.table.put(&mut core.vacant, row)).map(|()| row)
        });
        let row = made.inspect_err(|_| core.ranges.park(at as u32))?;
        core.keep(row.header.index(), Keep::Growing(at as u32));
        let (base, native) = core.ranges.0[at]
            .as_ref()
            .map_or((0, 0), |r| (r.base, r.chunk.map_or(0, |c| c.native)));
        let flags = GROWING | kind_bits(self.config.host_kind);
        row.buffer.describe((base, native), 0, None, flags, PackedTimepoint::NEVER);
        row.buffer.set_shared(0);
        core.allocations += 1;
        Ok(lease(self, row))
    }

    /// Lengthens a block by what is mapped there. `false`: not so much is.
    fn commit(&self, at: usize, block: &Lease<Buffer>, bytes: u64) -> Result<bool> {
        let mut core = self.core.lock();
        let Core { ranges, store, .. } = &mut *core;
        let Some(range) = ranges.0[at].as_mut() else { return Ok(false) };
        let want = self.within(range, bytes)?;
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

    /// The whole granules of `bytes`.
    pub(crate) fn within(&self, range: &Range, bytes: u64) -> Result<u64> {
        if bytes > range.bytes {
            return Err(Error::invalid(format!(
                "{bytes} bytes of a growing block of {} at most; give it a larger maximum",
                range.bytes
            )));
        }
        Ok(bytes.next_multiple_of(self.caps.granule))
    }

    /// Maps memory for the first `bytes` of a block.
    fn back(&self, at: usize, bytes: u64) -> Result<()> {
        if let Some(e) = self.lost.get() {
            return Err(e.clone());
        }
        let (want, mapped) = loop {
            let mut core = self.core.lock();
            let Core { ranges, store, .. } = &mut *core;
            let Some(range) = ranges.0[at].as_mut() else { return Ok(()) };
            let want = self.within(range, bytes)?;
            let own = want <= range.committed || range.own_tail(&store.heap.res);
            if want <= range.mapped && own {
                return Ok(());
            }
            match range.busy {
                Busy::No if !own => {
                    drop(core);
                    self.empty_tail(at)?;
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
        if let Some(range) = self.core.lock().ranges.0[at].as_mut() {
            range.busy = Busy::No;
        }
        result.inspect_err(|e| self.note_failure(e))
    }

    /// Counts a failure of the driver, and remembers the loss of the device.
    pub(crate) fn note_failure(&self, e: &Error) {
        self.counters.failed.fetch_add(1, Ordering::Relaxed);
        if matches!(e, Error::DeviceLost { .. }) {
            self.lost.get_or_init(|| e.clone());
        }
    }

    /// The attempts, in order, for a block that this thread has marked busy.
    fn map_more(&self, at: usize, want: u64, missing: u64) -> Result<()> {
        self.sweep_retired();
        self.trim_idle();
        self.unmap_old();
        let mut trail = Trail::default();
        let layout = Layout::new(missing);
        if missing > self.budget.limit() {
            return Err(self.over_budget(missing));
        }
        if self.map_to(at, want, false, &mut trail)? {
            return Ok(());
        }
        self.give_back_idle(missing);
        self.flush();
        if self.map_to(at, want, true, &mut trail)? {
            return Ok(());
        }
        let mut next = 0;
        loop {
            let reclaimer = self.reclaimers.lock().get(next).map(|r| r.1.clone());
            let Some(reclaimer) = reclaimer else { break };
            let freed = self.call_reclaimer(&reclaimer, missing);
            // One that panicked is out of the list, and the next one is in its place.
            next += usize::from(freed.is_some());
            if freed.unwrap_or(0) > 0 && self.map_to(at, want, true, &mut trail)? {
                return Ok(());
            }
        }
        Err(self.report(layout, trail.notes, trail.refused))
    }

    /// Maps what lacks up to `want`. `false`: the memory is not to be had, and nothing was changed.
    fn map_to(&self, at: usize, want: u64, forced: bool, trail: &mut Trail) -> Result<bool> {
        let granule = self.caps.granule;
        let granules = |bytes: u64| u32::try_from(bytes / granule).unwrap_or(u32::MAX).max(1);
        // Parts share whole pieces (`fork`), so theirs are as small as can be.
        let part = self.caps.aliases
            && self.core.lock().ranges.0[at].as_ref().is_some_and(|range| range.is_part());
        let mut piece =
            if forced || part { 1 } else { granules(self.growth().piece(self.budget.committed())) };
        loop {
            let mut plan = {
                let mut core = self.core.lock();
                self.settle(&mut core);
                let reclaim = forced && !self.config.immovable || self.may_move(&core);
                let Some(range) = core.ranges.0[at].as_mut().filter(|r| !r.broken) else {
                    trail.note(format_args!("the driver did not unmap a place of the block"));
                    return Ok(false);
                };
                let more = granules(want - range.mapped);
                // The places of pieces are noted without host memory.
                host::room(&mut range.pieces, more as usize)?;
                let from = range.base + range.mapped;
                let heap = &mut core.store.heap;
                let plan = heap.plan_pieces(from, more, (reclaim, piece), &self.budget)?;
                let Some(plan) = plan else {
                    trail.refused = true;
                    return Ok(false);
                };
                core.remaps += u64::from(plan.reclaims());
                plan
            };
            let result = self.carry_out(&mut plan);
            {
                let mut core = self.core.lock();
                core.store.heap.finish_pieces(&plan, &self.budget);
                if let Some(range) = core.ranges.0[at].as_mut() {
                    range.take_pieces(&plan.steps, result.is_ok());
                }
            }
            if result.is_ok() {
                return Ok(true);
            }
            self.end_attempt(result, trail)?;
            if piece == 1 {
                return Ok(false);
            }
            piece = 1;
        }
    }
}
