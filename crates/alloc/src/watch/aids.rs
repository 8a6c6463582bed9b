//! The work of the debug aids and the trace ring when a block comes and goes.
//!
//! The protocol is [`watch`](super)'s.

use super::{Block, Side, Source, SweepScope, Watch, id_of};
use crate::backing::Chunk;
use crate::buffer::{Buffer, Row, WATCHED};
use crate::debug::{POISON_FRESH, RED_ZONE};
use crate::layout::{Layout, MIN_ALIGN, NO_CLASS};
use crate::ring::EventKind;
use crate::state::{Inner, On, kind_bits, uses};
use crate::store::Placement;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, Lease, Name, PackedTimepoint, Result, Text};

impl Inner {
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
            (lease, Side { source: Source::Store(placement), usable })
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
                if self.call_reclaimer(&reclaimer, whole.size).is_none_or(|freed| freed == 0) {
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
        Ok((self.first_lease(row), Side { source, usable }))
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
            // The bytes that rounding took beyond the request were not reserved yet.
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
            (buffer.addr(), buffer.len(), buffer.tag(), buffer.home_timeline());
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
}
