//! Snapshots: where an allocator's memory is, block by block, with what the trace ring remembers;
//! and who holds what, by tag and by address.
//!
//! Taken under the allocator's lock, which is held for a walk over its tables. Exact when nobody
//! drops a lease meanwhile; a block whose last lease is being dropped, or that lies in a thread
//! cache, is *cached*.

use crate::allocator::Allocator;
use crate::buffer::{ARENA, IMPORTED, REGION};
use crate::config::AllocStats;
use crate::core::Core;
use crate::extent::{Extent, NIL, Placement, State};
use crate::heap::{Heap, Span};
use crate::layout::{UNIT_SHIFT, class_size};
use crate::ranges::Range;
use crate::state::Inner;
use crate::trace::TraceEvent;
use crate::trace::id_of;
use leasehold_core::{Name, PackedTimepoint, ShownTag, Text, TimelineId};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

/// The state of a block of a [`Segment`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum BlockState {
    /// Leases hold it.
    Live,
    /// Free for everybody.
    Ready,
    /// Free; a stream may still be using it.
    Pending,
    /// Freed, in a thread cache or on its way to the heap.
    Cached,
    /// Freed, kept from reuse by a debug check.
    HeldBack,
    /// In a change of what is mapped where.
    Moving,
    /// Lost to a driver call that failed.
    Quarantined,
}

/// A block. The blocks of a segment tile it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct BlockInfo {
    /// Its address.
    pub addr: u64,
    /// Its bytes, rounding included.
    pub bytes: u64,
    /// Bytes as asked for; 0 unless live.
    pub requested: u64,
    /// The state of the block.
    pub state: BlockState,
    /// The number of the timeline of the stream that it was allocated on (live), or that may still
    /// use it (pending). 0: none, or several.
    pub stream: u16,
    /// The release tag of a live block.
    pub tag: u32,
    /// The allocation, as in the trace ring; 0 unless live.
    pub id: u64,
    /// It is memory of a graph's arena.
    pub graph: bool,
}

/// A range of addresses with memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Segment {
    /// Its address.
    pub addr: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Made of granules that were mapped one by one.
    pub paged: bool,
    /// The blocks of the segment, by address, without gaps.
    pub blocks: Vec<BlockInfo>,
}

/// The state of an allocator at one time.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Snapshot {
    /// The name of the memory.
    pub name: Text,
    /// The numbers.
    pub stats: AllocStats,
    /// Where memory is, by address.
    pub segments: Vec<Segment>,
    /// The newest events, oldest first; empty unless
    /// [`trace_events`](crate::AllocatorConfig::trace_events) is set.
    pub events: Vec<TraceEvent>,
    /// Events that the ring has lost.
    pub events_lost: u64,
    /// The texts of the tags that are names.
    pub names: BTreeMap<u32, String>,
    /// The names of the streams that have one.
    pub streams: BTreeMap<u16, String>,
}

/// A buffer that leases hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct LiveBuffer {
    /// Its address.
    pub addr: u64,
    /// Its bytes, as asked for.
    pub len: u64,
    /// Its release tag.
    pub tag: u32,
    /// The number of the timeline of the stream that it was allocated on; 0: none.
    pub stream: u16,
    /// How many leases hold it.
    pub leases: u32,
    /// It is somebody else's memory.
    pub imported: bool,
}

/// The totals of the buffers of one release tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TagTotal {
    /// The tag.
    pub tag: u32,
    /// Buffers.
    pub count: u64,
    /// Their bytes, as asked for.
    pub bytes: u64,
}

/// The buffers that leases hold: at the end of a program, the leaks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct LeakReport {
    /// The buffers that leases hold, largest first.
    pub buffers: Vec<LiveBuffer>,
}

impl LeakReport {
    /// Whether nobody holds anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    /// The sums per release tag, largest first.
    #[must_use]
    pub fn by_tag(&self) -> Vec<TagTotal> {
        let mut sums: BTreeMap<u32, TagTotal> = BTreeMap::new();
        for b in &self.buffers {
            let sum = sums.entry(b.tag).or_insert(TagTotal { tag: b.tag, ..TagTotal::default() });
            sum.count += 1;
            sum.bytes += b.len;
        }
        let mut all: Vec<_> = sums.into_values().collect();
        all.sort_by_key(|t| (std::cmp::Reverse(t.bytes), t.tag));
        all
    }
}

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: u64 = self.buffers.iter().map(|b| b.len).sum();
        let Some(largest) = self.buffers.first() else { return f.write_str("no buffer is held") };
        write!(f, "{} buffers of {bytes} bytes are held", self.buffers.len())?;
        let tags = self.by_tag();
        for (i, &TagTotal { tag, count, bytes }) in tags.iter().take(8).enumerate() {
            let (before, tag) = (if i == 0 { ":" } else { "," }, ShownTag(tag));
            write!(f, "{before} {tag}: {count} of {bytes} bytes")?;
        }
        if tags.len() > 8 {
            write!(f, ", and {} more tags", tags.len() - 8)?;
        }
        let LiveBuffer { addr, len, tag, stream, .. } = *largest;
        let (tag, stream) = (ShownTag(tag), TimelineId::from_number(stream));
        write!(f, "; the largest: {len} bytes at {addr:#x} ({tag}, allocated on {stream})")
    }
}

/// A live buffer that holds a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// Its row in the block table: a good hint for the next question about the same address.
    pub row: u32,
    /// Its first byte.
    pub addr: u64,
    /// Its length in bytes, as asked for.
    pub len: u64,
    /// The native object that spans it, or 0.
    pub native: u64,
    /// Its tag, by which reports and snapshots name it.
    pub tag: u32,
}

impl Allocator {
    /// Where the memory is, block by block, and the newest events. Takes the lock for a walk over
    /// the tables; makes no driver call.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let inner = self.inner();
        let segments = segments(inner);
        let (events, events_lost) = inner.supply.trace.read();
        let (mut names, mut streams) = (BTreeMap::new(), BTreeMap::new());
        let blocks = segments.iter().flat_map(|s| &s.blocks).map(|b| (b.tag, b.stream));
        for (tag, stream) in blocks.chain(events.iter().map(|e| (e.tag, e.stream))) {
            names.extend(Name::from_tag(tag).map(|n| (tag, n.as_str().to_owned())));
            let stream_name = TimelineId::from_number(stream).name();
            streams.extend(stream_name.map(|n| (stream, n.as_str().to_owned())));
        }
        Snapshot {
            name: inner.config.name.clone(),
            stats: self.stats(),
            segments,
            events,
            events_lost,
            names,
            streams,
        }
    }

    /// The buffers that leases hold now, members of graphs and empty buffers left out. Walks the
    /// block table without a lock: exact when nobody allocates or drops meanwhile.
    #[must_use]
    pub fn leak_report(&self) -> LeakReport {
        let mut buffers = Vec::new();
        self.inner().table.for_each_live(|row, leases| {
            let b = &row.buffer;
            buffers.push(LiveBuffer {
                addr: b.addr(),
                len: b.len(),
                tag: b.tag(),
                stream: b.home_timeline().get(),
                leases,
                imported: b.flags() & IMPORTED != 0,
            });
        });
        buffers.sort_by_key(|b| (std::cmp::Reverse(b.len), b.addr));
        LeakReport { buffers }
    }

    /// The live buffer that holds all of `[addr, addr + bytes)`, imported ones included, members of
    /// graphs not. The row `hint` is looked at first, then every row there is. Any thread; takes no
    /// lock, allocates nothing.
    #[must_use]
    pub fn holding(&self, addr: u64, bytes: u64, hint: u32) -> Option<Holding> {
        let table = &self.inner().table;
        let end = addr.checked_add(bytes)?;
        let fits = |row: u32| {
            let r = table.get(row)?;
            if r.header.strong() == 0 || r.buffer.flags() & ARENA != 0 {
                return None;
            }
            let (at, len) = (r.buffer.addr(), r.buffer.len());
            (at <= addr && end <= at.saturating_add(len) && len != 0).then(|| Holding {
                row,
                addr: at,
                len,
                native: r.buffer.native(),
                tag: r.buffer.tag(),
            })
        };
        fits(hint).or_else(|| (0..table.len()).find_map(fits))
    }
}

/// The facts that the tables hold beside the extents.
struct Facts<'a> {
    core: &'a Core,
    /// Live buffers by address, with their lengths as asked for.
    live: HashMap<u64, BlockInfo>,
    held: HashSet<(u32, u16)>,
}

const WHOLE: u16 = u16::MAX;

/// The ranges with memory, by address.
fn segments(inner: &Inner) -> Vec<Segment> {
    let placements = inner.checks.held_placements();
    let held = placements.into_iter().map(|s| match s {
        Placement::Extent(extent) => (extent, WHOLE),
        Placement::Slot(run, slot) => (run, slot),
    });
    let core = inner.core.lock();
    let mut live = HashMap::new();
    inner.table.for_each_live(|row, _| {
        let b = &row.buffer;
        if b.flags() & IMPORTED == 0 {
            let block = BlockInfo {
                requested: b.len(),
                state: BlockState::Live,
                stream: b.home_timeline().get(),
                tag: b.tag(),
                id: id_of(row),
                graph: b.flags() & REGION != 0,
                ..NOTHING
            };
            live.insert(b.addr(), block);
        }
    });
    let facts = Facts { core: &core, live, held: held.collect() };
    let mut out = Vec::new();
    for span in core.store.heap.spans.iter().filter(|s| s.live) {
        facts.span(span, &mut out);
    }
    let mut seen = HashSet::new();
    core.ranges.each().for_each(|range| facts.growing(range, &mut seen, &mut out));
    let direct = inner.checks.direct_ranges();
    for (addr, bytes, row) in direct {
        let row = row.and_then(|r| inner.table.get(r));
        out.push(facts.direct(addr, bytes, row.map(|r| r.buffer.addr())));
    }
    out.sort_by_key(|s| s.addr);
    out
}

const NOTHING: BlockInfo = BlockInfo {
    addr: 0,
    bytes: 0,
    requested: 0,
    state: BlockState::Cached,
    stream: 0,
    tag: 0,
    id: 0,
    graph: false,
};

impl Facts<'_> {
    /// The block that begins at `addr`, live if anybody says so.
    fn used(&self, addr: u64, bytes: u64, held: (u32, u16)) -> BlockInfo {
        let block = match self.live.get(&addr) {
            Some(&live) => BlockInfo { requested: live.requested.min(bytes), ..live },
            None if self.held.contains(&held) => {
                BlockInfo { state: BlockState::HeldBack, ..NOTHING }
            }
            None => NOTHING,
        };
        BlockInfo { addr, bytes, ..block }
    }

    /// A growing block: what is in use, and what is mapped beyond. A block that shares its
    /// beginning with one before is listed without that.
    fn growing(&self, range: &Range, seen: &mut HashSet<u32>, out: &mut Vec<Segment>) {
        let res = &self.core.store.heap.res;
        let again = |piece: &u32| res.pieces[*piece as usize].more > 0 && !seen.insert(*piece);
        let listed: u64 = range.pieces.iter().copied().filter(again).map(|p| res.bytes_of(p)).sum();
        let (addr, end) = (range.base + listed, range.base + range.mapped);
        let middle = (range.base + range.committed).max(addr);
        let tail = BlockInfo { addr: middle, bytes: end - middle, ..NOTHING };
        let used = self.used(range.base, range.committed, (NIL, WHOLE));
        let bytes = middle - addr;
        let requested = used.requested.saturating_sub(listed).min(bytes);
        let used = BlockInfo { addr, bytes, requested, ..used };
        let blocks: Vec<_> = [used, tail].into_iter().filter(|b| b.bytes > 0).collect();
        if end > addr {
            out.push(Segment { addr, bytes: end - addr, paged: true, blocks });
        }
    }

    fn free(addr: u64, bytes: u64, until: PackedTimepoint) -> BlockInfo {
        let block = BlockInfo { addr, bytes, state: BlockState::Ready, ..NOTHING };
        if until.is_never() || until.has_passed() {
            return block;
        }
        BlockInfo { state: BlockState::Pending, stream: until.timeline_id().get(), ..block }
    }

    /// The blocks of an extent.
    fn extent(&self, heap: &Heap, id: u32, n: &Extent, push: &mut dyn FnMut(BlockInfo)) {
        let (addr, bytes) = (heap.place(id).0, u64::from(n.units) << UNIT_SHIFT);
        let other = |state| BlockInfo { addr, bytes, state, ..NOTHING };
        match n.state {
            State::Free => push(Self::free(addr, bytes, heap.extents.timepoint(id))),
            State::Waiting => push(other(BlockState::Pending)),
            State::Moving | State::Vacant => push(other(BlockState::Moving)),
            State::Quarantined => push(other(BlockState::Quarantined)),
            State::Used if n.link[0] == NIL => push(self.used(addr, bytes, (id, WHOLE))),
            State::Used => self.run(n.link[0], addr, bytes, push),
        }
    }

    /// The slots of a run; free ones of a kind that lie together are one block.
    fn run(&self, run: u32, addr: u64, bytes: u64, push: &mut dyn FnMut(BlockInfo)) {
        let slabs = &self.core.store.slabs;
        let (_, class, slots) = slabs.run(run);
        let size = class_size(class);
        let mut blocks: Vec<BlockInfo> = Vec::new();
        for slot in 0..slots {
            let at = addr + u64::from(slot) * size;
            let block = match slabs.free_slot(run, slot) {
                Some(until) => Self::free(at, size, until),
                None => self.used(at, size, (run, slot)),
            };
            let kind = |b: &BlockInfo| (b.state, b.stream);
            match blocks.last_mut() {
                Some(last) if last.state != BlockState::Live && kind(last) == kind(&block) => {
                    last.bytes += size;
                }
                _ => blocks.push(block),
            }
        }
        blocks.into_iter().for_each(&mut *push);
        let tail = bytes - u64::from(slots) * size;
        if tail > 0 {
            // Too small for a slot: nobody can have it while the run exists.
            push(BlockInfo { addr: addr + bytes - tail, bytes: tail, ..NOTHING });
        }
    }

    /// The backed parts of a span, each a segment.
    fn span(&self, span: &Span, out: &mut Vec<Segment>) {
        let heap = &self.core.store.heap;
        let res = &heap.res;
        let to_addr = |unit: u64| span.base + ((unit - u64::from(span.unit)) << UNIT_SHIFT);
        let end = u64::from(span.unit) + u64::from(span.units);
        // Backed runs of granules, in units.
        let mut runs: Vec<(u64, u64)> = Vec::new();
        if span.paged {
            let known = res.granules.len() as u64;
            let last = (end >> res.shift).min(known);
            for g in u64::from(span.unit >> res.shift)..last {
                if res.piece_of(g as u32) == NIL {
                    continue;
                }
                let (from, to) = (g << res.shift, (g + 1) << res.shift);
                match runs.last_mut() {
                    Some(run) if run.1 == from => run.1 = to,
                    _ => runs.push((from, to)),
                }
            }
        } else {
            runs.push((u64::from(span.unit), end));
        }
        let first = out.len();
        out.extend(runs.iter().map(|&(from, to)| Segment {
            addr: to_addr(from),
            bytes: (to - from) << UNIT_SHIFT,
            paged: span.paged,
            blocks: Vec::new(),
        }));
        let (mut at, mut segment) = (span.first, first);
        while at != NIL {
            let n = &heap.extents[at];
            self.extent(heap, at, n, &mut |block| {
                let (mut from, to) = (block.addr, block.addr + block.bytes);
                // Addresses that nothing backs lie in no segment.
                while from < to && segment < out.len() {
                    let s = &mut out[segment];
                    let (begin, end) = (from.max(s.addr), to.min(s.addr + s.bytes));
                    if begin < end {
                        s.blocks.push(BlockInfo { addr: begin, bytes: end - begin, ..block });
                    }
                    if s.addr + s.bytes > to {
                        break;
                    }
                    from = end.max(from);
                    segment += 1;
                }
            });
            at = n.next;
        }
    }

    /// A range that came straight from the backing.
    fn direct(&self, addr: u64, bytes: u64, buffer: Option<u64>) -> Segment {
        let mut blocks = Vec::new();
        match buffer {
            Some(at) if (addr..addr + bytes).contains(&at) => {
                if at > addr {
                    blocks.push(BlockInfo { addr, bytes: at - addr, ..NOTHING });
                }
                blocks.push(self.used(at, addr + bytes - at, (u32::MAX, WHOLE)));
            }
            _ => blocks.push(BlockInfo { addr, bytes, state: BlockState::HeldBack, ..NOTHING }),
        }
        Segment { addr, bytes, paged: false, blocks }
    }
}

#[cfg(test)]
#[path = "../tests/unit/lookup.rs"]
mod tests;
