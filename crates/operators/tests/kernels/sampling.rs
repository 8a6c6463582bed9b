//! Softmax, argmax, sampling, and the end of a decode step.

use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::sampling::{AdvanceParams, RowParams, SampleParams};
use leasehold_operators::kernels::cpu::tile::{bind, bind_read};
use proptest::prelude::*;

use super::{Level, Tensor, cases, close, dtypes, levels, noise, rounding, run, size};

fn argmax(isa: Level, x: &[f32]) -> i32 {
    let p = RowParams { rows: 1, n: x.len() as u32, ldx: x.len() as u32, ..Default::default() };
    let mut id = [-9];
    run(isa, "argmax", &p, &[bind_read(x), bind(&mut id)]);
    id[0]
}

fn sample(isa: Level, p: &SampleParams, logits: &[f32], position: i32) -> usize {
    usize::try_from(sampled(isa, p, logits, position)).unwrap()
}

fn sampled(isa: Level, p: &SampleParams, logits: &[f32], position: i32) -> i32 {
    let (mut at, mut token) = ([position], [-9i32]);
    run(isa, "sample", p, &[bind_read(logits), bind(&mut at), bind(&mut token)]);
    assert_eq!(at, [position]);
    token[0]
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn softmax_sums_to_one(rows in 1usize..4, n in prop_oneof![size(), Just(700usize)], x in dtypes(), y in dtypes(), spread in 0.1f32..60.0, seed in 0u64..99) {
        let p = RowParams { rows: rows as u32, n: n as u32, ldx: n as u32 + 1, ldy: n as u32 + 2, x: x as u32, y: y as u32 };
        let values: Vec<f32> = noise(rows * (n + 1), seed).iter().map(|v| v * spread).collect();
        let mut input = Tensor::new(x, &values);
        let mut wanted = Tensor::junk(y, rows * (n + 2)).values();
        for (r, row) in input.values().chunks(n + 1).enumerate() {
            let max = row[..n].iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = row[..n].iter().map(|v| (v - max).exp()).sum();
            for i in 0..n {
                wanted[r * (n + 2) + i] = (row[i] - max).exp() / total;
            }
        }
        for isa in levels() {
            let mut out = Tensor::junk(y, rows * (n + 2));
            run(isa, "softmax", &p, &[input.bind(), out.bind()]);
            close(isa.name(), &out.values(), &wanted, |i| wanted[i].abs() * (rounding(y) + 2e-6) + 6e-8);
        }
    }

    #[test]
    fn argmax_takes_the_first_of_the_largest(values in prop::collection::vec(-5i8..5, 1..300), x in dtypes()) {
        let floats: Vec<f32> = values.iter().map(|&v| f32::from(v)).collect();
        let max = values.iter().max().unwrap();
        let wanted = values.iter().position(|v| v == max).unwrap() as i32;
        let mut t = Tensor::new(x, &floats);
        let p = RowParams { rows: 1, n: floats.len() as u32, ldx: floats.len() as u32, x: x as u32, ..Default::default() };
        for isa in levels() {
            let mut id = [-1];
            run(isa, "argmax", &p, &[t.bind(), bind(&mut id)]);
            prop_assert_eq!(id[0], wanted);
            let greedy = SampleParams { n: floats.len() as u32, ..Default::default() };
            prop_assert_eq!(sample(isa, &greedy, &floats, 3), wanted as usize);
        }
    }

    #[test]
    fn a_sample_is_one_of_the_top_k(n in 1usize..300, k in 1u32..40, levels_of in 2i32..50, seed in 0u64..9999, position in 0i32..5000) {
        among_the_largest(n, k, levels_of, seed, position)?;
    }
}

fn among_the_largest(
    n: usize,
    k: u32,
    levels_of: i32,
    seed: u64,
    position: i32,
) -> Result<(), TestCaseError> {
    // Few distinct values, so that the threshold lies within ties. Zeros of both signs are among
    // them, and equal.
    let logits: Vec<f32> =
        noise(n, seed).iter().map(|v| (v * levels_of as f32).round() / 4.0).collect();
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| (logits[b] + 0.0).total_cmp(&(logits[a] + 0.0)).then(a.cmp(&b)));
    let allowed = &order[..n.min(k as usize)];
    let p =
        SampleParams { n: n as u32, top_k: k, temperature: 5.0, seed: [seed as u32, 1], ring: 0 };
    for isa in levels() {
        let token = sample(isa, &p, &logits, position);
        prop_assert!(allowed.contains(&token), "{isa}: {token} is not among the {k} largest");
        prop_assert_eq!(
            token,
            sample(isa, &p, &logits, position),
            "a draw is a function of seed and position"
        );
    }
    Ok(())
}

/// The threshold lies among the zeros; the first 24 in order have both signs.
#[test]
fn zeros_of_both_signs_are_equal() {
    among_the_largest(52, 24, 2, 7148, 389).unwrap();
}

#[test]
fn nan_and_infinities() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for isa in levels() {
        assert_eq!(argmax(isa, &[nan, 1.0, nan, 2.0, 2.0]), 3);
        assert_eq!(argmax(isa, &[nan; 40]), -1);
        assert_eq!(argmax(isa, &[-inf; 40]), 0);
        assert_eq!(argmax(isa, &[nan, -inf, -inf]), 1);
        assert_eq!(argmax(isa, &[-0.0, 0.0]), 0);
        let mut long = vec![nan; 100];
        long[97] = -3.0;
        assert_eq!(argmax(isa, &long), 97);
        let p = SampleParams { n: 5, top_k: 3, temperature: 1.0, ..Default::default() };
        assert_eq!(sample(isa, &p, &[0.0, inf, 1.0, inf, nan], 1), 1);
        for position in 0..50 {
            assert!([0, 3].contains(&sample(isa, &p, &[1.0, nan, -inf, 1.5, nan], position)));
        }
        for temperature in [0.0, 1.0] {
            let p = SampleParams { n: 40, top_k: 3, temperature, ..Default::default() };
            assert_eq!(sampled(isa, &p, &[nan; 40], 1), -1);
        }
        let softmax = RowParams { rows: 1, n: 3, ldx: 3, ldy: 3, ..Default::default() };
        for row in [[nan, 1.0, 2.0], [inf, 1.0, 2.0], [-inf; 3]] {
            let mut y = [0f32; 3];
            run(isa, "softmax", &softmax, &[bind_read(&row), bind(&mut y)]);
            assert!(y.iter().all(|v| v.is_nan()), "{isa}: softmax of {row:?} is {y:?}");
        }
        let mut y = [0f32; 3];
        run(isa, "softmax", &softmax, &[bind_read(&[-inf, 0.0, -inf]), bind(&mut y)]);
        assert_eq!(y, [0.0, 1.0, 0.0]);
    }
}

/// Frequencies follow the softmax at the temperature, within five standard deviations.
#[test]
fn samples_follow_the_distribution() {
    let logits = [1.0f32, 0.0, -1.0, 2.0, 0.5, -30.0];
    let temperature = 0.8;
    let p = SampleParams { n: 6, top_k: 0, temperature, seed: [42, 0], ring: 0 };
    let weights: Vec<f64> = logits.iter().map(|&l| f64::from(l / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    for isa in levels() {
        let draws = if matches!(isa, Level::Cpu(_)) { 20_000 } else { 500 };
        let mut counts = [0u32; 6];
        (0..draws).for_each(|position| counts[sample(isa, &p, &logits, position)] += 1);
        for (count, w) in counts.iter().zip(&weights) {
            let (q, n) = (w / total, f64::from(draws));
            let deviation = (f64::from(*count) - n * q).abs();
            assert!(deviation <= 5.0 * (n * q * (1.0 - q)).sqrt() + 1.0, "{isa}: {counts:?}");
        }
    }
    let other = SampleParams { seed: [43, 0], ..p };
    let isa = Level::GENERIC;
    assert!(
        (0..100).any(|at| sample(isa, &p, &logits, at) != sample(isa, &other, &logits, at)),
        "the seed does not matter"
    );
}

/// Covers every part of the logits that a warp of the CUDA kernel processes.
#[test]
fn every_level_draws_the_same_token() {
    for n in [5, 300, 1000, 5000] {
        let logits: Vec<f32> = noise(n, 4).iter().map(|v| (v * 30.0).round() / 10.0).collect();
        for top_k in [0, 40] {
            let p = SampleParams { n: n as u32, top_k, temperature: 2.0, seed: [9, 9], ring: 0 };
            for position in 0..6 {
                let wanted = sample(Level::GENERIC, &p, &logits, position);
                for isa in levels() {
                    assert_eq!(
                        sample(isa, &p, &logits, position),
                        wanted,
                        "{isa}: {n} logits, position {position}"
                    );
                }
            }
        }
    }
}

#[test]
fn next_token_is_sample_and_advance() {
    let logits = noise(1000, 8).iter().map(|v| v * 4.0).collect::<Vec<_>>();
    let p = SampleParams { n: 1000, top_k: 50, temperature: 0.9, seed: [1, 2], ring: 4 };
    for isa in levels() {
        let (mut token, mut position, mut ring, mut count) = ([-1i32], [10i32], [0i32; 4], [0u32]);
        let (mut token2, mut position2, mut ring2, mut count2) =
            ([-1i32], [10i32], [0i32; 4], [0u32]);
        for step in 0..6 {
            let loop_state =
                [bind(&mut token), bind(&mut position), bind(&mut ring), bind(&mut count)];
            run(
                isa,
                "next_token",
                &p,
                &[bind_read(&logits), loop_state[0], loop_state[1], loop_state[2], loop_state[3]],
            );
            run(isa, "sample", &p, &[bind_read(&logits), bind(&mut position2), bind(&mut token2)]);
            let advance = AdvanceParams { step: 1, ring: 4 };
            run(
                isa,
                "advance",
                &advance,
                &[bind(&mut token2), bind(&mut position2), bind(&mut ring2), bind(&mut count2)],
            );
            assert_eq!((token, position, ring, count), (token2, position2, ring2, count2));
            assert_eq!(
                (position[0], count[0], ring[step % 4]),
                (11 + step as i32, 1 + step as u32, token[0])
            );
        }
    }
}

#[test]
fn a_position_advances_by_a_whole_prompt() {
    let (mut token, mut position, mut ring, mut count) = ([5i32], [0i32], [0i32; 2], [3u32]);
    let bindings = [bind(&mut token), bind(&mut position), bind(&mut ring), bind(&mut count)];
    run(Level::GENERIC, "advance", &AdvanceParams { step: 17, ring: 2 }, &bindings);
    assert_eq!((position, ring, count), ([17], [0, 5], [4]));
    assert_eq!(DType::from_raw(3), None);
}
