//! Sums, products, SiLU·mul, casts, fills, copies, embedding.

use half::{bf16, f16};
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::elementwise::{CopyParams, ElementwiseParams, FillParams};
use leasehold_operators::kernels::cpu::embedding::EmbeddingParams;
use leasehold_operators::kernels::cpu::tile::bind;
use proptest::prelude::*;

use super::{Tensor, cases, close, dtypes, levels, noise, rounding, run, run_scattered, size};

type Function = fn(f64, f64) -> f64;

proptest! {
    #![proptest_config(cases(50))]

    #[test]
    fn two_inputs(rows in 1usize..6, k in prop_oneof![size(), Just(8200usize)], gap in 0usize..2, x in dtypes(), y in dtypes(), seed in 0u64..99) {
        let ld = [k, k + gap, k + 2 * gap];
        let p = ElementwiseParams { rows: rows as u32, k: k as u32, ld: ld.map(|l| l as u32), x: x as u32, y: y as u32 };
        let scaled: Vec<f32> = noise(rows * ld[0], seed).iter().map(|v| v * 30.0).collect();
        let mut a = Tensor::new(x, &scaled);
        let mut b = Tensor::new(x, &noise(rows * ld[1], seed + 1));
        let functions: [(&str, Function); 3] =
            [("add", |a, b| a + b), ("mul", |a, b| a * b), ("silu_mul", |a, b| a / (1.0 + (-a).exp()) * b)];
        for (name, f) in functions {
            let (va, vb) = (a.values(), b.values());
            let mut wanted = Tensor::junk(y, rows * ld[2]).values();
            for i in 0..rows * k {
                let (r, c) = (i / k, i % k);
                wanted[r * ld[2] + c] = f(va[r * ld[0] + c], vb[r * ld[1] + c]);
            }
            for isa in levels() {
                let mut out = Tensor::junk(y, rows * ld[2]);
                run(isa, name, &p, &[a.bind(), b.bind(), out.bind()]);
                close(name, &out.values(), &wanted, |i| wanted[i].abs() * (rounding(y) + 6e-7) + 6e-8);
                let mut again = Tensor::junk(y, rows * ld[2]);
                run_scattered(isa, name, &p, &[a.bind(), b.bind(), again.bind()]);
                prop_assert!(again.bits() == out.bits());
            }
        }
    }

    #[test]
    fn fill_repeats_its_pattern(width in prop_oneof![Just(1usize), Just(2), Just(4)], count in prop_oneof![0usize..40, Just(70_000)], skew in 0usize..4, pattern: u32) {
        let n = count * width;
        let p = FillParams { bytes: [n as u32, 0], width: width as u32, pattern };
        for isa in levels() {
            let mut bytes = vec![9u8; n + 8];
            run(isa, "fill", &p, &[bind(&mut bytes[skew..skew + n])]);
            prop_assert!(bytes[..skew].iter().chain(&bytes[skew + n..]).all(|&b| b == 9));
            prop_assert!(bytes[skew..skew + n].iter().enumerate().all(|(i, &b)| b == pattern.to_le_bytes()[i % width]));
        }
    }

    #[test]
    fn copy_2d_moves_rows(rows in 1usize..9, bytes in prop_oneof![1usize..70, Just(70_001)], gaps in (0usize..5, 0usize..5), seed in 0u64..99) {
        let (from_pitch, to_pitch) = (bytes + gaps.0, bytes + gaps.1);
        let p = CopyParams { rows: rows as u32, bytes: bytes as u32, from_pitch: from_pitch as u32, to_pitch: to_pitch as u32 };
        let mut from: Vec<u8> = (0..rows * from_pitch).map(|i| (i as u64 * 31 + seed) as u8).collect();
        for isa in levels() {
            let mut to = vec![1u8; rows * to_pitch];
            run(isa, "copy_2d", &p, &[bind(&mut from), bind(&mut to)]);
            for r in 0..rows {
                prop_assert_eq!(&to[r * to_pitch..][..bytes], &from[r * from_pitch..][..bytes]);
                prop_assert!(to[r * to_pitch + bytes..(r + 1) * to_pitch].iter().all(|&b| b == 1));
            }
        }
    }

    #[test]
    fn embedding_takes_rows(ids in prop::collection::vec(-2i32..14, 1..30), k in size(), table in dtypes(), y in dtypes(), seed in 0u64..99) {
        let p = EmbeddingParams { m: ids.len() as u32, vocabulary: 11, k: k as u32, ldy: k as u32, table: table as u32, y: y as u32 };
        let mut weights = Tensor::new(table, &noise(11 * k, seed));
        let mut ids = ids;
        let wanted: Vec<f64> = ids.iter().flat_map(|&id| match usize::try_from(id) {
            Ok(id) if id < 11 => weights.values()[id * k..][..k].to_vec(),
            _ => vec![f64::NAN; k],
        }).collect();
        for isa in levels() {
            let mut out = Tensor::junk(y, ids.len() * k);
            run(isa, "embedding", &p, &[bind(&mut ids), weights.bind(), out.bind()]);
            close(isa.name(), &out.values(), &wanted, |i| wanted[i].abs() * rounding(y) + 6e-8);
        }
    }
}

/// Every 16-bit pattern, and f32 of every kind, give the bits of the `half` crate.
#[test]
fn casts_are_exact_or_round_to_even() {
    let mut words: Vec<u16> = (0..=u16::MAX).collect();
    let mut singles: Vec<f32> = noise(4000, 3).iter().map(|&x| x * 1e5).collect();
    singles.extend((0..=u16::MAX).flat_map(|w| {
        let bits = u32::from(w) << 16;
        [0u32, 0x7fff, 0x8000, 0x8001, 0x1fff, 0x2000].map(|low| f32::from_bits(bits | low))
    }));
    let params = |n: usize, x: DType, y: DType| ElementwiseParams {
        rows: 1,
        k: n as u32,
        ld: [n as u32; 3],
        x: x as u32,
        y: y as u32,
    };
    for isa in levels() {
        let mut wide = vec![0f32; words.len()];
        run(
            isa,
            "cast",
            &params(words.len(), DType::Bf16, DType::F32),
            &[bind(&mut words), bind(&mut wide)],
        );
        for (&w, f) in words.iter().zip(&wide) {
            assert!(
                f.to_bits() | 0x0040_0000 == u32::from(w) << 16 | 0x0040_0000
                    && (f.is_nan() || f.to_bits() == u32::from(w) << 16)
            );
        }
        run(
            isa,
            "cast",
            &params(words.len(), DType::F16, DType::F32),
            &[bind(&mut words), bind(&mut wide)],
        );
        for (&w, f) in words.iter().zip(&wide) {
            let half = f16::from_bits(w);
            assert!(
                if half.is_nan() { f.is_nan() } else { f.to_bits() == half.to_f32().to_bits() },
                "{isa}: {w:#x}"
            );
        }
        let mut narrow = vec![0u16; singles.len()];
        run(
            isa,
            "cast",
            &params(singles.len(), DType::F32, DType::Bf16),
            &[bind(&mut singles), bind(&mut narrow)],
        );
        for (&f, &w) in singles.iter().zip(&narrow) {
            let (found, wanted) = (bf16::from_bits(w), bf16::from_f32(f));
            assert!(
                if f.is_nan() { found.is_nan() } else { found.to_bits() == wanted.to_bits() },
                "{isa}: {f:e} {found} {wanted}"
            );
        }
        run(
            isa,
            "cast",
            &params(singles.len(), DType::F32, DType::F16),
            &[bind(&mut singles), bind(&mut narrow)],
        );
        for (&f, &w) in singles.iter().zip(&narrow) {
            let (found, wanted) = (f16::from_bits(w), f16::from_f32(f));
            assert!(
                if f.is_nan() { found.is_nan() } else { found.to_bits() == wanted.to_bits() },
                "{isa}: {f:e} {found} {wanted}"
            );
        }
    }
}

/// The whole range of the exponential, through SiLU, including infinities and NaN.
#[test]
fn silu_of_extremes() {
    let mut a = [
        0.0f32,
        -0.0,
        88.0,
        -88.0,
        200.0,
        -200.0,
        f32::INFINITY,
        f32::NAN,
        1e-40,
        -86.5,
        -87.2,
        -87.4,
        1e30,
        -1e30,
    ];
    let mut one = [1.0f32; 14];
    let p = ElementwiseParams { rows: 1, k: 14, ld: [14; 3], ..Default::default() };
    for isa in levels() {
        let mut y = [0f32; 14];
        run(isa, "silu_mul", &p, &[bind(&mut a), bind(&mut one), bind(&mut y)]);
        for (&x, &y) in a.iter().zip(&y) {
            let wanted = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            let near = (f64::from(y) - wanted).abs() <= wanted.abs() * 5e-7 + 1e-35;
            assert!(
                near || (wanted.is_nan() && y.is_nan()) || f64::from(y) == wanted,
                "{isa}: silu({x}) = {y}, not {wanted}"
            );
        }
    }
}
