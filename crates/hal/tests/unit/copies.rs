//! Tests of copies that have no order.

use super::*;
use proptest::prelude::*;

fn piece((src, dst, bytes): (u64, u64, u64)) -> Copy1d {
    Copy1d { src, src_native: 0, dst, dst_native: 0, bytes }
}

/// The pieces that share a byte which one of them writes, byte by byte.
fn naive(pieces: &[Copy1d]) -> Vec<(usize, usize)> {
    let on = |at: u64, bytes: u64, byte: u64| (at..at + bytes).contains(&byte);
    let mut met = Vec::new();
    for byte in 0..128 {
        for (i, _) in pieces.iter().enumerate().filter(|(_, a)| on(a.dst, a.bytes, byte)) {
            for (j, b) in pieces.iter().enumerate() {
                let reads = on(b.src, b.bytes, byte);
                if reads || (i != j && on(b.dst, b.bytes, byte)) {
                    met.push((i.min(j), i.max(j)));
                }
            }
        }
    }
    met
}

proptest! {
    #[test]
    fn pieces_are_refused_if_their_bytes_meet(
        pieces in prop::collection::vec((0u64..60, 0u64..60, 0u64..6), 0..6),
    ) {
        let pieces: Vec<Copy1d> = pieces.into_iter().map(piece).collect();
        let met = naive(&pieces);
        match Copies::new(&pieces) {
            Ok(copies) => {
                prop_assert!(met.is_empty(), "{met:?}");
                prop_assert_eq!(copies.pieces(), &pieces[..]);
            }
            Err(error) => {
                let told = error.to_string();
                let named = |&(i, j): &(usize, usize)| {
                    told.contains(&format!("iece {i} overlaps itself")) && i == j
                        || told.contains(&format!("ieces {i} and {j} "))
                };
                prop_assert!(met.iter().any(named), "{told}: {met:?}");
            }
        }
    }
}

#[test]
fn a_source_may_be_read_twice_and_nothing_written_twice() {
    Copies::new(&[piece((0, 32, 8)), piece((0, 40, 8)), piece((4, 16, 8))]).unwrap();
    for (pieces, told) in [
        ([(0, 32, 8), (8, 39, 8)], "pieces 0 and 1 write the same bytes"),
        ([(8, 39, 8), (0, 32, 8)], "pieces 0 and 1 write the same bytes"),
        ([(0, 32, 8), (33, 64, 1)], "of pieces 0 and 1 one reads what the other one writes"),
        ([(0, 32, 1), (40, 44, 8)], "piece 1 overlaps itself"),
        ([(0, 32, 1), (40, u64::MAX - 3, 8)], "piece 1 wraps the address space"),
    ] {
        let error = Copies::new(&pieces.map(piece)).unwrap_err();
        assert_eq!(error.kind(), "InvalidArgument");
        assert!(error.to_string().contains(told), "{error}");
    }
}

#[test]
fn no_bytes_meet_nothing() {
    Copies::new(&[]).unwrap();
    Copies::new(&[piece((u64::MAX, 5, 0)), piece((5, 5, 0)), piece((0, 4, 4))]).unwrap();
}
