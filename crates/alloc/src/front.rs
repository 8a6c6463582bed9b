//! Magazines: blocks that were just freed, kept in front of the allocator's lock for the next request of their class and stream.
//!
//! A *shard* holds, for each of a few lines, one stack of rows per slab class. What lies there was freed on its own line, so the next
//! request on that line may take it without asking for its stamp. Threads are numbered; a thread uses the shard of its number.
//!
//! # Protocol
//! `word` is an owner and a bit `locked`. A shard is *unowned*, *biased* to one thread, *shared*, or *closed* (locked for ever).
//!
//! | who | enters by | leaves by |
//! |---|---|---|
//! | the owner of a biased shard | its `inside = 1`; light fence; `word` is still its own and unlocked | its `inside = 0` |
//! | any thread, shared shard | one CAS that sets `locked` | a store |
//! | any thread, any shard, slow path | CAS that sets `locked`; heavy fence; wait until the owner's `inside` is 0 | a store |
//!
//! The two fences make a Dekker pair (see `fence`): either the owner sees `locked`, or the other sees `inside`. Entering by the first two
//! ways never waits: who fails goes to the core. A second thread on a biased shard takes the bias over, in case the owner is gone; after a
//! few such moves the shard is shared, for good. Each ownership has an `inside` of its own: a former owner that learns late of its loss
//! takes its flag back late, and would take back its successor's.
//!
//! Nobody calls anything while inside. Rows that leave a magazine for the core are carried there after leaving.

use crate::buffer::Row;
use crate::fence::{Fences, Inside, NOBODY, OWNERS, Owned};
use crate::layout::{CLASSES, class_size};
use crate::mutant::mutated;
use leasehold_core::LineId;
use leasehold_core::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{CachePadded, UnsafeCell, spin_loop};
use std::ptr;

const LINES: usize = 2;
const LOCKED: u32 = 1;
const SHARED: u32 = Owned::SHARED.0;
/// Bytes by which a shard's count of live bytes may be ahead of the core's.
const DRIFT: i64 = 64 << 10;
/// Frees of a line that has no stacks before another line's are given up for it.
const PATIENCE: u32 = 32;
const MOST_ROWS: u64 = 64;

/// The shards of one allocator.
pub(crate) struct Front {
    shards: Box<[CachePadded<Shard>]>,
    fences: Fences,
    bytes: u64,
}

pub(crate) struct Shard {
    word: AtomicU32,
    /// For each ownership, whether its thread is inside. Written by that thread only.
    inside: Inside,
    /// Live bytes that this shard lent and took back, beyond what the core knows. Written inside only.
    drift: AtomicI64,
    /// Rows in the stacks, and their bytes. Written inside only.
    rows: AtomicU32,
    kept: AtomicU64,
    hits: AtomicU64,
    stacks: UnsafeCell<Stacks>,
}

struct Stacks {
    lines: [LineId; LINES],
    misses: u32,
    heads: [[*const Row; CLASSES]; LINES],
    lens: [[u16; CLASSES]; LINES],
}

// SAFETY: the stacks are touched only inside (see the protocol); rows are `Sync` and outlive the front.
unsafe impl Send for Shard {}
// SAFETY: as above.
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
        // SAFETY: the caller's.
        let row = unsafe { self.0.as_ref() }?;
        self.0 = link(row);
        Some(row)
    }

    fn push(&mut self, row: &Row) {
        set_link(row, self.0);
        self.0 = row;
    }
}

#[inline]
fn link(row: &Row) -> *const Row {
    ptr::with_exposed_provenance(row.header.user.load(Ordering::Relaxed) as usize)
}

#[inline]
fn set_link(row: &Row, to: *const Row) {
    row.header.user.store(to.expose_provenance() as u64, Ordering::Relaxed);
}

/// What came of a free.
pub(crate) enum Put {
    /// The magazine has it. The chain goes to the core, with the drift of live bytes.
    Kept(Chain, i64),
    /// The core must take it.
    Refused,
}

/// The rows that a class's stack may hold.
#[inline]
fn capacity(class: usize, bytes: u64) -> u16 {
    ((bytes / 8) >> (63 - class_size(class).leading_zeros())).clamp(2, MOST_ROWS) as u16
}

impl Front {
    /// Shards for `threads` threads that may run at once; each keeps at most `bytes`.
    pub(crate) fn new(threads: usize, bytes: u64) -> Self {
        let n = if cfg!(loom) { 1 } else { (threads * 2).next_power_of_two().clamp(4, 64) };
        let fences = Fences::detect();
        Self { shards: (0..n).map(|_| CachePadded::new(Shard::new())).collect(), fences, bytes }
    }

    /// No shards at all.
    pub(crate) fn none() -> Self {
        Self { shards: Box::new([]), fences: Fences::detect(), bytes: 0 }
    }

    #[inline]
    fn shard(&self, thread: u32) -> Option<&Shard> {
        // The number of shards is a power of two, or zero.
        self.shards.get(thread as usize & self.shards.len().wrapping_sub(1)).map(|s| &**s)
    }

    /// A row of `class` that was freed on `line`, lent for `size` bytes.
    ///
    /// # Safety
    /// - The table whose rows were put here is alive for `'a`.
    #[inline]
    pub(crate) unsafe fn take<'a>(&self, thread: u32, class: usize, line: LineId, size: u64) -> Option<&'a Row> {
        let shard = self.shard(thread)?;
        if shard.rows.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let way = shard.enter(thread, self.fences)?;
        let row = shard.stacks.with_mut(|s| {
            // SAFETY: inside.
            let s = unsafe { &mut *s };
            let at = if s.lines[0] == line { 0 } else { 1 };
            if s.lines[at] != line {
                return None;
            }
            // SAFETY: rows in the stacks are alive as the caller says.
            let row = unsafe { s.heads[at][class].as_ref() }?;
            s.heads[at][class] = link(row);
            s.lens[at][class] -= 1;
            Some(row)
        });
        if mutated('f') {
            // Leaves too early, and the counters are written outside.
            shard.leave(way);
            leasehold_core::sync::thread::yield_now();
        }
        if row.is_some() {
            add(&shard.rows, u32::MAX);
            shard.kept.store(shard.kept.load(Ordering::Relaxed) - class_size(class), Ordering::Relaxed);
            shard.hits.store(shard.hits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            shard.drift.store(shard.drift.load(Ordering::Relaxed) + size as i64, Ordering::Relaxed);
        }
        shard.leave(way);
        row
    }

    /// Keeps a row of `class` that nobody holds and whose last uses are on `line`.
    #[inline]
    pub(crate) fn put(&self, thread: u32, row: &Row, class: usize, line: LineId, size: u64) -> Put {
        let Some(shard) = self.shard(thread) else { return Put::Refused };
        let Some(way) = shard.enter(thread, self.fences) else { return Put::Refused };
        let mut chain = Chain::EMPTY;
        let kept = shard.stacks.with_mut(|s| {
            // SAFETY: inside.
            let s = unsafe { &mut *s };
            let at = if s.lines[0] == line { 0 } else { 1 };
            if s.lines[at] != line && !s.adopt_slow(line, shard, &mut chain) {
                return false;
            }
            let at = if s.lines[0] == line { 0 } else { 1 };
            let most = capacity(class, self.bytes);
            if s.lens[at][class] >= most || shard.kept.load(Ordering::Relaxed) >= self.bytes {
                s.spill_slow(at, class, most / 2, shard, &mut chain);
                if shard.kept.load(Ordering::Relaxed) >= self.bytes {
                    return false;
                }
            }
            set_link(row, s.heads[at][class]);
            s.heads[at][class] = row;
            s.lens[at][class] += 1;
            true
        });
        if !kept {
            shard.leave(way);
            return if chain.is_empty() {
                Put::Refused
            } else {
                chain.push(row);
                Put::Kept(chain, -(size as i64))
            };
        }
        add(&shard.rows, 1);
        shard.kept.store(shard.kept.load(Ordering::Relaxed) + class_size(class), Ordering::Relaxed);
        let mut drift = shard.drift.load(Ordering::Relaxed) - size as i64;
        let mut told = 0;
        if drift.abs() > DRIFT {
            (told, drift) = (drift, 0);
        }
        shard.drift.store(drift, Ordering::Relaxed);
        shard.leave(way);
        Put::Kept(chain, told)
    }

    /// Takes everything out of all shards, with the drift. `close`: and lets nobody in again.
    pub(crate) fn flush(&self, close: bool) -> (Chain, i64) {
        let mut chain = Chain::EMPTY;
        let mut drift = 0;
        for shard in &self.shards {
            let owner = shard.enter_slow(self.fences);
            shard.stacks.with_mut(|s| {
                // SAFETY: inside.
                let s = unsafe { &mut *s };
                for at in 0..LINES {
                    s.empty(at, shard, &mut chain);
                }
            });
            drift += shard.drift.load(Ordering::Relaxed);
            shard.drift.store(0, Ordering::Relaxed);
            if !close {
                shard.word.store(owner, Ordering::Release);
            }
        }
        (chain, drift)
    }

    /// Rows and bytes in the magazines, hits, and live bytes beyond what the core knows. Sums of single-writer counters: exact when
    /// nobody is inside.
    pub(crate) fn stats(&self) -> (u64, u64, u64, i64) {
        self.shards.iter().fold((0, 0, 0, 0), |(rows, kept, hits, drift), s| {
            (
                rows + u64::from(s.rows.load(Ordering::Relaxed)),
                kept + s.kept.load(Ordering::Relaxed),
                hits + s.hits.load(Ordering::Relaxed),
                drift + s.drift.load(Ordering::Relaxed),
            )
        })
    }
}

#[inline]
fn add(counter: &AtomicU32, n: u32) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// How a shard was entered.
#[derive(Clone, Copy)]
enum Way<'a> {
    /// As the owner, whose flag this is.
    Owner(&'a AtomicU8),
    Shared,
}

impl Shard {
    fn new() -> Self {
        Self {
            word: AtomicU32::new(0),
            inside: std::array::from_fn(|_| AtomicU8::new(0)),
            drift: AtomicI64::new(0),
            rows: AtomicU32::new(0),
            kept: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            stacks: UnsafeCell::new(Stacks {
                lines: [leasehold_core::Stamp::NEVER.line_id(); LINES],
                misses: 0,
                heads: [[ptr::null(); CLASSES]; LINES],
                lens: [[0; CLASSES]; LINES],
            }),
        }
    }

    /// Enters without waiting, or not at all.
    #[inline]
    fn enter(&self, thread: u32, fences: Fences) -> Option<Way<'_>> {
        let word = self.word.load(Ordering::Relaxed);
        if Owned(word).is(thread) {
            let inside = &self.inside[Owned(word).turn()];
            inside.store(1, Ordering::Relaxed);
            fences.light();
            if self.word.load(Ordering::Acquire) == word || mutated('a') {
                return Some(Way::Owner(inside));
            }
            inside.store(0, Ordering::Release);
        }
        self.enter_shared(thread, fences)
    }

    fn enter_shared(&self, thread: u32, fences: Fences) -> Option<Way<'_>> {
        const NEW: u32 = Owned::NEW.0;
        let word = self.word.load(Ordering::Relaxed);
        match word {
            SHARED => {
                let locked = SHARED | LOCKED;
                let won = self.word.compare_exchange(SHARED, locked, Ordering::Acquire, Ordering::Relaxed).is_ok();
                won.then_some(Way::Shared)
            }
            // Who has no number of its own must not own anything.
            _ if thread == NOBODY => None,
            NEW => {
                // Unowned: it becomes this thread's. The next call enters.
                let mine = Owned::by(thread, 0).0;
                let _ = self.word.compare_exchange(NEW, mine, Ordering::AcqRel, Ordering::Relaxed);
                None
            }
            _ if word & LOCKED == 0 && !Owned(word).is(thread) => {
                if self.word.compare_exchange(word, word | LOCKED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    fences.heavy();
                    // The owner may be gone: the bias moves a few times before the shard is shared. Not while it is inside.
                    let idle = self.inside[Owned(word).turn()].load(Ordering::Acquire) == 0;
                    let next = Owned(word).turn() + 1;
                    let to = match idle {
                        false => word,
                        true if next < OWNERS => Owned::by(thread, next).0,
                        true => SHARED,
                    };
                    self.word.store(to, Ordering::Release);
                }
                None
            }
            _ => None,
        }
    }

    #[inline]
    fn leave(&self, way: Way<'_>) {
        match way {
            Way::Owner(inside) => inside.store(0, Ordering::Release),
            Way::Shared => self.word.store(SHARED, Ordering::Release),
        }
    }

    /// Enters, waiting for whoever is inside. Returns the word to store on leaving.
    fn enter_slow(&self, fences: Fences) -> u32 {
        let mut spins = 0u32;
        loop {
            let word = self.word.load(Ordering::Relaxed);
            if word & LOCKED == 0
                && self.word.compare_exchange(word, word | LOCKED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                if Owned(word).is_owned() {
                    fences.heavy();
                    while self.inside[Owned(word).turn()].load(Ordering::Acquire) != 0 && !mutated('h') {
                        spins = pause(spins);
                    }
                }
                return word;
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

impl Stacks {
    /// Gives the line stacks of its own: unused ones, or at last another line's.
    #[cold]
    fn adopt_slow(&mut self, line: LineId, shard: &Shard, chain: &mut Chain) -> bool {
        let never = leasehold_core::Stamp::NEVER.line_id();
        let free = (0..LINES).find(|&i| self.lines[i] == never || self.lens[i].iter().all(|&n| n == 0));
        let at = match free {
            Some(at) => at,
            None => {
                self.misses += 1;
                if self.misses < PATIENCE {
                    return false;
                }
                let at = (self.misses as usize / PATIENCE as usize) % LINES;
                self.empty(at, shard, chain);
                at
            }
        };
        self.misses = 0;
        self.lines[at] = line;
        true
    }

    /// Moves `n` rows of a stack into the chain.
    #[cold]
    fn spill_slow(&mut self, at: usize, class: usize, n: u16, shard: &Shard, chain: &mut Chain) {
        for _ in 0..n {
            // SAFETY: rows in the stacks belong to a table that outlives the front.
            let Some(row) = (unsafe { self.heads[at][class].as_ref() }) else { return };
            self.heads[at][class] = link(row);
            self.lens[at][class] -= 1;
            add(&shard.rows, u32::MAX);
            shard.kept.store(shard.kept.load(Ordering::Relaxed) - class_size(class), Ordering::Relaxed);
            chain.push(row);
        }
    }

    fn empty(&mut self, at: usize, shard: &Shard, chain: &mut Chain) {
        for class in 0..CLASSES {
            self.spill_slow(at, class, self.lens[at][class], shard, chain);
        }
    }
}
