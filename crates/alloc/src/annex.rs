//! Annexes: blocks above 64 KiB without the allocator's lock, for threads that would have to wait for each other.
//!
//! Where the lock goes from thread to thread, its data move between processors, and many threads do less than one. A thread that finds it
//! so, because it has to wait, gets an annex: a heap of its own, whose spans are *segments*, used blocks of the core (*estates* there). Blocks of up to a quarter
//! of a segment are carved in it, with lanes and stamps as in the core, since a segment may be lent to several lines. A segment that lies
//! free goes back to the core, but for one. Sizes of slabs, large alignments, arenas' regions and imports stay with the core, and so do
//! allocators with debug aids, [`Policy::Compact`] and [`CrossStream::InsertWait`].
//!
//! # Protocol
//! - Each annex has a lock of its own, and it is taken before the core's, never after. Who needs several annexes at a time takes them by
//!   their number. Both are leaves for everything else: never held across a call of the backing, of a timeline or of foreign code.
//! - A thread uses the annex of its number; whoever frees a block locks the annex of the block. Rows of the block table come from the core
//!   in batches; those of an annex's blocks lie in its own list while they are vacant, and count as lent there.
//! - A magazine may keep a block of an annex as it keeps one of the core. It counts as lent there, and its bytes in the magazine's drift.
//! - `Row::slot` says which annex a block lies in. It changes with both locks held, from an annex to the core only ([`Inner::recall`]). So
//!   who read an annex asks again under its lock; who read none keeps that answer, and reads the place under the core's lock.
//! - Annexes must not hold memory back: when it is short, on a trim, and when their threads are alone or gone, all that is in them moves
//!   to the core, block by block, used ones too, so that neighbours merge and granules can be moved as if there never had been an annex.
//!   It fails only for want of host memory; then what lies free as whole segments goes back.
//! - The numbers of an annex are written under its lock and read without it.
//!
//! [`Policy::Compact`]: crate::Policy::Compact
//! [`CrossStream::InsertWait`]: crate::CrossStream::InsertWait

mod ways;

pub(crate) use ways::last_annexed;

use crate::allocator::{Core, Inner, On};
use crate::bias::{BiasedLock, Guard};
use crate::buffer::{Buffer, FIRST_ANNEX, NO_SLOT};
use crate::config::{AllocatorConfig, CrossStream, Policy};
use crate::heap::{Heap, Part};
use crate::host;
use crate::layout::UNIT_SHIFT;
use crate::node::{NIL, State};
use crate::numbers::thread_number;
use crate::parked::Parked;
use crate::store::{Need, Spot};
use crate::table::Vacant;
use leasehold_core::sync::CachePadded;
use leasehold_core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use leasehold_core::{Lease, Line, Result};

/// The smallest segment that is worth it.
const LEAST: u64 = 4 << 20;
/// What is reserved is this many times the segments that threads with an annex take next.
const SHARES: u64 = 6;
/// Blocks of the largest size that a segment holds.
const BLOCKS: u64 = 4;
/// Rows that move between the core and an annex at a time.
const BATCH: u32 = 64;
/// Vacant rows from which on an annex gives some back.
const MOST_ROWS: u32 = 4 * BATCH;
/// Waits count when there is one in so many operations: a thread that sleeps while others go on loses some hundreds.
const RARE: u64 = 2048;
/// Requests that go to the core after it had no segment.
const REST: u32 = 64;
/// Operations of all threads after which an annex that none of them was in is idle.
const IDLE: u64 = 1 << 20;
/// Operations of a thread after which it may turn out to be alone.
const ALONE: u64 = 1 << 20;
/// Marks the row in the name of an estate; the rest says which annex has it.
const ESTATE: u32 = 1 << 31;

/// The annexes of one allocator.
pub(crate) struct Annexes {
    all: Box<[CachePadded<Annex>]>,
    /// How many serve requests.
    open: AtomicU32,
    /// Bytes of all segments.
    held: AtomicU64,
    /// How often memory was short lately: each time, a thread must wait twice as often before it has an annex again. A guess: written
    /// without care.
    shortages: AtomicU32,
    most: u64,
    after: u32,
    /// Bytes that may lie free in the core whatever is reserved, while segments are taken from the driver.
    slack: u64,
}

/// The annex of the threads of some numbers.
pub(crate) struct Annex {
    /// What the slot of a row whose block lies here says.
    name: u16,
    /// The largest request that it serves, in bytes; 0 while it is closed.
    largest: AtomicU64,
    /// How often a thread had to wait for the core's lock, and since when. Guesses: written without care.
    heat: AtomicU32,
    since: AtomicU64,
    /// Live bytes, as asked for, that it has not told; with those of the core and of the magazines they sum up, one by one they mean little.
    ahead: AtomicI64,
    /// Blocks that were taken, ever, and those of them that are not lent any more, or not from here.
    taken: AtomicU64,
    ended: AtomicU64,
    /// Bytes of the segments, and units of the used and parked blocks in them.
    held: AtomicU64,
    used: AtomicU64,
    metadata: AtomicU64,
    /// `taken`, and the operations of all other threads, when that was last looked at, by itself and by others.
    looked: [AtomicU64; 2],
    seen: [AtomicU64; 2],
    lock: BiasedLock<Yard>,
}

/// What an annex's lock guards.
pub(crate) struct Yard {
    pub(crate) heap: Heap,
    /// The core's node of each span.
    estates: Vec<u32>,
    stock: Vacant,
    /// How many vacant rows there are.
    stocked: u32,
    parked: Parked,
    orphan: bool,
    /// A span that lies free and is kept.
    spare: usize,
    /// Requests that go to the core before it is asked for a segment again.
    rest: u32,
}

impl Annexes {
    pub(crate) fn none() -> Self {
        Self::with(0, 0, 0, 1, 0)
    }

    /// Annexes for `threads` threads that may run at once, over `memory` bytes.
    pub(crate) fn new(config: &AllocatorConfig, threads: usize, memory: u64, granule: u64) -> Self {
        let unfit = config.policy == Policy::Compact || config.cross_stream == CrossStream::InsertWait;
        if unfit || granule > LEAST || cfg!(loom) {
            return Self::none();
        }
        let n = (threads * 2).next_power_of_two().clamp(4, 64);
        let share = if config.annex_after == 0 { u64::MAX } else { memory / 64 / n as u64 };
        let most = config.annex_bytes.min(share).min(1 << 30);
        if most < LEAST {
            return Self::none();
        }
        Self::with(n, 1 << most.ilog2(), granule, config.annex_after, memory / 64)
    }

    fn with(n: usize, most: u64, granule: u64, after: u32, slack: u64) -> Self {
        let largest = if after == 0 { largest(most) } else { 0 };
        let annex = |k: usize| Annex {
            name: FIRST_ANNEX + k as u16,
            largest: AtomicU64::new(largest),
            heat: AtomicU32::new(0),
            since: AtomicU64::new(0),
            ahead: AtomicI64::new(0),
            taken: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            held: AtomicU64::new(0),
            used: AtomicU64::new(0),
            metadata: AtomicU64::new(0),
            looked: std::array::from_fn(|_| AtomicU64::new(0)),
            seen: std::array::from_fn(|_| AtomicU64::new(0)),
            lock: BiasedLock::new(Yard::new(granule)),
        };
        Self {
            all: (0..n).map(|k| CachePadded::new(annex(k))).collect(),
            open: AtomicU32::new(if after == 0 { n as u32 } else { 0 }),
            held: AtomicU64::new(0),
            shortages: AtomicU32::new(0),
            most,
            after,
            slack,
        }
    }

    /// Whether there is one that serves requests.
    #[inline]
    pub(crate) fn are_open(&self) -> bool {
        self.open.load(Ordering::Relaxed) != 0
    }

    /// Whether there may be blocks in one.
    #[inline]
    pub(crate) fn hold_any(&self) -> bool {
        self.held.load(Ordering::Relaxed) != 0
    }

    #[inline]
    fn number(&self, thread: u32) -> usize {
        // The number of annexes is a power of two, or zero.
        thread as usize & self.all.len().wrapping_sub(1)
    }

    /// Bytes of the next segment, or 0.
    fn segment(&self, committed: u64) -> u64 {
        if self.after == 0 {
            return self.most;
        }
        let part = committed / (SHARES * u64::from(self.open.load(Ordering::Relaxed).max(2)));
        if part < LEAST { 0 } else { (1 << part.ilog2()).min(self.most) }
    }

    /// What the annexes' numbers add up to: live bytes that the counters do not know, rows that are lent, blocks taken, free bytes, host memory.
    pub(crate) fn stats(&self) -> Sums {
        let mut sums = Sums::default();
        for a in &self.all {
            sums.live = sums.live.wrapping_add(a.ahead.load(Ordering::Relaxed));
            sums.rows += a.lent();
            sums.taken += a.taken.load(Ordering::Relaxed);
            sums.free += a.held.load(Ordering::Relaxed).saturating_sub(a.used.load(Ordering::Relaxed) << UNIT_SHIFT);
            sums.metadata += a.metadata.load(Ordering::Relaxed);
        }
        sums
    }

    /// The yards, all locked.
    pub(crate) fn lock_all(&self) -> Vec<Guard<'_, Yard>> {
        self.all.iter().map(|a| a.lock.lock()).collect()
    }

    fn close(&self, annex: &Annex) {
        if self.after > 0 && annex.largest.swap(0, Ordering::Relaxed) != 0 {
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
        annex.heat.store(0, Ordering::Relaxed);
    }
}

/// See [`Annexes::stats`].
#[derive(Default)]
pub(crate) struct Sums {
    pub(crate) live: i64,
    pub(crate) rows: u64,
    pub(crate) taken: u64,
    pub(crate) free: u64,
    pub(crate) metadata: u64,
}

/// The largest request that segments of so many bytes serve.
fn largest(segment: u64) -> u64 {
    segment / BLOCKS
}

/// Which annex has an estate, by the row that the core's node names.
pub(crate) fn of_name(row: u32) -> Option<usize> {
    (row & ESTATE != 0 && row != NIL).then_some((row & !ESTATE) as usize)
}

impl Yard {
    fn new(granule: u64) -> Self {
        Self {
            heap: Heap::new(granule.max(1 << UNIT_SHIFT)),
            estates: Vec::new(),
            stock: Vacant::new(),
            stocked: 0,
            parked: Parked::NONE,
            orphan: false,
            spare: usize::MAX,
            rest: 0,
        }
    }
}

impl Annex {
    /// Rows that are lent. (Which of the two is read first does not matter: one by one such numbers mean little.)
    fn lent(&self) -> u64 {
        self.taken.load(Ordering::Relaxed).saturating_sub(self.ended.load(Ordering::Relaxed))
    }

    #[inline]
    fn add(counter: &AtomicU64, by: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }

    #[inline]
    fn sub(counter: &AtomicU64, by: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_sub(by), Ordering::Relaxed);
    }
}

impl Inner {
    /// A thread had to wait for the core's lock, after `tick` operations of the core.
    #[cold]
    pub(crate) fn warm(&self, thread: u32, tick: u64) {
        let annexes = &self.annexes;
        let Some(annex) = annexes.all.get(annexes.number(thread)) else { return };
        let after = u64::from(annexes.after) << annexes.shortages.load(Ordering::Relaxed).min(20);
        let heat = if tick.wrapping_sub(annex.since.load(Ordering::Relaxed)) > after * RARE {
            annex.since.store(tick, Ordering::Relaxed);
            1
        } else {
            annex.heat.load(Ordering::Relaxed).saturating_add(1)
        };
        annex.heat.store(heat, Ordering::Relaxed);
        let open = annex.largest.load(Ordering::Relaxed) != 0;
        if open || u64::from(heat) >= after {
            let bytes = annexes.segment(self.budget.committed());
            if bytes > 0 && annex.largest.swap(largest(bytes), Ordering::Relaxed) == 0 {
                annexes.open.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// The annex has nothing that fits: what it holds is looked at again, then the core is asked for a segment, then the driver.
    #[cold]
    fn extend_slow(&self, k: usize, units: u32, size: u64, on: On<'_>) -> Option<Lease<Buffer>> {
        self.tend(k);
        let annex = &self.annexes.all[k];
        let bytes = self.annexes.segment(self.budget.committed());
        if annex.largest.load(Ordering::Relaxed) == 0 || size > largest(bytes) {
            return None;
        }
        annex.largest.store(largest(bytes), Ordering::Relaxed);
        let align = if self.caps.vmm { (self.caps.granule >> UNIT_SHIFT) as u32 } else { 1 };
        let want = Need { units: (bytes >> UNIT_SHIFT) as u32, align, class: None };
        let part = |shift: u32| Need { units: want.units >> shift, ..want };
        // As it lies there; from the driver; at last, smaller ones.
        let ways =
            [(false, want), (true, want), (false, part(1)), (false, part(2)), (false, part(3)), (false, part(4))];
        for (grown, want) in ways {
            let small = want.units < units || u64::from(want.units) << UNIT_SHIFT < LEAST;
            if small || grown && !(self.may_extend(bytes) && self.grow_idle(want, on)) {
                continue;
            }
            let mut yard = annex.lock.lock();
            self.settle_in(&mut yard, annex);
            let lane = yard.heap.lane_for(on.line);
            let mut node = yard.heap.take(units, 1, on.line).ok()?;
            if node.is_none() {
                node = yard.heap.take_foreign(units, 1, lane, |s| on.line.knows(s)).ok()?;
            }
            if node.is_none() && self.borrow(k, &mut yard, want, on.line) {
                node = yard.heap.take(units, 1, on.line).ok()?;
            }
            if let Some(node) = node {
                return self.issue_annexed(annex, &mut yard, node, size, on.line);
            }
        }
        annex.lock.lock().rest = REST;
        None
    }

    /// A segment from what lies free in the core. Under the annex's lock.
    fn borrow(&self, k: usize, yard: &mut Yard, want: Need, line: &'static Line) -> bool {
        let spans = yard.heap.spans.len() + 1;
        if spans > yard.estates.len() && host::room(&mut yard.estates, 1).is_err() {
            return false;
        }
        let mut core = self.core.lock();
        let mut block = core.store.take(want, line);
        if matches!(block, Ok(None)) {
            self.settle(&mut core);
            block = core.store.take(want, line);
        }
        let Ok(Some(block)) = block else { return false };
        let (Spot::Node(node), bytes) = (block.spot, block.bytes) else { return false };
        let Ok(slot) = yard.heap.borrow_span(block.addr, bytes, block.native, line, block.stamp) else {
            core.store.give(block.spot, block.stamp);
            return false;
        };
        core.store.name(block.spot, ESTATE | k as u32);
        if slot == yard.estates.len() {
            yard.estates.push(node);
        } else {
            yard.estates[slot] = node;
        }
        let annex = &self.annexes.all[k];
        Annex::add(&annex.held, bytes);
        annex.metadata.store(yard.heap.host_bytes(), Ordering::Relaxed);
        self.annexes.held.fetch_add(bytes, Ordering::Relaxed);
        true
    }

    /// Whether a segment may be taken from the driver: not while much lies free in the core, or the budget comes near.
    fn may_extend(&self, bytes: u64) -> bool {
        if self.lost.get().is_some() {
            return false;
        }
        if self.annexes.after == 0 {
            return self.budget.room() >= bytes;
        }
        let free = self.core.lock().store.free_bytes();
        self.budget.room() >= 4 * bytes && free.0 + free.1 <= self.annexes.slack.max(self.budget.committed() / 8)
    }

    /// Gives a segment that lies free back to the core, unless it is to be the `spare` one.
    #[cold]
    fn hand_back(&self, yard: &mut Yard, annex: &Annex, slot: usize, spare: bool) {
        let mut whole = yard.heap.is_whole(slot);
        if whole && spare && annex.largest.load(Ordering::Relaxed) != 0 {
            let other = yard.spare;
            if other == slot || other >= yard.heap.spans.len() || !yard.heap.is_whole(other) {
                yard.spare = slot;
                whole = false;
            }
        }
        if !whole {
            return;
        }
        let mut core = self.core.lock();
        if let Some((span, stamp)) = yard.heap.return_span(slot) {
            core.store.give(Spot::Node(yard.estates[slot]), stamp);
            let bytes = u64::from(span.units) << UNIT_SHIFT;
            Annex::sub(&annex.held, bytes);
            self.annexes.held.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Looks at parked rows of an annex, the oldest first, and gives the blocks back that one line at most may still be using.
    #[cold]
    fn unpark_in(&self, yard: &mut Yard, annex: &Annex, most: u32) {
        let Yard { parked, heap, stock, stocked, .. } = yard;
        self.each_due(parked, most, |row, stamp| {
            let node = row.buffer.place.load(Ordering::Relaxed);
            Annex::sub(&annex.used, heap.nodes[node].units.into());
            heap.unpark(node, stamp);
            *stocked += u32::from(self.table.restore(stock, row));
        });
    }

    /// Brings what is over to where every line can take it.
    fn settle_in(&self, yard: &mut Yard, annex: &Annex) {
        self.unpark_in(yard, annex, u32::MAX);
        yard.heap.drain_all();
    }

    /// Brings what is over in every annex to where every stream can take it, and free segments to the core.
    pub(crate) fn settle_annexes(&self) {
        if self.annexes.held.load(Ordering::Relaxed) == 0 {
            return;
        }
        for annex in &self.annexes.all {
            let mut yard = annex.lock.lock();
            self.settle_in(&mut yard, annex);
            for slot in 0..yard.heap.spans.len() {
                self.hand_back(&mut yard, annex, slot, false);
            }
        }
    }

    /// Moves everything that is in annexes to the core, and closes them. `false`: there was nothing.
    pub(crate) fn recall(&self) -> bool {
        let any = self.annexes.held.load(Ordering::Relaxed) > 0;
        if any {
            (0..self.annexes.all.len()).for_each(|k| self.recall_one(k));
        }
        any
    }

    /// As [`recall`](Self::recall), because memory is short.
    pub(crate) fn recall_short(&self) -> bool {
        let any = self.recall();
        if any {
            self.annexes.shortages.fetch_add(1, Ordering::Relaxed);
        }
        any
    }

    #[cold]
    fn recall_one(&self, k: usize) {
        let annex = &self.annexes.all[k];
        self.annexes.close(annex);
        if annex.held.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut yard = annex.lock.lock();
        self.settle_in(&mut yard, annex);
        for slot in 0..yard.heap.spans.len() {
            self.hand_back(&mut yard, annex, slot, false);
        }
        let mut core = self.core.lock();
        let blocks = u32::try_from(yard.heap.blocks()).unwrap_or(u32::MAX);
        if blocks > 0 && core.store.heap.nodes.ensure(blocks).is_ok() {
            self.move_to_core(annex, &mut yard, &mut core);
            self.annexes.held.fetch_sub(annex.held.load(Ordering::Relaxed), Ordering::Relaxed);
            annex.held.store(0, Ordering::Relaxed);
            annex.used.store(0, Ordering::Relaxed);
        }
        yard.stocked = 0;
        self.table.carry(thread_number(), &mut yard.stock, &mut core.vacant, u32::MAX);
    }

    /// Makes every block of an annex one of the core's.
    fn move_to_core(&self, annex: &Annex, yard: &mut Yard, core: &mut Core) {
        let Yard { heap, estates, parked, .. } = yard;
        let waiting = self.aside(*parked).map(|row| (row.buffer.place.load(Ordering::Relaxed), row.header.index()));
        heap.empty(waiting, |slot, units, part| {
            let at = estates[slot];
            estates[slot] = core.store.heap.put_part(at, units, part).unwrap_or(NIL);
            let (Part::Used(row) | Part::Parked(row)) = part else { return };
            if let Some(row) = self.table.get(row) {
                row.buffer.place.store(at, Ordering::Relaxed);
                row.buffer.slot.store(NO_SLOT, Ordering::Relaxed);
            }
            if let Part::Used(_) = part {
                Annex::add(&annex.ended, 1);
                core.vacant.live += 1;
            }
        });
        while let Some(row) = self.take_aside(parked) {
            self.append(&mut core.parked, row);
        }
    }

    /// A thread is about to look for memory, or to take more.
    pub(crate) fn tend_annexes(&self) {
        self.tend(self.annexes.number(thread_number()));
    }

    /// Moves what idle annexes hold to the core, and what this one holds if nobody else is there.
    fn tend(&self, k: usize) {
        if self.annexes.after == 0 || self.annexes.held.load(Ordering::Relaxed) == 0 {
            return;
        }
        let all = &self.annexes.all;
        let sum: u64 = all.iter().map(|a| a.taken.load(Ordering::Relaxed)).sum();
        let sum = sum + self.core.lock().store.heap.tick / 2;
        for (i, annex) in all.iter().enumerate() {
            let taken = annex.taken.load(Ordering::Relaxed);
            let others = sum.saturating_sub(taken);
            let [was, were] = if i == k { &annex.looked } else { &annex.seen };
            let since = |now: u64, then: &AtomicU64| now.saturating_sub(then.load(Ordering::Relaxed));
            let (mine, theirs) = (since(taken, was), since(others, were));
            let over = if i == k {
                mine >= ALONE && theirs < mine / 8
            } else {
                mine == 0 && theirs >= IDLE && annex.held.load(Ordering::Relaxed) > 0
            };
            if over {
                self.recall_one(i);
            } else if i == k && mine >= ALONE {
                // It has been open for long: the shortages of before count less.
                let shortages = self.annexes.shortages.load(Ordering::Relaxed);
                self.annexes.shortages.store(shortages.saturating_sub(1), Ordering::Relaxed);
            }
            if over || mine > 0 && (i != k || mine >= ALONE) {
                was.store(taken, Ordering::Relaxed);
                were.store(others, Ordering::Relaxed);
            }
        }
    }

    /// The keeper is gone: from now on rows that come back count down. `count` is told how many are out, while none comes back.
    pub(crate) fn orphan_annexes(&self, count: impl Fn(u64)) {
        for annex in &self.annexes.all {
            let mut yard = annex.lock.lock();
            yard.orphan = true;
            count(annex.lent());
        }
    }

    /// Whether every stream is done with the memory in annexes.
    pub(crate) fn annexes_are_over(&self) -> bool {
        self.annexes.all.iter().all(|annex| {
            let mut yard = annex.lock.lock();
            self.settle_in(&mut yard, annex);
            !yard.parked.any() && yard.heap.is_over()
        })
    }

    /// The row of the block at an address of an annex.
    pub(crate) fn row_in(&self, k: usize, addr: u64) -> Option<u32> {
        let yard = self.annexes.all.get(k)?.lock.lock();
        let node = yard.heap.at(addr)?;
        Some(yard.heap.nodes[node].link[1])
    }

    /// Checks every invariant of the core and of the annexes, and what they say about each other.
    pub(crate) fn check(&self) -> Result<(), String> {
        let yards = self.annexes.lock_all();
        let core = self.core.lock();
        core.store.check()?;
        let mut estates = 0;
        for (k, (yard, annex)) in yards.iter().zip(&self.annexes.all).enumerate() {
            yard.heap.check()?;
            let mut held = 0;
            for (slot, span) in yard.heap.spans.iter().enumerate().filter(|s| s.1.live) {
                let node = &core.store.heap.nodes[yard.estates[slot]];
                let at = core.store.heap.addr(yard.estates[slot]);
                let named = of_name(node.link[1]) == Some(k) && node.link[0] == NIL;
                if node.state != State::Used || node.units != span.units || at != span.base || !named {
                    return Err(format!("annex {k}: {span:?} is not its estate {node:?}"));
                }
                held += u64::from(span.units) << UNIT_SHIFT;
                estates += 1;
            }
            let (ready, pending) = yard.heap.free_units();
            let mut parked = 0;
            self.each_aside(yard.parked, |row| {
                parked += u64::from(yard.heap.nodes[row.buffer.place.load(Ordering::Relaxed)].units);
            });
            let used = held - ((ready + pending - parked) << UNIT_SHIFT);
            let told = (annex.held.load(Ordering::Relaxed), annex.used.load(Ordering::Relaxed));
            if told != (held, used >> UNIT_SHIFT) {
                return Err(format!("annex {k} says {told:?}, and holds {held} bytes of which {used} are used"));
            }
            let lent = yard.heap.nodes.rows.iter().filter(|n| n.state == State::Used);
            let mut rows = 0;
            for n in lent {
                let row =
                    self.table.get(n.link[1]).ok_or_else(|| format!("annex {k}: a block without a row: {n:?}"))?;
                if row.annex() != Some(k) {
                    return Err(format!("annex {k}: its block's row is elsewhere: {n:?}"));
                }
                rows += 1;
            }
            if rows != annex.lent() {
                return Err(format!("annex {k} has {rows} blocks lent, and {} rows", annex.lent()));
            }
        }
        let named =
            core.store.heap.nodes.rows.iter().filter(|n| n.state == State::Used && of_name(n.link[1]).is_some());
        if named.count() != estates {
            return Err("an estate has no annex".into());
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{ALONE, IDLE};
    use crate::fake::FakeBacking;
    use crate::virtual_stream::VirtualStream;
    use crate::{Allocator, AllocatorConfig, Layout, On};
    use leasehold_core::Lease;
    use leasehold_core::sync::atomic::Ordering;

    const MIB: u64 = 1 << 20;

    struct Bench(Allocator, VirtualStream);

    impl Bench {
        /// With so much that is live in the core that segments are of 16 MiB.
        fn new() -> (Self, Vec<Lease<crate::Buffer>>) {
            let config = AllocatorConfig { magazines: false, ..AllocatorConfig::default() };
            let allocator = Allocator::new(Box::new(FakeBacking::new(1 << 40)), config).expect("an allocator");
            let bench = Self(allocator, VirtualStream::new().expect("a line"));
            let held = (0..200).map(|_| bench.take()).collect();
            (bench, held)
        }

        fn take(&self) -> Lease<crate::Buffer> {
            self.0.alloc(Layout::new(MIB), On::new(&self.1)).expect("memory")
        }

        /// This thread waits for the core's lock so often, once in `every` operations.
        fn wait(&self, times: u64, every: u64) {
            let inner = self.0.inner();
            let tick = inner.core.lock().store.heap.tick;
            (1..=times).for_each(|i| inner.warm(crate::numbers::thread_number(), tick + i * every));
        }

        fn held(&self) -> u64 {
            self.0.inner().annexes.held.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn a_thread_that_waits_often_gets_an_annex() {
        let (b, _held) = Bench::new();
        b.wait(63, 100);
        let _core = b.take();
        assert_eq!(b.held(), 0, "not yet");
        b.wait(1, 100);
        let _annexed = b.take();
        assert_eq!(b.held(), 16 * MIB);
        b.0.check().expect("the invariants");
    }

    #[test]
    fn rare_waits_do_not_count() {
        let (b, _held) = Bench::new();
        b.wait(1000, super::RARE * 64 + 1);
        let _core = b.take();
        assert_eq!((b.held(), b.0.inner().annexes.are_open()), (0, false));
    }

    #[test]
    fn little_memory_is_not_worth_an_annex() {
        let (b, held) = Bench::new();
        drop(held);
        b.0.trim(0).expect("a trim");
        b.wait(1000, 1);
        let _core = b.take();
        assert_eq!((b.held(), b.0.inner().annexes.are_open()), (0, false));
    }

    /// A shortage closes annexes, and it takes twice as many waits to open them again.
    #[test]
    fn shortages_make_annexes_rarer() {
        let (b, _held) = Bench::new();
        b.wait(64, 1);
        let _annexed = b.take();
        assert!(b.0.inner().recall_short());
        assert_eq!((b.held(), b.0.inner().annexes.are_open()), (0, false));
        b.wait(64, 1);
        assert!(!b.0.inner().annexes.are_open());
        b.wait(64, 1);
        assert!(b.0.inner().annexes.are_open());
        b.0.check().expect("the invariants");
    }

    #[test]
    fn a_thread_that_is_alone_gives_its_annex_up() {
        let (b, _held) = Bench::new();
        b.wait(64, 1);
        let mut annexed = vec![b.take()];
        let annexes = &b.0.inner().annexes;
        let mine = &annexes.all[annexes.number(crate::numbers::thread_number())];
        mine.taken.fetch_add(ALONE * 2, Ordering::Relaxed);
        mine.ended.fetch_add(ALONE * 2, Ordering::Relaxed);
        while b.held() > 0 && annexed.len() < 100 {
            annexed.push(b.take());
        }
        assert!(!annexes.are_open() && b.held() == 0);
        b.0.check().expect("the invariants");
    }

    /// A block of an annex that is not `mine`, by a thread which is gone then: one of so many, all there at a time.
    fn elsewhere(b: &Bench, mine: usize, threads: u32) -> Option<Lease<crate::Buffer>> {
        let one = || {
            if b.0.inner().annexes.number(crate::numbers::thread_number()) == mine {
                return threads.checked_sub(1).and_then(|more| elsewhere(b, mine, more));
            }
            b.wait(64, 1);
            Some(b.take())
        };
        std::thread::scope(|s| s.spawn(one).join().expect("a thread"))
    }

    /// The thread of an annex is gone; another one's need for memory ends it.
    #[test]
    fn an_idle_annex_is_ended_by_others() {
        let (b, mut held) = Bench::new();
        let annexes = &b.0.inner().annexes;
        let mine = annexes.number(crate::numbers::thread_number());
        let left = elsewhere(&b, mine, 100).expect("a thread with another annex");
        assert_eq!(b.held(), 16 * MIB);
        let grow = |held: &mut Vec<_>| (0..100).for_each(|_| held.push(b.take()));
        grow(&mut held);
        b.0.inner().core.lock().store.heap.tick += IDLE * 4;
        grow(&mut held);
        b.0.inner().core.lock().store.heap.tick += IDLE * 4;
        grow(&mut held);
        assert_eq!(b.held(), 0);
        b.0.check().expect("the invariants");
        drop(left);
    }
}
