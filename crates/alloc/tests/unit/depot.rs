//! Tests of the lists in the depot.

use super::*;
use leasehold_core::Header;

const CLASS: usize = 15;
const BYTES: u64 = 4 << 10;

fn timeline(n: u64) -> TimelineId {
    PackedTimepoint::from_bits(n << 48).timeline_id()
}

/// Rows that are linked to each other.
fn rows(n: u32) -> Vec<Row> {
    let rows: Vec<_> = (0..n).map(|i| Row::new(Header::new(ptr::null(), i, 1))).collect();
    let mut list = List::EMPTY;
    rows.iter().rev().for_each(|row| list.push(row));
    rows
}

/// Whether the depot keeps them, and how many others it evicted.
fn push(depot: &Depot, timeline: TimelineId, rows: &[Row]) -> (bool, usize) {
    let mut left = List::EMPTY;
    // SAFETY: the rows live as long as each test.
    let kept = unsafe { depot.push(timeline, CLASS, (&rows[0], rows.len() as u16), &mut left) };
    // SAFETY: what was left are rows of the same test.
    (kept, std::iter::from_fn(|| unsafe { left.pop() }).count())
}

fn pop(depot: &Depot, timeline: TimelineId) -> Option<(u32, u16)> {
    // SAFETY: the rows live as long as each test.
    unsafe { depot.pop(timeline, CLASS) }.map(|(row, n)| (row.header.index(), n))
}

#[test]
fn the_last_list_of_a_timeline_comes_first() {
    let (depot, a, b) = (Depot::new(4, 1 << 20), rows(3), rows(2));
    assert!(push(&depot, timeline(1), &a[0..3]).0 && push(&depot, timeline(1), &b[1..]).0);
    assert_eq!(depot.kept(), (4, 4 * BYTES));
    assert_eq!(pop(&depot, timeline(2)), None);
    assert_eq!(
        (pop(&depot, timeline(1)), pop(&depot, timeline(1)), pop(&depot, timeline(1))),
        (Some((1, 1)), Some((0, 3)), None)
    );
    assert!(!depot.any());
}

#[test]
fn a_bin_belongs_to_one_timeline_until_it_is_empty() {
    let (depot, a) = (Depot::new(4, 1 << 20), rows(2));
    assert!(push(&depot, timeline(1), &a[0..1]).0);
    assert!(!push(&depot, timeline(5), &a[1..2]).0, "line 5 has the same bin");
    assert!(depot.may_have(timeline(5)) && pop(&depot, timeline(5)).is_none());
    assert_eq!(pop(&depot, timeline(1)), Some((0, 1)));
    assert!(push(&depot, timeline(5), &a[1..2]).0);
}

/// A timeline that was gone kept its bin for ever.
#[test]
fn a_timeline_that_does_not_come_any_more_loses_its_bin() {
    let (depot, a) = (Depot::new(4, 8 * BYTES), rows(20));
    assert_eq!(
        (push(&depot, timeline(1), &a[..6]), push(&depot, timeline(1), &a[6..8])),
        ((true, 0), (true, 0))
    );
    let other = |row: usize| push(&depot, timeline(5), &a[row..=row]);
    assert!((1..MOST_REFUSED).all(|_| other(8) == (false, 0)));
    assert_eq!(pop(&depot, timeline(1)), Some((6, 2)), "it is still there");
    assert!((1..MOST_REFUSED).all(|_| other(8) == (false, 0)));
    assert_eq!((other(8), depot.kept()), ((true, 6), (1, BYTES)));
    assert_eq!((pop(&depot, timeline(1)), pop(&depot, timeline(5))), (None, Some((8, 1))));
}

#[test]
fn a_bin_keeps_so_many_bytes() {
    let (depot, a) = (Depot::new(4, 4 * BYTES), rows(6));
    assert!(push(&depot, timeline(1), &a[0..4]).0 && !push(&depot, timeline(1), &a[4..5]).0);
    assert!(push(&depot, timeline(2), &a[4..6]).0, "another bin");
}

#[test]
fn a_drain_finds_every_row() {
    let (depot, a) = (Depot::new(4, 1 << 20), rows(6));
    assert!(push(&depot, timeline(1), &a[0..4]).0 && push(&depot, timeline(2), &a[4..6]).0);
    let mut list = List::EMPTY;
    // SAFETY: the rows live as long as the test.
    unsafe { depot.drain(&mut list) };
    let mut found = Vec::new();
    // SAFETY: the list has the test's own rows.
    while let Some(row) = unsafe { list.pop() } {
        found.push(row.header.index());
    }
    found.sort_unstable();
    assert_eq!((found, depot.kept()), ((0..6).collect(), (0, 0)));
}
