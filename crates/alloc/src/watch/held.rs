//! Freed blocks that the debug aids hold: what is checked, and how they go back.
//!
//! The protocol is [`watch`](super)'s.

use super::{Block, Source, SweepScope, Watch};
use crate::backing::Chunk;
use crate::debug::{FindingKind, POISON_FREED, RED_ZONE};
use crate::ring::EventKind;
use crate::state::{Inner, On};
use leasehold_core::PackedTimepoint;

impl Inner {
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
            if watch.aids.poison && !matches!(block.side.source, Source::Guarded { .. }) {
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
        if let Source::Guarded { base, bytes, .. } = side.source {
            return self.decommit(Chunk { addr: base, bytes, native: 0 }, true);
        }
        true
    }

    /// Gives a block's memory, and with a guard its addresses, back to where they came from.
    pub(super) fn release_source(&self, source: Source) {
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
    pub(super) fn release_held(&self, watch: &Watch, on: On<'_>) -> bool {
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
