//! Giving memory back to the driver: free memory, and pieces in hand.
//!
//! The lock is not held across a call of the backing.

use crate::backing::Chunk;
use crate::host;
use crate::layout::UNIT_SHIFT;
use crate::residency::Step;
use crate::ring::EventKind;
use crate::state::Inner;
use leasehold_core::Result;

impl Inner {
    /// Gives free memory back to the driver until at most `keep` bytes lie free.
    pub(crate) fn trim_core(&self, keep: u64) -> Result<u64> {
        self.unmap_old();
        let idle = self.core.lock().ranges.idle_bytes();
        if idle > keep || keep == 0 {
            self.give_back_idle(if keep == 0 { u64::MAX } else { idle - keep });
        }
        let (steps, segments) = {
            let mut core = self.core.lock();
            self.settle(&mut core);
            let heap = &mut core.store.heap;
            let free = (heap.free_units().0 + if heap.single() { heap.free_units().1 } else { 0 })
                << UNIT_SHIFT;
            let mut surplus = (free + heap.res.cached_bytes()).saturating_sub(keep);
            let mut segments = Vec::new();
            host::room(&mut segments, heap.spans.len())?;
            for slot in 0..heap.spans.len() {
                let span = heap.spans[slot];
                let bytes = u64::from(span.units) << UNIT_SHIFT;
                if span.live && !span.paged && bytes <= surplus && heap.remove_span(slot).is_some()
                {
                    surplus -= bytes;
                    segments.push(Chunk { addr: span.base, bytes, native: span.native });
                }
            }
            (heap.plan_trim(surplus), segments)
        };
        let mut freed = 0;
        for chunk in segments {
            if self.decommit(chunk, true) {
                freed += chunk.bytes;
            }
        }
        Ok(freed + self.carry_out_trim(steps?))
    }

    pub(crate) fn carry_out_trim(&self, mut steps: Vec<Step>) -> u64 {
        for s in &mut steps {
            s.destroy(&*self.backing);
        }
        self.trace_steps(&steps);
        self.core.lock().store.heap.finish_trim(&steps, &self.budget)
    }

    /// Unmaps old mappings whose uses are over. If the driver refuses, a later call tries again,
    /// and the piece stays in hand. Called without the lock.
    pub(crate) fn unmap_old(&self) {
        loop {
            let Some(mapping) = self.core.lock().store.heap.old_mappings.take() else { return };
            // SAFETY: a plan left this mapping behind, this thread alone has taken it, and the work
            // that might use it is over.
            let gone = unsafe { self.backing.unmap(mapping.addr, mapping.bytes) }.is_ok();
            if gone {
                self.trace(EventKind::Unmap, mapping.addr, mapping.bytes);
            }
            self.core.lock().store.heap.end_old_mapping(mapping, gone);
            if !gone {
                return;
            }
        }
    }

    /// Gives pieces that a failed plan left over back to the driver.
    pub(crate) fn destroy_loose(&self) {
        let mut core = self.core.lock();
        let steps = core.store.heap.plan_cached(u64::MAX, 0);
        drop(core);
        // Without host memory for the list they stay in hand, for the next growth or trim.
        if let Ok(steps) = steps {
            self.carry_out_trim(steps);
        }
    }

    /// Gives a segment back; one that the driver does not take stays counted.
    pub(crate) fn decommit(&self, chunk: Chunk, undo: bool) -> bool {
        // SAFETY: callers hand in a commitment that they took out of the heap, or never put in: no
        // block and no stream uses it.
        match unsafe { self.backing.decommit(chunk) } {
            Ok(()) => {
                self.trace(EventKind::SegmentFree, chunk.addr, chunk.bytes);
                if undo {
                    self.budget.give_back(chunk.bytes);
                }
                true
            }
            Err(_) => {
                self.core.lock().store.heap.res.quarantined += chunk.bytes;
                false
            }
        }
    }
}
