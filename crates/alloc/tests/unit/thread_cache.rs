//! Tests of the blocks that a shard gives, keeps and evicts, thread by thread.

use super::bins::TRIES;
use super::*;
use crate::layout::class_size;
use leasehold_core::{Header, PackedTimepoint};
use std::ptr;

const CLASS: usize = 15;
const MIB: u64 = 1 << 20;

fn timeline(n: u64) -> TimelineId {
    PackedTimepoint::from_bits(n << 48).timeline_id()
}

fn rows(n: u32) -> Vec<Row> {
    let row = |i| {
        let row = Row::new(Header::new(ptr::null(), i, 1));
        row.buffer.class.store(CLASS as u16, Ordering::Relaxed);
        row
    };
    (0..n).map(row).collect()
}

fn list(rows: &[Row]) -> List {
    let mut list = List::EMPTY;
    rows.iter().for_each(|row| list.push(row));
    list
}

fn count(mut list: List) -> usize {
    let mut n = 0;
    // SAFETY: the rows live as long as the test.
    while unsafe { list.pop() }.is_some() {
        n += 1;
    }
    n
}

fn index(row: Option<&Row>) -> Option<u32> {
    row.map(|r| r.header.index())
}

fn refill(caches: &ThreadCaches, thread: u32, timeline: TimelineId) -> Refill<'_> {
    // SAFETY: the rows live as long as the test.
    unsafe { caches.refill(thread, CLASS, timeline, 4000) }
}

/// The number of rows that go to the heap.
fn put_slow(caches: &ThreadCaches, row: &Row, class: usize, timeline: TimelineId) -> usize {
    count(caches.put_slow(1, row, class, timeline, 8).expect("nobody is inside").rows)
}

fn caches() -> ThreadCaches {
    ThreadCaches::new(2, MIB, 32 * MIB, 0)
}

#[test]
fn a_shard_under_contention_fetches_some_more_and_finds_it() {
    let (caches, rows) = (caches(), rows(8));
    assert!(matches!(refill(&caches, 1, timeline(1)), Refill::Empty(0, _)), "nobody contends");
    caches.note_contention(1);
    assert!(matches!(refill(&caches, 1, timeline(1)), Refill::Empty(8, _)));
    assert!(matches!(refill(&caches, 2, timeline(2)), Refill::Empty(0, _)), "another shard");
    let mut more = list(&rows);
    // SAFETY: the rows live as long as the test.
    unsafe { caches.stock(1, &mut more, CLASS, timeline(1)) };
    assert!(more.is_empty());
    assert_eq!(caches.stats(), (8, 8 * 4096, 0, 0));
    for _ in 0..8 {
        assert!(matches!(refill(&caches, 1, timeline(1)), Refill::Row(..)));
    }
    assert_eq!(caches.stats(), (0, 0, 8, 8 * 4000));
    caches.flush(false);
    assert!(matches!(refill(&caches, 1, timeline(1)), Refill::Empty(0, _)), "a flush ends it");
}

#[test]
fn what_finds_no_room_comes_back() {
    let (caches, rows) = (ThreadCaches::new(2, 8 << 10, 0, 0), rows(5));
    caches.note_contention(1);
    assert!(matches!(refill(&caches, 1, timeline(1)), Refill::Empty(..)));
    let mut more = list(&rows);
    // SAFETY: the rows live as long as the test.
    unsafe { caches.stock(1, &mut more, CLASS, timeline(1)) };
    assert_eq!((caches.stats().0, count(more)), (2, 3));
}

#[test]
fn a_thread_empties_its_own_shard_only() {
    let (caches, rows) = (caches(), rows(4));
    for (thread, row) in [(1, 0), (1, 1), (2, 2), (2, 3)] {
        assert!(
            caches
                .put_slow(thread, &rows[row], CLASS, timeline(1), 4000)
                .is_some_and(|evicted| evicted.is_nothing())
        );
    }
    let evicted = caches.flush_own(1);
    assert_eq!((count(evicted.rows), evicted.unreported, caches.stats().0), (2, -8000, 2));
    let evicted = caches.flush(false);
    assert_eq!((count(evicted.rows), evicted.unreported, caches.stats()), (2, -8000, (0, 0, 0, 0)));
    assert!(caches.shards.iter().all(|s| s.is_idle() && s.word.load(Ordering::Relaxed) == FREE));
}

/// A timeline that was gone, or sizes that nobody asked for any more, held all that a shard may
/// hold: nothing else was kept there.
#[test]
fn what_is_left_behind_gives_way() {
    for (class, other) in [(CLASS, timeline(2)), (CLASS - 9, timeline(1))] {
        let (caches, rows) = (caches(), rows(2000));
        // A bin holds an eighth of the bytes, so that eight of them hold all.
        let mut next = 0..1000;
        for class in (CLASS - 8..=CLASS).rev() {
            let full = || caches.stats().1 + class_size(class) > MIB;
            for row in
                next.by_ref().take((1 << 17) / class_size(class) as usize).take_while(|_| !full())
            {
                assert_eq!(put_slow(&caches, &rows[row], class, timeline(1)), 0);
            }
        }
        let left = caches.stats().0;
        let evicted: usize =
            (1000..1020).map(|row| put_slow(&caches, &rows[row], class, other)).sum();
        let (kept, bytes, ..) = caches.stats();
        assert_eq!((left + 20, bytes <= MIB), (kept + evicted as u64, true), "none is lost");
        assert!(evicted <= 64, "{evicted} rows made room for 20");
        // SAFETY: the rows live as long as the test.
        let took = (0..20).filter(|_| unsafe { caches.take(1, class, other, 8) }.is_some()).count();
        assert!(if other == timeline(1) { took >= 8 } else { took == 20 }, "{took} are kept of 20");
    }
}

/// Only one of a shard's timelines was ever given up for another: two that took turns got each
/// other's place while the third was long gone.
#[test]
fn timelines_that_take_turns_find_room_beside_one_that_is_gone() {
    let (caches, rows) = (caches(), rows(400));
    let put = |row: usize, n| put_slow(&caches, &rows[row], CLASS, timeline(n));
    let _gone = [put(0, 1), put(1, 2)];
    for row in (2..400).step_by(2) {
        let _ = [put(row, 3), put(row + 1, 4)];
    }
    // SAFETY: the rows live as long as the test.
    let has = |n| unsafe { caches.take(1, CLASS, timeline(n), 8) }.is_some();
    assert_eq!([1, 2, 3, 4].map(has), [false, false, true, true]);
}

/// A thread that only takes what others free never got bins for its timeline where two that were
/// gone had them.
#[test]
fn who_only_takes_from_the_depot_finds_room_beside_timelines_that_are_gone() {
    let (caches, rows) = (ThreadCaches::new(2, MIB, 0, MIB), rows(20));
    assert_eq!(
        (
            put_slow(&caches, &rows[0], CLASS, timeline(1)),
            put_slow(&caches, &rows[1], CLASS, timeline(2))
        ),
        (0, 0)
    );
    // (Linked to each other.)
    let _ = list(&rows[2..18]);
    let mut none = List::EMPTY;
    // SAFETY: the rows live as long as the test.
    assert!(unsafe { caches.depot.push(timeline(3), CLASS, (&rows[17], 16), &mut none) });
    let mut left = 0;
    let took = (0..100).find_map(|_| match refill(&caches, 1, timeline(3)) {
        Refill::Row(row, evicted) => {
            left += count(evicted.rows);
            Some(row.header.index())
        }
        Refill::Empty(_, evicted) => {
            left += count(evicted.rows);
            None
        }
    });
    assert_eq!((took, left), (Some(17), 1), "the last that came, for one that was given up");
    assert!((0..15).all(|_| matches!(refill(&caches, 1, timeline(3)), Refill::Row(..))));
}

/// The work of a hit, and the work that a hit leaves to the slow path.
#[test]
fn a_hit_takes_and_keeps_what_needs_nothing_else() {
    let (caches, rows) = (caches(), rows(80));
    // SAFETY: the rows live as long as the test.
    let take = |thread, timeline| unsafe { caches.take(thread, CLASS, timeline, 4000) };
    let put = |thread, row: usize, timeline| caches.put(thread, &rows[row], CLASS, timeline, 4000);
    assert!(take(1, timeline(1)).is_none(), "there is nothing");
    assert!(!put(1, 0, timeline(1)), "the timeline has no bins");
    assert!(caches.put_slow(1, &rows[0], CLASS, timeline(1), 4000).is_some());
    assert!(put(1, 1, timeline(1)));
    assert_eq!(caches.stats(), (2, 8192, 0, -8000));
    assert!(take(2, timeline(1)).is_none() && !put(2, 2, timeline(1)), "another thread's shard");
    {
        let _inside = caches.shard(1).enter();
        assert!(take(1, timeline(1)).is_none() && !put(1, 2, timeline(1)), "somebody is inside");
        assert!(caches.put_slow(1, &rows[2], CLASS, timeline(1), 8).is_none());
    }
    assert!(take(1, timeline(2)).is_none(), "another timeline");
    assert_eq!(
        [index(take(1, timeline(1))), index(take(1, timeline(1))), index(take(1, timeline(1)))],
        [Some(1), Some(0), None]
    );
    assert_eq!(caches.stats(), (0, 0, 2, 0));
    // A full bin is not its concern: 1 MiB / 8 / 4 KiB.
    let most = (0..80).take_while(|&row| put(1, row, timeline(1))).count();
    assert_eq!(most, 32);
    // Nor is what must be reported: more than so much that came back.
    let row = take(1, timeline(1)).expect("one of them");
    let kept = (0..).take_while(|_| {
        let fine = caches.put(1, row, CLASS, timeline(1), 1 << 19);
        assert!(!fine || take(1, timeline(1)).is_some());
        fine
    });
    let kept = kept.count() as i64;
    assert!((2..=4).contains(&kept), "{kept} times half a MiB");
    assert!(
        caches.stats().3 >= -MOST_UNREPORTED && caches.stats().3 - (1 << 19) < -MOST_UNREPORTED
    );
    let evicted = caches.put_slow(1, row, CLASS, timeline(1), 1 << 19).expect("nobody is inside");
    assert!(evicted.unreported < -MOST_UNREPORTED && caches.stats().3 == 0, "it is reported");
    // A closed shard lets nobody in.
    let _ = caches.flush(true);
    assert!(take(1, timeline(1)).is_none() && !put(1, 3, timeline(1)));
}

/// Where the same sizes do not come again, a shard keeps no large block for a while: within a
/// budget for good, also after a flush.
#[test]
fn trials_of_large_blocks_end_within_a_budget_and_come_again_without() {
    for budgeted in [false, true] {
        let (caches, rows) = (caches().within_budget(budgeted), rows(1));
        let keeps = || caches.put_large(1, &rows[0], timeline(1), MIB).is_some();
        // SAFETY: the row lives as long as the test.
        let misses = || assert!(unsafe { caches.take_large(1, timeline(1), 2 * MIB) }.is_err());
        let tried = (0..=TRIES).filter(|_| (keeps(), misses()).0).count();
        assert_eq!(tried, TRIES as usize + 1, "the last trial starts the rest");
        assert_eq!((0..REST).filter(|_| keeps()).count(), 0);
        assert_eq!(keeps(), !budgeted, "after the rest");
        caches.flush(false);
        assert_eq!((0..SHORT_REST).filter(|_| keeps()).count(), 0, "after a flush");
        assert_eq!(keeps(), !budgeted);
        caches.flush(false);
        caches.note_contention(1);
        assert!(keeps(), "contention decides otherwise");
        caches.flush(false);
    }
}

/// The table of the module's head, case by case.
#[test]
fn large_blocks_are_kept_by_the_table() {
    #[derive(Debug, Clone, Copy)]
    enum Event {
        /// A block of so many MiB is freed.
        Free(u64),
        Hit,
        Miss,
        Flush,
    }
    use Event::{Flush, Free, Hit, Miss};
    const HALF: usize = LARGE / 2;
    // Event; whether there is a budget, and contention; the rest, tries and kept blocks before;
    // kept blocks, blocks that go to the heap, and rest afterwards.
    let cases = [
        // Alone: the last one.
        (Free(1), false, false, (0, 0, 0), (1, 0, 0)),
        (Free(1), false, false, (0, 0, 1), (1, 1, 0)),
        // A rest counts frees. Within a budget one has no end.
        (Free(1), false, false, (2, 0, 0), (0, 1, 1)),
        (Free(1), true, false, (FOREVER, 0, 0), (0, 1, FOREVER)),
        // The try beyond the last is kept too; it begins the rest.
        (Free(1), false, false, (0, TRIES - 1, 0), (1, 0, 0)),
        (Free(1), false, false, (0, TRIES, 0), (1, 0, REST)),
        (Free(1), true, false, (0, TRIES, 0), (1, 0, FOREVER)),
        // Where threads contend: up to `LARGE`, whatever the rest.
        (Free(1), false, true, (2, 0, 3), (4, 0, 2)),
        (Free(1), true, true, (FOREVER, 0, 0), (1, 0, FOREVER)),
        (Free(1), false, true, (0, TRIES, 3), (4, 0, REST)),
        (Free(1), true, true, (0, TRIES, 3), (4, 0, FOREVER)),
        (Free(1), false, true, (0, 0, LARGE - 1), (LARGE, 0, 0)),
        (Free(1), false, true, (0, 0, LARGE), (1, LARGE, 0)),
        // As many bytes as the shard may keep: 32 MiB.
        (Free(16), false, true, (0, 0, LARGE - 1), (LARGE, 0, 0)),
        (Free(18), false, true, (0, 0, LARGE - 1), (1, LARGE - 1, 0)),
        // A hit takes one.
        (Hit, false, false, (2, TRIES, 1), (0, 0, 2)),
        (Hit, true, true, (FOREVER, TRIES, 4), (3, 0, FOREVER)),
        // A request for another size.
        (Miss, false, false, (0, 7, 1), (0, 1, 0)),
        (Miss, true, false, (FOREVER, 7, HALF), (0, HALF, FOREVER)),
        (Miss, false, true, (0, 7, HALF), (HALF, 0, 0)),
        (Miss, false, true, (0, 7, HALF + 1), (0, HALF + 1, 0)),
        // A flush of what is kept, and of nothing.
        (Flush, false, false, (0, 7, 1), (0, 1, SHORT_REST)),
        (Flush, false, true, (REST, 7, 5), (0, 5, SHORT_REST)),
        (Flush, false, false, (9, 7, 0), (0, 0, 9)),
        (Flush, true, false, (0, 7, 1), (0, 1, 0)),
        (Flush, true, true, (FOREVER, 7, 5), (0, 5, FOREVER)),
    ];
    for case @ (event, budgeted, contended, (rest, tries, n), then) in cases {
        let (caches, rows) = (caches().within_budget(budgeted), rows(LARGE as u32 + 1));
        let shard = caches.shard(1);
        shard.contended.store(contended, Ordering::Relaxed);
        shard.rest.store(rest, Ordering::Relaxed);
        {
            let mut inside = shard.enter().expect("nobody is inside");
            let large = &mut inside.bins().large;
            rows[..n].iter().for_each(|row| large.put(row, timeline(1), MIB, &shard.large));
            large.tries = tries;
        }
        // SAFETY: the rows live as long as the test.
        let take = |bytes| unsafe { caches.take_large(1, timeline(1), bytes) };
        let gone = match event {
            Free(mib) => caches
                .put_large(1, &rows[n], timeline(1), mib * MIB)
                .map_or(1, |evicted| count(evicted.rows)),
            Hit => take(MIB).map_or_else(|evicted| 100 + count(evicted.rows), |_| 0),
            Miss => take(2 * MIB).map_or_else(|evicted| count(evicted.rows), |_| 100),
            Flush => count(caches.flush(false).rows),
        };
        let now = (caches.stats().0 as usize, gone, shard.rest.load(Ordering::Relaxed));
        assert_eq!(now, then, "{case:?}");
        let left = shard.enter().expect("nobody is inside").bins().large.tries;
        let counts = match event {
            Free(_) if rest > 0 && !contended => tries,
            Free(_) => {
                if tries < TRIES {
                    tries + 1
                } else {
                    0
                }
            }
            Hit => 0,
            Miss | Flush => tries,
        };
        assert_eq!(left, counts, "{case:?}");
        let still = contended && !matches!(event, Flush);
        assert_eq!(shard.contended.load(Ordering::Relaxed), still, "{case:?}");
    }
}

/// Alone, a thread keeps the last large block up to the next request for another size; many where
/// threads contend.
#[test]
fn a_shard_keeps_the_last_large_block_and_more_under_contention() {
    let (caches, rows) = (caches(), rows(100));
    let put = |row: usize, bytes| {
        let evicted =
            caches.put_large(1, &rows[row], timeline(1), bytes).expect("nobody is inside");
        (count(evicted.rows), evicted.unreported)
    };
    // SAFETY: the rows live as long as the test.
    let take = |timeline, bytes| match unsafe { caches.take_large(1, timeline, bytes) } {
        Ok((row, _)) => Ok(row.header.index()),
        Err(evicted) => Err((count(evicted.rows), evicted.unreported)),
    };
    let mib = MIB as i64;
    assert_eq!(
        (put(0, MIB), put(1, 2 * MIB)),
        ((0, 0), (1, -3 * mib)),
        "the one before goes to the heap"
    );
    assert_eq!((take(timeline(1), 2 * MIB - 1), take(timeline(1), 2 * MIB)), (Ok(1), Err((0, 0))));
    assert_eq!(
        (put(2, MIB), take(timeline(2), MIB), take(timeline(1), MIB)),
        ((0, 0), Err((1, mib - 1)), Err((0, 0)))
    );
    caches.note_contention(1);
    assert!((0..LARGE).all(|row| put(row, MIB + row as u64 * 512) == (0, 0)));
    assert_eq!(
        (take(timeline(1), MIB + 512), take(timeline(1), 9 * MIB).map_err(|e| e.0)),
        (Ok(1), Err(LARGE - 1))
    );
    assert!((0..LARGE / 2).all(|row| put(row, MIB + row as u64 * 512).0 == 0));
    assert_eq!(take(timeline(1), 9 * MIB), Err((0, 0)), "few are kept");
    assert_eq!(caches.stats().0, LARGE as u64 / 2);
    assert_eq!(
        (put(20, 16 * MIB).0, put(21, 16 * MIB).0),
        (0, LARGE / 2 + 1),
        "so many bytes are kept"
    );
    assert!(caches.keeps(16 * MIB) && !caches.keeps(16 * MIB + 1));
}

#[test]
fn caches_without_shards_keep_nothing() {
    let (caches, rows) = (ThreadCaches::none(), rows(1));
    for thread in [1, 2, leasehold_core::thread_number::NOBODY] {
        assert!(caches.is_none() && !caches.put(thread, &rows[0], CLASS, timeline(1), 4000));
        assert!(caches.put_slow(thread, &rows[0], CLASS, timeline(1), 4000).is_none());
        assert!(
            matches!(refill(&caches, thread, timeline(1)), Refill::Empty(0, evicted) if evicted.is_nothing())
        );
    }
    assert!(caches.flush(true).is_nothing() && !caches.keeps(1 << 20));
}
