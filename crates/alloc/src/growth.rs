//! Taking memory from the driver: by plans that map granules, or, where addresses and memory are
//! one, by segments.
//!
//! This is the growth of an expandable segment (PyTorch's, on CUDA's virtual memory management). It
//! departs from that in what it does first: granules that lie under free memory are moved to where
//! they are needed, as the [policy](crate::config::Policy) says. If their last use is on the same
//! stream and not over within a moment, nobody waits for it: see
//! [`old_mappings`](crate::old_mappings).

use crate::config::{CREDIT, GRANULES_PER_REMAP, Growth, Moves, OPERATIONS_PER_REMAP};
use crate::core::Core;
use crate::layout::UNIT_SHIFT;
use crate::oom::AttemptLog;
use crate::plan::{Means, Planned};
use crate::state::Inner;
use crate::store::{Found, Need};
use crate::stream::On;
use crate::trim::{destroy_loose, trim, unmap_old};
use leasehold_core::{Error, Result};
use std::time::Duration;

/// Waits for nearly free memory, of one allocation, instead of growing.
const MOST_NEAR_WAITS: u32 = 8;
/// The longest of them. Longer ones cost more than the memory that they save, and might never end:
/// the host of a training may be a step ahead, and a wait for the device would take all of that.
const NEAR_WAIT: Duration = Duration::from_millis(1);
/// The largest share of a segment, where memory comes in whole segments.
const MOST_SEGMENT: u64 = 256 << 20;

impl Inner {
    /// How memory is taken from the driver now.
    pub(crate) fn growth(&self) -> Growth {
        self.config.policy.growth(self.supply.budget.limit() != u64::MAX)
    }

    /// Whether free granules are moved rather than new memory taken.
    pub(crate) fn may_move(&self, core: &Core) -> bool {
        if self.config.immovable {
            return false;
        }
        match self.growth().moves {
            Moves::Never => false,
            Moves::Always => true,
            Moves::Credit => {
                let granules = self.supply.budget.committed() / self.supply.caps.granule;
                // Allocations and frees so far, whoever served them.
                let operations = 2 * (core.allocations + self.caches.stats().2);
                self.supply.remaps.get()
                    < CREDIT + granules / GRANULES_PER_REMAP + operations / OPERATIONS_PER_REMAP
            }
        }
    }

    /// Grows. `forced`: move free granules whatever the policy says, and take no more than
    /// needed.
    pub(crate) fn grow(&self, need: Need, on: On<'_>, forced: bool, log: &mut AttemptLog) -> Found {
        let paged = self.core.lock().store.heap.spans.iter().any(|s| s.live && s.paged);
        if !paged {
            return self.grow_segment(need, on, forced, log);
        }
        unmap_old(&self.core, &self.supply);
        let growth = self.growth();
        let granules =
            |bytes: u64| u32::try_from(bytes / self.supply.caps.granule).unwrap_or(u32::MAX).max(1);
        let mut piece =
            if forced { 1 } else { granules(growth.piece(self.supply.budget.committed())) };
        let (mut waits, mut timed_out) = (0, false);
        loop {
            let planned = {
                let mut core = self.core.lock();
                let reclaim = forced && !self.config.immovable || self.may_move(&core);
                let near = growth.near.filter(|_| !forced && waits < MOST_NEAR_WAITS);
                let least = if forced {
                    1
                } else {
                    granules(growth.least(self.supply.budget.committed())).max(piece)
                };
                let alias = (timed_out && self.supply.caps.aliases).then(|| on.timeline.id());
                let means = Means { reclaim, alias, near, aligned: !forced, piece, least };
                let list = core.store.heap.list_for(on.timeline);
                let units = core.store.units(need);
                core.store.heap.plan(units, need.align, list, means, &self.supply.budget)?
            };
            let mut plan = match planned {
                Planned::Plan(plan) => plan,
                Planned::Wait(timepoint) => {
                    // Moving memory that is nearly free costs less than holding more for ever.
                    waits += 1;
                    let Some(p) = timepoint.timepoint() else { continue };
                    // Bounded: the caller itself may be the one who lets that stream go on.
                    if let Err(e) = self.supply.wait(p, on, Some(NEAR_WAIT)) {
                        log.note(format_args!("waiting for {p:?}: {e}"));
                        // In a capture the wait fails otherwise: a graph may use the old addresses.
                        (waits, timed_out) = (MOST_NEAR_WAITS, matches!(e, Error::Timeout(_)));
                    }
                    let block = self.take_coalesced(need, on)?;
                    if block.is_some() {
                        return Ok(block);
                    }
                    continue;
                }
                Planned::Nothing if piece > 1 => {
                    piece = 1;
                    continue;
                }
                Planned::Nothing => {
                    log.refused |= self.supply.budget.room() < self.supply.caps.granule;
                    return Ok(None);
                }
            };
            let result = self.supply.run(&mut plan);
            let mut core = self.core.lock();
            let extent = core.store.heap.finish(plan, result.is_ok(), &self.supply.budget);
            if let Some(extent) = extent {
                return core.store.block_for(extent, need);
            }
            drop(core);
            self.end_attempt(result, log)?;
            if piece == 1 {
                return Ok(None);
            }
            piece = 1;
        }
    }

    /// Ends an attempt that gave nothing: what the driver refused is noted.
    ///
    /// # Errors
    /// `DeviceLost`.
    pub(crate) fn end_attempt(&self, result: Result<()>, log: &mut AttemptLog) -> Result<()> {
        destroy_loose(&self.core, &self.supply);
        result.or_else(|e| log.driver(e))
    }

    fn grow_segment(&self, need: Need, on: On<'_>, forced: bool, log: &mut AttemptLog) -> Found {
        let granule = self.supply.caps.granule;
        let units = self.core.lock().store.units(need);
        let least = (u64::from(units) + u64::from(need.align.max(1)) - 1) << UNIT_SHIFT;
        let least = least.next_multiple_of(granule);
        let part = (self.supply.budget.committed() / 8)
            .next_multiple_of(granule)
            .clamp(self.supply.caps.segment, MOST_SEGMENT);
        let mut wants =
            [least.max(part.next_multiple_of(granule)), least.max(self.supply.caps.segment), least];
        if forced {
            wants = [least; 3];
        }
        let found = self.new_segment(need, on, wants, log)?;
        // Segments that lie free are too small one by one; the driver may make a larger one of
        // them.
        if found.is_none()
            && forced
            && !self.config.immovable
            && trim(&self.core, &self.supply, &self.table, 0).is_ok_and(|freed| freed > 0)
        {
            log.note(format_args!("gave free segments back to the driver"));
            return self.new_segment(need, on, wants, log);
        }
        Ok(found)
    }

    fn new_segment(&self, need: Need, on: On<'_>, wants: [u64; 3], log: &mut AttemptLog) -> Found {
        for (i, &bytes) in wants.iter().enumerate() {
            if i > 0 && wants[i - 1] == bytes {
                continue;
            }
            match self.supply.take_segment(bytes) {
                Ok(chunk) => {
                    self.supply.growths.add(1);
                    let mut core = self.core.lock();
                    if let Err(e) =
                        core.store.heap.add_span(chunk.addr, chunk.bytes, chunk.native, false)
                    {
                        drop(core);
                        // SAFETY: the heap did not take it.
                        unsafe { self.supply.give_segment(chunk) };
                        return Err(e);
                    }
                    // Without a block another thread was faster. Its request is served, and the
                    // next attempt is ours.
                    return core.store.take(need, on.timeline);
                }
                Err(Error::OverBudget { .. }) => log.refused = true,
                Err(e) => log.driver(e)?,
            }
        }
        Ok(None)
    }

    /// A block of the memory that is free once everything that is over was brought to where it can
    /// be taken.
    pub(crate) fn take_coalesced(&self, need: Need, on: On<'_>) -> Found {
        let mut core = self.core.lock();
        core.settle(&self.table);
        core.store.take(need, on.timeline)
    }
}
