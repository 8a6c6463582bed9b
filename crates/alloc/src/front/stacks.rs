//! What lies in a shard: stacks of rows, for each of a few lines. Touched inside the shard only.

use super::{Chain, LINES, Pocket, STACKS, Shard, link, set_link};
use crate::buffer::Row;
use crate::depot::{Depot, NAMED};
use crate::layout::CLASSES;
use leasehold_core::LineId;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use std::ptr;

/// Frees of a line that has no stacks before another line's are given up for it.
const PATIENCE: u32 = 32;
/// Rows of a stack from which on it is worth a place in the depot.
const LEAST_STACK: u16 = 8;
/// How many times as much as a stack another one of its line holds that gives up room for it.
const CROWDED: u64 = 4;
const MOST_LARGE_ROWS: u64 = 16;
/// Large blocks that are kept in a row without being asked for, before no more are kept.
const TRIES: u32 = 48;
/// Frees of large blocks that then go to the core.
const REST: i32 = 4096;
/// Spills from which on small blocks go to the depot, with fewer hits than this between them; longer pauses halve their number. Where batches
/// are freed it pays, and where it does not pay what is free lies better in the core.
const RUSH: u32 = 8;
const SOON: u64 = 64;

/// Rows and their bytes.
pub(super) struct Kept {
    pub(super) rows: AtomicU64,
    pub(super) bytes: AtomicU64,
}

pub(super) struct Stacks {
    pub(super) lines: [LineId; LINES],
    pub(super) misses: u32,
    /// Whose stacks were given up last.
    pub(super) turn: usize,
    /// Large blocks kept since one was asked for.
    pub(super) tries: u32,
    /// Spills of small blocks in quick succession, and the hits at the last one.
    pub(super) rush: u32,
    pub(super) spilled_at: u64,
    /// Where the last large block was kept: line and stack.
    pub(super) hand: Option<(usize, usize)>,
    /// How many blocks of a class are fetched together: more each time that there is none.
    pub(super) fetch: [[u8; CLASSES]; LINES],
    pub(super) stacks: [[Stack; STACKS]; LINES],
}

#[derive(Clone, Copy)]
pub(super) struct Stack {
    pub(super) head: *const Row,
    pub(super) len: u16,
    pub(super) most: u16,
    /// The bytes of each of its blocks.
    pub(super) bytes: u32,
}

/// Adds to a counter that has one writer at a time.
#[inline(always)]
pub(super) fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}

impl Kept {
    #[inline(always)]
    pub(super) fn add(&self, rows: u64, bytes: u64) {
        add(&self.rows, rows);
        add(&self.bytes, bytes);
    }

    #[inline(always)]
    pub(super) fn sub(&self, rows: u64, bytes: u64) {
        self.rows.store(self.rows.load(Ordering::Relaxed) - rows, Ordering::Relaxed);
        self.bytes.store(self.bytes.load(Ordering::Relaxed) - bytes, Ordering::Relaxed);
    }
}

impl Stack {
    #[inline(always)]
    pub(super) fn push(&mut self, row: &Row) {
        set_link(row, self.head);
        self.head = row;
        self.len += 1;
    }

    /// A row and the bytes of its block.
    ///
    /// # Safety
    /// - The rows that were pushed are alive for `'a`.
    #[inline(always)]
    pub(super) unsafe fn pop<'a>(&mut self) -> Option<(&'a Row, u64)> {
        // SAFETY: the head is null or a row that was pushed, which the caller keeps alive for `'a`.
        let row = unsafe { self.head.as_ref() }?;
        self.head = link(row);
        self.len -= 1;
        Some((row, u64::from(self.bytes)))
    }
}

impl Stacks {
    /// Which stacks are a line's.
    #[inline(always)]
    pub(super) fn place(&self, line: LineId) -> Option<usize> {
        let at = usize::from(self.lines[0] != line);
        (self.lines[at] == line).then_some(at)
    }

    /// Makes a stack of large blocks one of this size. `false`: nothing large is kept for a while, because nothing large was asked for again.
    #[inline]
    pub(super) fn invite(&mut self, at: usize, pocket: Pocket, most: u64, shard: &Shard, chain: &mut Chain) -> bool {
        self.tries += 1;
        if self.tries > TRIES {
            self.rest_slow(shard, chain);
            return false;
        }
        if self.stacks[at][pocket.stack & (STACKS - 1)].bytes != pocket.bytes {
            self.dedicate_slow(at, pocket, most, shard, chain);
        }
        true
    }

    #[cold]
    pub(super) fn rest_slow(&mut self, shard: &Shard, chain: &mut Chain) {
        self.tries = 0;
        shard.credit.store(-REST, Ordering::Relaxed);
        for at in 0..LINES {
            self.empty(at, CLASSES..STACKS, shard, chain);
        }
    }

    #[cold]
    pub(super) fn dedicate_slow(&mut self, at: usize, pocket: Pocket, most: u64, shard: &Shard, chain: &mut Chain) {
        self.empty(at, pocket.stack..pocket.stack + 1, shard, chain);
        let rows = (most / 4 / u64::from(pocket.bytes)).clamp(1, MOST_LARGE_ROWS);
        self.stacks[at][pocket.stack] = Stack { head: ptr::null(), len: 0, most: rows as u16, bytes: pocket.bytes };
    }

    /// Gives the line stacks of its own: unused ones, or at last another line's.
    #[cold]
    pub(super) fn adopt_slow(&mut self, line: LineId, shard: &Shard, chain: &mut Chain) -> Option<usize> {
        let at = match self.unused() {
            Some(at) => at,
            None => {
                self.misses += 1;
                if self.misses < PATIENCE {
                    return None;
                }
                // In turn: one that nobody uses any more is gone after a round.
                self.turn = (self.turn + 1) % LINES;
                self.empty(self.turn, 0..STACKS, shard, chain);
                self.turn
            }
        };
        self.assign(at, line);
        Some(at)
    }

    /// Stacks that no line has, or whose line has nothing in them.
    pub(super) fn unused(&self) -> Option<usize> {
        let never = leasehold_core::Stamp::NEVER.line_id();
        (0..LINES).find(|&i| self.lines[i] == never || self.stacks[i].iter().all(|s| s.len == 0))
    }

    pub(super) fn assign(&mut self, at: usize, line: LineId) {
        self.misses = 0;
        self.lines[at] = line;
        self.fetch[at] = [0; CLASSES];
    }

    /// Makes room for a block in a stack that is full, or that may not grow because the shard holds `most` bytes. Then those that hold the
    /// most give half of theirs up if they are of another line, which may be gone, or of a size that nobody may ask for any more.
    #[cold]
    pub(super) fn make_room_slow(
        &mut self,
        at: usize,
        i: usize,
        most: u64,
        shard: &Shard,
        depot: &Depot,
        chain: &mut Chain,
    ) {
        let (own, large) = (self.stacks[at][i], i >= CLASSES);
        let sort = if large { CLASSES..STACKS } else { 0..CLASSES };
        let kept = &shard.kept[usize::from(large)].bytes;
        let full = || kept.load(Ordering::Relaxed) + u64::from(own.bytes) > most;
        let held = |s: &Stack| u64::from(s.len) * u64::from(s.bytes);
        while own.len < own.most && full() {
            let weight = |l: usize, c: usize| held(&self.stacks[l][c]) / if l == at { CROWDED } else { 1 };
            let all = (0..LINES).flat_map(|l| sort.clone().map(move |c| (l, c)));
            match all.map(|(l, c)| (weight(l, c), l, c)).max() {
                Some((bytes, l, c)) if bytes > held(&own) => {
                    self.spill_slow(l, c, self.stacks[l][c].len / 2, shard, chain);
                }
                _ => break,
            }
        }
        if (own.len >= own.most || full()) && (large || !self.deposit_slow(at, i, shard, depot, chain)) {
            self.spill_slow(at, i, own.most / 2, shard, chain);
        }
    }

    /// Gives half of a stack to the depot. `false`: it has no room, or the stack holds too little.
    #[cold]
    fn deposit_slow(&mut self, at: usize, i: usize, shard: &Shard, depot: &Depot, chain: &mut Chain) -> bool {
        let stack = &mut self.stacks[at][i];
        let n = (stack.most / 2).min(stack.len);
        let hits = shard.hits.load(Ordering::Relaxed);
        let soon = hits - std::mem::replace(&mut self.spilled_at, hits) < SOON;
        self.rush = if soon { self.rush.saturating_add(1) } else { self.rush / 2 };
        if n < LEAST_STACK || self.rush < RUSH && shard.quarrels.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // SAFETY: rows in the stacks belong to a table that outlives the front.
        let row = |at: *const Row| unsafe { at.as_ref() };
        let Some(first) = row(stack.head) else { return false };
        let (mut rows, mut last) = ([first; NAMED], first);
        let n = n.min(NAMED as u16);
        for place in &mut rows[1..n.into()] {
            let Some(next) = row(link(last)) else { return false };
            (last, *place) = (next, next);
        }
        let rest = link(last);
        set_link(last, ptr::null());
        // SAFETY: rows in the depot are of the same table.
        if !unsafe { depot.push(self.lines[at], i, &rows[..n.into()], chain) } {
            set_link(last, rest);
            return false;
        }
        (stack.head, stack.len) = (rest, stack.len - n);
        let counter = &shard.kept[0];
        counter.sub(u64::from(n), u64::from(n) * u64::from(stack.bytes));
        true
    }

    /// Moves `n` rows of a stack into the chain.
    #[cold]
    pub(super) fn spill_slow(&mut self, at: usize, i: usize, n: u16, shard: &Shard, chain: &mut Chain) {
        let stack = &mut self.stacks[at][i];
        let counter = &shard.kept[usize::from(i >= CLASSES)];
        for _ in 0..n.max(1) {
            // SAFETY: rows in the stacks belong to a table that outlives the front.
            let Some((row, bytes)) = (unsafe { stack.pop() }) else { return };
            counter.sub(1, bytes);
            chain.push(row);
        }
    }

    pub(super) fn empty(&mut self, at: usize, stacks: std::ops::Range<usize>, shard: &Shard, chain: &mut Chain) {
        for i in stacks {
            self.spill_slow(at, i, self.stacks[at][i].len, shard, chain);
        }
    }
}
