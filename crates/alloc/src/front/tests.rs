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
        row.class.store(CLASS as u16, Ordering::Relaxed);
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

/// A front in which threads 1 and 2 own their shards.
fn front() -> Front {
    let front = Front::new(2, 1 << 20, 0, 0);
    for thread in [1, 2] {
        // The first entry makes the thread the owner.
        let shard = front.shard(thread).expect("a shard");
        assert!(shard.enter(thread, front.fences).is_none());
    }
    front
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
    // SAFETY: as above.
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
    let (shard, rows) = (front.shard(1).expect("a shard"), rows(5));
    assert!(shard.enter(1, front.fences).is_none());
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
    assert!(front.shards.iter().all(|s| s.is_idle() && s.word.load(Ordering::Relaxed) & LOCKED == 0));
}
