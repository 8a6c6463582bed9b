//! Giving memory back to the driver: free memory, and pieces in hand.
//!
//! The lock is not held across a call of the backing.

use crate::backing::Chunk;
use crate::core::Core;
use crate::host;
use crate::idle::give_back_idle;
use crate::layout::UNIT_SHIFT;
use crate::lock::Lock;
use crate::residency::Step;
use crate::ring::EventKind;
use crate::supply::Supply;
use crate::table::Table;
use leasehold_core::Result;

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
            if span.live && !span.paged && bytes <= surplus && heap.remove_span(slot).is_some() {
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
    core.lock().store.heap.finish_trim(&steps, &supply.budget)
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
