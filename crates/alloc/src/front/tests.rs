//! What a shard of magazines gives, keeps and gives up, thread by thread.

use super::*;
use leasehold_core::{Header, Stamp};

const CLASS: usize = 15;

fn line(n: u64) -> LineId {
    Stamp::from_bits(n << 48).line_id()
}

fn rows(n: u32) -> Vec<Row> {
    let row = |i| {
        let row = Row::new(Header::new(ptr::null(), i, 1));
        row.buffer.class.store(CLASS as u16, Ordering::Relaxed);
        row
    };
    (0..n).map(row).collect()
}

fn chain(rows: &[Row]) -> Chain {
    let mut chain = Chain::EMPTY;
    rows.iter().for_each(|row| chain.push(row));
    chain
}

fn count(mut chain: Chain) -> usize {
    let mut n = 0;
    // SAFETY: the rows live as long as the test.
    while unsafe { chain.pop() }.is_some() {
        n += 1;
    }
    n
}

fn take(front: &Front, thread: u32, line: LineId) -> Took<'_> {
    // SAFETY: the rows live as long as the test.
    unsafe { front.take::<false>(thread, Pocket::small(CLASS), line, 4000) }
}

fn front() -> Front {
    Front::new(2, 1 << 20, 0, 0)
}

#[test]
fn who_quarrels_fetches_more_each_time_and_finds_it() {
    let (front, rows) = (front(), rows(8));
    assert!(matches!(take(&front, 1, line(1)), Took::Nothing(_)), "nobody quarrels");
    front.encourage(1);
    assert!(matches!(take(&front, 1, line(1)), Took::Empty(1)), "a line without stacks");
    let mut more = chain(&rows[..1]);
    // SAFETY: the rows live as long as the test.
    unsafe { front.stock(1, &mut more, CLASS, line(1)) };
    assert!(more.is_empty());
    assert!(matches!(take(&front, 1, line(1)), Took::Row(..)));
    for want in [1, 3, 7, 15, 16, 16] {
        assert!(matches!(take(&front, 1, line(1)), Took::Empty(n) if n == want), "{want}");
    }
    assert!(matches!(take(&front, 2, line(2)), Took::Nothing(_)), "the other thread does not quarrel");
    let mut more = chain(&rows);
    // SAFETY: the rows live as long as the test.
    unsafe { front.stock(1, &mut more, CLASS, line(1)) };
    let (kept, bytes, hits, drift) = front.stats();
    assert_eq!((kept, bytes, hits, drift), (8, 8 * 4096, 1, 4000));
    for _ in 0..8 {
        assert!(matches!(take(&front, 1, line(1)), Took::Row(..)));
    }
}

#[test]
fn what_finds_no_room_comes_back() {
    let front = Front::new(2, 8 << 10, 0, 0);
    let rows = rows(5);
    let mut more = chain(&rows);
    // SAFETY: the rows live as long as the test.
    unsafe { front.stock(1, &mut more, CLASS, line(1)) };
    assert_eq!((front.stats().0, count(more)), (2, 3));
}

#[test]
fn a_thread_empties_its_own_shard_only() {
    let (front, rows) = (front(), rows(4));
    for (thread, row) in [(1, 0), (1, 1), (2, 2), (2, 3)] {
        let put = front.put::<false>(thread, &rows[row], Pocket::small(CLASS), line(1), 4000);
        assert!(matches!(put, Put::Kept(chain, 0) if chain.is_empty()));
    }
    let (chain, drift) = front.flush_own(1);
    assert_eq!((count(chain), drift, front.stats().0), (2, -8000, 2));
    let (chain, drift) = front.flush(false);
    assert_eq!((count(chain), drift, front.stats()), (2, -8000, (0, 0, 0, 0)));
    assert!(front.shards.all().iter().all(|s| s.is_idle() && s.word.load(Ordering::Relaxed) == FREE));
}

/// A line that was gone, or sizes that nobody asked for any more, held all that a shard may hold: nothing else was kept there.
#[test]
fn what_is_left_behind_gives_way() {
    for (class, other) in [(CLASS, line(2)), (CLASS - 9, line(1))] {
        let (front, rows) = (front(), rows(2000));
        let put = |row: usize, class, line| match front.put::<false>(1, &rows[row], Pocket::small(class), line, 8) {
            Put::Kept(chain, _) => count(chain),
            Put::Refused => panic!("row {row} is refused"),
        };
        // A stack holds an eighth of the bytes, so that eight of them hold all.
        let mut next = 0..1000;
        for class in (CLASS - 8..=CLASS).rev() {
            let full = || front.stats().1 + class_size(class) > 1 << 20;
            for row in next.by_ref().take((1 << 17) / class_size(class) as usize).take_while(|_| !full()) {
                assert_eq!(put(row, class, line(1)), 0);
            }
        }
        let left = front.stats().0;
        let back: usize = (1000..1020).map(|row| put(row, class, other)).sum();
        let (kept, bytes, ..) = front.stats();
        assert_eq!((left + 20, bytes <= 1 << 20), (kept + back as u64, true), "none is lost");
        assert!(back <= 64, "{back} rows made room for 20");
        // SAFETY: the rows live as long as the test.
        let took = (0..20).filter(|_| unsafe { front.take_own(1, class, other, 8) }.is_some()).count();
        assert!(if other == line(1) { took >= 8 } else { took == 20 }, "{took} are kept of 20");
    }
}

/// The same for large blocks: two of 16 MiB that lines which were gone had left kept every other size out.
#[test]
fn what_large_blocks_are_left_behind_gives_way() {
    let front = Front::new(2, 1 << 20, 32 << 20, 0);
    front.shards.of(1).credit.store(CREDIT, Ordering::Relaxed);
    let rows = rows(4);
    let put = |row: usize, bytes: u64, line| match front.put::<true>(1, &rows[row], Pocket::large(bytes), line, bytes) {
        Put::Kept(chain, _) => count(chain),
        Put::Refused => panic!("row {row} is refused"),
    };
    assert_eq!((put(0, 16 << 20, line(1)), put(1, 16 << 20, line(2))), (0, 0));
    // Another size of the same line; then it is there, and one of the others is not.
    assert_eq!((put(2, 1 << 20, line(2)), front.stats().1), (1, 17 << 20));
    // SAFETY: the rows live as long as the test.
    let took = unsafe { front.take::<true>(1, Pocket::large(1 << 20), line(2), 1 << 20) };
    assert!(matches!(took, Took::Row(row, _) if row.header.index() == 2));
}

/// Only one of a shard's lines was ever given up for another: two that took turns got each other's place while the third was long gone.
#[test]
fn lines_that_take_turns_find_room_beside_one_that_is_gone() {
    let (front, rows) = (front(), rows(400));
    let put = |row: usize, line| front.put::<false>(1, &rows[row], Pocket::small(CLASS), line, 8);
    let _gone = [put(0, line(1)), put(1, line(2))];
    for row in (2..400).step_by(2) {
        let _ = [put(row, line(3)), put(row + 1, line(4))];
    }
    // SAFETY: the rows live as long as the test.
    let has = |line| unsafe { front.take_own(1, CLASS, line, 8) }.is_some();
    assert_eq!([1, 2, 3, 4].map(|n| has(line(n))), [false, false, true, true]);
}

/// A thread that only takes what others free never got stacks for its line where two that were gone had them.
#[test]
fn who_only_takes_from_the_depot_finds_room_beside_lines_that_are_gone() {
    let front = Front::new(2, 1 << 20, 0, 1 << 20);
    let rows = rows(20);
    for (row, line) in [(0, line(1)), (1, line(2))] {
        let put = front.put::<false>(1, &rows[row], Pocket::small(CLASS), line, 8);
        assert!(matches!(put, Put::Kept(chain, 0) if chain.is_empty()));
    }
    // (Linked to each other.)
    let _ = chain(&rows[2..18]);
    let stack: Vec<&Row> = rows[2..18].iter().rev().collect();
    let mut none = Chain::EMPTY;
    // SAFETY: the rows live as long as the test.
    assert!(unsafe { front.depot.push(line(3), CLASS, &stack, &mut none) });
    let mut left = 0;
    let took = (0..100).find_map(|_| match take(&front, 1, line(3)) {
        Took::Row(row, _) => Some(row.header.index()),
        Took::Nothing(chain) => {
            left += count(chain);
            None
        }
        Took::Empty(_) => None,
    });
    assert_eq!((took, left), (Some(17), 1), "the last that came, for one that was given up");
    assert!((0..15).all(|_| matches!(take(&front, 1, line(3)), Took::Row(..))));
}

/// What a hit does, and what it leaves to the slow way.
#[test]
fn a_hit_takes_and_keeps_what_needs_nothing_else() {
    let (front, rows) = (front(), rows(80));
    // SAFETY: the rows live as long as the test.
    let take = |thread, line| unsafe { front.take_own(thread, CLASS, line, 4000) };
    let put = |thread, row: usize, line| front.put_own(thread, &rows[row], CLASS, line, 4000);
    assert!(take(1, line(1)).is_none(), "there is nothing");
    assert!(!put(1, 0, line(1)), "the line has no stacks");
    assert!(matches!(front.put::<false>(1, &rows[0], Pocket::small(CLASS), line(1), 4000), Put::Kept(..)));
    assert!(put(1, 1, line(1)));
    assert_eq!(front.stats(), (2, 8192, 0, -8000));
    assert!(take(2, line(1)).is_none() && !put(2, 2, line(1)), "another thread's shard");
    {
        let _inside = front.shards.of(1).enter();
        assert!(take(1, line(1)).is_none() && !put(1, 2, line(1)), "somebody is inside");
    }
    assert!(take(1, line(2)).is_none(), "another line");
    let index = |row: Option<&Row>| row.map(|r| r.header.index());
    assert_eq!([index(take(1, line(1))), index(take(1, line(1))), index(take(1, line(1)))], [Some(1), Some(0), None]);
    assert_eq!(front.stats(), (0, 0, 2, 0));
    // A full stack is not its concern: 2 MiB / 8 / 4 KiB.
    let most = (0..80).take_while(|&row| put(1, row, line(1))).count();
    assert_eq!(most, 32);
    // Nor is what must be told: more than so much that came back.
    let row = take(1, line(1)).expect("one of them");
    let kept = (0..).take_while(|_| {
        let fine = front.put_own(1, row, CLASS, line(1), 1 << 19);
        assert!(!fine || take(1, line(1)).is_some());
        fine
    });
    let kept = kept.count() as i64;
    assert!((2..=4).contains(&kept), "{kept} times half a MiB");
    assert!(front.stats().3 >= -DRIFT[0] && front.stats().3 - (1 << 19) < -DRIFT[0]);
    // A closed shard lets nobody in.
    let _ = front.flush(true);
    assert!(take(1, line(1)).is_none() && !put(1, 3, line(1)));
}

#[test]
fn a_front_without_shards_keeps_nothing() {
    let (front, rows) = (Front::none(), rows(1));
    for thread in [1, 2, crate::numbers::NOBODY] {
        assert!(front.is_none() && !front.put_own(thread, &rows[0], CLASS, line(1), 4000));
        let put = front.put::<false>(thread, &rows[0], Pocket::small(CLASS), line(1), 4000);
        assert!(matches!(put, Put::Refused));
        assert!(matches!(take(&front, thread, line(1)), Took::Nothing(chain) if chain.is_empty()));
    }
    assert!(front.flush(true).0.is_empty());
}
