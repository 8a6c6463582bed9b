//! The first value of each part that is not finite, beside a search of one value after the other.

use leasehold_operators::kernels::cpu::check::{Found, NotFiniteParams};
use leasehold_operators::kernels::cpu::tile::{KernelSpec, Params, bind, bind_read};
use proptest::prelude::*;

use super::{cases, levels, run, run_scattered};

/// The width and the exponent of bf16, f16, f32 and f64.
const FLOATS: [(u32, u32); 4] = [(2, 0x7f80), (2, 0x7c00), (4, 0x7f80_0000), (8, 0x7ff0_0000)];

/// Elements in memory that is aligned for all of them.
struct Elements {
    words: Vec<u64>,
    width: usize,
    exponent: u32,
}

impl Elements {
    /// Finite values with many bits: all of the exponent but its lowest one.
    fn new((width, exponent): (u32, u32), count: usize, seed: u64) -> Self {
        let width = width as usize;
        let mut elements = Self { words: vec![0; (count * width).div_ceil(8)], width, exponent };
        let lowest = elements.mask() & elements.mask().wrapping_neg();
        for i in 0..count {
            let noise = (i as u64 ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            elements.set(i, (noise | elements.mask()) & !lowest);
        }
        elements
    }

    /// The exponent's bits in an element.
    fn mask(&self) -> u64 {
        if self.width == 8 { u64::from(self.exponent) << 32 } else { self.exponent.into() }
    }

    fn set(&mut self, i: usize, bits: u64) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        bytes[i * self.width..][..self.width].copy_from_slice(&bits.to_le_bytes()[..self.width]);
    }

    fn get(&self, i: usize) -> u64 {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        let mut bits = [0; 8];
        bits[..self.width].copy_from_slice(&bytes[i * self.width..][..self.width]);
        u64::from_le_bytes(bits)
    }
}

/// The kernel's findings among the first `count` elements, at every level.
fn finds(elements: &Elements, count: usize) -> Vec<Option<(u64, u64)>> {
    let p = NotFiniteParams::new(count as u64, elements.width as u32, elements.exponent);
    let parts = p.parts() as usize;
    let length = count.div_ceil(parts);
    let is_bad = |&i: &usize| elements.get(i) & elements.mask() == elements.mask();
    let part = |part: usize| (part * length).min(count)..((part + 1) * length).min(count);
    let wanted: Vec<_> =
        (0..parts).map(|n| part(n).find(is_bad).map(|i| (i as u64, elements.get(i)))).collect();
    for level in levels() {
        for run in [run, run_scattered] {
            let mut found = vec![Found { index: [7; 2], bits: [7; 2] }; parts + 1];
            run(level, "not_finite", &p, &[bind_read(&elements.words), bind(&mut found[..parts])]);
            let got: Vec<_> = found[..parts].iter().map(|found| found.get()).collect();
            assert_eq!(got, wanted, "{level}");
            assert_eq!(found[parts].index, [7; 2], "{level}: what lies behind");
        }
    }
    wanted
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn the_first_of_each_part_is_found(
        float in 0usize..4,
        count in prop_oneof![1usize..40, 4000usize..9000, Just(70_001)],
        bad in prop::collection::vec((0u64..u64::MAX, 0u64..u64::MAX), 0..6),
        seed in 0u64..99,
    ) {
        let mut elements = Elements::new(FLOATS[float], count, seed);
        for (at, bits) in bad {
            elements.set((at % count as u64) as usize, bits | elements.mask());
        }
        finds(&elements, count);
    }
}

#[test]
fn each_kind_of_bad_value_is_found_at_either_end() {
    let values: [&[u64]; 4] = [
        &[0x7f80, 0xff80, 0x7fc0, 0x7f81],
        &[0x7c00, 0xfc00, 0x7e00, 0x7c01],
        &[0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0x7f80_0001],
        &[
            0x7ff0_0000_0000_0000,
            0xfff0_0000_0000_0000,
            0x7ff8_0000_0000_0000,
            0x7ff0_0000_0000_0001,
        ],
    ];
    for (float, values) in FLOATS.into_iter().zip(values) {
        for &bits in values {
            for (count, at) in [(1, 0), (9001, 0), (9001, 9000)] {
                let mut elements = Elements::new(float, count, 3);
                assert!(finds(&elements, count).iter().all(Option::is_none));
                elements.set(at, bits);
                let found: Vec<_> = finds(&elements, count).into_iter().flatten().collect();
                assert_eq!(found, [(at as u64, bits)], "{float:?}");
            }
        }
    }
}

#[test]
fn a_check_of_nothing_or_of_no_float_is_refused() {
    let spec = KernelSpec::find("not_finite").unwrap();
    for (count, width, exponent) in
        [(0, 4, 0x7f80_0000), (9, 3, 0x7f80), (9, 2, 0x7f80_0000), (9, 4, 0), (9, 1, 0x70)]
    {
        let p = NotFiniteParams::new(count, width, exponent);
        assert!(spec.plan(p.as_bytes()).is_err(), "{p:?}");
    }
    let many = NotFiniteParams::new(1 << 40, 8, 0x7ff0_0000);
    assert_eq!(spec.plan(many.as_bytes()).unwrap().grid, [256, 1, 1]);
}
