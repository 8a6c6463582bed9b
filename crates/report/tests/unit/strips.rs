//! Tests of figures of fragmentation and of strips.

use super::*;

fn segment(blocks: &[(u64, State)]) -> Segment {
    let mut at = 0x1000;
    let block = |&(bytes, state): &(u64, State)| {
        let b = Block { addr: at, bytes, requested: bytes.min(90), state, ..Block::default() };
        at += bytes;
        b
    };
    let blocks: Vec<Block> = blocks.iter().map(block).collect();
    let bytes = blocks.iter().map(|b| b.bytes).sum();
    Segment { addr: 0x1000, bytes, paged: false, blocks }
}

#[test]
fn sums_know_the_largest_range_of_free_neighbours() {
    use State::{Cached, Live, Pending, Ready};
    let s = segment(&[(100, Ready), (100, Live), (100, Ready), (150, Pending), (50, Cached)]);
    let sums = Sums::of(&s);
    assert_eq!((sums.live, sums.ready, sums.pending, sums.cached), (100, 200, 150, 50));
    assert_eq!((sums.largest, sums.rounding, sums.free()), (250, 10, 350));
    // 100 of 350 free bytes lie outside of the largest range.
    assert_eq!(sums.fragmentation(), "28.6 %");
    assert_eq!(Sums::of(&segment(&[(10, Live)])).fragmentation(), "–");
}

#[test]
fn columns_hold_each_state_by_its_share_and_a_sliver_is_seen() {
    let s = segment(&[(1000, State::Live), (999, State::Ready), (1, State::Pending)]);
    assert_eq!(columns(&s, 4), [[20, 0, 0, 0], [20, 0, 0, 0], [0; 4], [0, 1, 0, 0]]);
    let s = segment(&[(500, State::Live), (1500, State::Ready)]);
    assert_eq!(columns(&s, 2), [[10, 0, 0, 0], [0; 4]]);
    let picture = strip(&s, 2, "s", &|b| b.bytes.to_string());
    assert!(picture.contains("M0 10h1v10h-1z"), "{picture}");
    assert!(picture.contains("<title>1500</title>"), "{picture}");
}
