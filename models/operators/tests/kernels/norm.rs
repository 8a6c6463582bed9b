//! RMSNorm, alone and after an addition.

use leasehold_operators::kernels::cpu::norm::NormParams;
use proptest::prelude::*;

use super::{Tensor, cases, close, dtypes, levels, noise, rounding, run, size};

fn reference(row: &[f64], weight: &[f64]) -> Vec<f64> {
    let scale = 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64 + 1e-6).sqrt();
    row.iter().zip(weight).map(|(v, g)| v * scale * g).collect()
}

proptest! {
    #![proptest_config(cases(80))]

    #[test]
    fn rms_norm_scales_rows(rows in 1usize..20, k in prop_oneof![size(), Just(4099usize)], x in dtypes(), weight in dtypes(), seed in 0u64..99) {
        let ld = k + 3;
        let p = NormParams { rows: rows as u32, k: k as u32, ldx: ld as u32, ldy: k as u32, eps: 1e-6, x: x as u32, weight: weight as u32 };
        let mut input = Tensor::new(x, &noise(rows * ld, seed));
        let mut g = Tensor::new(weight, &noise(k, seed + 1));
        let wanted: Vec<f64> = input.values().chunks(ld).flat_map(|row| reference(&row[..k], &g.values())).collect();
        for isa in levels() {
            let mut y = Tensor::junk(x, rows * k);
            run(isa, "rms_norm", &p, &[input.bind(), g.bind(), y.bind()]);
            close(isa.name(), &y.values(), &wanted, |i| wanted[i].abs() * (rounding(x) + 1e-6) + 1e-7);
        }
    }

    #[test]
    fn add_rms_norm_normalises_what_it_stored(rows in 1usize..20, k in size(), x in dtypes(), weight in dtypes(), seed in 0u64..99) {
        let p = NormParams { rows: rows as u32, k: k as u32, ldx: k as u32, ldy: k as u32, eps: 1e-6, x: x as u32, weight: weight as u32 };
        let before = Tensor::new(x, &noise(rows * k, seed));
        let mut delta = Tensor::new(x, &noise(rows * k, seed + 7));
        let mut g = Tensor::new(weight, &noise(k, seed + 1));
        let sums: Vec<f64> = before.values().iter().zip(delta.values()).map(|(a, b)| a + b).collect();
        for isa in levels() {
            let (mut h, mut y) = (before.clone(), Tensor::junk(x, rows * k));
            run(isa, "add_rms_norm", &p, &[h.bind(), delta.bind(), g.bind(), y.bind()]);
            close("h", &h.values(), &sums, |i| sums[i].abs() * rounding(x) + 1e-7);
            let wanted: Vec<f64> = h.values().chunks(k).flat_map(|row| reference(row, &g.values())).collect();
            close("y", &y.values(), &wanted, |i| wanted[i].abs() * (rounding(x) + 1e-6) + 1e-7);
        }
    }
}
