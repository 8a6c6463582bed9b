//! The work of the debug aids and the trace ring when a block comes and goes, and when memory is
//! mapped.
//!
//! The protocol is [`watch`](super)'s.

use super::{Block, Side, Source, SweepScope, Watch, id_of};
use crate::allocator::Allocator;
use crate::backing::Chunk;
use crate::buffer::{Buffer, Row, WATCHED};
use crate::debug::{Finding, FindingKind, POISON_FREED, POISON_FRESH, RED_ZONE};
use crate::layout::{Layout, MIN_ALIGN, NO_CLASS};
use crate::residency::{End, Source as From, Step};
use crate::ring::EventKind;
use crate::state::{Inner, On, kind_bits, uses};
use crate::store::Placement;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, Lease, Name, PackedTimepoint, Result, Text, TimelineId};
use std::panic::AssertUnwindSafe;

impl Allocator {
    /// The wrong uses of memory that the debug aids found so far, the first 1,000 of them;
    /// [`AllocStats`](crate::AllocStats) has their number. A block that is freed but still in use
    /// by a stream, or in the quarantine, is not yet decided; [`trim`](Self::trim) empties the
    /// quarantine.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        let inner = self.inner();
        let Some(watch) = &inner.watch else { return Vec::new() };
        inner.sweep_held(watch, SweepScope::Due);
        watch.findings()
    }
}

impl Inner {
    /// Records what became of memory of the driver's.
    pub(crate) fn trace(&self, kind: EventKind, addr: u64, bytes: u64) {
        if let Some(ring) = self.watch.as_ref().and_then(|w| w.ring()) {
            ring.record(kind, 0, addr, bytes, 0, 0);
        }
    }

    /// Records what steps mapped and unmapped, and what they took, moved and gave back in all.
    /// Before anybody else may have the addresses.
    pub(crate) fn trace_steps(&self, steps: &[Step]) {
        if self.watch.as_ref().and_then(|w| w.ring()).is_none() {
            return;
        }
        let (mut taken, mut moved, mut given) = (0, 0, 0);
        for s in steps {
            match (s.source, s.end) {
                (From::New, End::Untouched | End::Destroyed) => {}
                (From::New, _) => taken += s.bytes,
                (_, End::Destroyed) => given += s.bytes,
                (From::Reclaimed { .. } | From::Aliased { .. }, End::Mapped) => moved += s.bytes,
                _ => {}
            }
            if let (Some(from), true) =
                (s.source_addr(), !matches!(s.end, End::Untouched | End::LostAtSource))
            {
                self.trace(EventKind::Unmap, from, s.bytes);
            }
            if s.end == End::Mapped {
                self.trace(EventKind::Map, s.addr, s.bytes);
            }
        }
        let sums =
            [(EventKind::Growth, taken), (EventKind::Remap, moved), (EventKind::Trim, given)];
        for (kind, bytes) in sums.into_iter().filter(|&(_, bytes)| bytes > 0) {
            self.trace(kind, 0, bytes);
        }
    }

    /// Records a wait for a stream.
    pub(crate) fn trace_wait(&self, kind: EventKind, stream: TimelineId, us: u64) {
        if let Some(ring) = self.watch.as_ref().and_then(|w| w.ring()) {
            ring.record(kind, 0, 0, us, stream.get(), 0);
        }
    }

    /// An allocation of a watched allocator.
    #[cold]
    pub(crate) fn alloc_watched(
        &self,
        watch: &Watch,
        layout: Layout,
        on: On<'_>,
    ) -> Result<Lease<Buffer>> {
        self.sweep_held(watch, SweepScope::Due);
        let mut lent = self.alloc_aided(watch, layout, on);
        if matches!(lent, Err(Error::OutOfMemory(_) | Error::OverBudget { .. }))
            && self.release_held(watch, on)
        {
            lent = self.alloc_aided(watch, layout, on);
        }
        // A buffer of a watched allocator begins with the name of its call site.
        let scope = Name::current().map_or(0, |name| name.tag());
        if let Ok(buffer) = &lent
            && scope != 0
        {
            buffer.set_tag(scope);
        }
        if let Some(ring) = &watch.ring {
            let timeline = on.timeline.id().get();
            match &lent {
                Ok(buffer) => {
                    if let Some(row) = self.table.get(buffer.header().index()) {
                        ring.record(
                            EventKind::Alloc,
                            id_of(row),
                            buffer.addr(),
                            buffer.len(),
                            timeline,
                            scope,
                        );
                    }
                }
                Err(_) => ring.record(EventKind::OutOfMemory, 0, 0, layout.size, timeline, scope),
            }
        }
        lent
    }

    fn alloc_aided(&self, watch: &Watch, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        let aids = watch.aids;
        if !aids.any() {
            return self.alloc_block(layout, on);
        }
        let Some(size) = layout.size.checked_add(aids.red_zone) else {
            return Err(self.refuse(layout));
        };
        let whole = Layout { size, ..layout };
        let (lease, side) = if aids.direct() {
            self.alloc_direct(watch, whole, layout.size, on)?
        } else {
            let lease = self.alloc_block(whole, on)?;
            let Some(row) = self.table.get(lease.header().index()) else { return Ok(lease) };
            let core = self.core.lock();
            let placement = row.placement();
            let usable = core.store.bytes(placement);
            self.add_live(-(aids.red_zone as i64));
            drop(core);
            row.buffer.reuse(layout.size);
            (lease, Side { source: Source::Store(placement), usable, unbacked: false })
        };
        watch.sides.lock().insert(lease.header().index(), side);
        let (addr, len) = (lease.addr(), layout.size);
        if aids.poison {
            // SAFETY: the block is fresh and committed, the allocator's only; nobody has its lease
            // yet.
            unsafe { self.backing.fill(addr, len, POISON_FRESH) }?;
        }
        if aids.red_zone > 0 {
            // SAFETY: the zone behind the length belongs to the fresh block, whose usable bytes are
            // committed.
            unsafe { self.backing.fill(addr + len, side.usable - len, RED_ZONE) }?;
        }
        Ok(lease)
    }

    /// A block straight from the backing, with the attempts of the fallback that can help it.
    fn alloc_direct(
        &self,
        watch: &Watch,
        whole: Layout,
        len: u64,
        on: On<'_>,
    ) -> Result<(Lease<Buffer>, Side)> {
        if whole.size > self.budget.limit() {
            self.counters.failed.fetch_add(1, Ordering::Relaxed);
            return Err(self.over_budget(whole.size));
        }
        let mut notes: Vec<Text> = Vec::new();
        let mut refused = false;
        let mut attempt = || match self.take_direct(watch, whole) {
            Ok(taken) => Ok(Some(taken)),
            Err(e @ (Error::DeviceLost { .. } | Error::Unsupported(_))) => Err(e),
            Err(Error::OverBudget { .. }) => {
                refused = true;
                Ok(None)
            }
            Err(e) => {
                notes.push(format!("the backing: {e}").into());
                Ok(None)
            }
        };
        let mut taken = attempt()?;
        let list: Vec<_> = self.reclaimers.lock().iter().map(|r| r.1.clone()).collect();
        for reclaimer in list {
            while taken.is_none() {
                let freed = std::panic::catch_unwind(AssertUnwindSafe(|| reclaimer(whole.size)));
                if freed.unwrap_or(0) == 0 {
                    break;
                }
                self.release_held(watch, on);
                taken = attempt()?;
            }
        }
        let Some((addr, chunk, source)) = taken else {
            self.counters.failed.fetch_add(1, Ordering::Relaxed);
            notes.dedup();
            return Err(self.report(Layout { size: len, ..whole }, notes, refused));
        };
        let usable = chunk.addr + chunk.bytes - addr;
        let mut core = self.core.lock();
        let row = match self.table.take(&mut core.vacant, self.owner_ptr()) {
            Ok(row) => row,
            Err(e) => {
                drop(core);
                self.release_source(source);
                return Err(e);
            }
        };
        // A slot, so that nobody takes the place for an extent.
        row.set_placement(Placement::Slot(u32::MAX, 0), NO_CLASS);
        let flags = kind_bits(self.config.host_kind) | WATCHED;
        row.buffer.describe(
            (addr, chunk.native),
            len,
            Some(on.timeline),
            flags,
            PackedTimepoint::NEVER,
        );
        core.allocations += 1;
        self.add_live(len as i64);
        Ok((self.first_lease(row), Side { source, usable, unbacked: false }))
    }

    /// Address, backed range and source of a block straight from the backing.
    fn take_direct(&self, watch: &Watch, whole: Layout) -> Result<(u64, Chunk, Source)> {
        let align = whole.align.max(MIN_ALIGN);
        if !watch.aids.guard {
            if !self.budget.take(whole.size) {
                return Err(self.over_budget(whole.size));
            }
            let chunk = self.backing.exact(whole.size, align);
            let chunk = chunk.inspect_err(|_| self.budget.undo(whole.size))?;
            // The bytes that rounding took beyond the request had no ticket; the budget counts them
            // too.
            if chunk.bytes > whole.size && !self.budget.take(chunk.bytes - whole.size) {
                self.budget.undo(whole.size);
                // SAFETY: it came from `exact` with this alignment just now, and was lent to
                // nobody.
                unsafe { self.backing.exact_free(chunk, align) }?;
                return Err(self.over_budget(chunk.bytes));
            }
            self.budget.keep(chunk.bytes);
            self.trace(EventKind::SegmentAlloc, chunk.addr, chunk.bytes);
            return Ok((chunk.addr, chunk, Source::Exact { chunk, align }));
        }
        let granule = self.caps.granule;
        if whole.align > granule {
            return Err(Error::Unsupported(
                format!("an alignment of {} with guard granules of {granule}", whole.align).into(),
            ));
        }
        let (Some(bytes), true) =
            (whole.size.checked_next_multiple_of(granule), whole.size < 1 << 60)
        else {
            return Err(self.over_budget(whole.size));
        };
        if !self.budget.take(bytes) {
            return Err(self.over_budget(bytes));
        }
        let span = bytes + granule;
        let base = self.backing.reserve(span).inspect_err(|_| self.budget.undo(bytes))?;
        // SAFETY: the range begins the reservation that was made just now.
        let chunk = unsafe { self.backing.commit(Some(base), bytes) }.inspect_err(|_| {
            self.budget.undo(bytes);
            // SAFETY: reserved just now, and the commitment in it failed.
            unsafe { self.backing.release(base, span) };
        })?;
        self.budget.keep(bytes);
        self.trace(EventKind::SegmentAlloc, chunk.addr, chunk.bytes);
        let addr = (base + bytes - whole.size) & !(align - 1);
        Ok((addr, chunk, Source::Guarded { base, bytes, span }))
    }

    /// Takes a watched row back that nobody holds. Returns the counts that the caller owes to an
    /// orphaned allocator.
    #[cold]
    pub(crate) fn free_watched(&self, watch: &Watch, row: &Row) -> u64 {
        watch.record_free(row);
        let buffer = &row.buffer;
        let (addr, len, tag, stream) =
            (buffer.addr(), buffer.len(), buffer.tag(), buffer.home_line());
        let side =
            if watch.aids.any() { watch.sides.lock().remove(&row.header.index()) } else { None };
        let Some(side) = side else { return self.free_shared_slow(row) };
        // The aids keep lists of their own, on the host's memory.
        let timepoints = uses(&row.buffer);
        buffer.reset();
        {
            let mut held = watch.held.lock();
            held.bytes += side.usable;
            held.waiting
                .push((Block { side, addr, len, tag, stream }, timepoints.into_boxed_slice()));
        }
        self.sweep_held(watch, SweepScope::Free);
        // The row keeps the allocator alive; once it is vacant nothing does, so this comes last.
        let mut core = self.core.lock();
        self.add_live(-(len as i64));
        self.table.put(&mut core.vacant, row);
        u64::from(core.orphan)
    }

    /// Checks what is due, and brings back what leaves the quarantine.
    pub(crate) fn sweep_held(&self, watch: &Watch, scope: SweepScope) {
        if !watch.aids.any() || scope == SweepScope::Free && watch.aids.direct() {
            return;
        }
        let due: Vec<Block> = {
            let mut held = watch.held.lock();
            let over =
                |w: &mut (Block, Box<[PackedTimepoint]>)| w.1.iter().all(|&s| s.has_passed());
            held.waiting.extract_if(.., over).map(|w| w.0).collect()
        };
        for block in due {
            let keeps = self.inspect_freed(watch, &block);
            let mut held = watch.held.lock();
            if !keeps {
                held.bytes -= block.side.usable;
                continue;
            }
            held.quarantined += block.side.usable;
            held.quarantine.push_back(block);
        }
        loop {
            let block = {
                let mut held = watch.held.lock();
                if held.quarantined <= watch.aids.quarantine && scope != SweepScope::All {
                    return;
                }
                let Some(block) = held.quarantine.pop_front() else { return };
                held.quarantined -= block.side.usable;
                held.bytes -= block.side.usable;
                block
            };
            if watch.aids.poison
                && !block.side.unbacked
                && !matches!(block.side.source, Source::Guarded { .. })
            {
                // The backing could be written when the allocator was made; it has no way to fail
                // later.
                // SAFETY: a block in quarantine is lent to nobody, and its last use is over; its
                // memory is committed still.
                let seen =
                    unsafe { self.backing.verify(block.addr, block.side.usable, POISON_FREED) };
                if let Ok(Some(offset)) = seen {
                    watch.report(FindingKind::WriteAfterFree, &block, offset);
                }
            }
            self.release_source(block.side.source);
        }
    }

    /// A freed block that no stream uses any more: its red zone is checked, its memory poisoned or,
    /// with a guard, taken away. `false`: the driver did not take it, and its addresses are lost.
    fn inspect_freed(&self, watch: &Watch, block: &Block) -> bool {
        let Block { addr, len, side, .. } = *block;
        if !side.unbacked {
            if watch.aids.red_zone > 0 {
                // SAFETY: the block was freed and its last use is over, as the caller checked; the
                // zone is committed.
                let seen = unsafe { self.backing.verify(addr + len, side.usable - len, RED_ZONE) };
                if let Ok(Some(offset)) = seen {
                    watch.report(FindingKind::RedZone, block, len + offset);
                }
            }
            if watch.aids.poison && !matches!(side.source, Source::Guarded { .. }) {
                // As in `sweep_held`: it cannot fail.
                // SAFETY: the freed block's memory is committed and nobody's.
                let _ = unsafe { self.backing.fill(addr, side.usable, POISON_FREED) };
            }
        }
        if let Source::Guarded { base, bytes, .. } = side.source {
            return self.decommit(Chunk { addr: base, bytes, native: 0 }, true);
        }
        true
    }

    /// Gives a block's memory, and with a guard its addresses, back to where they came from.
    fn release_source(&self, source: Source) {
        match source {
            Source::Store(placement) => {
                self.core.lock().store.free(placement, PackedTimepoint::NEVER)
            }
            Source::Exact { chunk, align } => {
                // SAFETY: the side names the chunk and alignment that `exact` gave; it left the
                // table, so it is given back once.
                match unsafe { self.backing.exact_free(chunk, align) } {
                    Ok(()) => {
                        self.trace(EventKind::SegmentFree, chunk.addr, chunk.bytes);
                        self.budget.give_back(chunk.bytes);
                    }
                    Err(_) => self.core.lock().store.heap.res.quarantined += chunk.bytes,
                }
            }
            // SAFETY: the side's own reservation; what was committed in it was given back when the
            // block was freed.
            Source::Guarded { base, span, .. } => unsafe { self.backing.release(base, span) },
        }
    }

    /// Waits for the streams that still use held blocks, and brings all of them back. `false`:
    /// nothing was held.
    fn release_held(&self, watch: &Watch, on: On<'_>) -> bool {
        let timepoints: Vec<PackedTimepoint> = {
            let held = watch.held.lock();
            if held.waiting.is_empty() && held.quarantine.is_empty() {
                return false;
            }
            held.waiting.iter().flat_map(|w| w.1.iter().copied()).collect()
        };
        for point in timepoints.into_iter().filter_map(PackedTimepoint::timepoint) {
            // A stream that cannot be waited for keeps its block held.
            let _ = self.wait_point(point, on, None);
        }
        self.sweep_held(watch, SweepScope::All);
        true
    }
}
