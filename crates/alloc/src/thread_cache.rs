//! Thread caches: blocks that were just freed, kept in front of the heap's lock for the next
//! request.
//!
//! These are Bonwick's magazines with their depot, per stream: a block's former uses are on the
//! timeline that freed it, so the next request on that timeline may take it without asking for its
//! timepoint. A *shard* is the cache of the threads of some numbers. For each of a few timelines it
//! has one *bin* per slab class, a list of blocks. A full bin gives half of its blocks to the heap.
//! Where the shard holds all that it may, its fullest bin does.
//!
//! One flag says that the shard's threads found the heap's lock taken. Then full bins give to the
//! [`depot`](crate::depot), and empty ones take a list from there or fetch some more blocks of the
//! heap. A flush clears the flag.
//!
//! # Large blocks
//! A block in a cache cannot coalesce, and its next use does not move to a lower address. So a
//! shard keeps blocks of large sizes ([`ThreadCaches::keeps`]) only while they are of use:
//!
//! | event | a thread alone | threads contend |
//! |---|---|---|
//! | a free during a rest | to the heap; the rest is one free shorter | as without a rest |
//! | another free | kept; what was kept goes to the heap | kept, up to [`LARGE`] together |
//! | a request for a block that is kept | the last such one; the tries begin anew | the same |
//! | a request for another | what is kept goes to the heap | only if more than half of `LARGE` |
//! | more than `TRIES` kept without a hit | a rest of `REST` frees | the same, for later |
//! | a flush of what is kept | a rest of `SHORT_REST` frees | the same, and contention is over |
//!
//! - A request is for a size on a timeline.
//! - What is kept goes to the heap all at once. On a request it goes under the lock which that
//!   takes anyway, as mimalloc's threads collect deferred frees. A free that finds no room, in
//!   number or in bytes, sends it there before its own block is kept.
//! - With a budget, a shard that rests after `TRIES` keeps no large block any more, and a flush
//!   begins no rest. Every trial changes where blocks lie, and so may take new memory. A workload
//!   that repeats must come to rest.
//!
//! # Protocol
//! A shard has one lock word. A thread enters by a compare-and-swap from free to locked and leaves
//! by a store. It does not wait: a thread that finds the word locked goes to the heap. Only a flush
//! waits, since it must find everything that was freed before it. A closed shard stays locked.
//! Counters are written inside only, and read anywhere.
//!
//! The hits, [`ThreadCaches::take`] and [`ThreadCaches::put`], do nothing else and give up where
//! anything else is to be done. A hit touches the shard and the first 64 bytes of a row. Nobody
//! calls anything while inside. Rows that leave for the heap are carried there after leaving.

use crate::buffer::Row;
use crate::depot::Depot;
use crate::layout::SLAB_MAX;
use crate::table::List;
use leasehold_core::TimelineId;
use leasehold_core::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{UnsafeCell, spin_loop};

mod bins;
use bins::{Bins, Kept, LARGE, add};

const FREE: u32 = 0;
const LOCKED: u32 = 1;
/// Bytes by which a shard's count of live bytes may be ahead of the heap's. A report is a write to
/// what all threads share.
const MOST_UNREPORTED: i64 = 2 << 20;
/// Frees of large blocks that go to the heap after [`TRIES`](bins::TRIES).
const REST: u32 = 4096;
/// The same after a flush: what was kept was missing elsewhere.
const SHORT_REST: u32 = 512;
/// A rest without an end.
const FOREVER: u32 = u32::MAX;
/// Shards that there are at most.
const MOST_SHARDS: usize = 64;

/// The shards of one allocator.
pub(crate) struct ThreadCaches {
    /// A power of two of them; or one that lets nobody in, which stands for none.
    shards: Box<[Shard]>,
    /// One less than there are.
    mask: u32,
    /// The most bytes that each shard keeps, of small blocks and of large ones.
    small: u64,
    large: u64,
    /// The largest block that is kept.
    largest: u64,
    /// The allocator has a budget, so trials of large blocks end.
    budgeted: bool,
    depot: Depot,
}

// Aligned to pages: processors fetch lines of a page in advance, and so would take a neighbour's
// from its thread.
#[repr(align(4096))]
pub(crate) struct Shard {
    word: AtomicU32,
    /// The shard's threads found the heap's lock taken. A hint.
    contended: AtomicBool,
    /// Large blocks that go to the heap before the next is kept. A guess: written without care.
    rest: AtomicU32,
    /// Live bytes that this shard lent and took back, beyond what the heap knows.
    unreported: AtomicI64,
    small: Kept,
    large: Kept,
    hits: AtomicU64,
    bins: UnsafeCell<Bins>,
}

// SAFETY: the bins are touched only inside (see the protocol); rows are `Sync` and outlive the
// caches.
unsafe impl Send for Shard {}
// SAFETY: the bins are entered by one thread at a time (see the protocol); all else is atomic.
unsafe impl Sync for Shard {}

/// The rows that go to the heap, and the live bytes that the heap does not know of.
pub(crate) struct Evicted {
    pub(crate) rows: List,
    pub(crate) unreported: i64,
}

impl Evicted {
    pub(crate) const NOTHING: Evicted = Evicted { rows: List::EMPTY, unreported: 0 };

    #[inline(always)]
    pub(crate) fn is_nothing(&self) -> bool {
        self.rows.is_empty() && self.unreported == 0
    }
}

/// The outcome of a request for a small block that was no hit.
pub(crate) enum Refill<'a> {
    Row(&'a Row, Evicted),
    /// There is none. So many more than the one that was asked for are welcome: see
    /// [`ThreadCaches::stock`].
    Empty(u32, Evicted),
}

impl ThreadCaches {
    /// Shards for `threads` threads that may run at once; each keeps at most `small` bytes of small
    /// blocks and `large` of large ones. The depot has as many bins, of `depot` bytes.
    pub(crate) fn new(threads: usize, small: u64, large: u64, depot: u64) -> Self {
        let n =
            if cfg!(loom) { 1 } else { (threads * 2).next_power_of_two().clamp(4, MOST_SHARDS) };
        let depot = Depot::new(if depot == 0 { 0 } else { n }, depot);
        // Two of the largest find room.
        let largest = if large / 2 <= SLAB_MAX { 0 } else { (large / 2).min(1 << 30) };
        let shards = (0..n).map(|_| Shard::new(small, FREE)).collect();
        let mask = n as u32 - 1;
        Self { shards, mask, small, large, largest, budgeted: false, depot }
    }

    /// The same for an allocator that has a budget, if `budgeted`.
    pub(crate) fn within_budget(self, budgeted: bool) -> Self {
        Self { budgeted, ..self }
    }

    /// No shards at all.
    pub(crate) fn none() -> Self {
        let closed = Box::new([Shard::new(0, LOCKED)]);
        Self { shards: closed, mask: 0, ..Self::new(1, 0, 0, 0) }
    }

    /// Whether there are no shards.
    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.small == 0
    }

    /// The shard of a thread.
    #[inline(always)]
    fn shard(&self, thread: u32) -> &Shard {
        // SAFETY: the index is at most the mask, and so less than the number of shards.
        unsafe { self.shards.get_unchecked((thread & self.mask) as usize) }
    }

    /// The shards that let threads in.
    fn open_shards(&self) -> &[Shard] {
        if self.is_none() { &[] } else { &self.shards }
    }

    /// The threads of the shard found the heap's lock taken.
    #[cold]
    pub(crate) fn note_contention(&self, thread: u32) {
        self.shard(thread).contended.store(true, Ordering::Relaxed);
    }

    /// A row of a slab class that was freed on `timeline`, lent for `size` bytes, if the thread's
    /// shard has one.
    ///
    /// # Safety
    /// - The table whose rows were put here is alive for `'a`.
    #[inline(always)]
    pub(crate) unsafe fn take<'a>(
        &self,
        thread: u32,
        class: usize,
        timeline: TimelineId,
        size: u64,
    ) -> Option<&'a Row> {
        let shard = self.shard(thread);
        let mut inside = shard.enter()?;
        let bins = inside.bins();
        let at = bins.find(timeline)?;
        // SAFETY: the caller keeps the table of the rows in the bins alive for `'a`.
        let (row, bytes) = unsafe { bins.of(at, class).pop() }?;
        shard.count_hit(&shard.small, bytes, size);
        Some(row)
    }

    /// Keeps a row of a slab class that nobody holds and whose last uses are on `timeline`, if the
    /// thread's shard has room for it.
    #[inline(always)]
    pub(crate) fn put(
        &self,
        thread: u32,
        row: &Row,
        class: usize,
        timeline: TimelineId,
        size: u64,
    ) -> bool {
        let shard = self.shard(thread);
        let Some(mut inside) = shard.enter() else { return false };
        let unreported = shard.unreported.load(Ordering::Relaxed) - size as i64;
        let bins = inside.bins();
        let Some(at) = bins.find(timeline) else { return false };
        let bin = bins.of(at, class);
        let kept = shard.small.bytes.load(Ordering::Relaxed) + u64::from(bin.bytes);
        let fine = bin.len < bin.most && kept <= self.small && unreported >= -MOST_UNREPORTED;
        if fine {
            bin.push(row);
            shard.small.bytes.store(kept, Ordering::Relaxed);
            add(&shard.small.rows, 1);
            shard.unreported.store(unreported, Ordering::Relaxed);
        }
        fine
    }

    /// As [`take`](Self::take), from the depot if the shard has none.
    ///
    /// # Safety
    /// - As [`take`](Self::take).
    pub(crate) unsafe fn refill<'a>(
        &self,
        thread: u32,
        class: usize,
        timeline: TimelineId,
        size: u64,
    ) -> Refill<'a> {
        const EMPTY: Refill<'_> = Refill::Empty(0, Evicted::NOTHING);
        let shard = self.shard(thread);
        let contended = shard.contended.load(Ordering::Relaxed);
        if shard.small.rows.load(Ordering::Relaxed) == 0
            && !contended
            && !self.depot.may_have(timeline)
        {
            return EMPTY;
        }
        let Some(mut inside) = shard.enter() else { return EMPTY };
        let bins = inside.bins();
        let mut rows = List::EMPTY;
        let at = match bins.find(timeline) {
            None if contended || self.depot.may_have(timeline) => {
                bins.assign(timeline, &shard.small, &mut rows)
            }
            place => place,
        };
        let Some(at) = at else { return EMPTY };
        let bin = bins.of(at, class);
        if bin.len == 0
            && self.depot.may_have(timeline)
            // SAFETY: the depot has rows of the same table, which the caller keeps alive.
            && let Some((first, n)) = unsafe { self.depot.pop(timeline, class) }
        {
            (bin.head, bin.len) = (first, n);
            shard.small.add(n.into(), u64::from(n) * u64::from(bin.bytes));
        }
        // SAFETY: the caller keeps the table of the rows in the bins alive for `'a`.
        if let Some((row, bytes)) = unsafe { bin.pop() } {
            shard.count_hit(&shard.small, bytes, size);
            return Refill::Row(row, Evicted { rows, unreported: shard.report() });
        }
        let more = if contended && shard.small.bytes.load(Ordering::Relaxed) < self.small / 2 {
            bin.most / 4
        } else {
            0
        };
        Refill::Empty(more.into(), Evicted { rows, unreported: 0 })
    }

    /// As [`put`](Self::put), and makes room. `None`: somebody is inside.
    pub(crate) fn put_slow(
        &self,
        thread: u32,
        row: &Row,
        class: usize,
        timeline: TimelineId,
        size: u64,
    ) -> Option<Evicted> {
        let shard = self.shard(thread);
        let mut inside = shard.enter()?;
        let bins = inside.bins();
        let mut rows = List::EMPTY;
        let fine =
            match bins.find(timeline).or_else(|| bins.assign(timeline, &shard.small, &mut rows)) {
                Some(at) => {
                    let contended = shard.contended.load(Ordering::Relaxed);
                    let depot = contended.then_some(&self.depot);
                    bins.make_room((at, class), self.small, &shard.small, depot, &mut rows);
                    bins.keep((at, class), row, self.small, &shard.small)
                }
                None => false,
            };
        if !fine {
            rows.push(row);
        }
        shard
            .unreported
            .store(shard.unreported.load(Ordering::Relaxed) - size as i64, Ordering::Relaxed);
        Some(Evicted { rows, unreported: shard.report() })
    }

    /// Keeps rows of small blocks of one class that nobody has held yet and that `timeline` may
    /// use. Rows that find no room stay in the list.
    ///
    /// # Safety
    /// - The table whose rows these are outlives the caches.
    pub(crate) unsafe fn stock(
        &self,
        thread: u32,
        rows: &mut List,
        class: usize,
        timeline: TimelineId,
    ) {
        let shard = self.shard(thread);
        let Some(mut inside) = shard.enter() else { return };
        let bins = inside.bins();
        let Some(at) = bins.find(timeline) else { return };
        // SAFETY: the caller keeps the table of the list's rows alive.
        while let Some(row) = unsafe { rows.pop() } {
            if !bins.keep((at, class), row, self.small, &shard.small) {
                return rows.push(row);
            }
        }
    }

    /// Whether large blocks that were asked for with this size may be kept.
    #[inline]
    pub(crate) fn keeps(&self, size: u64) -> bool {
        size > SLAB_MAX && size <= self.largest
    }

    /// A large row that was freed on `timeline`, lent for `size` bytes, and the live bytes that the
    /// heap does not know of.
    ///
    /// # Errors
    /// The rows and live bytes that go to the heap before the request does.
    ///
    /// # Safety
    /// - As [`take`](Self::take).
    #[inline]
    pub(crate) unsafe fn take_large<'a>(
        &self,
        thread: u32,
        timeline: TimelineId,
        size: u64,
    ) -> Result<(&'a Row, i64), Evicted> {
        let shard = self.shard(thread);
        if shard.large.rows.load(Ordering::Relaxed) == 0 {
            return Err(Evicted::NOTHING);
        }
        let Some(mut inside) = shard.enter() else { return Err(Evicted::NOTHING) };
        let large = &mut inside.bins().large;
        // SAFETY: the caller keeps the table of the rows in the shard alive for `'a`.
        match unsafe { large.take(timeline, size) } {
            Some((row, bytes)) => {
                shard.count_hit(&shard.large, bytes, size);
                Ok((row, shard.unreported.load(Ordering::Relaxed)))
            }
            None => {
                let mut rows = List::EMPTY;
                if !shard.contended.load(Ordering::Relaxed) || large.len() > LARGE / 2 {
                    large.evict(&shard.large, &mut rows);
                }
                let unreported =
                    if rows.is_empty() { 0 } else { shard.unreported.swap(0, Ordering::Relaxed) };
                Err(Evicted { rows, unreported })
            }
        }
    }

    /// Keeps a large row of a size that it [`keeps`](Self::keeps), which nobody holds and whose
    /// last uses are on `timeline`. `None`: the shard rests, or somebody is inside.
    #[inline]
    pub(crate) fn put_large(
        &self,
        thread: u32,
        row: &Row,
        timeline: TimelineId,
        size: u64,
    ) -> Option<Evicted> {
        let shard = self.shard(thread);
        let contended = shard.contended.load(Ordering::Relaxed);
        let rest = shard.rest.load(Ordering::Relaxed);
        if rest > 0 && !contended {
            if rest != FOREVER {
                shard.rest.store(rest - 1, Ordering::Relaxed);
            }
            return None;
        }
        let mut inside = shard.enter()?;
        let large = &mut inside.bins().large;
        let most = if contended { LARGE } else { 1 };
        let mut rows = List::EMPTY;
        if large.are_useless() {
            let rest = if self.budgeted { FOREVER } else { REST };
            shard.rest.store(rest, Ordering::Relaxed);
        }
        if large.len() >= most || shard.large.bytes.load(Ordering::Relaxed) + size > self.large {
            large.evict(&shard.large, &mut rows);
        }
        large.put(row, timeline, size, &shard.large);
        let unreported = shard.unreported.load(Ordering::Relaxed) - size as i64;
        if rows.is_empty() {
            shard.unreported.store(unreported, Ordering::Relaxed);
            return Some(Evicted::NOTHING);
        }
        shard.unreported.store(0, Ordering::Relaxed);
        Some(Evicted { rows, unreported })
    }

    /// Takes everything out of the shard of a thread, unless somebody else is inside; and out of
    /// the depot.
    pub(crate) fn flush_own(&self, thread: u32) -> Evicted {
        let mut evicted = Evicted::NOTHING;
        // SAFETY: rows in the depot belong to a table that outlives the caches.
        unsafe { self.depot.drain(&mut evicted.rows) };
        let shard = self.shard(thread);
        if !shard.is_idle()
            && let Some(mut inside) = shard.enter()
        {
            inside.drain(&mut evicted, self.budgeted);
        }
        evicted
    }

    /// Takes everything out of all shards and the depot. `close`: and lets nobody in again.
    pub(crate) fn flush(&self, close: bool) -> Evicted {
        let mut evicted = Evicted::NOTHING;
        // Rows in the depot must not get into a shard that the flush has already looked at.
        let all = close || self.depot.any();
        // Every flush begins at the first shard, so no two wait for each other.
        let mut entered: [Option<Inside<'_>>; MOST_SHARDS] = [const { None }; MOST_SHARDS];
        for (inside, shard) in
            entered.iter_mut().zip(self.open_shards()).filter(|(_, s)| all || !s.is_idle())
        {
            *inside = Some(shard.await_turn());
        }
        // SAFETY: rows in the depot belong to a table that outlives the caches.
        unsafe { self.depot.drain(&mut evicted.rows) };
        for mut inside in entered.into_iter().flatten() {
            inside.drain(&mut evicted, self.budgeted);
            if close {
                std::mem::forget(inside);
            }
        }
        evicted
    }

    /// Rows and bytes in the shards and the depot, hits, and live bytes beyond what the heap knows.
    /// Sums of single-writer counters: exact when nobody is inside.
    pub(crate) fn stats(&self) -> (u64, u64, u64, i64) {
        let (rows, bytes) = self.depot.kept();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.open_shards().iter().fold((rows, bytes, 0, 0), |(rows, bytes, hits, unreported), s| {
            (
                rows + load(&s.small.rows) + load(&s.large.rows),
                bytes + load(&s.small.bytes) + load(&s.large.bytes),
                hits + load(&s.hits),
                unreported + s.unreported.load(Ordering::Relaxed),
            )
        })
    }
}

/// A thread inside a shard; it leaves when this goes.
struct Inside<'a>(&'a Shard);

impl Inside<'_> {
    #[inline(always)]
    fn bins(&mut self) -> &mut Bins {
        // SAFETY: one thread is inside at a time, and this is its only way to the bins.
        unsafe { &mut *self.0.bins.with_mut(|bins| bins) }
    }

    /// Takes everything out.
    fn drain(&mut self, evicted: &mut Evicted, budgeted: bool) {
        let shard = self.0;
        if shard.large.rows.load(Ordering::Relaxed) > 0 && !budgeted {
            shard.rest.store(SHORT_REST, Ordering::Relaxed);
        }
        self.bins().drain(&shard.small, &shard.large, &mut evicted.rows);
        evicted.unreported += shard.unreported.load(Ordering::Relaxed);
        shard.unreported.store(0, Ordering::Relaxed);
        shard.contended.store(false, Ordering::Relaxed);
    }
}

impl Drop for Inside<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Shard {
    /// A shard that keeps `small` bytes of small blocks, entered as `word` says.
    fn new(small: u64, word: u32) -> Self {
        Self {
            word: AtomicU32::new(word),
            contended: AtomicBool::new(false),
            rest: AtomicU32::new(0),
            unreported: AtomicI64::new(0),
            small: Kept::default(),
            large: Kept::default(),
            hits: AtomicU64::new(0),
            bins: UnsafeCell::new(Bins::new(small)),
        }
    }

    /// Enters without waiting, or not at all.
    #[inline(always)]
    fn enter(&self) -> Option<Inside<'_>> {
        let free =
            self.word.compare_exchange(FREE, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then(|| Inside(self))
    }

    #[inline(always)]
    fn leave(&self) {
        self.word.store(FREE, Ordering::Release);
    }

    /// Enters, and waits for a thread that is inside.
    fn await_turn(&self) -> Inside<'_> {
        let mut spins = 0;
        loop {
            if let Some(inside) = self.enter() {
                return inside;
            }
            // The thread inside leaves within nanoseconds, unless the scheduler took it off.
            if spins < 64 {
                spin_loop();
                spins += 1;
            } else {
                leasehold_core::sync::thread::yield_now();
            }
        }
    }

    /// Counts a hit: a block of `bytes` bytes, lent for `size`. Inside only.
    #[inline(always)]
    fn count_hit(&self, kept: &Kept, bytes: u64, size: u64) {
        kept.sub(1, bytes);
        add(&self.hits, 1);
        self.unreported
            .store(self.unreported.load(Ordering::Relaxed) + size as i64, Ordering::Relaxed);
    }

    /// The live bytes to report, if they are many. Inside only.
    fn report(&self) -> i64 {
        let unreported = self.unreported.load(Ordering::Relaxed);
        if unreported.abs() <= MOST_UNREPORTED {
            return 0;
        }
        self.unreported.store(0, Ordering::Relaxed);
        unreported
    }

    /// Whether the shard looks empty from outside (relaxed loads).
    fn is_idle(&self) -> bool {
        let none = |kept: &Kept| kept.rows.load(Ordering::Relaxed) == 0;
        none(&self.small) && none(&self.large) && self.unreported.load(Ordering::Relaxed) == 0
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/thread_cache.rs"]
mod tests;
