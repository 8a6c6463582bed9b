//! The work of the debug checks and the trace when a block comes and goes.
//!
//! The protocol is [`checks`](super)'s.

use super::{Block, DebugChecks, Side, Source, SweepScope, release};
use crate::backing::Chunk;
use crate::buffer::{Buffer, CHECKED, Row};
use crate::debug::{POISON_FRESH, RED_ZONE};
use crate::extent::Placement;
use crate::layout::{Layout, MIN_ALIGN, NO_CLASS};
use crate::oom::AttemptLog;
use crate::state::Inner;
use crate::stream::On;
use crate::supply::Supply;
use leasehold_core::{Error, Lease, Name, Result};

impl DebugChecks {
    /// An allocation of a checked allocator.
    #[cold]
    pub(crate) fn alloc(&self, below: &Inner, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        let (core, supply) = (&below.core, &below.supply);
        self.sweep(core, supply, SweepScope::Due);
        let mut lent = self.alloc_checked(below, layout, on);
        if matches!(lent, Err(Error::OutOfMemory(_) | Error::OverBudget { .. }))
            && self.release_held(core, supply, on)
        {
            lent = self.alloc_checked(below, layout, on);
        }
        // A buffer of a checked allocator begins with the name of its call site.
        let scope = Name::current().map_or(0, |name| name.tag());
        let timeline = on.timeline.id();
        match &lent {
            Ok(buffer) => {
                if scope != 0 {
                    buffer.set_tag(scope);
                }
                if let Some(row) = below.table.get(buffer.header().index()) {
                    supply.trace.alloc(row, timeline, scope);
                }
            }
            Err(_) => supply.trace.failed(layout.size, timeline, scope),
        }
        lent
    }

    fn alloc_checked(&self, below: &Inner, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        let debug = self.debug;
        if !debug.any() {
            return below.alloc_block(layout, on);
        }
        let Some(size) = layout.size.checked_add(debug.red_zone) else {
            return Err(below.refuse(layout));
        };
        let whole = Layout { size, ..layout };
        let (lease, side) = if debug.direct() {
            self.alloc_direct(below, whole, layout.size, on)?
        } else {
            let lease = below.alloc_block(whole, on)?;
            let Some(row) = below.table.get(lease.header().index()) else { return Ok(lease) };
            let placement = row.placement();
            let core = below.core.lock();
            let usable = core.store.bytes(placement);
            below.add_live(-(debug.red_zone as i64));
            drop(core);
            row.buffer.set_len(layout.size);
            (lease, Side { source: Source::Store(placement), usable })
        };
        self.sides.lock().insert(lease.header().index(), side);
        let (addr, len, backing) = (lease.addr(), layout.size, &below.supply.backing);
        if debug.poison {
            // SAFETY: the block is fresh and committed, the allocator's only; nobody has its lease
            // yet.
            unsafe { backing.fill(addr, len, POISON_FRESH) }?;
        }
        if debug.red_zone > 0 {
            // SAFETY: the zone behind the length belongs to the fresh block, whose usable bytes are
            // committed.
            unsafe { backing.fill(addr + len, side.usable - len, RED_ZONE) }?;
        }
        Ok(lease)
    }

    /// A block straight from the backing, with the attempts of the fallback that can help it.
    fn alloc_direct(
        &self,
        below: &Inner,
        whole: Layout,
        len: u64,
        on: On<'_>,
    ) -> Result<(Lease<Buffer>, Side)> {
        let (core, supply) = (&below.core, &below.supply);
        if whole.size > supply.budget.limit() {
            supply.failed.add(1);
            return Err(supply.budget.refusal(whole.size));
        }
        let mut log = AttemptLog::default();
        let mut attempt = || match self.take_direct(supply, whole) {
            Ok(taken) => Ok(Some(taken)),
            Err(e @ (Error::DeviceLost { .. } | Error::Unsupported(_))) => Err(e),
            Err(Error::OverBudget { .. }) => {
                log.refused = true;
                Ok(None)
            }
            Err(e) => {
                log.note(format_args!("the backing: {e}"));
                Ok(None)
            }
        };
        let mut taken = attempt()?;
        if taken.is_none() {
            taken = below.reclaimers.each(whole.size, |_| {
                self.release_held(core, supply, on);
                attempt()
            })?;
        }
        let Some((addr, chunk, source)) = taken else {
            supply.failed.add(1);
            return Err(below.report(Layout { size: len, ..whole }, log));
        };
        let usable = chunk.addr + chunk.bytes - addr;
        let mut guard = core.lock();
        let row = match below.table.take(&mut guard.vacant) {
            Ok(row) => row,
            Err(e) => {
                drop(guard);
                if let Source::Guarded { chunk, .. } = source {
                    // SAFETY: the chunk was taken just now, and was lent to nobody.
                    unsafe { supply.give_segment(chunk) };
                }
                release(source, core, supply);
                return Err(e);
            }
        };
        // A slot, so that nobody takes the place for an extent.
        row.set_placement(Placement::Slot(u32::MAX, 0), NO_CLASS);
        below.table.fill_special(row, (addr, chunk.native), len, Some(on.timeline), CHECKED);
        guard.allocations += 1;
        below.add_live(len as i64);
        Ok((row.first_lease(), Side { source, usable }))
    }

    /// Address, backed range and source of a block straight from the backing.
    fn take_direct(&self, supply: &Supply, whole: Layout) -> Result<(u64, Chunk, Source)> {
        let (backing, granule) = (&supply.backing, supply.caps.granule);
        let align = whole.align.max(MIN_ALIGN);
        if !self.debug.guard {
            let chunk = supply.take(whole.size, || {
                let chunk = backing.exact(whole.size, align)?;
                // The bytes that rounding took beyond the request were not reserved yet.
                if chunk.bytes > whole.size && !supply.budget.take(chunk.bytes - whole.size) {
                    // SAFETY: it came from `exact` with this alignment just now, and was lent to
                    // nobody.
                    unsafe { backing.exact_free(chunk, align) }?;
                    return Err(supply.budget.refusal(chunk.bytes));
                }
                Ok(chunk)
            })?;
            return Ok((chunk.addr, chunk, Source::Exact { chunk, align }));
        }
        if whole.align > granule {
            return Err(Error::Unsupported(
                format!("an alignment of {} with guard granules of {granule}", whole.align).into(),
            ));
        }
        let bytes = whole.size.checked_next_multiple_of(granule).filter(|_| whole.size < 1 << 60);
        let bytes = bytes.ok_or_else(|| supply.budget.refusal(whole.size))?;
        let span = bytes + granule;
        let chunk = supply.take(bytes, || {
            let base = backing.reserve(span)?;
            // SAFETY: the range begins the reservation that was made just now.
            let chunk = unsafe { backing.commit(Some(base), bytes) };
            // SAFETY: reserved just now, and the commitment in it failed.
            chunk.inspect_err(|_| unsafe { backing.release(base, span) })
        })?;
        let addr = (chunk.addr + bytes - whole.size) & !(align - 1);
        Ok((addr, chunk, Source::Guarded { chunk, span }))
    }

    /// Takes a checked row back that nobody holds. Returns the counts that the caller owes to an
    /// orphaned allocator.
    #[cold]
    pub(crate) fn free(&self, below: &Inner, row: &Row) -> u64 {
        below.supply.trace.free(row);
        let buffer = &row.buffer;
        let (addr, len) = (buffer.addr(), buffer.len());
        let (tag, stream) = (buffer.tag(), buffer.home_timeline());
        let side = self.sides.lock().remove(&row.header.index());
        let Some(side) = side else { return below.free_shared_slow(row) };
        // The checks keep lists of their own, on the host's memory.
        let uses = buffer.uses().into_boxed_slice();
        buffer.reset();
        {
            let mut held = self.held.lock();
            held.bytes += side.usable;
            held.waiting.push((Block { side, addr, len, tag, stream }, uses));
        }
        self.sweep(&below.core, &below.supply, SweepScope::Free);
        // The row keeps the allocator alive; once it is vacant nothing does, so this comes last.
        let mut core = below.core.lock();
        below.add_live(-(len as i64));
        below.table.put(&mut core.vacant, row);
        u64::from(core.orphan)
    }
}
