//! Debug checks and traces: the steps of an allocator with either for each block.
//!
//! This wraps the allocator: requests come here behind the thread caches, of which a checked
//! allocator has none, and go on to the heap. Rows of a checked allocator bear the flag `CHECKED`,
//! so that their last drop comes here.
//!
//! # Protocol
//! With checks a freed block is *held*: first until its last use is over, then, red zone checked
//! and memory poisoned, in the quarantine, and when enough younger blocks lie there it is checked
//! again and goes back. So host and stream never touch a block at the same time, and memory in the
//! store is ready for everybody.
//!
//! A free makes no driver call: what must go back to the backing waits for the next allocation,
//! drain or trim. The locks of this module are leaves, never held together or across a call of the
//! backing.

mod blocks;

use crate::backing::{Backing, Chunk};
use crate::config::AllocatorConfig;
use crate::core::Core;
use crate::debug::{DebugOptions, Finding, FindingKind, MOST_FINDINGS, POISON_FREED, RED_ZONE};
use crate::extent::Placement;
use crate::lock::Lock;
use crate::stream::On;
use crate::supply::Supply;
use leasehold_core::sync::Mutex;
use leasehold_core::{Error, PackedTimepoint, Result, TimelineId};
use std::collections::{HashMap, VecDeque};

/// The debug checks of an allocator.
pub(crate) struct DebugChecks {
    debug: DebugOptions,
    /// Whether blocks pass here.
    on: bool,
    /// The side data of rows that are out, by the row's index. Empty without checks.
    sides: Mutex<HashMap<u32, Side>>,
    held: Mutex<Held>,
    findings: Mutex<(Vec<Finding>, u64)>,
}

/// Where a checked block comes from.
#[derive(Debug, Clone, Copy)]
enum Source {
    Store(Placement),
    /// The backing, exactly.
    Exact {
        chunk: Chunk,
        align: u64,
    },
    /// Addresses of its own, `span` of them, of which the first ones are backed.
    Guarded {
        chunk: Chunk,
        span: u64,
    },
}

impl Source {
    /// The range that came straight from the backing.
    fn range(self) -> Option<(u64, u64)> {
        match self {
            Source::Store(_) => None,
            Source::Exact { chunk, .. } | Source::Guarded { chunk, .. } => {
                Some((chunk.addr, chunk.bytes))
            }
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Side {
    source: Source,
    /// Bytes from the buffer's address that are the block's.
    usable: u64,
}

/// A freed block.
#[derive(Debug, Clone, Copy)]
struct Block {
    side: Side,
    addr: u64,
    len: u64,
    tag: u32,
    stream: TimelineId,
}

/// The freed blocks.
#[derive(Default)]
struct Held {
    waiting: Vec<(Block, Box<[PackedTimepoint]>)>,
    quarantine: VecDeque<Block>,
    /// Bytes in the quarantine, and in both.
    quarantined: u64,
    bytes: u64,
}

/// How far a sweep goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SweepScope {
    /// No driver call.
    Free,
    /// The blocks that are due.
    Due,
    /// The quarantine too.
    All,
}

impl DebugChecks {
    /// The checks of a configuration.
    ///
    /// # Errors
    /// `Unsupported` when the backing cannot do what a check needs.
    pub(crate) fn new(config: &AllocatorConfig, backing: &dyn Backing) -> Result<Self> {
        let (debug, name) = (config.debug, &config.name);
        if debug.guard && !backing.caps().reserve {
            return Err(Error::Unsupported(
                format!("{name}: guard granules need a backing that reserves addresses").into(),
            ));
        }
        // SAFETY: of no bytes.
        if debug.writes() && unsafe { backing.fill(0, 0, 0) }.is_err() {
            return Err(Error::Unsupported(
                format!("{name}: poison and red zones need memory that the host can write").into(),
            ));
        }
        Ok(Self {
            debug,
            on: debug.any() || config.trace_events > 0,
            sides: Mutex::default(),
            held: Mutex::default(),
            findings: Mutex::default(),
        })
    }

    /// Whether blocks pass here.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Bytes of freed blocks that are held, and how many findings there are.
    pub(crate) fn numbers(&self) -> (u64, u64) {
        (self.held.lock().bytes, self.findings.lock().1)
    }

    pub(crate) fn findings(&self) -> Vec<Finding> {
        self.findings.lock().0.clone()
    }

    /// Whether every stream is done with what is held.
    pub(crate) fn is_over(&self) -> bool {
        self.held.lock().waiting.iter().all(|(_, uses)| uses.iter().all(|s| s.has_passed()))
    }

    /// Held blocks that lie in the store: for snapshots.
    pub(crate) fn held_placements(&self) -> Vec<Placement> {
        let held = self.held.lock();
        let blocks = held.waiting.iter().map(|(b, _)| b).chain(&held.quarantine);
        let placement =
            |b: &Block| if let Source::Store(place) = b.side.source { Some(place) } else { None };
        blocks.filter_map(placement).collect()
    }

    /// Ranges that came straight from the backing, with the row that holds each (`None`: held
    /// back).
    pub(crate) fn direct_ranges(&self) -> Vec<(u64, u64, Option<u32>)> {
        let range = |side: &Side, row| side.source.range().map(|(at, bytes)| (at, bytes, row));
        let mut all: Vec<_> =
            self.sides.lock().iter().filter_map(|(&row, side)| range(side, Some(row))).collect();
        let held = self.held.lock();
        // Guarded blocks in the quarantine have no memory any more.
        let exact =
            held.quarantine.iter().filter(|b| matches!(b.side.source, Source::Exact { .. }));
        let blocks = held.waiting.iter().map(|(b, _)| b).chain(exact);
        all.extend(blocks.filter_map(|b| range(&b.side, None)));
        all.sort_unstable();
        all
    }

    /// Checks what is due, and brings back what leaves the quarantine.
    pub(crate) fn sweep(&self, core: &Lock<Core>, supply: &Supply, scope: SweepScope) {
        if !self.debug.any() || scope == SweepScope::Free && self.debug.direct() {
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
                if held.quarantined <= self.debug.quarantine && scope != SweepScope::All {
                    return;
                }
                let Some(block) = held.quarantine.pop_front() else { return };
                held.quarantined -= block.side.usable;
                held.bytes -= block.side.usable;
                block
            };
            if self.debug.poison && !matches!(block.side.source, Source::Guarded { .. }) {
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
        if self.debug.red_zone > 0 {
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
        if self.debug.poison {
            // As in `sweep`: it cannot fail.
            // SAFETY: the freed block's memory is committed and nobody's.
            let _ = unsafe { supply.backing.fill(addr, side.usable, POISON_FREED) };
        }
        true
    }

    /// Waits for the streams that still use held blocks, and brings all of them back. `false`:
    /// nothing was held.
    fn release_held(&self, core: &Lock<Core>, supply: &Supply, on: On<'_>) -> bool {
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

    fn report(&self, kind: FindingKind, block: &Block, offset: u64) {
        let Block { addr, len, tag, stream, .. } = *block;
        let (findings, found) = &mut *self.findings.lock();
        *found += 1;
        if findings.len() < MOST_FINDINGS {
            findings.push(Finding { kind, addr, len, offset, tag, stream });
        }
    }
}

/// Gives a block's memory, and with a guard its addresses, back to where they came from.
fn release(source: Source, core: &Lock<Core>, supply: &Supply) {
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
