//! Tests of the rules for bindings, against a plain statement of them.

use super::*;
use leasehold_hal::KernelSource;

/// The result that the shortcuts must give, from a look at each binding and each pair.
fn fine(bindings: &[Binding], alignment: &[u32], overlap: Overlap) -> bool {
    let aligned =
        std::iter::zip(bindings, alignment).all(|(b, &a)| b.addr.is_multiple_of(a.into()));
    let apart = |(a, b): (&Binding, &Binding)| match overlap {
        Overlap::Any => true,
        Overlap::InPlace if (a.addr, a.len) == (b.addr, b.len) => true,
        _ => !(a.access.writes() || b.access.writes()) || !a.overlaps(b),
    };
    let pairs = (0..bindings.len()).flat_map(|j| (0..j).map(move |i| (i, j)));
    aligned && pairs.map(|(i, j)| (&bindings[i], &bindings[j])).all(apart)
}

#[test]
fn shortcuts_accept_what_a_look_at_every_pair_does() {
    let places: Vec<(u64, u64)> =
        (0..6).flat_map(|addr| (0..4).map(move |len| (addr, len))).collect();
    let roles = [[1, 1, 2], [2, 1, 1], [1, 3, 2], [1, 1, 1]].map(|of| {
        of.map(|access| match access {
            1 => Access::Read,
            2 => Access::Write,
            _ => Access::ReadWrite,
        })
    });
    let (mut accepted, mut refused) = (0, 0);
    for roles in roles {
        for alignment in [[1, 1, 1], [1, 4, 2]] {
            for overlap in [Overlap::Refused, Overlap::InPlace, Overlap::Any] {
                let source = KernelSource::Registered("k".into());
                let mut desc =
                    KernelDesc::new("k", source, &roles, KernelCheck::any()).overlapping(overlap);
                desc.alignment = alignment.to_vec().into();
                let rules = Rules::of(&desc, KernelCheck::any());
                for case in 0..places.len().pow(3) {
                    let n = places.len();
                    let bindings = [case % n, case / n % n, case / n / n].map(|at| places[at]);
                    let bindings: [Binding; 3] = std::array::from_fn(|i| {
                        let ((addr, len), access) = (bindings[i], roles[i]);
                        Binding { addr, len, native: 0, access }
                    });
                    let ok = rules.check_bindings(&bindings).is_ok();
                    assert_eq!(
                        ok,
                        fine(&bindings, &alignment, overlap),
                        "{bindings:?} {alignment:?} {overlap:?}"
                    );
                    if ok { accepted += 1 } else { refused += 1 }
                }
            }
        }
    }
    assert!(accepted > 10_000 && refused > 10_000, "{accepted} {refused}");
}
