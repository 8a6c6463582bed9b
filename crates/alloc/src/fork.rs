//! Forks of growing blocks: memory that several blocks have at their beginnings.
//!
//! A fork maps the first pieces of a block in another block too. A piece counts its further
//! mappings, and goes with the last of them. Budget and reserved bytes count it once. From then on
//! nobody writes it: the allocator knows how much of each block is shared, and its caller keeps to
//! that.
//!
//! This module must not know how work is kept from writing shared memory.

use crate::allocator::Allocator;
use crate::buffer::Buffer;
use crate::host;
use crate::layout::UNIT_SHIFT;
use crate::ranges::{Busy, busy};
use crate::residency::{Plan, Source, Step};
use crate::state::{Core, Inner};
use leasehold_core::{Error, Lease, Result};

impl Allocator {
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
        let places = (self.growing_at(from)?, self.growing_at(to)?);
        inner.may_fork(places, (from, to), bytes)?;
        inner.empty_tail(places.1)?;
        inner.fork(places, (from, to), bytes)
    }
}

impl Inner {
    fn may_fork(
        &self,
        places: (usize, usize),
        (from, to): (&Lease<Buffer>, &Lease<Buffer>),
        bytes: u64,
    ) -> Result<()> {
        if let Some(e) = self.lost.get() {
            return Err(e.clone());
        }
        if places.0 == places.1 {
            return Err(Error::invalid("a growing block cannot be a fork of itself; name another"));
        }
        if !(self.caps.vmm && self.caps.aliases) {
            return Err(Error::Unsupported(
                format!(
                    "{}: memory has one address here; copy instead of a fork",
                    self.config.name
                )
                .into(),
            ));
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
        let core = self.core.lock();
        core.ranges.0[places.1].as_ref().map_or(Ok(()), |to| self.within(to, bytes).map(drop))
    }

    fn fork(
        &self,
        places: (usize, usize),
        blocks: (&Lease<Buffer>, &Lease<Buffer>),
        bytes: u64,
    ) -> Result<u64> {
        let (mut plan, before) = self.core.lock().plan_fork(places, blocks, bytes)?;
        let result = self.carry_out(&mut plan);
        let mut core = self.core.lock();
        let Core { ranges, store, .. } = &mut *core;
        plan.steps.iter().for_each(|step| _ = store.heap.end_step(step));
        if let Some(from) = ranges.0[places.0].as_mut() {
            if result.is_err() {
                from.shared = before.max(from.end_of_forks(&store.heap.res));
            }
            blocks.0.set_shared(from.shared);
        }
        let Some(to) = ranges.0[places.1].as_mut() else { return Ok(0) };
        to.take_pieces(&plan.steps, result.is_ok());
        to.busy = Busy::No;
        result.inspect_err(|e| self.note_failure(e))?;
        (to.committed, to.shared) = (to.mapped, to.mapped);
        blocks.1.set_shared(to.shared);
        blocks.1.set_len(to.mapped);
        self.add_live(to.mapped as i64);
        Ok(to.mapped)
    }
}

impl Core {
    /// Plans the mappings of a fork. The pieces stay until the plan has come back. Also returns how
    /// much of `from` was shared before.
    fn plan_fork(
        &mut self,
        places: (usize, usize),
        (from, to): (&Lease<Buffer>, &Lease<Buffer>),
        bytes: u64,
    ) -> Result<(Plan, u64)> {
        let (ranges, heap) = (&mut self.ranges.0, &mut self.store.heap);
        // (A buffer counts its shared bytes in so many units.)
        let bytes = bytes.min(from.len()).min(u64::from(u32::MAX) << UNIT_SHIFT);
        let Some(source) = ranges[places.0].as_ref() else { return Err(busy()) };
        let (mut steps, mut shared) = (Vec::new(), 0);
        host::room(&mut steps, source.pieces.len())?;
        for &piece in &source.pieces {
            let step = heap.shared_step(piece, Source::Shared);
            if shared + step.bytes > bytes {
                break;
            }
            steps.push(Step { addr: to.addr() + shared, ..step });
            shared += step.bytes;
        }
        match ranges[places.1].as_mut() {
            Some(range) if range.busy == Busy::No && range.mapped == 0 && to.is_empty() => {
                host::room(&mut range.pieces, steps.len())?;
                range.busy = Busy::Mapping;
            }
            _ => return Err(busy()),
        }
        steps.iter().for_each(|step| heap.res.share(step.piece));
        let mut before = 0;
        if let Some(source) = ranges[places.0].as_mut() {
            before = source.shared;
            source.shared = before.max(shared);
            from.set_shared(source.shared);
        }
        Ok((Plan::of_pieces(steps, 0, 0), before))
    }
}
