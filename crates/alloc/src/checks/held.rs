//! Freed blocks that the debug checks hold: what is checked, and how they go back.
//!
//! The protocol is [`checks`](super)'s.

use super::{Block, DebugChecks, Source, SweepScope};
use crate::core::Core;
use crate::debug::{FindingKind, POISON_FREED, RED_ZONE};
use crate::lock::Lock;
use crate::stream::On;
use crate::supply::Supply;
use leasehold_core::PackedTimepoint;

impl DebugChecks {
    /// Checks what is due, and brings back what leaves the quarantine.
    pub(crate) fn sweep(&self, core: &Lock<Core>, supply: &Supply, scope: SweepScope) {
        if !self.aids.any() || scope == SweepScope::Free && self.aids.direct() {
            return;
        }
        let due: Vec<Block> = {
            let mut held = self.held.lock();
            let over =
                |w: &mut (Block, Box<[PackedTimepoint]>)| w.1.iter().all(|&s| s.has_passed());
            held.waiting.extract_if(.., over).map(|w| w.0).collect()
        };
        for block in due {
            let keeps = self.inspect_freed(supply, &block);
            let mut held = self.held.lock();
            if !keeps {
                held.bytes -= block.side.usable;
                continue;
            }
            held.quarantined += block.side.usable;
            held.quarantine.push_back(block);
        }
        loop {
            let block = {
                let mut held = self.held.lock();
                if held.quarantined <= self.aids.quarantine && scope != SweepScope::All {
                    return;
                }
                let Some(block) = held.quarantine.pop_front() else { return };
                held.quarantined -= block.side.usable;
                held.bytes -= block.side.usable;
                block
            };
            if self.aids.poison && !matches!(block.side.source, Source::Guarded { .. }) {
                // The backing could be written when the allocator was made; it has no way to fail
                // later.
                // SAFETY: a block in quarantine is lent to nobody, and its last use is over; its
                // memory is committed still.
                let seen =
                    unsafe { supply.backing.verify(block.addr, block.side.usable, POISON_FREED) };
                if let Ok(Some(offset)) = seen {
                    self.report(FindingKind::WriteAfterFree, &block, offset);
                }
            }
            release(block.side.source, core, supply);
        }
    }

    /// A freed block that no stream uses any more: its red zone is checked, its memory poisoned or,
    /// with a guard, taken away. `false`: the driver did not take it, and its addresses are lost.
    fn inspect_freed(&self, supply: &Supply, block: &Block) -> bool {
        let Block { addr, len, side, .. } = *block;
        if self.aids.red_zone > 0 {
            // SAFETY: the block was freed and its last use is over, as the caller checked; the
            // zone is committed.
            let seen = unsafe { supply.backing.verify(addr + len, side.usable - len, RED_ZONE) };
            if let Ok(Some(offset)) = seen {
                self.report(FindingKind::RedZone, block, len + offset);
            }
        }
        if let Source::Guarded { chunk, .. } = side.source {
            // SAFETY: the side names the chunk; no stream uses it, and it is given back once.
            return unsafe { supply.give_segment(chunk) };
        }
        if self.aids.poison {
            // As in `sweep`: it cannot fail.
            // SAFETY: the freed block's memory is committed and nobody's.
            let _ = unsafe { supply.backing.fill(addr, side.usable, POISON_FREED) };
        }
        true
    }

    /// Waits for the streams that still use held blocks, and brings all of them back. `false`:
    /// nothing was held.
    pub(super) fn release_held(&self, core: &Lock<Core>, supply: &Supply, on: On<'_>) -> bool {
        let timepoints: Vec<PackedTimepoint> = {
            let held = self.held.lock();
            if held.waiting.is_empty() && held.quarantine.is_empty() {
                return false;
            }
            held.waiting.iter().flat_map(|w| w.1.iter().copied()).collect()
        };
        for point in timepoints.into_iter().filter_map(PackedTimepoint::timepoint) {
            // A stream that cannot be waited for keeps its block held.
            let _ = supply.wait(point, on, None);
        }
        self.sweep(core, supply, SweepScope::All);
        true
    }
}

/// Gives a block's memory, and with a guard its addresses, back to where they came from.
pub(super) fn release(source: Source, core: &Lock<Core>, supply: &Supply) {
    match source {
        Source::Store(placement) => core.lock().store.free(placement, PackedTimepoint::NEVER),
        Source::Exact { chunk, align } => {
            // SAFETY: the side names the chunk and alignment that `exact` gave; it left the table,
            // so it is given back once.
            supply.give(chunk, || unsafe { supply.backing.exact_free(chunk, align) });
        }
        // SAFETY: the side's own reservation; what was committed in it was given back when the
        // block was freed.
        Source::Guarded { chunk, span } => unsafe { supply.backing.release(chunk.addr, span) },
    }
}
