//! Tests of the pieces of a copy between backends.

use super::*;

fn rows(width: u64, rows: u64, src_pitch: u64, dst_pitch: u64) -> Copy2d {
    Copy2d { src: 0, src_native: 0, src_pitch, dst: 0, dst_native: 0, dst_pitch, width, rows }
}

/// The bytes that pieces name, in order.
fn bytes(pieces: &[Vec<Run>]) -> Vec<(u64, u64)> {
    pieces.iter().flatten().flat_map(|r| (0..r.bytes).map(|i| (r.src + i, r.dst + i))).collect()
}

#[test]
fn pieces_are_all_of_a_copy_in_order() {
    for (width, n, src, dst) in
        [(10, 1, 0, 0), (10, 4, 10, 10), (10, 7, 16, 10), (7, 300, 8, 9), (1, 1000, 1, 2)]
    {
        for size in [1, 3, 10, 64, 10_000] {
            let c = rows(width, n, src, dst);
            let expect: Vec<_> =
                (0..n).flat_map(|r| (0..width).map(move |i| (r * src + i, r * dst + i))).collect();
            let all = pieces(&c, size);
            assert_eq!(bytes(&all), expect, "{c:?} in pieces of {size}");
            assert!(
                all.iter()
                    .all(|p| p.len() <= RUNS && p.iter().map(|r| r.bytes).sum::<u64>() <= size)
            );
        }
    }
}

#[test]
fn what_has_no_gaps_is_one_run() {
    assert_eq!(pieces(&rows(10, 4, 10, 10), 100), [[Run { src: 0, dst: 0, bytes: 40 }]]);
}

#[test]
fn staging_is_bounded_and_no_longer_than_the_copy() {
    let sizes = [1, 1 << 20, 4 << 20, 1 << 30, 1 << 37].map(piece_bytes);
    assert_eq!(sizes, [1, 1 << 20, 1 << 20, 16 << 20, 32 << 20]);
}
