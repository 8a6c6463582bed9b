//! Debug checks: what an allocator with debug aids or a trace does with each block.
//!
//! This wraps the allocator: requests come here behind the thread caches, of which a checked
//! allocator has none, and go on to the heap. Rows of a checked allocator bear the flag `CHECKED`,
//! so that their last drop comes here.
//!
//! # Protocol
//! With aids a freed block is *held*: first until its last use is over, then, red zone checked and
//! memory poisoned, in the quarantine, and when enough younger blocks lie there it is checked again
//! and goes back. So host and stream never touch a block at the same time, and memory in the store
//! is ready for everybody.
//!
//! A free makes no driver call: what must go back to the backing waits for the next allocation,
//! drain or trim. The locks of this module are leaves, never held together or across a call of the
//! backing.

mod blocks;
mod held;

use crate::backing::{Backing, Chunk};
use crate::config::AllocatorConfig;
use crate::debug::{DebugAids, Finding, FindingKind, MOST_FINDINGS};
use crate::store::Placement;
use leasehold_core::sync::Mutex;
use leasehold_core::{Error, PackedTimepoint, Result, TimelineId};
use std::collections::{HashMap, VecDeque};

/// The debug checks of an allocator.
pub(crate) struct DebugChecks {
    aids: DebugAids,
    /// Whether blocks pass here.
    on: bool,
    /// The side data of rows that are out, by the row's index. Empty without aids.
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
    /// `Unsupported` when the backing cannot do what an aid needs.
    pub(crate) fn new(config: &AllocatorConfig, backing: &dyn Backing) -> Result<Self> {
        let (aids, name) = (config.debug, &config.name);
        if aids.guard && !backing.caps().reserve {
            return Err(Error::Unsupported(
                format!("{name}: guard granules need a backing that reserves addresses").into(),
            ));
        }
        // SAFETY: of no bytes.
        if aids.writes() && unsafe { backing.fill(0, 0, 0) }.is_err() {
            return Err(Error::Unsupported(
                format!("{name}: poison and red zones need memory that the host can write").into(),
            ));
        }
        Ok(Self {
            aids,
            on: aids.any() || config.trace_events > 0,
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

    fn report(&self, kind: FindingKind, block: &Block, offset: u64) {
        let Block { addr, len, tag, stream, .. } = *block;
        let (findings, found) = &mut *self.findings.lock();
        *found += 1;
        if findings.len() < MOST_FINDINGS {
            findings.push(Finding { kind, addr, len, offset, tag, stream });
        }
    }
}
