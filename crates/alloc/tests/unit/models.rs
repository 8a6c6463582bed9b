//! Models of the allocator's concurrent parts: loom runs the code that ships through its
//! interleavings. `ci/sanitize.sh loom alloc`.
//!
//! - a. Actors: two threads on one shard of the thread caches, a third that empties it. Invariant:
//!   no block twice, none lost.
//! - c. Actors: a stream's work, the last drop, the next allocation. Invariant: memory is reused
//!   after its last use only.
//! - d. Actors: growths within a budget. Invariant: never above the limit; a failure gives back.
//! - f. Actors: a shard's counters, a reader. Invariant: never more than there is, never less than
//!   nothing.
//! - g. Actors: the allocator's end, the last lease. Invariant: everything goes back, once.
//! - h. Actors: a thread that frees, a flush. Invariant: what was freed before the flush is in it.
//! - i. Actors: threads that come and go. Invariant: a number is one thread's at a time, and what
//!   the last one did is seen.
//! - j. Actors: two streams' submitters that use one buffer. Invariant: the second sees the first
//!   one's mark, and its work waits.
//! - k. Actors: the growth of a block, the last drop of another one. Invariant: memory is in one
//!   place, and is counted once.
//!
//! Each counts in how many executions the interesting thing happened and fails if there was none.
//! For each, `ci/planted.sh` plants a mistake in the code that it must find.

use crate::allocator::Allocator;
use crate::budget::Budget;
use crate::buffer::Row;
use crate::config::AllocatorConfig;
use crate::fake::FakeBacking;
use crate::layout::Layout;
use crate::stream::On;
use crate::table::List;
use crate::thread_cache::{Refill, ThreadCaches};
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::sync::{Arc, UnsafeCell, thread};
use leasehold_core::thread_number::Numbers;
use leasehold_core::{
    Header, PackedTimepoint, Result, Timeline, TimelineId, TimelineOwner, TimelineSource, Timepoint,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// The events that happened, over all executions of a model.
#[derive(Clone, Default)]
struct Seen(std::sync::Arc<parking::Counts>);

mod parking {
    //! A lock that loom does not know: it counts across executions.
    use super::BTreeMap;
    use std::cell::RefCell;

    #[derive(Default)]
    pub(super) struct Counts(pub(super) RefCell<BTreeMap<&'static str, u64>>);
    // SAFETY: loom runs all threads of a model on one, and `check` returns before the counts are
    // read.
    unsafe impl Send for Counts {}
    // SAFETY: loom runs all threads of a model on one, so two never share it.
    unsafe impl Sync for Counts {}
}

impl Seen {
    fn note(&self, what: &'static str) {
        *self.0.0.borrow_mut().entry(what).or_default() += 1;
    }
}

fn check(model: impl Fn(&Seen) + Send + Sync + 'static) -> Seen {
    let seen = Seen::default();
    let inside = seen.clone();
    let mut builder = loom::model::Builder::new();
    // `LOOM_MAX_PREEMPTIONS` makes the exploration shorter.
    builder.preemption_bound = builder.preemption_bound.map_or(Some(3), |asked| Some(asked.min(3)));
    builder.max_branches = 20_000;
    builder.check(move || {
        inside.note("executions");
        model(&inside);
    });
    seen
}

/// Explores a model, and wants all of `expected` to have happened.
fn explore(letter: char, expected: &[&str], model: impl Fn(&Seen) + Send + Sync + 'static) {
    let begin = std::time::Instant::now();
    let seen = check(model);
    let seen = seen.0.0.borrow();
    println!("{letter}: {seen:?} in {:.1} s", begin.elapsed().as_secs_f32());
    for what in expected {
        assert!(
            seen.contains_key(what),
            "{letter} is vacuous: {what} never happened; seen: {seen:?}"
        );
    }
}

/// Blocks in a thread cache, each with a cell that only its holder may touch.
struct Pile {
    caches: ThreadCaches,
    rows: Box<[Row]>,
    cells: Vec<UnsafeCell<u32>>,
}

// SAFETY: a cell is touched by the holder of its row only, as loom checks.
unsafe impl Send for Pile {}
// SAFETY: a shared pile gives rows through its cache, and a cell to the holder of its row only.
unsafe impl Sync for Pile {}

const CLASS: usize = 0;
const SIZE: u64 = 256;

fn timeline() -> TimelineId {
    PackedTimepoint::from_bits(1 << 48).timeline_id()
}

impl Pile {
    fn new(rows: u32) -> Self {
        let row = |i| Row::new(Header::new(std::ptr::null(), i, 1));
        // Room for two blocks of the smallest class.
        let caches = ThreadCaches::new(1, 4096, 0, 0);
        Self {
            caches,
            rows: (0..rows).map(row).collect(),
            cells: (0..rows).map(|_| UnsafeCell::new(0)).collect(),
        }
    }

    fn touch(&self, row: &Row) {
        // SAFETY: whoever took the row holds it alone, as loom checks.
        self.cells[row.header.index() as usize].with_mut(|n| unsafe { *n += 1 });
    }

    fn put(&self, thread: u32, row: &Row) -> Option<usize> {
        self.touch(row);
        if self.caches.put(thread, row, CLASS, timeline(), SIZE) {
            return Some(0);
        }
        self.caches
            .put_slow(thread, row, CLASS, timeline(), SIZE)
            .map(|evicted| self.count(evicted.rows))
    }

    fn take(&self, thread: u32) -> Option<&Row> {
        // SAFETY: the rows live as long as the pile.
        if let Some(row) = unsafe { self.caches.take(thread, CLASS, timeline(), SIZE) } {
            self.touch(row);
            return Some(row);
        }
        // SAFETY: the rows live as long as the pile.
        match unsafe { self.caches.refill(thread, CLASS, timeline(), SIZE) } {
            Refill::Row(row, _) => {
                self.touch(row);
                Some(row)
            }
            Refill::Empty(..) => None,
        }
    }

    fn count(&self, mut list: List) -> usize {
        let mut n = 0;
        // SAFETY: the rows live as long as the pile.
        while let Some(row) = unsafe { list.pop() } {
            self.touch(row);
            n += 1;
        }
        n
    }

    fn flush(&self) -> usize {
        self.count(self.caches.flush(false).rows)
    }
}

/// A pile with so many rows in it.
fn filled(rows: u32) -> Arc<Pile> {
    let pile = Pile::new(rows);
    for row in &pile.rows {
        while pile.put(1, row).is_none() {}
    }
    Arc::new(pile)
}

#[test]
fn a_no_block_twice_and_none_lost() {
    explore('a', &["owner's hit", "other's hit", "owner refused", "stolen"], |seen| {
        let pile = filled(2);
        // The blocks that a thread has in its hands in the end: taken and not kept again.
        let turn =
            |pile: &Pile, thread: u32, seen: &Seen, hit: &'static str, refused: &'static str| {
                let Some(row) = pile.take(thread) else {
                    seen.note(refused);
                    return 0;
                };
                seen.note(hit);
                pile.put(thread, row).map_or(1, |evicted| evicted)
            };
        let (there, note) = (pile.clone(), seen.clone());
        let other = thread::spawn(move || {
            // The second time it may have the shard.
            turn(&there, 2, &note, "other's hit", "other refused")
                + turn(&there, 2, &note, "other's hit", "other refused")
        });
        let (there, note) = (pile.clone(), seen.clone());
        let thief = thread::spawn(move || {
            let n = there.flush();
            if n > 0 {
                note.note("stolen");
            }
            n
        });
        let mine = turn(&pile, 1, seen, "owner's hit", "owner refused");
        let sum = mine + other.join().unwrap() + thief.join().unwrap() + pile.flush();
        assert_eq!(sum, 2, "blocks are lost or doubled");
    });
}

#[test]
fn c_memory_is_reused_after_its_last_use() {
    explore('c', &["over", "not over"], |seen| {
        let owner: &'static TimelineOwner = Box::leak(Box::new(TimelineOwner::for_model(1)));
        let timeline = owner.timeline();
        let row: &'static Row = Box::leak(Box::new(Row::new(Header::new(std::ptr::null(), 0, 1))));
        row.buffer.describe((0x1000, 0), 64, Some(timeline), 0, PackedTimepoint::NEVER);
        let memory = Arc::new(UnsafeCell::new(0u32));
        let dropped = Arc::new(AtomicU32::new(0));
        let (there, last) = (memory.clone(), dropped.clone());
        let stream = thread::spawn(move || {
            let value = owner.advance().expect("a value");
            // SAFETY: the streams are virtual: nothing ever uses the memory.
            unsafe { row.buffer.mark_write(timeline.at(value)) };
            // The last lease goes; only then does the device do the work.
            last.store(1, Ordering::Release);
            // SAFETY: the memory is this work's until its value is complete, as loom checks.
            there.with_mut(|n| unsafe { *n += 1 });
            owner.complete(value);
        });
        if dropped.load(Ordering::Acquire) == 1 {
            let until = row.buffer.own_timepoint();
            if timeline.completed() >= until.value() {
                seen.note("over");
                // SAFETY: the last use is over, as loom checks.
                memory.with_mut(|n| unsafe { *n += 1 });
            } else {
                seen.note("not over");
            }
        }
        stream.join().unwrap();
    });
}

#[test]
fn d_a_budget_is_never_exceeded() {
    explore('d', &["taken", "refused"], |seen| {
        let budget = Arc::new(Budget::new(2));
        let grow = |budget: &Budget, bytes: u64, fails: bool, seen: &Seen| {
            if !budget.take(bytes) {
                seen.note("refused");
                return 0;
            }
            seen.note("taken");
            assert!(budget.committed() <= 2, "above the limit");
            // The driver refuses: the reservation goes back.
            if fails {
                budget.undo(bytes);
                return 0;
            }
            bytes
        };
        let (there, note) = (budget.clone(), seen.clone());
        let one = thread::spawn(move || grow(&there, 1, true, &note));
        let (there, note) = (budget.clone(), seen.clone());
        let two = thread::spawn(move || grow(&there, 2, false, &note));
        let mine = grow(&budget, 1, false, seen);
        let kept = mine + one.join().unwrap() + two.join().unwrap();
        assert_eq!(budget.committed(), kept, "a reservation was lost");
        assert!(budget.peak() <= 2 && budget.committed() <= 2);
    });
}

/// A stream that is always idle, outside the table of timelines.
struct Idle(&'static Timeline);

impl Idle {
    fn new() -> Self {
        Self(TimelineOwner::for_model(1).timeline())
    }
}

// SAFETY: nothing is ever submitted to it.
unsafe impl TimelineSource for Idle {
    fn timeline(&self) -> &'static Timeline {
        self.0
    }
    fn signal(&self) -> Result<u64> {
        Ok(0)
    }
    fn refresh(&self) -> Result<u64> {
        Ok(0)
    }
    fn wait(&self, _: Timepoint) -> Result<()> {
        Ok(())
    }
    fn wait_host(&self, _: u64, _: Option<Duration>) -> Result<()> {
        Ok(())
    }
}

fn allocator() -> (Allocator, FakeBacking) {
    let fake = FakeBacking::new(16 << 20);
    let config = AllocatorConfig { thread_caches: false, ..AllocatorConfig::default() };
    (Allocator::new(Box::new(fake.clone()), config).expect("an allocator"), fake)
}

#[test]
fn f_counters_tell_no_more_than_there_is() {
    explore('f', &["some", "none"], |seen| {
        let pile = filled(2);
        let there = pile.clone();
        let other = thread::spawn(move || there.flush());
        let row = pile.take(1);
        let (rows, kept, _, _) = pile.caches.stats();
        assert!(rows <= 2 && kept <= 2 * SIZE, "{rows} rows, {kept} bytes");
        seen.note(if rows > 0 { "some" } else { "none" });
        let mine = row.map_or(0, |row| pile.put(1, row).map_or(1, |evicted| evicted));
        let sum = mine + other.join().unwrap() + pile.flush();
        let (rows, kept, _, unreported) = pile.caches.stats();
        assert_eq!((sum, rows, kept, unreported), (2, 0, 0, 0), "a counter has lost a step");
    });
}

#[test]
fn g_everything_goes_back_once() {
    explore('g', &["allocator first", "lease first"], |seen| {
        let (allocator, fake) = allocator();
        let stream = Idle::new();
        let lease = allocator.alloc(Layout::new(70_000), On::new(&stream)).expect("memory");
        let memory = fake.clone();
        let other = thread::spawn(move || drop(lease));
        let alive = memory.outstanding().0;
        drop(allocator);
        // The allocator's end gives the addresses back, unless the lease is still out.
        seen.note(if memory.outstanding().0 == alive { "allocator first" } else { "lease first" });
        other.join().unwrap();
        assert_eq!((memory.outstanding(), memory.violations()), ((0, 0, 0, 0), Vec::new()));
    });
}

#[test]
fn k_a_growth_beside_a_free_takes_memory_once() {
    explore('k', &["the freed memory", "none"], |seen| {
        const GRANULE: u64 = 2 << 20;
        // Two granules are for the growth and for the other block, but not for both.
        let fake = FakeBacking::new(2 * GRANULE);
        let config = AllocatorConfig { thread_caches: false, ..AllocatorConfig::default() };
        let allocator = Allocator::new(Box::new(fake.clone()), config).expect("an allocator");
        let stream = Idle::new();
        let growing = allocator.growing(2 * GRANULE).expect("addresses");
        allocator.grow(&growing, GRANULE).expect("the first granule");
        let other = allocator.alloc(Layout::new(GRANULE), On::new(&stream)).expect("the second");
        let free = thread::spawn(move || drop(other));
        let grown = allocator.grow(&growing, 2 * GRANULE).is_ok();
        seen.note(if grown { "the freed memory" } else { "none" });
        free.join().unwrap();
        assert_eq!(growing.len(), if grown { 2 * GRANULE } else { GRANULE });
        assert!(fake.is_backed(growing.addr(), growing.len()), "not backed");
        allocator.check().expect("the invariants");
        assert_eq!(allocator.stats().reserved, fake.used(), "counted otherwise than taken");
        drop((growing, allocator));
        assert_eq!((fake.outstanding(), fake.violations()), ((0, 0, 0, 0), Vec::new()));
    });
}

#[test]
fn h_a_flush_finds_what_was_freed_before_it() {
    explore('h', &["freed before", "freed later"], |seen| {
        let pile = filled(1);
        let row =
            pile.take(1).map(|row| row.header.index() as usize).expect("the owner's own block");
        let freed = Arc::new(AtomicU32::new(0));
        let (there, done) = (pile.clone(), freed.clone());
        let owner = thread::spawn(move || {
            let kept = there.put(1, &there.rows[row]);
            done.store(1, Ordering::Release);
            kept.map_or(1, |evicted| evicted)
        });
        let before = freed.load(Ordering::Acquire) == 1;
        let found = pile.flush();
        seen.note(if before { "freed before" } else { "freed later" });
        let theirs = owner.join().unwrap();
        assert!(!before || found + theirs == 1, "freed before the flush, and not in it");
        assert_eq!(found + theirs + pile.flush(), 1, "blocks are lost or doubled");
    });
}

#[test]
fn i_a_number_is_one_threads_at_a_time() {
    explore('i', &["the other's before", "both at a time"], |seen| {
        let all = Arc::new((Numbers::for_model(), [(); 2].map(|()| UnsafeCell::new(0u32))));
        let live = |(numbers, owned): &(Numbers, [UnsafeCell<u32>; 2]), seen: &Seen| {
            let number = numbers.take();
            assert!((1..=2).contains(&number), "{number} for one of two threads");
            // SAFETY: what goes by the number is this thread's, as loom checks.
            let before = owned[number as usize - 1]
                .with_mut(|n| unsafe { std::mem::replace(&mut *n, *n + 1) });
            seen.note(match (number, before) {
                (2, _) => "both at a time",
                (_, 0) => "the first",
                _ => "the other's before",
            });
            numbers.put(number);
        };
        let (there, note) = (all.clone(), seen.clone());
        let other = thread::spawn(move || live(&there, &note));
        live(&all, seen);
        other.join().unwrap();
    });
}

#[test]
fn j_of_two_submissions_one_waits_for_the_other() {
    explore('j', &["first", "second"], |seen| {
        let owners: [&'static TimelineOwner; 2] =
            [1, 2].map(|n| &*Box::leak(Box::new(TimelineOwner::for_model(n))));
        let row: &'static Row = Box::leak(Box::new(Row::new(Header::new(std::ptr::null(), 0, 1))));
        row.buffer.describe((0x1000, 0), 64, None, 0, PackedTimepoint::NEVER);
        let memory = Arc::new(UnsafeCell::new(0u32));
        let submit = move |me: usize, memory: &UnsafeCell<u32>, seen: &Seen| {
            let (timeline, other) = (owners[me].timeline(), owners[1 - me].timeline());
            // SAFETY: this thread alone submits to the timeline, and the row stays.
            while !unsafe { row.buffer.try_lock_record(timeline.id()) } {
                thread::yield_now();
            }
            let before = row.buffer.write_timepoint();
            let value = owners[me].advance().expect("a value");
            // The mark without what it displaces, for which a point would have to find its
            // timeline.
            row.buffer.inherit(timeline.at(value).into());
            // SAFETY: the work below waits for what the record said; the record was locked above.
            unsafe { row.buffer.unlock_record() };
            seen.note(if before.is_never() { "first" } else { "second" });
            while !before.is_never() && other.completed() < before.value() {
                thread::yield_now();
            }
            // SAFETY: the work of the submission before is over, as loom checks.
            memory.with_mut(|n| unsafe { *n += 1 });
            owners[me].complete(value);
        };
        let (there, note) = (memory.clone(), seen.clone());
        let stream = thread::spawn(move || submit(1, &there, &note));
        submit(0, &memory, seen);
        stream.join().unwrap();
    });
}
