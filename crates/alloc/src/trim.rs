//! Giving memory back to the driver: free memory, pieces in hand, and idle memory of growing blocks
//! ([`ranges`](crate::ranges) says what is idle), which becomes pieces in hand.

use crate::backing::Chunk;
use crate::core::Core;
use crate::host;
use crate::layout::UNIT_SHIFT;
use crate::lock::Lock;
use crate::ranges::{Busy, IDLE_SHARE, Leaving, busy};
use crate::residency::{End, Step};
use crate::supply::Supply;
use crate::table::Table;
use crate::trace::EventKind;
use leasehold_core::{Error, Result};

/// Gives free memory back to the driver until at most `keep` bytes lie free.
pub(crate) fn trim(core: &Lock<Core>, supply: &Supply, table: &Table, keep: u64) -> Result<u64> {
    unmap_old(core, supply);
    let idle = core.lock().ranges.idle_bytes();
    if idle > keep || keep == 0 {
        give_back_idle(core, supply, if keep == 0 { u64::MAX } else { idle - keep });
    }
    let (steps, segments) = {
        let mut core = core.lock();
        core.settle(table);
        let heap = &mut core.store.heap;
        let free = (heap.free_units().0 + if heap.single() { heap.free_units().1 } else { 0 })
            << UNIT_SHIFT;
        let mut surplus = (free + heap.res.cached_bytes()).saturating_sub(keep);
        let mut segments = Vec::new();
        host::room(&mut segments, heap.spans.len())?;
        for slot in 0..heap.spans.len() {
            let span = heap.spans[slot];
            let bytes = u64::from(span.units) << UNIT_SHIFT;
            if !span.paged && bytes <= surplus && heap.remove_span(slot) {
                surplus -= bytes;
                segments.push(Chunk { addr: span.base, bytes, native: span.native });
            }
        }
        (heap.plan_trim(surplus), segments)
    };
    let mut freed = 0;
    for chunk in segments {
        // SAFETY: the span was taken out of the heap while it lay free and ready as one block.
        if unsafe { supply.give_segment(chunk) } {
            freed += chunk.bytes;
        }
    }
    Ok(freed + destroy(core, supply, steps?))
}

fn destroy(core: &Lock<Core>, supply: &Supply, mut steps: Vec<Step>) -> u64 {
    supply.destroy(&mut steps);
    // A piece that was not destroyed is leaked and stays counted.
    let heap = &mut core.lock().store.heap;
    let freed = heap.end_steps(&steps);
    supply.budget.give_back(freed);
    freed
}

/// Unmaps old mappings whose uses are over. If the driver refuses, a later call tries again, and
/// the piece stays in hand. Called without the lock.
pub(crate) fn unmap_old(core: &Lock<Core>, supply: &Supply) {
    loop {
        let Some(mapping) = core.lock().store.heap.old_mappings.take() else { return };
        // SAFETY: a plan left this mapping behind, this thread alone has taken it, and the work
        // that might use it is over.
        let gone = unsafe { supply.backing.unmap(mapping.addr, mapping.bytes) }.is_ok();
        if gone {
            supply.trace.memory(EventKind::Unmap, mapping.addr, mapping.bytes);
        }
        core.lock().store.heap.end_old_mapping(mapping, gone);
        if !gone {
            return;
        }
    }
}

/// Gives pieces that a failed plan left over back to the driver.
pub(crate) fn destroy_loose(core: &Lock<Core>, supply: &Supply) {
    let steps = core.lock().store.heap.plan_cached(u64::MAX, 0);
    // Without host memory for the list they stay in hand, for the next growth or trim.
    if let Ok(steps) = steps {
        destroy(core, supply, steps);
    }
}

/// Brings idle memory whose uses are over back to the pieces in hand, `wanted` bytes if there are
/// so many. Calls the driver. Returns the bytes. Called without the lock.
pub(crate) fn give_back_idle(core: &Lock<Core>, supply: &Supply, wanted: u64) -> u64 {
    let mut freed = 0;
    while freed < wanted {
        let leaving = {
            let Core { ranges, store, .. } = &mut *core.lock();
            ranges.take_idle(&mut store.heap, wanted - freed)
        };
        // Without host memory for the list the memory stays where it is.
        let Ok(Some(leaving)) = leaving else { break };
        let (bytes, moved) = send_away(core, supply, leaving);
        freed += bytes;
        if !moved {
            break;
        }
    }
    freed
}

/// Brings idle memory beyond its share back to the pieces in hand.
pub(crate) fn trim_idle(core: &Lock<Core>, supply: &Supply) {
    let idle = core.lock().ranges.idle_bytes();
    let most = supply.budget.limit().min(supply.caps.physical) / IDLE_SHARE;
    if idle > most {
        give_back_idle(core, supply, idle - most);
    }
}

/// Unmaps what leaves a range. Returns the bytes that are in hand now or with the driver, and
/// whether anything has left.
fn send_away(core: &Lock<Core>, supply: &Supply, mut leaving: Leaving) -> (u64, bool) {
    supply.unmap(&mut leaving.steps);
    let (mut bytes, gone, whole) = {
        let Core { ranges, store, .. } = &mut *core.lock();
        ranges.end_idle(&mut store.heap, &leaving)
    };
    if let (Some((base, size, chunk)), true) = (leaving.whole, whole) {
        // SAFETY: the range was taken out of the table, and nothing is mapped in it.
        bytes += unsafe { release_range(supply, base, size, chunk) };
    }
    (bytes, gone || leaving.steps.iter().any(|s| s.end == End::Loose))
}

/// Unmaps all pieces beyond the length of a block.
///
/// # Errors
/// `Occupied` while work may still use them, or another thread maps memory for the block;
/// `InvalidState` if the driver keeps one.
pub(crate) fn empty_tail(core: &Lock<Core>, supply: &Supply, at: usize) -> Result<()> {
    let leaving = {
        let Core { ranges, store, .. } = &mut *core.lock();
        match ranges.get(at) {
            Some(range) if range.mapped == range.committed => None,
            Some(range) if range.busy != Busy::No => return Err(busy()),
            Some(range) if !range.is_over() => {
                return Err(Error::Occupied {
                    resource: "memory that a growing block had (work may still use it)",
                });
            }
            _ => ranges.take_tail(&mut store.heap, at, u64::MAX)?,
        }
    };
    if let Some(leaving) = leaving {
        send_away(core, supply, leaving);
    }
    match core.lock().ranges.get(at) {
        Some(range) if range.broken => Err(Error::state(
            "the driver did not unmap a place of the growing block; make another block",
        )),
        _ => Ok(()),
    }
}

/// Gives addresses without memory back to the driver, or a chunk. Returns the chunk's bytes.
///
/// # Safety
/// - The range was reserved or committed for a growing block. No table has it, nothing is mapped
///   in a reservation, and nobody uses a chunk.
pub(crate) unsafe fn release_range(
    supply: &Supply,
    base: u64,
    bytes: u64,
    chunk: Option<Chunk>,
) -> u64 {
    let Some(chunk) = chunk else {
        // SAFETY: the caller vouches for the reservation.
        unsafe { supply.backing.release(base, bytes) };
        return 0;
    };
    // SAFETY: the caller vouches for the chunk.
    if unsafe { supply.give_segment(chunk) } { chunk.bytes } else { 0 }
}
