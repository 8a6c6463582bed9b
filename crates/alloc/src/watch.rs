//! What an allocator with debug aids or a trace ring does with each block. Absent otherwise.
//!
//! # Protocol
//! Rows of a watched allocator bear the flag `WATCHED`, so that their last drop comes here; its allocations come here behind the magazines,
//! of which it has none. With aids a freed block is *held*: first until its last use is over, then, red zone checked and memory
//! poisoned, in the quarantine, and when enough younger blocks lie there it is checked again and goes back. So host and stream never
//! touch a block at the same time, and memory in the store is ready for everybody.
//!
//! A free makes no driver call: what must go back to the backing waits for the next allocation, drain or trim. The locks of this module
//! are leaves, never held together or across a call of the backing.

use crate::allocator::kind_bits;
use crate::allocator::{Allocator, Inner, On, uses};
use crate::backing::{Backing, BackingCaps, Chunk};
use crate::buffer::{Buffer, NO_SLOT, Row, WATCHED};
use crate::config::AllocatorConfig;
use crate::debug::{DebugAids, Finding, FindingKind, MOST_FINDINGS, POISON_FREED, POISON_FRESH, RED_ZONE};
use crate::layout::NO_CLASS;
use crate::layout::{Layout, UNIT_SHIFT, class_size};
use crate::residency::{End, Step};
use crate::ring::{EventKind, Ring};
use crate::store::Spot;
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Lease, LineId, Result, Stamp, Text};
use std::collections::{HashMap, VecDeque};
use std::panic::AssertUnwindSafe;

/// The state of a watched allocator.
pub(crate) struct Watch {
    aids: DebugAids,
    ring: Option<Ring>,
    /// What rows that are out hold, by index. Empty without aids.
    sides: Mutex<HashMap<u32, Side>>,
    held: Mutex<Held>,
    findings: Mutex<Vec<Finding>>,
    found: AtomicU64,
}

/// Where a watched block comes from.
#[derive(Debug, Clone, Copy)]
enum Source {
    Store(Spot),
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
    /// Its memory was given back in between: nothing in it can be checked.
    dark: bool,
}

/// A freed block.
#[derive(Debug, Clone, Copy)]
struct Block {
    side: Side,
    addr: u64,
    len: u64,
    tag: u32,
    stream: LineId,
}

#[derive(Default)]
struct Held {
    waiting: Vec<(Block, Box<[Stamp]>)>,
    quarantine: VecDeque<Block>,
    /// Bytes in the quarantine, and in both.
    quarantined: u64,
    bytes: u64,
}

/// How far a sweep goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// No driver call.
    Free,
    /// What is due.
    Due,
    /// The quarantine too.
    All,
}

impl Watch {
    /// The state for a configuration, if it wants any.
    ///
    /// # Errors
    /// `Unsupported` when the backing cannot do what an aid needs.
    pub(crate) fn new(config: &AllocatorConfig, backing: &dyn Backing) -> Result<Option<Box<Watch>>> {
        let aids = config.debug;
        if !aids.any() && config.trace_events == 0 {
            return Ok(None);
        }
        let BackingCaps { reserve, .. } = backing.caps();
        if aids.guard && !reserve {
            return Err(Error::Unsupported(
                format!("{}: guard granules need a backing that reserves addresses", config.name).into(),
            ));
        }
        // SAFETY: of no bytes.
        if aids.writes() && unsafe { backing.fill(0, 0, 0) }.is_err() {
            return Err(Error::Unsupported(
                format!("{}: poison and red zones need memory that the host can write", config.name).into(),
            ));
        }
        let ring = (config.trace_events > 0).then(|| Ring::new(config.trace_events));
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
        self.held.lock().waiting.iter().all(|(_, stamps)| stamps.iter().all(|&s| s.has_passed()))
    }

    /// The row's memory goes back to the driver while the row is out.
    pub(crate) fn darken(&self, row: &Row) {
        if let Some(side) = self.sides.lock().get_mut(&row.header.index()) {
            side.dark = true;
        }
    }

    /// Held blocks that lie in the store: for snapshots.
    pub(crate) fn held_spots(&self) -> Vec<Spot> {
        let held = self.held.lock();
        let blocks = held.waiting.iter().map(|(b, _)| b).chain(&held.quarantine);
        blocks.filter_map(|b| if let Source::Store(spot) = b.side.source { Some(spot) } else { None }).collect()
    }

    /// Ranges that came straight from the backing, with the row that holds each (`None`: held back).
    pub(crate) fn direct_ranges(&self) -> Vec<(u64, u64, Option<u32>)> {
        let range = |source: Source| match source {
            Source::Store(_) => None,
            Source::Exact { chunk, .. } => Some((chunk.addr, chunk.bytes)),
            Source::Guarded { base, bytes, .. } => Some((base, bytes)),
        };
        let mut all: Vec<_> = {
            let sides = self.sides.lock();
            sides.iter().filter_map(|(&row, s)| range(s.source).map(|(a, b)| (a, b, Some(row)))).collect()
        };
        let held = self.held.lock();
        // Guarded blocks in the quarantine have no memory any more.
        let exact = held.quarantine.iter().filter(|b| matches!(b.side.source, Source::Exact { .. }));
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
            let home = b.home_line();
            // The stream that used it last, where that is another one.
            let mut stream = home;
            b.for_each_use(|s| {
                if stream == home && !s.has_passed() {
                    stream = s.line_id();
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

impl Allocator {
    /// The wrong uses of memory that the debug aids found so far, the first 1,000 of them; [`AllocStats`](crate::AllocStats) has their
    /// number. What is freed but still in use by a stream, or in the quarantine, is not yet decided; [`trim`](Self::trim) empties the
    /// quarantine.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        let inner = self.inner();
        let Some(watch) = &inner.watch else { return Vec::new() };
        inner.sweep_held(watch, Reach::Due);
        watch.findings()
    }
}

impl Inner {
    /// Records what became of memory of the driver's.
    pub(crate) fn trace(&self, kind: EventKind, addr: u64, bytes: u64) {
        if let Some(ring) = self.watch.as_ref().and_then(|w| w.ring()) {
            ring.record(kind, 0, addr, bytes, 0, 0);
        }
    }

    /// Records what steps mapped and unmapped. Before anybody else may have the addresses.
    pub(crate) fn trace_steps<'a>(&self, steps: impl Iterator<Item = &'a Step>) {
        for s in steps {
            if let (Some(from), true) = (s.source_addr(), !matches!(s.end, End::Untouched | End::LostAtSource)) {
                self.trace(EventKind::Unmap, from, s.bytes);
            }
            if s.end == End::Mapped {
                self.trace(EventKind::Map, s.addr, s.bytes);
            }
        }
    }

    /// An allocation of a watched allocator.
    #[cold]
    pub(crate) fn alloc_watched(&self, watch: &Watch, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        self.sweep_held(watch, Reach::Due);
        let mut lent = self.alloc_aided(watch, layout, on);
        if matches!(lent, Err(Error::OutOfMemory(_) | Error::OverBudget { .. })) && self.release_held(watch, on) {
            lent = self.alloc_aided(watch, layout, on);
        }
        if let Some(ring) = &watch.ring {
            let line = on.line.id().get();
            match &lent {
                Ok(buffer) => {
                    if let Some(row) = self.table.get(buffer.header().index()) {
                        ring.record(EventKind::Alloc, id_of(row), buffer.addr(), buffer.len(), line, 0);
                    }
                }
                Err(_) => ring.record(EventKind::OutOfMemory, 0, 0, layout.size, line, 0),
            }
        }
        lent
    }

    fn alloc_aided(&self, watch: &Watch, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        let aids = watch.aids;
        if !aids.any() {
            return self.alloc_block(layout, on);
        }
        let Some(size) = layout.size.checked_add(aids.red_zone) else { return Err(self.refuse(layout)) };
        let whole = Layout { size, ..layout };
        let (lease, side) = if aids.direct() {
            self.alloc_direct(watch, whole, layout.size, on)?
        } else {
            let lease = self.alloc_block(whole, on)?;
            let Some(row) = self.table.get(lease.header().index()) else { return Ok(lease) };
            let core = self.core.lock();
            let (spot, usable) = match row.buffer.slot.load(Ordering::Relaxed) {
                NO_SLOT => {
                    let node = row.buffer.place.load(Ordering::Relaxed);
                    (Spot::Node(node), u64::from(core.store.heap.nodes[node].units) << UNIT_SHIFT)
                }
                slot => {
                    let class = usize::from(row.buffer.class.load(Ordering::Relaxed));
                    (Spot::Slot(row.buffer.place.load(Ordering::Relaxed), slot), class_size(class))
                }
            };
            self.counters.add_live(-(aids.red_zone as i64));
            drop(core);
            row.buffer.relend(layout.size);
            (lease, Side { source: Source::Store(spot), usable, dark: false })
        };
        watch.sides.lock().insert(lease.header().index(), side);
        let (addr, len) = (lease.addr(), layout.size);
        if aids.poison {
            // SAFETY: the block is fresh and committed, the allocator's only; nobody has its lease yet.
            unsafe { self.backing.fill(addr, len, POISON_FRESH) }?;
        }
        if aids.red_zone > 0 {
            // SAFETY: the zone behind the length belongs to the fresh block, whose usable bytes are committed.
            unsafe { self.backing.fill(addr + len, side.usable - len, RED_ZONE) }?;
        }
        Ok(lease)
    }

    /// A block straight from the backing, climbing the ladder's steps that can help it.
    fn alloc_direct(&self, watch: &Watch, whole: Layout, len: u64, on: On<'_>) -> Result<(Lease<Buffer>, Side)> {
        let limit = self.budget.limit();
        if whole.size > limit {
            self.counters.failed.fetch_add(1, Ordering::Relaxed);
            return Err(Error::OverBudget {
                unit: leasehold_core::Budgeted::Bytes,
                requested: whole.size,
                used: self.budget.committed(),
                limit,
            });
        }
        let mut notes: Vec<Text> = Vec::new();
        let mut refused = false;
        let mut attempt = || match self.take_direct(watch, whole) {
            Ok(taken) => Ok(Some(taken)),
            Err(e @ (Error::DeviceLost { .. } | Error::Unsupported(_))) => Err(e),
            Err(Error::OverBudget { .. }) => {
                refused = true;
                Ok(None)
            }
            Err(e) => {
                notes.push(format!("the backing: {e}").into());
                Ok(None)
            }
        };
        let mut taken = attempt()?;
        let list: Vec<_> = self.reclaimers.lock().iter().map(|r| r.1.clone()).collect();
        for reclaimer in list {
            while taken.is_none() {
                let freed = std::panic::catch_unwind(AssertUnwindSafe(|| reclaimer(whole.size)));
                if freed.unwrap_or(0) == 0 {
                    break;
                }
                self.release_held(watch, on);
                taken = attempt()?;
            }
        }
        let Some((addr, chunk, source)) = taken else {
            self.counters.failed.fetch_add(1, Ordering::Relaxed);
            notes.dedup();
            return Err(self.report(Layout { size: len, ..whole }, notes, refused));
        };
        let usable = chunk.addr + chunk.bytes - addr;
        let mut core = self.core.lock();
        let row = match self.table.take(&mut core.vacant, self.owner_ptr()) {
            Ok(row) => row,
            Err(e) => {
                drop(core);
                self.release_source(source);
                return Err(e);
            }
        };
        // A slot, so that nobody takes the place for a node.
        row.buffer.place.store(u32::MAX, Ordering::Relaxed);
        row.buffer.slot.store(0, Ordering::Relaxed);
        row.buffer.class.store(NO_CLASS, Ordering::Relaxed);
        row.buffer.describe(len, Some(on.line), kind_bits(self.config.host_kind) | WATCHED);
        row.buffer.lie_at(addr, chunk.native);
        row.buffer.inherit(Stamp::NEVER);
        core.allocations += 1;
        self.counters.add_live(len as i64);
        Ok((self.lend(row), Side { source, usable, dark: false }))
    }

    /// Address, backed range and source of a block straight from the backing.
    fn take_direct(&self, watch: &Watch, whole: Layout) -> Result<(u64, Chunk, Source)> {
        let over = |bytes| Error::OverBudget {
            unit: leasehold_core::Budgeted::Bytes,
            requested: bytes,
            used: self.budget.committed(),
            limit: self.budget.limit(),
        };
        if !watch.aids.guard {
            if !self.budget.take(whole.size) {
                return Err(over(whole.size));
            }
            let chunk = self.backing.exact(whole.size, whole.align.max(crate::layout::MIN_ALIGN));
            let chunk = chunk.inspect_err(|_| self.budget.undo(whole.size))?;
            // What rounding took beyond the request: past the ticket, but true.
            if chunk.bytes > whole.size && !self.budget.take(chunk.bytes - whole.size) {
                self.budget.undo(whole.size);
                // SAFETY: it came from `exact` with this alignment just now, and was lent to nobody.
                unsafe { self.backing.exact_free(chunk, whole.align.max(crate::layout::MIN_ALIGN)) }?;
                return Err(over(chunk.bytes));
            }
            self.budget.keep(chunk.bytes);
            self.trace(EventKind::SegmentAlloc, chunk.addr, chunk.bytes);
            let align = whole.align.max(crate::layout::MIN_ALIGN);
            return Ok((chunk.addr, chunk, Source::Exact { chunk, align }));
        }
        let granule = self.caps.granule;
        if whole.align > granule {
            return Err(Error::Unsupported(
                format!("an alignment of {} with guard granules of {granule}", whole.align).into(),
            ));
        }
        let (Some(bytes), true) = (whole.size.checked_next_multiple_of(granule), whole.size < 1 << 60) else {
            return Err(over(whole.size));
        };
        if !self.budget.take(bytes) {
            return Err(over(bytes));
        }
        let span = bytes + granule;
        let base = self.backing.reserve(span).inspect_err(|_| self.budget.undo(bytes))?;
        // SAFETY: the range begins the reservation that was made just now.
        let chunk = unsafe { self.backing.commit(Some(base), bytes) }.inspect_err(|_| {
            self.budget.undo(bytes);
            // SAFETY: reserved just now, and the commitment in it failed.
            unsafe { self.backing.release(base, span) };
        })?;
        self.budget.keep(bytes);
        self.trace(EventKind::SegmentAlloc, chunk.addr, chunk.bytes);
        let align = whole.align.max(crate::layout::MIN_ALIGN);
        let addr = (base + bytes - whole.size) & !(align - 1);
        Ok((addr, chunk, Source::Guarded { base, bytes, span }))
    }

    /// Takes a watched row back that nobody holds. Returns the counts that the caller owes to an orphaned allocator.
    #[cold]
    pub(crate) fn free_watched(&self, watch: &Watch, row: &Row) -> u64 {
        watch.record_free(row);
        let buffer = &row.buffer;
        let (addr, len, tag, stream) = (buffer.addr(), buffer.len(), buffer.tag(), buffer.home_line());
        let side = if watch.aids.any() { watch.sides.lock().remove(&row.header.index()) } else { None };
        let Some(side) = side else { return self.free_shared_slow(row) };
        // The aids keep lists of their own, on the host's memory.
        let stamps = uses(&row.buffer);
        buffer.reset();
        {
            let mut held = watch.held.lock();
            held.bytes += side.usable;
            held.waiting.push((Block { side, addr, len, tag, stream }, stamps.into_boxed_slice()));
        }
        self.sweep_held(watch, Reach::Free);
        // The row keeps the allocator alive; once it is vacant nothing does, so this comes last.
        let mut core = self.core.lock();
        self.counters.add_live(-(len as i64));
        self.table.put(&mut core.vacant, row);
        u64::from(core.orphan)
    }

    /// Checks what is due, and brings back what leaves the quarantine.
    pub(crate) fn sweep_held(&self, watch: &Watch, reach: Reach) {
        if !watch.aids.any() || reach == Reach::Free && watch.aids.direct() {
            return;
        }
        let due: Vec<Block> = {
            let mut held = watch.held.lock();
            let over = |w: &mut (Block, Box<[Stamp]>)| w.1.iter().all(|&s| s.has_passed());
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
                if held.quarantined <= watch.aids.quarantine && reach != Reach::All {
                    return;
                }
                let Some(block) = held.quarantine.pop_front() else { return };
                held.quarantined -= block.side.usable;
                held.bytes -= block.side.usable;
                block
            };
            if watch.aids.poison && !block.side.dark && !matches!(block.side.source, Source::Guarded { .. }) {
                // The backing could be written when the allocator was made; it has no way to fail later.
                // SAFETY: a block in quarantine is lent to nobody, and its last use is over; its memory is committed still.
                let seen = unsafe { self.backing.verify(block.addr, block.side.usable, POISON_FREED) };
                if let Ok(Some(offset)) = seen {
                    watch.report(FindingKind::WriteAfterFree, &block, offset);
                }
            }
            self.release_source(block.side.source);
        }
    }

    /// A freed block that no stream uses any more: its red zone is checked, its memory poisoned or, with a guard, taken away.
    /// `false`: the driver did not take it, and its addresses are lost.
    fn inspect_freed(&self, watch: &Watch, block: &Block) -> bool {
        let Block { addr, len, side, .. } = *block;
        if !side.dark {
            if watch.aids.red_zone > 0 {
                // SAFETY: the block was freed and its last use is over, as the caller checked; the zone is committed.
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
        }
        if let Source::Guarded { base, bytes, .. } = side.source {
            return self.decommit(Chunk { addr: base, bytes, native: 0 }, true);
        }
        true
    }

    /// Gives a block's memory, and with a guard its addresses, back to where they came from.
    fn release_source(&self, source: Source) {
        match source {
            Source::Store(spot) => self.core.lock().store.give(spot, Stamp::NEVER),
            // SAFETY: the side names the chunk and alignment that `exact` gave; it left the table, so it is given back once.
            Source::Exact { chunk, align } => match unsafe { self.backing.exact_free(chunk, align) } {
                Ok(()) => {
                    self.trace(EventKind::SegmentFree, chunk.addr, chunk.bytes);
                    self.budget.give_back(chunk.bytes);
                }
                Err(_) => self.core.lock().store.heap.res.quarantined += chunk.bytes,
            },
            // SAFETY: the side's own reservation; what was committed in it was given back when the block was freed.
            Source::Guarded { base, span, .. } => unsafe { self.backing.release(base, span) },
        }
    }

    /// Waits for the streams that still use held blocks, and brings all of them back. `false`: nothing was held.
    fn release_held(&self, watch: &Watch, on: On<'_>) -> bool {
        let stamps: Vec<Stamp> = {
            let held = watch.held.lock();
            if held.waiting.is_empty() && held.quarantine.is_empty() {
                return false;
            }
            held.waiting.iter().flat_map(|w| w.1.iter().copied()).collect()
        };
        for point in stamps.into_iter().filter_map(Stamp::point) {
            // A stream that cannot be waited for keeps its block held.
            let _ = self.wait_point(point, on, None);
        }
        self.sweep_held(watch, Reach::All);
        true
    }
}
