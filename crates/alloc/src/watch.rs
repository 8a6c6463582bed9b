//! The work of debug aids and of the trace ring on each block. Absent in other allocators.
//!
//! # Protocol
//! Rows of a watched allocator bear the flag `WATCHED`, so that their last drop comes here; its
//! allocations come here behind the thread caches, of which it has none. With aids a freed block is
//! *held*: first until its last use is over, then, red zone checked and memory poisoned, in the
//! quarantine, and when enough younger blocks lie there it is checked again and goes back. So host
//! and stream never touch a block at the same time, and memory in the store is ready for everybody.
//!
//! A free makes no driver call: what must go back to the backing waits for the next allocation,
//! drain or trim. The locks of this module are leaves, never held together or across a call of the
//! backing.

mod aids;
mod held;
mod trace;

use crate::backing::{Backing, BackingCaps, Chunk};
use crate::buffer::Row;
use crate::config::AllocatorConfig;
use crate::debug::{DebugAids, Finding, FindingKind, MOST_FINDINGS};
use crate::ring::{EventKind, Ring};
use crate::store::Placement;
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, PackedTimepoint, Result, TimelineId};
use std::collections::{HashMap, VecDeque};

/// The state of a watched allocator.
pub(crate) struct Watch {
    aids: DebugAids,
    ring: Option<Ring>,
    /// The side data of rows that are out, by the row's index. Empty without aids.
    sides: Mutex<HashMap<u32, Side>>,
    held: Mutex<Held>,
    findings: Mutex<Vec<Finding>>,
    found: AtomicU64,
}

/// Where a watched block comes from.
#[derive(Debug, Clone, Copy)]
enum Source {
    Store(Placement),
    /// The backing, exactly.
    Exact {
        chunk: Chunk,
        align: u64,
    },
    /// Addresses of its own, `span` of them, of which the first `bytes` are backed.
    Guarded {
        base: u64,
        bytes: u64,
        span: u64,
    },
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

impl Watch {
    /// The state for a configuration, if it wants any.
    ///
    /// # Errors
    /// `Unsupported` when the backing cannot do what an aid needs.
    pub(crate) fn new(
        config: &AllocatorConfig,
        backing: &dyn Backing,
    ) -> Result<Option<Box<Watch>>> {
        let aids = config.debug;
        if !aids.any() && config.trace_events == 0 {
            return Ok(None);
        }
        let BackingCaps { reserve, .. } = backing.caps();
        if aids.guard && !reserve {
            return Err(Error::Unsupported(
                format!("{}: guard granules need a backing that reserves addresses", config.name)
                    .into(),
            ));
        }
        // SAFETY: of no bytes.
        if aids.writes() && unsafe { backing.fill(0, 0, 0) }.is_err() {
            let name = &config.name;
            return Err(Error::Unsupported(
                format!("{name}: poison and red zones need memory that the host can write").into(),
            ));
        }
        let events = config.trace_events;
        let ring = if events > 0 { Some(Ring::new(events)?) } else { None };
        Ok(Some(Box::new(Watch {
            aids,
            ring,
            sides: Mutex::new(HashMap::new()),
            held: Mutex::new(Held::default()),
            findings: Mutex::new(Vec::new()),
            found: AtomicU64::new(0),
        })))
    }

    pub(crate) fn ring(&self) -> Option<&Ring> {
        self.ring.as_ref()
    }

    /// Bytes of freed blocks that are held, and how many findings there are.
    pub(crate) fn numbers(&self) -> (u64, u64) {
        (self.held.lock().bytes, self.found.load(Ordering::Relaxed))
    }

    pub(crate) fn findings(&self) -> Vec<Finding> {
        self.findings.lock().clone()
    }

    /// Whether every stream is done with what is held.
    pub(crate) fn is_over(&self) -> bool {
        self.held
            .lock()
            .waiting
            .iter()
            .all(|(_, timepoints)| timepoints.iter().all(|&s| s.has_passed()))
    }

    /// Held blocks that lie in the store: for snapshots.
    pub(crate) fn held_placements(&self) -> Vec<Placement> {
        let held = self.held.lock();
        let blocks = held.waiting.iter().map(|(b, _)| b).chain(&held.quarantine);
        blocks
            .filter_map(|b| {
                if let Source::Store(placement) = b.side.source { Some(placement) } else { None }
            })
            .collect()
    }

    /// Ranges that came straight from the backing, with the row that holds each (`None`: held
    /// back).
    pub(crate) fn direct_ranges(&self) -> Vec<(u64, u64, Option<u32>)> {
        let range = |source: Source| match source {
            Source::Store(_) => None,
            Source::Exact { chunk, .. } => Some((chunk.addr, chunk.bytes)),
            Source::Guarded { base, bytes, .. } => Some((base, bytes)),
        };
        let mut all: Vec<_> = {
            let sides = self.sides.lock();
            sides
                .iter()
                .filter_map(|(&row, s)| range(s.source).map(|(a, b)| (a, b, Some(row))))
                .collect()
        };
        let held = self.held.lock();
        // Guarded blocks in the quarantine have no memory any more.
        let exact =
            held.quarantine.iter().filter(|b| matches!(b.side.source, Source::Exact { .. }));
        let blocks = held.waiting.iter().map(|(b, _)| b).chain(exact);
        all.extend(blocks.filter_map(|b| range(b.side.source).map(|(a, b)| (a, b, None))));
        all.sort_unstable();
        all
    }

    fn report(&self, kind: FindingKind, block: &Block, offset: u64) {
        let Block { addr, len, tag, stream, .. } = *block;
        self.found.fetch_add(1, Ordering::Relaxed);
        let mut findings = self.findings.lock();
        if findings.len() < MOST_FINDINGS {
            findings.push(Finding { kind, addr, len, offset, tag, stream });
        }
    }

    fn record_free(&self, row: &Row) {
        if let Some(ring) = &self.ring {
            let b = &row.buffer;
            let home = b.home_timeline();
            // The stream that used it last, where that is another one.
            let mut stream = home;
            b.for_each_use(|s| {
                if stream == home && !s.has_passed() {
                    stream = s.timeline_id();
                }
            });
            ring.record(EventKind::Free, id_of(row), b.addr(), b.len(), stream.get(), b.tag());
        }
    }
}

/// A name of the allocation that holds the row, never used again.
pub(crate) fn id_of(row: &Row) -> u64 {
    u64::from(row.header.generation()) << 32 | u64::from(row.header.index())
}
