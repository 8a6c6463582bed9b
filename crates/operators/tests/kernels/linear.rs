//! Matrix products: few and many rows, fused and not fused.

use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::linear::{BIAS, FEW, LinearParams, NORM};
use leasehold_operators::kernels::cpu::tile::NONE;
use proptest::prelude::*;

use super::{Tensor, cases, close, dtypes, levels, noise, rounding, run, run_scattered, size};

const EPS: f32 = 1e-5;

/// A product's operands and its expected result.
#[derive(Debug, Clone, Copy)]
struct Case {
    m: usize,
    k: usize,
    n: usize,
    gap: usize,
    x: DType,
    w: DType,
    y: DType,
    flags: u32,
}

fn case() -> impl Strategy<Value = Case> {
    let rows = prop_oneof![1usize..=FEW, FEW + 1..28, Just(97)];
    ((rows, size(), size(), 0usize..5), dtypes(), dtypes(), dtypes(), 0u32..4).prop_map(
        |((m, k, n, gap), x, w, y, flags)| {
            let flags = if m > FEW { flags & !NORM } else { flags };
            Case { m, k, n, gap, x, w, y, flags }
        },
    )
}

/// `x · wᵀ + bias` and, for its error bound, `|x| · |w|ᵀ + |bias|`, in f64.
fn product(c: &Case, x: &Tensor, norm: &Tensor, w: &Tensor, bias: &Tensor) -> (Vec<f64>, Vec<f64>) {
    let (x, norm, w, bias) = (x.values(), norm.values(), w.values(), bias.values());
    let (mut sums, mut sizes) = (Vec::new(), Vec::new());
    for m in 0..c.m {
        let row = &x[m * (c.k + c.gap)..][..c.k];
        let scale =
            1.0 / (row.iter().map(|v| v * v).sum::<f64>() / c.k as f64 + f64::from(EPS)).sqrt();
        let row: Vec<f64> = match c.flags & NORM {
            0 => row.to_vec(),
            _ => row.iter().zip(&norm).map(|(v, g)| v * scale * g).collect(),
        };
        for n in 0..c.n {
            let terms = row.iter().zip(&w[n * c.k..][..c.k]).map(|(a, b)| a * b);
            let bias = if c.flags & BIAS != 0 { bias[n] } else { 0.0 };
            sums.push(terms.clone().sum::<f64>() + bias);
            sizes.push(terms.map(f64::abs).sum::<f64>() + bias.abs());
        }
    }
    (sums, sizes)
}

fn operands(c: &Case, seed: u64) -> (Tensor, Tensor, Tensor, Tensor) {
    (
        Tensor::new(c.x, &noise((c.m - 1) * (c.k + c.gap) + c.k, seed)),
        Tensor::new(c.w, &noise(c.k, seed + 1)),
        Tensor::new(c.w, &noise(c.n * c.k, seed + 2)),
        Tensor::new(c.w, &noise(c.n, seed + 3)),
    )
}

fn params(c: &Case) -> LinearParams {
    LinearParams {
        m: c.m as u32,
        k: c.k as u32,
        n: [c.n as u32, 0, 0],
        ldx: (c.k + c.gap) as u32,
        ldy: [(c.n + c.gap) as u32, 0, 0],
        eps: EPS,
        x: c.x as u32,
        w: c.w as u32,
        y: c.y as u32,
        vector: c.w as u32,
        flags: c.flags,
    }
}

/// Takes the rows out of a strided result and checks that the gaps are unchanged.
fn rows(c: &Case, y: &Tensor) -> Vec<f64> {
    let (y, gap) = (y.values(), Tensor::junk(c.y, 1).values()[0]);
    let mut rows = Vec::new();
    for (m, row) in y.chunks(c.n + c.gap).enumerate() {
        rows.extend(&row[..c.n]);
        assert!(
            m + 1 == c.m || row[c.n..].iter().all(|&v| v == gap),
            "a gap between rows was written"
        );
    }
    rows
}

/// The bound relative to the sum of the absolute products: rounding of f32 sums, and of the result.
fn bound(c: &Case, size: f64, value: f64) -> f64 {
    size * (2.0 + (c.k as f64).sqrt()) * 1.2e-7 + value.abs() * rounding(c.y) + 1e-7
}

proptest! {
    #![proptest_config(cases(120))]

    #[test]
    fn linear_is_the_product(c in case(), seed in 0u64..1000) {
        let (mut x, mut norm, mut w, mut bias) = operands(&c, seed);
        let (wanted, sizes) = product(&c, &x, &norm, &w, &bias);
        for isa in levels() {
            let mut y = Tensor::junk(c.y, (c.m - 1) * (c.n + c.gap) + c.n);
            let bindings = [x.bind(), norm.bind(), w.bind(), bias.bind(), y.bind()];
            run(isa, "linear", &params(&c), &bindings);
            close(isa.name(), &rows(&c, &y), &wanted, |i| bound(&c, sizes[i], wanted[i]));
            let mut again = Tensor::junk(c.y, (c.m - 1) * (c.n + c.gap) + c.n);
            run_scattered(isa, "linear", &params(&c), &[bindings[0], bindings[1], bindings[2], bindings[3], again.bind()]);
            prop_assert!(again.bits() == y.bits(), "{isa}: the order of tiles shows in the result");
        }
    }

    #[test]
    fn linear_add_adds_to_what_is_there(c in case(), seed in 0u64..1000) {
        let (mut x, mut norm, mut w, mut bias) = operands(&c, seed);
        let (sums, sizes) = product(&c, &x, &norm, &w, &bias);
        let before = Tensor::new(c.y, &noise((c.m - 1) * (c.n + c.gap) + c.n, seed + 9));
        let start = before.values();
        let wanted: Vec<f64> = (0..c.m * c.n).map(|i| sums[i] + start[i / c.n * (c.n + c.gap) + i % c.n]).collect();
        for isa in levels() {
            let mut y = before.clone();
            run(isa, "linear_add", &params(&c), &[x.bind(), norm.bind(), w.bind(), bias.bind(), y.bind()]);
            let after = y.values();
            let after: Vec<f64> = (0..c.m * c.n).map(|i| after[i / c.n * (c.n + c.gap) + i % c.n]).collect();
            close(isa.name(), &after, &wanted, |i| bound(&c, sizes[i] + 1.0, wanted[i]));
        }
    }

    #[test]
    fn linear_gated_is_silu_of_one_product_times_another(c in case(), seed in 0u64..1000) {
        let (mut x, mut norm, mut gate, mut gate_bias) = operands(&c, seed);
        let (mut up, mut up_bias) = { let (_, _, w, b) = operands(&c, seed + 50); (w, b) };
        let (g, g_sizes) = product(&c, &x, &norm, &gate, &gate_bias);
        let (u, u_sizes) = product(&c, &x, &norm, &up, &up_bias);
        let wanted: Vec<f64> = g.iter().zip(&u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        for isa in levels() {
            let mut y = Tensor::junk(c.y, (c.m - 1) * (c.n + c.gap) + c.n);
            let bindings = [x.bind(), norm.bind(), gate.bind(), gate_bias.bind(), up.bind(), up_bias.bind(), y.bind()];
            run(isa, "linear_gated", &params(&c), &bindings);
            close(isa.name(), &rows(&c, &y), &wanted, |i| {
                let error = bound(&c, g_sizes[i], 0.0) * 1.1 * (u[i].abs() + 1e-6) + bound(&c, u_sizes[i], 0.0) * (g[i].abs() + 1.0);
                error + wanted[i].abs() * (rounding(c.y) + 4e-7) + 1e-6
            });
        }
    }

    #[test]
    fn linear3_is_three_products(c in case(), others in (size(), size()), seed in 0u64..1000) {
        let sizes = [c.n, others.0, others.1];
        let each: Vec<Case> = sizes.iter().map(|&n| Case { n, ..c }).collect();
        let (mut x, mut norm, ..) = operands(&c, seed);
        let mut weights: Vec<(Tensor, Tensor)> = each.iter().enumerate().map(|(i, c)| {
            let (_, _, w, b) = operands(c, seed + 100 * i as u64);
            (w, b)
        }).collect();
        for isa in levels() {
            let mut ys: Vec<Tensor> = each.iter().map(|c| Tensor::junk(c.y, (c.m - 1) * (c.n + c.gap) + c.n)).collect();
            let mut bindings = vec![x.bind(), norm.bind()];
            for (y, (w, b)) in ys.iter_mut().zip(&mut weights) {
                bindings.extend([w.bind(), b.bind(), y.bind()]);
            }
            let p = LinearParams { n: sizes.map(|n| n as u32), ldy: sizes.map(|n| (n + c.gap) as u32), ..params(&c) };
            run(isa, "linear3", &p, &bindings);
            for (i, y) in ys.iter().enumerate() {
                let (wanted, sizes) = product(&each[i], &x, &norm, &weights[i].0, &weights[i].1);
                close(isa.name(), &rows(&each[i], y), &wanted, |j| bound(&c, sizes[j], wanted[j]));
            }
        }
    }
}

/// Rows wider than the buffer on the stack, so that they are widened in chunks; and several panels
/// of many rows.
#[test]
fn wide_rows_are_chunked() {
    for (m, x, flags) in [
        (1, DType::F32, NORM),
        (4, DType::Bf16, 0),
        (7, DType::F32, NORM | BIAS),
        (9, DType::Bf16, BIAS),
        (25, DType::F32, 0),
    ] {
        for w in [DType::F32, DType::Bf16, DType::F16] {
            let c = Case { m, k: 5003, n: 70, gap: 0, x, w, y: DType::F32, flags };
            let (mut x, mut norm, mut w, mut bias) = operands(&c, 5);
            let (wanted, sizes) = product(&c, &x, &norm, &w, &bias);
            for isa in levels() {
                let mut y = Tensor::junk(c.y, c.m * c.n);
                run(
                    isa,
                    "linear",
                    &params(&c),
                    &[x.bind(), norm.bind(), w.bind(), bias.bind(), y.bind()],
                );
                close(isa.name(), &y.values(), &wanted, |i| bound(&c, sizes[i], wanted[i]));
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(60))]

    /// One row of x, all of which a warp or a block holds.
    #[test]
    fn one_row_is_held_in_registers(
        units in prop_oneof![4 => 1usize..130, 1 => 130usize..140, 1 => 256usize..270],
        n in size(), half in prop_oneof![Just(DType::Bf16), Just(DType::F16)], x in dtypes(),
        y in dtypes(), flags in 0u32..4, add in any::<bool>(), seed in 0u64..1000,
    ) {
        let c = Case { m: 1, k: 8 * units, n, gap: 0, x, w: half, y, flags };
        let (mut x, mut norm, mut w, mut bias) = operands(&c, seed);
        let (sums, sizes) = product(&c, &x, &norm, &w, &bias);
        let before = Tensor::new(c.y, &noise(n, seed + 9));
        let start = before.values();
        let wanted: Vec<f64> = (0..n).map(|i| sums[i] + if add { start[i] } else { 0.0 }).collect();
        for isa in levels() {
            let mut y = before.clone();
            let name = if add { "linear_add" } else { "linear" };
            run(isa, name, &params(&c), &[x.bind(), norm.bind(), w.bind(), bias.bind(), y.bind()]);
            close(isa.name(), &y.values(), &wanted, |i| bound(&c, sizes[i] + 1.0, wanted[i]));
        }
    }
}

#[test]
fn operands_that_the_flags_leave_out_may_be_empty() {
    let c =
        Case { m: 2, k: 40, n: 5, gap: 0, x: DType::F32, w: DType::Bf16, y: DType::F32, flags: 0 };
    let (mut x, norm, mut w, bias) = operands(&c, 1);
    let (wanted, sizes) = product(&c, &x, &norm, &w, &bias);
    for isa in levels() {
        let mut y = Tensor::junk(c.y, c.m * c.n);
        run(isa, "linear", &params(&c), &[x.bind(), NONE, w.bind(), NONE, y.bind()]);
        close(isa.name(), &y.values(), &wanted, |i| bound(&c, sizes[i], wanted[i]));
    }
}
