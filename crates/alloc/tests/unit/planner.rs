//! The packer against its bound.

use super::*;

#[test]
fn packings_are_disjoint_deterministic_and_close_to_their_bound() {
    let mut state = 99u64;
    let mut below = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % n
    };
    let (mut all, mut least) = (0, 0);
    for _ in 0..200 {
        let n = 1 + below(60);
        let list: Vec<Interval> = (0..n)
            .map(|_| {
                let first = below(50) as u32;
                let (size, align) = (below(1 << 20), 1 << below(10));
                Interval { size, align, first, last: first + below(12) as u32 }
            })
            .collect();
        let (offsets, total) = plan(&list).expect("a packing");
        assert_eq!((offsets.clone(), total), plan(&list).expect("a packing"));
        for (i, a) in list.iter().enumerate() {
            assert_eq!(offsets[i] % a.align, 0);
            assert!(offsets[i] + a.size <= total || a.size == 0);
            for (j, b) in list.iter().enumerate().skip(i + 1) {
                let apart = offsets[i] + a.size <= offsets[j] || offsets[j] + b.size <= offsets[i];
                let meet = a.first <= b.last && b.first <= a.last && a.size > 0 && b.size > 0;
                assert!(apart || !meet, "{a:?} and {b:?} overlap");
            }
        }
        assert!(total >= bound(&list));
        (all, least) = (all + total, least + bound(&list));
    }
    assert!(all as f64 <= least as f64 * 1.08, "{all} against {least}");
    assert!(plan(&[Interval { size: 1, align: 3, first: 0, last: 0 }]).is_err());
    assert!(plan(&[Interval { size: u64::MAX, align: 1, first: 0, last: 0 }]).is_err());
}
