//! Magazines: blocks that were just freed, kept in front of the allocator's lock for the next request of their class and stream.
//!
//! A *shard* holds, for each of a few lines, one stack of rows per slab class. What lies there was freed on its own line, so the next
//! request on that line may take it without asking for its stamp. Threads are numbered; a thread uses the shard of its number.
//!
//! Where the core's lock goes from thread to thread, a request that finds its stack empty fetches some more blocks of its class, which nobody
//! has held yet: twice as many each time, as far as there are any without new memory.
//!
//! A stack that is full gives half of its rows to the [`depot`](crate::depot), and one that is empty takes some from there; only what
//! does not lie there either, or finds no room, concerns the core. Where a stack may not grow because the shard holds all that it may, another
//! one gives half of its rows to the core: its line may be gone.
//!
//! Larger blocks have stacks too, a few that are found by a hash of the size; each holds blocks of one size until another size takes it
//! over. What lies there cannot merge, which costs memory, so it is done only where the core's lock goes from thread to thread: each time
//! that a thread finds it so, its shard may keep some more large blocks. Otherwise a shard keeps one, the last that was freed, and only up
//! to the next request for or free of another large one. Where the same sizes do not come again, it soon keeps none for a while.
//!
//! # Protocol
//! A shard has one lock word. A thread enters by a compare-and-swap from free to locked and leaves by a store. It does not wait: a thread
//! that finds the word locked goes to the core. Only a flush waits, since it must find everything that was freed before it. A shard that
//! is closed stays locked.
//!
//! The hits have code of their own ([`Front::take_own`], [`Front::put_own`]), which does nothing else and gives up where anything else
//! is to be done; whatever a hit touches lies in the shard and in the first 64 bytes of a row.
//!
//! Nobody calls anything while inside. Rows that leave a magazine for the core are carried there after leaving.

use crate::buffer::Row;
use crate::depot::Depot;
use crate::layout::{CLASSES, SLAB_MAX, UNIT, class_size};
use crate::mutant::mutated;
use leasehold_core::LineId;
use leasehold_core::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{UnsafeCell, spin_loop};
use std::ptr;

mod shards;
mod stacks;
use shards::Shards;
use stacks::{Kept, Stack, Stacks, add};

const LINES: usize = 2;
const FREE: u32 = 0;
const LOCKED: u32 = 1;
/// Bytes by which a shard's count of live bytes may be ahead of the core's, after a free of a small block and of a large one. Who tells
/// meets the others, so small blocks are told by the dozen.
const DRIFT: [i64; 2] = [2 << 20, 256 << 10];
const MOST_ROWS: u64 = 64;
/// Stacks of each line: one per class, the rest for large blocks. A power of two, so that an index needs no check.
const STACKS: usize = 64;
const LARGE_STACKS: usize = STACKS - CLASSES;
/// Large blocks that may be kept each time that the core's lock came from another thread.
const CREDIT: i32 = 1024;
/// Times that small blocks may be fetched in advance, as often.
const QUARRELS: u32 = 64;
/// Frees of large blocks that go to the core after what was kept was missing elsewhere.
const SHORT_REST: i32 = 512;
/// Shards that there are at most.
const MOST_SHARDS: usize = 64;

/// Where a block lies in a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pocket {
    stack: usize,
    bytes: u32,
}

impl Pocket {
    /// Of a slab class.
    #[inline]
    pub(crate) fn small(class: usize) -> Self {
        // The size is known by the stack.
        Self { stack: class, bytes: 0 }
    }

    /// Of a block of its own, by the size that was asked for: [`Front::keeps`] it.
    #[inline]
    pub(crate) fn large(size: u64) -> Self {
        let bytes = size.next_multiple_of(UNIT) as u32;
        let hash = (bytes / UNIT as u32).wrapping_mul(0x9E37_79B1) >> (32 - LARGE_STACKS.ilog2());
        Self { stack: CLASSES + hash as usize, bytes }
    }

    #[inline]
    fn is_large(self) -> bool {
        self.bytes != 0
    }
}

/// The shards of one allocator.
pub(crate) struct Front {
    shards: Shards,
    /// What each shard keeps at most, small and large.
    bytes: [u64; 2],
    /// The largest block that is kept.
    most: u64,
    depot: Depot,
}

// Aligned to pages: processors fetch lines of a page in advance, and so would take a neighbour's from its thread.
#[repr(align(4096))]
pub(crate) struct Shard {
    word: AtomicU32,
    /// Live bytes that this shard lent and took back, beyond what the core knows. Written inside only.
    drift: AtomicI64,
    /// What lies in the stacks, small blocks and large ones. Written inside only.
    kept: [Kept; 2],
    hits: AtomicU64,
    /// Large blocks that may still be kept; below zero, how many must go to the core before there may be more. A guess: written without
    /// care.
    credit: AtomicI32,
    /// Times that small blocks may be fetched in advance. A guess too.
    quarrels: AtomicU32,
    stacks: UnsafeCell<Stacks>,
}

// SAFETY: the stacks are touched only inside (see the protocol); rows are `Sync` and outlive the front.
unsafe impl Send for Shard {}
// SAFETY: the stacks are entered by one thread at a time (see the protocol); all else is atomic.
unsafe impl Sync for Shard {}

/// Rows on their way to the core, linked through their headers.
pub(crate) struct Chain(*const Row);

impl Chain {
    pub(crate) const EMPTY: Chain = Chain(ptr::null());

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_null()
    }

    /// The next row of the chain.
    ///
    /// # Safety
    /// - The table whose rows these are is alive for `'a`.
    pub(crate) unsafe fn pop<'a>(&mut self) -> Option<&'a Row> {
        // SAFETY: the chain is null or a row that was pushed, whose table the caller keeps alive for `'a`.
        let row = unsafe { self.0.as_ref() }?;
        self.0 = link(row);
        Some(row)
    }

    pub(crate) fn push(&mut self, row: &Row) {
        set_link(row, self.0);
        self.0 = row;
    }
}

#[inline]
pub(crate) fn link(row: &Row) -> *const Row {
    ptr::with_exposed_provenance(row.header.user.load(Ordering::Relaxed) as usize)
}

#[inline]
pub(crate) fn set_link(row: &Row, to: *const Row) {
    row.header.user.store(to.expose_provenance() as u64, Ordering::Relaxed);
}

/// What came of a request.
pub(crate) enum Took<'a> {
    /// A row, and the live bytes that the core does not know of now.
    Row(&'a Row, i64),
    /// Nothing fits. The chain goes to the core first: it may fit then.
    Nothing(Chain),
    /// There is no small block left. So many more than the one that was asked for are welcome: see [`Front::stock`].
    Empty(u32),
}

impl Took<'_> {
    const NOTHING: Self = Took::Nothing(Chain::EMPTY);
}

/// What came of a free.
pub(crate) enum Put {
    /// The magazine has it. The chain goes to the core, with the drift of live bytes.
    Kept(Chain, i64),
    /// The core must take it.
    Refused,
}

impl Front {
    /// Shards for `threads` threads that may run at once; each keeps at most `small` bytes of small blocks and `large` of large ones. The
    /// depot has as many bins, of `depot` bytes.
    pub(crate) fn new(threads: usize, small: u64, large: u64, depot: u64) -> Self {
        let n = if cfg!(loom) { 1 } else { (threads * 2).next_power_of_two().clamp(4, MOST_SHARDS) };
        let depot = Depot::new(if depot == 0 { 0 } else { n }, depot);
        // Two of the largest find room.
        let most = if large / 2 <= SLAB_MAX { 0 } else { (large / 2).min(1 << 30) };
        Self { shards: Shards::new(n, || Shard::new(small, FREE)), bytes: [small, large], most, depot }
    }

    /// No shards at all.
    pub(crate) fn none() -> Self {
        let shards = Shards::new(0, || Shard::new(0, LOCKED));
        Self { shards, bytes: [0; 2], most: 0, depot: Depot::new(0, 0) }
    }

    /// Whether there are no shards.
    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.shards.is_none()
    }

    /// Whether large blocks that were asked for with this size may be kept.
    #[inline]
    pub(crate) fn keeps(&self, size: u64) -> bool {
        size > SLAB_MAX && size <= self.most
    }

    /// Whether a large block lies in the shard of a thread, as far as it can know.
    #[inline(always)]
    pub(crate) fn holds_large(&self, thread: u32) -> bool {
        self.shards.of(thread).kept[1].rows.load(Ordering::Relaxed) != 0
    }

    /// Whether a large block that is freed must go to the core now, as far as it can know.
    #[inline(always)]
    pub(crate) fn is_refusing(&self, thread: u32) -> bool {
        self.shards.of(thread).credit.load(Ordering::Relaxed) < 0
    }

    /// A large block that is freed goes to the core: one less that must.
    #[inline(always)]
    pub(crate) fn count_refusal(&self, thread: u32) {
        let credit = &self.shards.of(thread).credit;
        let rest = credit.load(Ordering::Relaxed);
        if rest < 0 {
            credit.store(rest + 1, Ordering::Relaxed);
        }
    }

    /// The core's lock came from another thread: large blocks may be kept, small ones fetched in advance.
    #[cold]
    pub(crate) fn encourage(&self, thread: u32) {
        let shard = self.shards.of(thread);
        if shard.credit.load(Ordering::Relaxed) == 0 {
            shard.credit.store(CREDIT, Ordering::Relaxed);
        }
        shard.quarrels.store(QUARRELS, Ordering::Relaxed);
    }

    /// A row of a slab class that was freed on `line`, lent for `size` bytes, if it lies in the shard of the thread: what
    /// [`take`](Self::take) does most of the time, and nothing besides.
    ///
    /// # Safety
    /// - The table whose rows were put here is alive for `'a`.
    #[inline(always)]
    pub(crate) unsafe fn take_own<'a>(&self, thread: u32, class: usize, line: LineId, size: u64) -> Option<&'a Row> {
        let shard = self.shards.of(thread);
        let inside = shard.enter()?;
        let row = shard.stacks.with_mut(|s| {
            // SAFETY: inside.
            let s = unsafe { &mut *s };
            let at = s.place(line)?;
            // SAFETY: the caller keeps the table of the rows in the stacks alive for `'a`.
            unsafe { s.stacks[at][class & (STACKS - 1)].pop() }
        });
        if mutated('f') {
            // Leaves too early, and the counters are written outside.
            shard.leave();
            leasehold_core::sync::thread::yield_now();
        }
        if let Some((_, bytes)) = row {
            shard.kept[0].sub(1, bytes);
            add(&shard.hits, 1);
            shard.drift.store(shard.drift.load(Ordering::Relaxed) + size as i64, Ordering::Relaxed);
        }
        drop(inside);
        row.map(|r| r.0)
    }

    /// Keeps a row of a slab class that nobody holds and whose last uses are on `line`, if the shard of the thread has room for it and
    /// nothing else is to be done: what [`put`](Self::put) does most of the time.
    #[inline(always)]
    pub(crate) fn put_own(&self, thread: u32, row: &Row, class: usize, line: LineId, size: u64) -> bool {
        let shard = self.shards.of(thread);
        let Some(_inside) = shard.enter() else { return false };
        let drift = shard.drift.load(Ordering::Relaxed) - size as i64;
        let fine = (drift + DRIFT[0]).cast_unsigned() <= 2 * DRIFT[0].cast_unsigned()
            && shard.stacks.with_mut(|s| {
                // SAFETY: inside.
                let s = unsafe { &mut *s };
                let Some(at) = s.place(line) else { return false };
                let stack = &mut s.stacks[at][class & (STACKS - 1)];
                let kept = shard.kept[0].bytes.load(Ordering::Relaxed) + u64::from(stack.bytes);
                let fine = stack.len < stack.most && kept <= self.bytes[0];
                if fine {
                    stack.push(row);
                    shard.kept[0].bytes.store(kept, Ordering::Relaxed);
                    add(&shard.kept[0].rows, 1);
                }
                fine
            });
        if fine {
            shard.drift.store(drift, Ordering::Relaxed);
        }
        fine
    }

    /// A row of `pocket` that was freed on `line`, lent for `size` bytes.
    ///
    /// # Safety
    /// - The table whose rows were put here is alive for `'a`.
    #[inline]
    pub(crate) unsafe fn take<'a, const LARGE: bool>(
        &self,
        thread: u32,
        pocket: Pocket,
        line: LineId,
        size: u64,
    ) -> Took<'a> {
        let shard = self.shards.of(thread);
        debug_assert_eq!(LARGE, pocket.is_large());
        let kept = &shard.kept[usize::from(LARGE)];
        // (Who asks for a large one has looked.)
        if !LARGE
            && kept.rows.load(Ordering::Relaxed) == 0
            && shard.quarrels.load(Ordering::Relaxed) == 0
            && !self.depot.may_have(line)
        {
            return Took::NOTHING;
        }
        let Some(inside) = shard.enter() else { return Took::NOTHING };
        let row = shard.stacks.with_mut(|s| {
            // SAFETY: inside.
            let s = unsafe { &mut *s };
            let at = s.place(line)?;
            let stack = &mut s.stacks[at][pocket.stack & (STACKS - 1)];
            if LARGE && stack.bytes != pocket.bytes {
                return None;
            }
            // SAFETY: rows in the stacks are alive as the caller says.
            let took = unsafe { stack.pop() };
            if LARGE && took.is_some() {
                s.tries = 0;
            }
            took
        });
        let mut left = Chain::EMPTY;
        let row = match row {
            None if !LARGE && self.depot.may_have(line) => {
                // SAFETY: the caller keeps the table of the rows in front and depot alive.
                unsafe { shard.refill_slow(&self.depot, pocket, line, &mut left) }
            }
            row => row,
        };
        if mutated('f') {
            // Leaves too early, and the counters are written outside.
            shard.leave();
            leasehold_core::sync::thread::yield_now();
        }
        let took = match row {
            Some((row, bytes)) => {
                kept.sub(1, bytes);
                add(&shard.hits, 1);
                let drift = shard.drift.load(Ordering::Relaxed) + size as i64;
                shard.drift.store(drift, Ordering::Relaxed);
                Took::Row(row, drift)
            }
            None if !left.is_empty() => Took::Nothing(left),
            None => shard.miss_slow(pocket, line, self.bytes[0]),
        };
        drop(inside);
        took
    }

    /// Keeps rows of small blocks of one class that nobody has held yet and that `line` may use. What finds no room stays in the chain.
    ///
    /// # Safety
    /// - The table whose rows these are outlives the front.
    pub(crate) unsafe fn stock(&self, thread: u32, chain: &mut Chain, class: usize, line: LineId) {
        let shard = self.shards.of(thread);
        let Some(inside) = shard.enter() else { return };
        let counter = &shard.kept[0];
        let mut displaced = Chain::EMPTY;
        shard.stacks.with_mut(|s| {
            // SAFETY: inside.
            let s = unsafe { &mut *s };
            let Some(at) = s.place(line).or_else(|| s.adopt_slow(line, shard, &mut displaced)) else { return };
            let stack = &mut s.stacks[at][class];
            let bytes = u64::from(stack.bytes);
            while stack.len < stack.most && counter.bytes.load(Ordering::Relaxed) + bytes <= self.bytes[0] {
                // SAFETY: the caller keeps the table of the chain's rows alive.
                let Some(row) = (unsafe { chain.pop() }) else { return };
                stack.push(row);
                counter.add(1, bytes);
            }
        });
        drop(inside);
        // SAFETY: what was displaced was kept here, so it is of the same table.
        while let Some(row) = unsafe { displaced.pop() } {
            chain.push(row);
        }
    }

    /// Keeps a row of `pocket` that nobody holds and whose last uses are on `line`.
    #[inline]
    pub(crate) fn put<const LARGE: bool>(
        &self,
        thread: u32,
        row: &Row,
        pocket: Pocket,
        line: LineId,
        size: u64,
    ) -> Put {
        let shard = self.shards.of(thread);
        debug_assert_eq!(LARGE, pocket.is_large());
        // (Who brings a large one has asked whether it is refused.)
        let credit = if LARGE { shard.credit.load(Ordering::Relaxed) } else { 0 };
        if credit > 0 {
            shard.credit.store(credit - 1, Ordering::Relaxed);
        }
        let Some(inside) = shard.enter() else { return Put::Refused };
        let mut chain = if LARGE && credit == 0 { shard.open_hand() } else { Chain::EMPTY };
        let counter = &shard.kept[usize::from(LARGE)];
        let bytes = shard.stacks.with_mut(|s| {
            // SAFETY: inside.
            let s = unsafe { &mut *s };
            let at = s.place(line).or_else(|| s.adopt_slow(line, shard, &mut chain))?;
            let i = pocket.stack & (STACKS - 1);
            let most = self.bytes[usize::from(LARGE)];
            if LARGE {
                if !s.invite(at, pocket, most, shard, &mut chain) {
                    return None;
                }
                s.hand = Some((at, i));
            }
            let full = |s: &Stacks| {
                let add = u64::from(s.stacks[at][i].bytes);
                counter.bytes.load(Ordering::Relaxed) + add > most
            };
            if s.stacks[at][i].len >= s.stacks[at][i].most || full(s) {
                s.make_room_slow(at, i, most, shard, &self.depot, &mut chain);
                if full(s) {
                    return None;
                }
            }
            let stack = &mut s.stacks[at][i];
            stack.push(row);
            Some(u64::from(stack.bytes))
        });
        let Some(bytes) = bytes else {
            drop(inside);
            return if chain.is_empty() {
                Put::Refused
            } else {
                chain.push(row);
                Put::Kept(chain, -(size as i64))
            };
        };
        counter.add(1, bytes);
        let mut drift = shard.drift.load(Ordering::Relaxed) - size as i64;
        let mut told = 0;
        if drift.abs() > DRIFT[usize::from(LARGE)] {
            (told, drift) = (drift, 0);
        }
        shard.drift.store(drift, Ordering::Relaxed);
        drop(inside);
        Put::Kept(chain, told)
    }

    /// Takes everything out of the shard of a thread, with the drift, unless somebody else is inside; and out of the depot.
    pub(crate) fn flush_own(&self, thread: u32) -> (Chain, i64) {
        let mut chain = Chain::EMPTY;
        // SAFETY: rows in the depot belong to a table that outlives the front.
        unsafe { self.depot.drain(&mut chain) };
        let shard = self.shards.of(thread);
        if shard.is_idle() {
            return (chain, 0);
        }
        let Some(inside) = shard.enter() else { return (chain, 0) };
        let drift = shard.drain(&mut chain);
        drop(inside);
        (chain, drift)
    }

    /// Takes everything out of all shards and the depot, with the drift. `close`: and lets nobody in again.
    pub(crate) fn flush(&self, close: bool) -> (Chain, i64) {
        let mut chain = Chain::EMPTY;
        let mut drift = 0;
        // What lies in the depot must not get into a shard that was looked at.
        let all = close || self.depot.any();
        // Every flush begins at the first shard, so no two wait for each other.
        let mut entered: [Option<Inside<'_>>; MOST_SHARDS] = [const { None }; MOST_SHARDS];
        for (inside, shard) in entered.iter_mut().zip(self.shards.all()).filter(|(_, s)| all || !s.is_idle()) {
            *inside = Some(shard.await_turn());
        }
        // SAFETY: rows in the depot belong to a table that outlives the front.
        unsafe { self.depot.drain(&mut chain) };
        for inside in entered.into_iter().flatten() {
            drift += inside.0.drain(&mut chain);
            if close {
                std::mem::forget(inside);
            }
        }
        (chain, drift)
    }

    /// Rows and bytes in the magazines and the depot, hits, and live bytes beyond what the core knows. Sums of single-writer counters: exact when
    /// nobody is inside.
    pub(crate) fn stats(&self) -> (u64, u64, u64, i64) {
        let (rows, bytes) = self.depot.kept();
        self.shards.all().iter().fold((rows, bytes, 0, 0), |(rows, bytes, hits, drift), s| {
            let sum = |of: fn(&Kept) -> &AtomicU64| s.kept.iter().map(|k| of(k).load(Ordering::Relaxed)).sum::<u64>();
            (
                rows + sum(|k| &k.rows),
                bytes + sum(|k| &k.bytes),
                hits + s.hits.load(Ordering::Relaxed),
                drift + s.drift.load(Ordering::Relaxed),
            )
        })
    }
}

/// A thread inside a shard; it leaves when this goes.
struct Inside<'a>(&'a Shard);

impl Drop for Inside<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Shard {
    /// A shard that keeps `small` bytes of small blocks, entered as `word` says.
    fn new(small: u64, word: u32) -> Self {
        let stack = |i: usize| Stack {
            head: ptr::null(),
            len: 0,
            // An eighth of the bytes for each class, more or less.
            most: if i < CLASSES { ((small / 8) >> class_size(i).ilog2()).clamp(2, MOST_ROWS) as u16 } else { 0 },
            bytes: if i < CLASSES { class_size(i) as u32 } else { 0 },
        };
        let stacks = std::array::from_fn(stack);
        Self {
            word: AtomicU32::new(word),
            drift: AtomicI64::new(0),
            kept: std::array::from_fn(|_| Kept { rows: AtomicU64::new(0), bytes: AtomicU64::new(0) }),
            hits: AtomicU64::new(0),
            credit: AtomicI32::new(0),
            quarrels: AtomicU32::new(0),
            stacks: UnsafeCell::new(Stacks {
                lines: [leasehold_core::Stamp::NEVER.line_id(); LINES],
                misses: 0,
                turn: 0,
                tries: 0,
                rush: 0,
                spilled_at: 0,
                hand: None,
                fetch: [[0; CLASSES]; LINES],
                stacks: [stacks; LINES],
            }),
        }
    }

    /// Enters without waiting, or not at all.
    #[inline(always)]
    fn enter(&self) -> Option<Inside<'_>> {
        let free = self.word.compare_exchange(FREE, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok();
        (free || mutated('a')).then(|| Inside(self))
    }

    #[inline(always)]
    fn leave(&self) {
        self.word.store(FREE, if mutated('h') { Ordering::Relaxed } else { Ordering::Release });
    }

    /// Takes a stack from the depot, and a row of it. A line without stacks gets some: unused ones, or after a while another line's, which
    /// go into the chain. Inside only.
    ///
    /// # Safety
    /// - The table whose rows were put there is alive for `'a`.
    #[cold]
    unsafe fn refill_slow<'a>(
        &self,
        depot: &Depot,
        pocket: Pocket,
        line: LineId,
        left: &mut Chain,
    ) -> Option<(&'a Row, u64)> {
        self.stacks.with_mut(|s| {
            // SAFETY: inside.
            let s = unsafe { &mut *s };
            let at = match s.lines.iter().position(|&l| l == line).or_else(|| s.unused()) {
                Some(at) => at,
                None => {
                    s.adopt_slow(line, self, left);
                    return None;
                }
            };
            // SAFETY: the depot has rows of the same table, which the caller keeps alive.
            let (first, rows) = unsafe { depot.pop(line, pocket.stack) }?;
            if s.lines[at] != line {
                s.assign(at, line);
            }
            let stack = &mut s.stacks[at][pocket.stack];
            debug_assert!(stack.head.is_null());
            (stack.head, stack.len) = (link(first), rows - 1);
            let bytes = u64::from(stack.bytes);
            let counter = &self.kept[0];
            counter.add(u64::from(rows), u64::from(rows) * bytes);
            Some((first, bytes))
        })
    }

    /// There is no block in this pocket for this line. Inside only.
    #[cold]
    fn miss_slow<'a>(&self, pocket: Pocket, line: LineId, most: u64) -> Took<'a> {
        if pocket.is_large() {
            let rests = self.credit.load(Ordering::Relaxed) > 0;
            return if rests { Took::NOTHING } else { Took::Nothing(self.open_hand()) };
        }
        // Where threads contend for the core's lock, the next visit fetches some more; twice as many as the last one.
        let quarrels = self.quarrels.load(Ordering::Relaxed);
        if quarrels == 0 || self.kept[0].bytes.load(Ordering::Relaxed) >= most / 2 {
            return Took::NOTHING;
        }
        self.quarrels.store(quarrels - 1, Ordering::Relaxed);
        let want = self.stacks.with_mut(|s| {
            // SAFETY: inside.
            let s = unsafe { &mut *s };
            let Some(at) = s.lines.iter().position(|&l| l == line) else { return 1 };
            let (class, fetch) = (pocket.stack, &mut s.fetch[at]);
            fetch[class] = (fetch[class] * 2 + 1).min(s.stacks[at][class].most as u8 / 2);
            u32::from(fetch[class])
        });
        Took::Empty(want)
    }

    /// Takes out what was kept where the last large block was. Inside only.
    #[inline]
    fn open_hand(&self) -> Chain {
        let mut chain = Chain::EMPTY;
        self.stacks.with_mut(|s| {
            // SAFETY: inside.
            let s = unsafe { &mut *s };
            if let Some((at, i)) = s.hand.take()
                && s.stacks[at][i].len > 0
            {
                s.spill_slow(at, i, s.stacks[at][i].len, self, &mut chain);
            }
        });
        chain
    }

    /// Takes everything out. Returns the drift. Inside only.
    fn drain(&self, chain: &mut Chain) -> i64 {
        self.stacks.with_mut(|s| {
            // SAFETY: inside.
            let s = unsafe { &mut *s };
            if self.kept[1].rows.load(Ordering::Relaxed) > 0 {
                self.credit.store(-SHORT_REST, Ordering::Relaxed);
            }
            for at in 0..LINES {
                s.empty(at, 0..STACKS, self, chain);
            }
        });
        let drift = self.drift.load(Ordering::Relaxed);
        self.drift.store(0, Ordering::Relaxed);
        drift
    }

    /// Whether there is nothing to take out, as far as this thread can know.
    fn is_idle(&self) -> bool {
        self.kept.iter().all(|k| k.rows.load(Ordering::Relaxed) == 0) && self.drift.load(Ordering::Relaxed) == 0
    }

    /// Enters, and waits for a thread that is inside.
    fn await_turn(&self) -> Inside<'_> {
        let mut spins = 0u32;
        loop {
            if let Some(inside) = self.enter() {
                return inside;
            }
            spins = pause(spins);
        }
    }
}

/// Spins a little, then lets others run: who is inside leaves within nanoseconds unless the scheduler took it off.
fn pause(spins: u32) -> u32 {
    if spins < 64 {
        spin_loop();
    } else {
        leasehold_core::sync::thread::yield_now();
    }
    spins.saturating_add(1)
}

#[cfg(all(test, not(loom)))]
mod tests;
