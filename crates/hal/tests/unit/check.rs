//! The overlap of copies, against their bytes.

use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

proptest! {
    #[test]
    fn overlap_of_copies_is_what_their_bytes_say(
        (src, dst) in (0u64..48, 0u64..48),
        (src_pitch, extra) in (0u64..12, 0u64..8),
        (width, rows) in (0u64..9, 0u64..6),
    ) {
        let dst_pitch = width + extra;
        let c = Copy2d { src, src_native: 0, src_pitch, dst, dst_native: 0, dst_pitch, width, rows };
        let bytes = |at: u64, pitch: u64| -> HashSet<u64> {
            (0..rows).flat_map(|r| (0..width).map(move |b| at + r * pitch + b)).collect()
        };
        let naive = !bytes(src, src_pitch).is_disjoint(&bytes(dst, dst_pitch));
        prop_assert_eq!(copy(&c).is_err(), naive);
    }
}

#[test]
fn fills_want_a_pattern_that_fits_and_an_aligned_range() {
    let ok = Fill { dst: 8, native: 0, bytes: 8, pattern: 0xabcd, width: 2 };
    fill(&ok).unwrap();
    for bad in [
        Fill { width: 3, ..ok },
        Fill { width: 8, ..ok },
        Fill { width: 1, ..ok },
        Fill { dst: 9, ..ok },
        Fill { bytes: 7, ..ok },
        Fill { width: 4, bytes: 6, ..ok },
    ] {
        assert_eq!(fill(&bad).unwrap_err().kind(), "InvalidArgument", "{bad:?}");
    }
}

#[test]
fn a_copy_that_wraps_is_refused_before_any_arithmetic() {
    let c = Copy2d::linear((u64::MAX - 3, 0), (16, 0), 8);
    assert!(copy(&c).is_err());
    assert!(copy(&Copy2d { rows: u64::MAX, ..Copy2d::linear((1 << 20, 0), (16, 0), 8) }).is_err());
    copy(&Copy2d::linear((u64::MAX, 0), (0, 0), 0)).unwrap();
}
