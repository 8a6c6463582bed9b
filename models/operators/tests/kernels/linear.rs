//! Matrix products: few and many rows, fused and not fused.

use leasehold::kernel::Binding;
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::isa::Isa;
use leasehold_operators::kernels::cpu::linear::{BIAS, FEW, LinearParams, NORM};
use leasehold_operators::kernels::cpu::tile::{NONE, Params};
use leasehold_operators::kernels::cuda::TENSOR_KERNELS;
use proptest::prelude::*;

use super::{
    Level, Tensor, cases, close, dtypes, levels, long, noise, rounding, run, run_scattered, size,
};

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

/// One row takes the weights of a large matrix in the order of their addresses, and those of a
/// small one side by side. Rows that both matrices have give equal bits.
#[test]
fn the_order_of_large_weights_does_not_show() {
    for w in [DType::F32, DType::Bf16, DType::F16] {
        for k in [1000, 1024] {
            let large =
                Case { m: 1, k, n: 2400, gap: 0, x: DType::F32, w, y: DType::F32, flags: 0 };
            let small = Case { n: 64, ..large };
            let (mut x, _, mut w, _) = operands(&large, 4);
            for level in levels().into_iter().filter(|level| matches!(level, Level::Cpu(_))) {
                let mut of = |c: &Case| {
                    let mut y = Tensor::junk(c.y, c.n);
                    run(level, "linear", &params(c), &[x.bind(), NONE, w.bind(), NONE, y.bind()]);
                    y.values()
                };
                assert_eq!(of(&large)[..small.n], of(&small), "{level}, k {k}");
            }
        }
    }
}

/// Many rows of bf16 by bf16 at both sides of every block's boundary. A level that multiplies bf16
/// has its own method for them. There the result of a row does not depend on the rows beside it.
#[test]
fn many_rows_of_bf16_are_multiplied_as_they_are() {
    for (k, n, gap) in [
        (1, 1, 0),
        (31, 5, 3),
        (32, 32, 0),
        (33, 33, 1),
        (64, 48, 0),
        (511, 31, 0),
        (512, 20, 16),
        (1000, 70, 0),
        (1056, 16, 8),
    ] {
        let case =
            |m| Case { m, k, n, gap, x: DType::Bf16, w: DType::Bf16, y: DType::F32, flags: 0 };
        let most = case(130);
        let (mut x, norm, mut w, bias) = operands(&most, 3);
        let (wanted, sizes) = product(&most, &x, &norm, &w, &bias);
        for level in levels().into_iter().filter(|level| matches!(level, Level::Cpu(_))) {
            let mut first: Option<Vec<f64>> = None;
            for m in [25, 32, 33, 64, 95, 96, 97, 112, 127, 128, 130] {
                let c = case(m);
                let mut y = Tensor::junk(c.y, (m - 1) * (n + gap) + n);
                run(level, "linear", &params(&c), &[x.bind(), NONE, w.bind(), NONE, y.bind()]);
                let found = rows(&c, &y);
                let name = format!("{level}, {c:?}");
                close(&name, &found, &wanted[..m * n], |i| bound(&c, sizes[i], wanted[i]));
                if matches!(level, Level::Cpu(Isa::Avx512Bf16 | Isa::Amx)) {
                    let before = first.get_or_insert_with(|| found.clone());
                    assert!(found.starts_with(before), "{name}: rows depend on those beside them");
                }
            }
        }
    }
}

/// Many rows at both sides of every boundary of registers, panels, blocks and chunks, in all types.
/// A row has the same bits in any order of tiles, and at levels with panels beside any number of
/// others.
#[test]
fn many_rows_meet_every_boundary() {
    let types = [DType::F32, DType::Bf16, DType::F16];
    let counts = [25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 95, 96, 97, 107, 110];
    let mut turn = 0;
    for k in [1, 7, 16, 31, 33, 255, 256, 257, 999] {
        for n in [1, 15, 16, 17, 31, 33, 63, 65, 130] {
            let [x, w, y] = [turn, turn / 3, turn / 9].map(|i| types[i % 3]);
            let most = Case { m: 110, k, n, gap: turn % 4, x, w, y, flags: [BIAS, 0][turn % 2] };
            let (mut x, norm, mut w, mut bias) = operands(&most, turn as u64);
            let (wanted, sizes) = product(&most, &x, &norm, &w, &bias);
            for level in levels() {
                let Level::Cpu(isa) = level else { continue };
                let panels = matches!(isa, Isa::Generic | Isa::Neon | Isa::Avx2);
                let mut own: Option<Vec<f64>> = None;
                for m in [110, 96, counts[turn % counts.len()], counts[(turn + 7) % counts.len()]] {
                    let c = Case { m, ..most };
                    let mut y = Tensor::junk(c.y, (m - 1) * (n + c.gap) + n);
                    let bound_to = [x.bind(), NONE, w.bind(), bias.bind(), y.bind()];
                    run(level, "linear", &params(&c), &bound_to);
                    let (name, found) = (format!("{level}, {c:?}"), rows(&c, &y));
                    close(&name, &found, &wanted[..m * n], |i| bound(&c, sizes[i], wanted[i]));
                    let own = own.get_or_insert_with(|| found.clone());
                    let alone = !panels || own.starts_with(&found);
                    assert!(alone, "{name}: rows depend on those beside them");
                    let mut again = Tensor::junk(c.y, (m - 1) * (n + c.gap) + n);
                    let bound_to = [x.bind(), NONE, w.bind(), bias.bind(), again.bind()];
                    run_scattered(level, "linear", &params(&c), &bound_to);
                    assert!(again.bits() == y.bits(), "{name}: the order of tiles shows");
                }
            }
            turn += 1;
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

/// An operand that begins `skew` elements of 16 bits behind a multiple of 16 bytes.
fn skewed(t: &mut Tensor, skew: usize) -> Binding {
    let whole = t.bind();
    let bytes = 2 * skew as u64;
    Binding { addr: whole.addr + bytes, len: whole.len - bytes, ..whole }
}

/// All four products of a case on the emulated tensor cores, with operands that begin `skew`
/// elements behind a multiple of 16 bytes. Of the results, every row of number `step` is compared.
/// One row has kernels of its own.
fn on_tensor_cores(c: Case, skew: usize, step: usize) {
    let front = |dtype: DType, n: usize, seed: u64| {
        let mut values = vec![-512.0; skew];
        values.extend(noise(n, seed));
        Tensor::new(dtype, &values)
    };
    let plain = |dtype: DType, n: usize, seed: u64| Tensor::new(dtype, &noise(n, seed));
    let sizes = [c.n, c.n + 17, 3];
    let x_len = (c.m - 1) * (c.k + c.gap) + c.k;
    let mut x = front(c.x, x_len, 1);
    let mut w: Vec<Tensor> = (0..3).map(|i| front(c.w, sizes[i] * c.k, 10 + i as u64)).collect();
    let mut bias: Vec<Tensor> = (0..3).map(|i| front(c.w, sizes[i], 20 + i as u64)).collect();
    let mut up = front(c.w, c.n * c.k, 30);
    // An f32 is as long as two elements.
    let y_skew = skew * c.y.bytes() / 2;
    let before = |n: usize| {
        let mut values = vec![-512.0; skew];
        values.extend(vec![0.5; (c.m - 1) * (n + c.gap) + n]);
        Tensor::new(c.y, &values)
    };
    let rows_of = |c: &Case, y: &Tensor| -> Vec<f64> {
        let all = y.values();
        assert!(all[..skew].iter().all(|&v| v == -512.0), "elements in front were written");
        let mut rows = Vec::new();
        for (m, row) in all[skew..].chunks(c.n + c.gap).enumerate() {
            if m.is_multiple_of(step) {
                rows.extend(&row[..c.n]);
            }
            let gap = m + 1 == c.m || row[c.n..].iter().all(|&v| v == 0.5);
            assert!(gap, "a gap between rows was written");
        }
        rows
    };
    let each: Vec<Case> = sizes.iter().map(|&n| Case { n, ..c }).collect();
    let some_x: Vec<f32> = noise(x_len, 1)
        .chunks(c.k + c.gap)
        .step_by(step)
        .flat_map(|row| row[..c.k].to_vec())
        .collect();
    let (some_x, norm) = (Tensor::new(c.x, &some_x), plain(c.w, c.k, 2));
    let some = |c: &Case| Case { m: c.m.div_ceil(step), gap: 0, ..*c };
    let wanted: Vec<(Vec<f64>, Vec<f64>)> = (0..3)
        .map(|i| {
            let (w, b) =
                (plain(c.w, sizes[i] * c.k, 10 + i as u64), plain(c.w, sizes[i], 20 + i as u64));
            product(&some(&each[i]), &some_x, &norm, &w, &b)
        })
        .collect();
    let x = skewed(&mut x, skew);
    let mut factors = front(c.w, c.k, 2);
    let factors = if c.flags & NORM == 0 { NONE } else { skewed(&mut factors, skew) };
    let w: Vec<Binding> = w.iter_mut().map(|w| skewed(w, skew)).collect();
    let bias: Vec<Binding> = bias.iter_mut().map(|b| skewed(b, skew)).collect();
    let run = |name: &str, p: &LinearParams, bindings: &[Binding]| {
        let boxes = c.m <= 64 && c.k.is_multiple_of(64) && c.x == DType::Bf16 && skew == 0;
        let entry = match c.m {
            1 => "row",
            _ if boxes => "boxes",
            _ => "tiles",
        };
        let entry = format!("{name}_{entry}");
        let tensor = TENSOR_KERNELS.iter().find(|cuda| cuda.entry == entry).expect("an entry");
        assert!(tensor.takes(p.as_bytes()), "{p:?}");
        run(Level::Cuda("cuda/sm_90"), name, p, bindings);
    };

    let mut y = before(c.n);
    run("linear", &params(&c), &[x, factors, w[0], bias[0], skewed(&mut y, y_skew)]);
    let (sums, errors) = &wanted[0];
    close(&format!("linear {c:?}"), &rows_of(&c, &y), sums, |i| bound(&c, errors[i], sums[i]));

    let mut y = before(c.n);
    run("linear_add", &params(&c), &[x, factors, w[0], bias[0], skewed(&mut y, y_skew)]);
    let added: Vec<f64> = sums.iter().map(|v| v + 0.5).collect();
    close(&format!("linear_add {c:?}"), &rows_of(&c, &y), &added, |i| {
        bound(&c, errors[i] + 1.0, added[i])
    });

    let mut ys: Vec<Tensor> = sizes.iter().map(|&n| before(n)).collect();
    let mut bindings = vec![x, factors];
    for (i, y) in ys.iter_mut().enumerate() {
        bindings.extend([w[i], bias[i], skewed(y, y_skew)]);
    }
    let p = LinearParams {
        n: sizes.map(|n| n as u32),
        ldy: sizes.map(|n| (n + c.gap) as u32),
        ..params(&c)
    };
    run("linear3", &p, &bindings);
    for (i, y) in ys.iter().enumerate() {
        let (sums, errors) = &wanted[i];
        let what = format!("linear3 {c:?}, product {i}");
        close(&what, &rows_of(&each[i], y), sums, |j| bound(&c, errors[j], sums[j]));
    }

    let (plain_up, plain_bias) = (plain(c.w, c.n * c.k, 30), plain(c.w, c.n, 20));
    let other = product(&some(&c), &some_x, &norm, &plain_up, &plain_bias);
    let mut y = before(c.n);
    let up = skewed(&mut up, skew);
    let bindings = [x, factors, w[0], bias[0], up, bias[0], skewed(&mut y, y_skew)];
    run("linear_gated", &params(&c), &bindings);
    let gated: Vec<f64> =
        wanted[0].0.iter().zip(&other.0).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    close(&format!("linear_gated {c:?}"), &rows_of(&c, &y), &gated, |i| {
        let (g, u) = (wanted[0].0[i].abs(), other.0[i].abs());
        let error = bound(&c, wanted[0].1[i], 0.0) * 1.1 * (u + 1e-6)
            + bound(&c, other.1[i], 0.0) * (g + 1.0);
        error + gated[i].abs() * (rounding(c.y) + 4e-7) + 1e-6
    });
}

/// Every number of fragments, steps that end within the columns, and operands that are not aligned.
#[test]
fn tensor_cores_multiply_several_rows() {
    if !levels().contains(&Level::Cuda("cuda/sm_90")) {
        return;
    }
    let halves = [DType::Bf16, DType::F16];
    let mut turn = 0;
    for m in [2, 3, 8, 9, 16, 17, 27, 32, 33, 65, 129] {
        for k in [8, 40, 264, 1000] {
            let half = halves[turn % 2];
            let c = Case {
                m,
                k,
                n: [33, 8, 70, 1, 47][turn % 5],
                gap: [0, 8, 24][turn % 3],
                x: half,
                w: half,
                y: if turn % 4 == 3 { DType::F32 } else { half },
                flags: [BIAS, 0][turn / 2 % 2],
            };
            on_tensor_cores(c, 0, 1);
            if k < 1000 || m < 16 {
                on_tensor_cores(c, 1 + turn % 7, 1);
            }
            turn += 1;
        }
    }
}

/// Every number of rows of a fragment, stages that end behind the columns, more blocks than
/// processors, blocks of 64 rows of weights, and more columns than the ring has.
#[test]
fn boxes_of_weights_multiply_several_rows() {
    if !levels().contains(&Level::Cuda("cuda/sm_90")) {
        return;
    }
    let half = DType::Bf16;
    let few = Case { m: 2, k: 64, n: 33, gap: 0, x: half, w: half, y: half, flags: BIAS };
    let mut turn = 0;
    for m in [2, 3, 8, 9, 16, 17, 32, 33, 64] {
        for k in [64, 320] {
            let c = Case {
                m,
                k,
                n: [33, 8, 70, 1, 47][turn % 5],
                gap: [0, 8, 24][turn % 3],
                y: if turn % 4 == 3 { DType::F32 } else { half },
                flags: [BIAS, 0][turn / 2 % 2],
                ..few
            };
            on_tensor_cores(c, 0, 1);
            turn += 1;
        }
    }
    on_tensor_cores(Case { n: 2120, ..few }, 0, 1);
    on_tensor_cores(Case { m: 31, k: 4672, n: 19, ..few }, 0, 3);
    if long() {
        on_tensor_cores(Case { m: 9, n: 2120, k: 2624, ..few }, 0, 7);
        on_tensor_cores(Case { n: 16_400, ..few }, 0, 1);
    }
}

/// Pieces, chunks and groups that end within a row of weights or within a block, and operands that
/// are not aligned.
#[test]
fn tensor_cores_multiply_one_long_row() {
    if !levels().contains(&Level::Cuda("cuda/sm_90")) {
        return;
    }
    let half = DType::Bf16;
    for (turn, k) in [2048, 2056, 2080, 2304, 3072, 4120].into_iter().enumerate() {
        let y = if turn % 3 == 2 { DType::F32 } else { half };
        let flags = [NORM, BIAS, NORM | BIAS, 0][turn % 4];
        let n = [1, 70, 9, 283][turn % 4];
        let c = Case { m: 1, k, n, gap: 0, x: half, w: half, y, flags };
        on_tensor_cores(c, 0, 1);
        on_tensor_cores(Case { n: 9, ..c }, 1 + turn % 7, 1);
    }
    if !long() {
        return;
    }
    // Enough groups in a block that the places of sums serve again.
    let groups = Case { m: 1, k: 2048, n: 8450, gap: 0, x: half, w: half, y: half, flags: NORM };
    on_tensor_cores(groups, 0, 1);
}

/// More groups of outputs than blocks, and tiles of 128 rows.
#[test]
fn tensor_cores_multiply_large_matrices() {
    if !levels().contains(&Level::Cuda("cuda/sm_90")) {
        return;
    }
    let half = DType::Bf16;
    let few = Case { m: 2, k: 16, n: 9000, gap: 0, x: half, w: half, y: half, flags: BIAS };
    on_tensor_cores(few, 0, 1);
    on_tensor_cores(Case { m: 129, k: 8, n: 8130, gap: 8, y: DType::F32, ..few }, 3, 7);
    if long() {
        on_tensor_cores(few, 5, 1);
        on_tensor_cores(Case { m: 29, gap: 8, ..few }, 0, 7);
        on_tensor_cores(Case { m: 32, k: 264, n: 4300, ..few }, 0, 31);
        on_tensor_cores(Case { m: 129, k: 104, n: 8130, ..few }, 0, 7);
    }
}

/// A row has the same bits beside 1 to 31 other ones, in groups of 16 and of 32 rows of weights,
/// and by boxes beside 63.
#[test]
fn rows_that_stream_have_equal_bits() {
    let level = Level::Cuda("cuda/sm_90");
    if !levels().contains(&level) {
        return;
    }
    let half = DType::Bf16;
    for (k, rows) in [(520, [2, 9, 16, 17, 32]), (576, [2, 9, 17, 32, 64])] {
        let most = Case { m: 64, k, n: 4300, gap: 0, x: half, w: half, y: DType::F32, flags: 0 };
        let (mut x, _, mut w, _) = operands(&most, 6);
        let mut first: Option<Vec<f64>> = None;
        for (i, m) in rows.into_iter().enumerate() {
            let c = Case { m, n: [40, 4300][i % 2], ..most };
            let mut y = Tensor::junk(c.y, m * c.n);
            run(level, "linear", &params(&c), &[x.bind(), NONE, w.bind(), NONE, y.bind()]);
            let found: Vec<f64> =
                y.values().chunks(c.n).take(2).flat_map(|r| r[..40].to_vec()).collect();
            assert_eq!(*first.get_or_insert_with(|| found.clone()), found, "{c:?}");
        }
    }
}
