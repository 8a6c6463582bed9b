//! The contents of a shard: bins of small blocks, for each of a few timelines, and the last large
//! blocks. Touched inside the shard only.

use crate::buffer::Row;
use crate::depot::Depot;
use crate::layout::{CLASSES, UNIT, class_size};
use crate::table::{List, link, set_link};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{PackedTimepoint, TimelineId};
use std::ptr;

/// Large blocks that a shard keeps at most.
pub(super) const LARGE: usize = 16;
/// Large blocks that are kept in a row without a hit, before no more are kept.
pub(super) const TRIES: u32 = 48;
/// Timelines that have bins.
const TIMELINES: usize = 2;
/// Bins of each timeline: one per class. A power of two, so that an index needs no check.
const BINS: usize = CLASSES.next_power_of_two();
/// Frees of a timeline that has no bins before another timeline's are given up for it.
const MOST_MISSES: u32 = 32;
/// The most rows of a bin.
const MOST_ROWS: u64 = 64;
/// Rows from which on a list is worth a place in the depot.
const LEAST_LIST: u16 = 8;

/// Rows and their bytes.
#[derive(Default)]
pub(super) struct Kept {
    pub(super) rows: AtomicU64,
    pub(super) bytes: AtomicU64,
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

/// A list of rows, the last one that came first.
#[derive(Clone, Copy)]
pub(super) struct Bin {
    pub(super) head: *const Row,
    pub(super) len: u16,
    pub(super) most: u16,
    /// The bytes of each of its blocks.
    pub(super) bytes: u32,
}

impl Bin {
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

    fn held(&self) -> u64 {
        u64::from(self.len) * u64::from(self.bytes)
    }
}

/// Everything in a shard.
pub(super) struct Bins {
    timelines: [TimelineId; TIMELINES],
    /// Frees of timelines without bins since a timeline got some.
    misses: u32,
    /// The timeline whose bins were given up last.
    turn: usize,
    bins: [[Bin; BINS]; TIMELINES],
    pub(super) large: Large,
}

impl Bins {
    /// Bins that together keep `bytes` bytes.
    pub(super) fn new(bytes: u64) -> Self {
        let bin = |i: usize| {
            let size = if i < CLASSES { class_size(i) } else { 0 };
            // An eighth of the bytes for each class, more or less.
            let most =
                if size == 0 { 0 } else { ((bytes / 8) >> size.ilog2()).clamp(2, MOST_ROWS) };
            Bin { head: ptr::null(), len: 0, most: most as u16, bytes: size as u32 }
        };
        let bins = std::array::from_fn(bin);
        let timelines = [PackedTimepoint::NEVER.timeline_id(); TIMELINES];
        Self { timelines, misses: 0, turn: 0, bins: [bins; TIMELINES], large: Large::new() }
    }

    /// The number of a timeline that has bins.
    #[inline(always)]
    pub(super) fn find(&self, timeline: TimelineId) -> Option<usize> {
        let at = usize::from(self.timelines[0] != timeline);
        (self.timelines[at] == timeline).then_some(at)
    }

    #[inline(always)]
    pub(super) fn of(&mut self, at: usize, class: usize) -> &mut Bin {
        &mut self.bins[at][class & (BINS - 1)]
    }

    /// Keeps a row, if there is room.
    pub(super) fn keep(
        &mut self,
        (at, class): (usize, usize),
        row: &Row,
        most: u64,
        small: &Kept,
    ) -> bool {
        let bin = self.of(at, class);
        let fine = bin.len < bin.most
            && small.bytes.load(Ordering::Relaxed) + u64::from(bin.bytes) <= most;
        if fine {
            bin.push(row);
            small.add(1, bin.bytes.into());
        }
        fine
    }

    /// Gives the timeline bins of its own: unused ones, or after a while another timeline's.
    #[cold]
    pub(super) fn assign(
        &mut self,
        timeline: TimelineId,
        small: &Kept,
        rows: &mut List,
    ) -> Option<usize> {
        let never = PackedTimepoint::NEVER.timeline_id();
        let unused =
            |i: &usize| self.timelines[*i] == never || self.bins[*i].iter().all(|bin| bin.len == 0);
        let at = match (0..TIMELINES).find(unused) {
            Some(at) => at,
            None => {
                self.misses += 1;
                if self.misses < MOST_MISSES {
                    return None;
                }
                // In turn: a timeline that nobody uses any more is gone after a round.
                self.turn = (self.turn + 1) % TIMELINES;
                self.empty(self.turn, small, rows);
                self.turn
            }
        };
        self.misses = 0;
        self.timelines[at] = timeline;
        Some(at)
    }

    /// Makes room for a block in a bin that is full, or that may not grow because the shard holds
    /// `most` bytes. Rows go to the `depot`, if there is one with room.
    #[cold]
    pub(super) fn make_room(
        &mut self,
        (at, class): (usize, usize),
        most: u64,
        small: &Kept,
        depot: Option<&Depot>,
        rows: &mut List,
    ) {
        let bin = *self.of(at, class);
        let deposited = |depot| self.deposit(at, class, small, depot, rows);
        if bin.len >= bin.most && !depot.is_some_and(deposited) {
            self.evict(at, class, bin.most / 2, small, rows);
        }
        while small.bytes.load(Ordering::Relaxed) + u64::from(bin.bytes) > most {
            let all = (0..TIMELINES).flat_map(|l| (0..CLASSES).map(move |c| (l, c)));
            let Some((l, c)) = all.max_by_key(|&(l, c)| (self.bins[l][c].held(), l, c)) else {
                return;
            };
            if self.bins[l][c].len == 0 {
                return;
            }
            self.evict(l, c, self.bins[l][c].len / 2, small, rows);
        }
    }

    /// Gives half of a bin to the depot. `false`: it has no room, or the bin holds too little.
    fn deposit(
        &mut self,
        at: usize,
        class: usize,
        small: &Kept,
        depot: &Depot,
        left: &mut List,
    ) -> bool {
        let timeline = self.timelines[at];
        let bin = self.of(at, class);
        let n = (bin.most / 2).min(bin.len);
        if n < LEAST_LIST {
            return false;
        }
        // SAFETY: rows in the bins belong to a table that outlives the caches.
        let row = |at: *const Row| unsafe { at.as_ref() };
        let Some(first) = row(bin.head) else { return false };
        let mut last = first;
        for _ in 1..n {
            let Some(next) = row(link(last)) else { return false };
            last = next;
        }
        let rest = link(last);
        set_link(last, ptr::null());
        // SAFETY: rows in the depot are of the same table.
        if !unsafe { depot.push(timeline, class, (first, n), left) } {
            set_link(last, rest);
            return false;
        }
        (bin.head, bin.len) = (rest, bin.len - n);
        small.sub(n.into(), u64::from(n) * u64::from(bin.bytes));
        true
    }

    /// Moves `n` rows of a bin, and at least one, into the list.
    fn evict(&mut self, at: usize, class: usize, n: u16, small: &Kept, rows: &mut List) {
        let bin = self.of(at, class);
        for _ in 0..n.max(1) {
            // SAFETY: rows in the bins belong to a table that outlives the caches.
            let Some((row, bytes)) = (unsafe { bin.pop() }) else { return };
            small.sub(1, bytes);
            rows.push(row);
        }
    }

    fn empty(&mut self, at: usize, small: &Kept, rows: &mut List) {
        for class in 0..CLASSES {
            self.evict(at, class, u16::MAX, small, rows);
        }
    }

    /// Moves everything into the list.
    pub(super) fn drain(&mut self, small: &Kept, large: &Kept, rows: &mut List) {
        for at in 0..TIMELINES {
            self.empty(at, small, rows);
        }
        self.large.evict(large, rows);
    }
}

/// The last large blocks that were freed, by timeline and size.
pub(super) struct Large {
    len: usize,
    /// How many were kept since the last hit.
    pub(super) tries: u32,
    all: [(TimelineId, u32, *const Row); LARGE],
}

impl Large {
    fn new() -> Self {
        Self {
            len: 0,
            tries: 0,
            all: [(PackedTimepoint::NEVER.timeline_id(), 0, ptr::null()); LARGE],
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Counts one that is kept. `true`: more than [`TRIES`] were, without a hit; the count begins
    /// anew.
    pub(super) fn are_useless(&mut self) -> bool {
        self.tries += 1;
        let useless = self.tries > TRIES;
        if useless {
            self.tries = 0;
        }
        useless
    }

    /// The units that were asked for.
    #[inline(always)]
    fn units(size: u64) -> u32 {
        size.div_ceil(UNIT) as u32
    }

    /// The last row of this size that was freed on this timeline, and its bytes.
    ///
    /// # Safety
    /// - The rows that were put are alive for `'a`.
    #[inline(always)]
    pub(super) unsafe fn take<'a>(
        &mut self,
        timeline: TimelineId,
        size: u64,
    ) -> Option<(&'a Row, u64)> {
        let units = Self::units(size);
        let kept = self.all.get(..self.len)?;
        let at = kept.iter().rposition(|&(l, u, _)| (l, u) == (timeline, units))?;
        let row = kept[at].2;
        self.tries = 0;
        self.len -= 1;
        self.all[at] = self.all[self.len];
        // SAFETY: a row that was put, which the caller keeps alive for `'a`.
        Some((unsafe { row.as_ref() }?, u64::from(units) * UNIT))
    }

    /// Keeps a row. There is room.
    #[inline(always)]
    pub(super) fn put(&mut self, row: &Row, timeline: TimelineId, size: u64, kept: &Kept) {
        let units = Self::units(size);
        self.all[self.len] = (timeline, units, row);
        self.len += 1;
        kept.add(1, u64::from(units) * UNIT);
    }

    /// Moves everything into the list.
    pub(super) fn evict(&mut self, kept: &Kept, rows: &mut List) {
        for &(_, units, row) in &self.all[..self.len] {
            // SAFETY: rows in a shard belong to a table that outlives the caches.
            if let Some(row) = unsafe { row.as_ref() } {
                rows.push(row);
                kept.sub(1, u64::from(units) * UNIT);
            }
        }
        self.len = 0;
    }
}
