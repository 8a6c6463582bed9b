//! Softmax, argmax, and the end of a decode step, beside a model that sorts and adds in f64.

use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::sampling::{
    AdvanceParams, LogProbabilities, MAX_LOG_PROBABILITIES, NextTokenParams, RowParams,
    SamplingRecord, philox,
};
use leasehold_operators::kernels::cpu::tile::{bind, bind_read};
use leasehold_operators::ops::Sampling;
use proptest::prelude::*;

use super::{Level, Tensor, cases, close, dtypes, levels, noise, rounding, run, size};

fn argmax(isa: Level, x: &[f32]) -> i32 {
    let p = RowParams { rows: 1, n: x.len() as u32, ldx: x.len() as u32, ..Default::default() };
    let mut id = [-9];
    run(isa, "argmax", &p, &[bind_read(x), bind(&mut id)]);
    id[0]
}

/// A row before a step.
#[derive(Debug, Clone)]
struct Row {
    logits: Vec<f32>,
    record: SamplingRecord,
    position: i32,
    count: u32,
}

/// A row's words: token, position, count, ring, and the bits of its log-probabilities.
#[derive(Debug, Clone, PartialEq)]
struct State {
    token: i32,
    position: i32,
    count: u32,
    ring: Vec<i32>,
    logs: Vec<[u32; 1 + 2 * MAX_LOG_PROBABILITIES]>,
}

const TOKEN: i32 = -9;
const LOG: u32 = 0xA5A5_A5A5;

impl Row {
    /// Its words before the step.
    fn before(&self, [ring, logs]: [usize; 2]) -> State {
        State {
            token: TOKEN,
            position: self.position,
            count: self.count,
            ring: vec![TOKEN; ring],
            logs: vec![[LOG; 1 + 2 * MAX_LOG_PROBABILITIES]; logs],
        }
    }
}

/// One step of rows with as many logits, which lie `gap` elements apart, with rings of these sizes.
fn step(isa: Level, rows: &[Row], gap: usize, rings: [usize; 2]) -> Vec<State> {
    let n = rows[0].logits.len();
    let p = NextTokenParams {
        rows: rows.len() as u32,
        n: n as u32,
        ld: (n + gap) as u32,
        ring: rings[0] as u32,
        log_ring: rings[1] as u32,
    };
    let apart = |r: &Row| [&r.logits[..], &vec![1e30; gap]].concat();
    let logits: Vec<f32> = rows.iter().flat_map(apart).collect();
    let records: Vec<SamplingRecord> = rows.iter().map(|r| r.record).collect();
    let before: Vec<State> = rows.iter().map(|r| r.before(rings)).collect();
    let mut tokens: Vec<i32> = before.iter().map(|s| s.token).collect();
    let mut positions: Vec<i32> = before.iter().map(|s| s.position).collect();
    let mut counts: Vec<u32> = before.iter().map(|s| s.count).collect();
    let mut ring: Vec<i32> = before.iter().flat_map(|s| s.ring.clone()).collect();
    let mut logs: Vec<_> = before.iter().flat_map(|s| s.logs.clone()).collect();
    let bindings = [
        bind_read(&logits[..logits.len() - gap]),
        bind_read(&records),
        bind(&mut tokens),
        bind(&mut positions),
        bind(&mut ring),
        bind(&mut counts),
        bind(&mut logs),
    ];
    run(isa, "next_token", &p, &bindings);
    let state = |r: usize| State {
        token: tokens[r],
        position: positions[r],
        count: counts[r],
        ring: ring[r * rings[0]..][..rings[0]].to_vec(),
        logs: logs[r * rings[1]..][..rings[1]].to_vec(),
    };
    (0..rows.len()).map(state).collect()
}

/// The token that a level draws.
fn drawn(isa: Level, how: Sampling, logits: &[f32], position: i32) -> i32 {
    let record = how.record().unwrap();
    let row = Row { logits: logits.to_vec(), record, position, count: 0 };
    step(isa, &[row], 0, [1, 0])[0].token
}

fn sample(isa: Level, how: Sampling, logits: &[f32], position: i32) -> usize {
    usize::try_from(drawn(isa, how, logits, position)).unwrap()
}

/// The ids of the numbers among the logits, the largest first, equal ones in order.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).filter(|&i| !logits[i].is_nan()).collect();
    order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    order
}

/// The largest error of a sum of f32 weights, relative to the sum of all.
const ERROR: f64 = 2e-6;

/// The token of a row; `None` if a sum or a weight lies too close to a border.
fn model(row: &Row) -> Option<i32> {
    let (logits, r) = (&row.logits, &row.record);
    let mut left = ranked(logits);
    let Some(&first) = left.first() else { return Some(-1) };
    let inverse = 1.0 / r.temperature;
    if logits[first].is_infinite() || !(inverse > 0.0 && inverse.is_finite()) {
        return Some(first as i32);
    }
    let distance = |i: usize| f64::from(logits[i]) - f64::from(logits[first]);
    let weight = |i: usize| (distance(i) / f64::from(r.temperature)).exp();
    let sum = |ids: &[usize]| ids.iter().map(|&i| weight(i)).sum::<f64>();
    if r.top_k > 0 {
        left.truncate(r.top_k as usize);
    }
    if r.top_p > 0.0 && r.top_p < 1.0 {
        let total = sum(&left);
        let (mut reached, mut kept) = (0.0, 0);
        for &i in &left {
            reached += weight(i);
            kept += 1;
            let over = reached / total - f64::from(r.top_p);
            if over.abs() < ERROR {
                return None;
            }
            if over > 0.0 {
                break;
            }
        }
        left.truncate(kept);
    }
    if r.min_p > 0.0 && r.min_p <= 1.0 {
        let parts = left.iter().map(|&i| weight(i) / f64::from(r.min_p) - 1.0);
        if parts.clone().any(|over| over != 0.0 && over.abs() < ERROR) {
            return None;
        }
        let kept: Vec<bool> = parts.map(|over| over >= 0.0).collect();
        left = std::iter::zip(left, kept).filter(|(_, kept)| *kept).map(|(i, _)| i).collect();
    }
    left.sort_unstable();
    let (total, mut reached) = (sum(&left), 0.0);
    let uniform = f64::from(philox(r.seed, row.position as u64)) / 4_294_967_296.0;
    for &i in &left {
        let before = reached / total - uniform;
        reached += weight(i);
        let over = reached / total - uniform;
        if over > 0.0 {
            let close = over < ERROR || (i != left[0] && -before < ERROR);
            return (!close).then_some(i as i32);
        }
    }
    None
}

/// Compares an entry of log-probabilities with `ln softmax` in f64.
#[track_caller]
fn check_logs(what: &str, row: &Row, token: i32, words: [u32; 1 + 2 * MAX_LOG_PROBABILITIES]) {
    let found: LogProbabilities = bytemuck::cast(words);
    let order = ranked(&row.logits);
    let max = order.first().map_or(f64::NAN, |&i| row.logits[i].into());
    let total: f64 = order.iter().map(|&i| (f64::from(row.logits[i]) - max).exp()).sum();
    let same = |found: f32, id: usize| {
        let wanted = f64::from(row.logits[id]) - max - total.ln();
        let error = (f64::from(found) - wanted).abs();
        let fits = if max.is_infinite() {
            found.is_nan()
        } else {
            found == wanted as f32 || error <= 2e-6 * (1.0 + wanted.abs())
        };
        assert!(fits, "{what}: id {id} has {found}, not {wanted}");
    };
    match usize::try_from(token) {
        Ok(token) => same(found.chosen, token),
        Err(_) => assert!(found.chosen.is_nan(), "{what}: {}", found.chosen),
    }
    let wanted = (row.record.log_probabilities as usize).min(MAX_LOG_PROBABILITIES);
    for (place, (&id, &value)) in std::iter::zip(&found.ids, &found.values).enumerate() {
        match order.get(place).filter(|_| place < wanted) {
            Some(&best) => {
                assert_eq!(id, best as i32, "{what}: place {place}");
                same(value, best);
            }
            None => assert!(id == -1 && value.is_nan(), "{what}: {id} at place {place}"),
        }
    }
}

/// Steps rows at a level, and compares them with the model. Returns the number of tokens that the
/// model left open.
#[track_caller]
fn check(isa: Level, rows: &[Row], gap: usize, rings: [usize; 2]) -> usize {
    let mut open = 0;
    for (at, (row, after)) in std::iter::zip(rows, step(isa, rows, gap, rings)).enumerate() {
        let what = format!(
            "{isa}: row {at} of {} logits, {:?} at {}",
            row.logits.len(),
            row.record,
            row.position
        );
        let mut wanted = row.before(rings);
        if row.position >= 0 {
            match model(row) {
                Some(token) => assert_eq!(after.token, token, "{what}"),
                None => open += 1,
            }
            wanted.token = after.token;
            wanted.position = row.position.wrapping_add(1);
            wanted.count = row.count.wrapping_add(1);
            if rings[0] > 0 {
                wanted.ring[row.count as usize % rings[0]] = after.token;
            }
            if rings[1] > 0 && row.record.log_probabilities > 0 {
                let entry = row.count as usize % rings[1];
                check_logs(&what, row, after.token, after.logs[entry]);
                wanted.logs[entry] = after.logs[entry];
            }
        }
        assert_eq!(after, wanted, "{what}");
    }
    open
}

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    fn below(&mut self, n: u32) -> u32 {
        self.next() % n
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u32) as usize]
    }

    /// Logits with ties, with or without what is no number.
    fn logits(&mut self, n: usize) -> Vec<f32> {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let (spread, steps) = (self.one(&[0.0, 3.0, 12.0, 40.0]), self.one(&[2.0, 16.0, 1e6]));
        let mut all: Vec<f32> = noise(n, self.next().into())
            .iter()
            .map(|v| (v * spread * steps).round() / steps)
            .collect();
        for _ in 0..self.one(&[0, 0, 2, 9]) {
            all[self.below(n as u32) as usize] = self.one(&[nan, -inf, -0.0, 0.0, f32::MIN]);
        }
        match self.below(16) {
            0 => all.fill(nan),
            1 => all.fill(-inf),
            2 => all[self.below(n as u32) as usize] = inf,
            _ => (),
        }
        all
    }

    /// A rule that a host accepts.
    fn sampling(&mut self) -> Sampling {
        Sampling {
            temperature: self.one(&[0.0, 0.3, 1.0, 1.0, 2.5, 1e-30, 1e30]),
            top_k: self.one(&[0, 0, 1, 2, 7, 40, 1000]),
            top_p: self.one(&[1.0, 1.0, 0.95, 0.5, 0.1, 1e-6]),
            min_p: self.one(&[0.0, 0.0, 0.02, 0.3, 1.0]),
            seed: u64::from(self.next()) << 32 | u64::from(self.next()),
            log_probabilities: self.one(&[0, 0, 1, 5, 20]),
        }
    }

    /// A record with words that no host writes.
    fn corrupt(&mut self) -> SamplingRecord {
        let mut record = self.sampling().record().unwrap();
        let words: &mut [u32; 8] = bytemuck::cast_mut(&mut record);
        for _ in 0..1 + self.below(4) {
            let odd = [f32::NAN, -1.0, f32::INFINITY, f32::NEG_INFINITY, 1e-45, -0.0, 7.0];
            let word = [self.next(), u32::MAX, 1 << 31, self.one(&odd).to_bits()];
            words[self.below(8) as usize] = self.one(&word);
        }
        record
    }

    fn rows(&mut self, count: usize, n: usize, corrupt: bool) -> Vec<Row> {
        let row = |_| Row {
            logits: self.logits(n),
            record: if corrupt { self.corrupt() } else { self.sampling().record().unwrap() },
            position: self.one(&[0, 1, 77, 4095, i32::MAX, -1, i32::MIN]),
            count: self.one(&[0, 1, 2, 9, u32::MAX]),
        };
        (0..count).map(row).collect()
    }
}

/// Steps random rows at every level. Most of them are away from borders.
fn random_rows(sizes: &[usize], count: usize, times: usize, corrupt: bool) {
    for isa in levels() {
        let (mut dice, mut open) = (Dice(7), 0);
        for &n in sizes {
            for i in 0..times {
                let rows = dice.rows(count, n, corrupt);
                open += check(isa, &rows, i % 3, [i % 4, i % 3]);
            }
        }
        assert!(open * 2 <= sizes.len() * times * count, "{isa}: {open} rows are left open");
    }
}

#[test]
fn rows_follow_their_own_records_and_idle_rows_stay() {
    random_rows(&[1, 2, 31, 257], 5, 24, false);
    random_rows(&[1025, 5000], 3, 6, false);
}

#[test]
fn rows_of_real_vocabularies_follow_their_records() {
    random_rows(&[32_000], 2, 2, false);
    random_rows(&[128_256], 1, 2, false);
}

#[test]
fn any_words_are_a_record() {
    random_rows(&[1, 40, 300], 5, 24, true);
}

/// Words are equal to the bit, also those of sums that another order could round otherwise.
#[test]
fn a_cluster_of_blocks_finds_what_one_block_finds() {
    if super::emulated::cuda().is_none() {
        return;
    }
    let (cluster, block) = (Level::Cuda("cuda/sm_90"), Level::Cuda("cuda"));
    let mut dice = Dice(11);
    for (n, corrupt) in [(16_384, false), (16_385, true), (20_011, false), (33_001, false)] {
        for i in 0..3 {
            let rows = dice.rows(2, n, corrupt);
            let words = |level| step(level, &rows, i, [3, 2]);
            assert_eq!(words(cluster), words(block), "{rows:?}");
        }
        // The first of equal ones, wherever they lie among the blocks.
        let mut values = vec![f32::NAN; n];
        for places in [&[][..], &[n - 1], &[n / 2, n - 1], &[n / 3, n / 2], &[0, n / 8]] {
            places.iter().for_each(|&i| values[i] = -2.5);
            let wanted = values.iter().position(|v| *v == -2.5).map_or(-1, |i| i as i32);
            for x in [DType::F32, DType::Bf16, DType::F16] {
                let mut input = Tensor::new(x, &values);
                let p = RowParams {
                    rows: 1,
                    n: n as u32,
                    ldx: n as u32,
                    x: x as u32,
                    ..Default::default()
                };
                let mut ids = [-9, -9];
                run(cluster, "argmax", &p, &[input.bind(), bind(&mut ids[..1])]);
                run(block, "argmax", &p, &[input.bind(), bind(&mut ids[1..])]);
                assert_eq!(ids, [wanted; 2], "{n} elements of {x:?}, {places:?}");
            }
        }
    }
}

/// A model of one cut at a time, with the ids that are left.
#[test]
fn each_cut_leaves_what_it_says() {
    // Probabilities of 1/2, 1/4, 1/8, 1/8.
    let logits: Vec<f32> = [0.5f32, 0.125, 0.25, 0.125].iter().map(|p| p.ln()).collect();
    let warm = Sampling { temperature: 1.0, ..Sampling::default() };
    for (how, wanted) in [
        (warm, &[0, 1, 2, 3][..]),
        (Sampling { top_k: 3, ..warm }, &[0, 1, 2]),
        (Sampling { top_p: 0.49, ..warm }, &[0]),
        (Sampling { top_p: 0.74, ..warm }, &[0, 2]),
        // Of equal ones the first.
        (Sampling { top_p: 0.8, ..warm }, &[0, 1, 2]),
        (Sampling { top_p: 0.9, ..warm }, &[0, 1, 2, 3]),
        // Of what top-k leaves, which is 7/8.
        (Sampling { top_k: 3, top_p: 0.84, ..warm }, &[0, 2]),
        (Sampling { min_p: 0.24, ..warm }, &[0, 1, 2, 3]),
        (Sampling { min_p: 0.26, ..warm }, &[0, 2]),
        (Sampling { min_p: 1.0, ..warm }, &[0]),
        // The temperature goes first: the square roots are 0.71, 0.35, 0.5, 0.35 of 1.91.
        (Sampling { temperature: 2.0, min_p: 0.6, ..warm }, &[0, 2]),
        (Sampling { temperature: 2.0, top_p: 0.36, ..warm }, &[0]),
        (Sampling { temperature: 2.0, top_p: 0.38, ..warm }, &[0, 2]),
    ] {
        for isa in levels() {
            let mut seen: Vec<usize> =
                (0..60).map(|position| sample(isa, how, &logits, position)).collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen, wanted, "{isa}: {how:?}");
        }
    }
}

/// All levels find the same cut among many weights, also one that lies within rounding of a border.
#[test]
fn every_level_cuts_at_the_same_candidate() {
    let n = 3000;
    for seed in 0..6 {
        let logits: Vec<f32> =
            noise(n, seed).iter().map(|v| if seed % 2 == 0 { 2.0 } else { v * 4.0 }).collect();
        // Equal logits: exact parts of the sum.
        for top_p in [0.25, 0.5, 0.749, 0.999_999] {
            let how = Sampling { temperature: 1.0, top_p, seed, ..Sampling::default() };
            for position in 0..4 {
                let wanted = drawn(Level::GENERIC, how, &logits, position);
                for isa in levels() {
                    assert_eq!(drawn(isa, how, &logits, position), wanted, "{isa}: {how:?}");
                }
            }
        }
    }
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
            prop_assert_eq!(drawn(isa, Sampling::default(), &floats, 3), wanted);
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
    let order = ranked(&logits);
    let allowed = &order[..n.min(k as usize)];
    let p = Sampling { top_k: k, temperature: 5.0, seed, ..Sampling::default() };
    for isa in levels() {
        let token = sample(isa, p, &logits, position);
        prop_assert!(allowed.contains(&token), "{isa}: {token} is not among the {k} largest");
        prop_assert_eq!(
            token,
            sample(isa, p, &logits, position),
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
        let p = Sampling { top_k: 3, temperature: 1.0, ..Sampling::default() };
        assert_eq!(sample(isa, p, &[0.0, inf, 1.0, inf, nan], 1), 1);
        for position in 0..50 {
            assert!([0, 3].contains(&sample(isa, p, &[1.0, nan, -inf, 1.5, nan], position)));
        }
        for temperature in [0.0, 1.0] {
            assert_eq!(drawn(isa, Sampling { temperature, ..p }, &[nan; 40], 1), -1);
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
    let p = Sampling { temperature, seed: 42, ..Sampling::default() };
    let weights: Vec<f64> = logits.iter().map(|&l| f64::from(l / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    for isa in levels() {
        let draws = if matches!(isa, Level::Cpu(_)) { 20_000 } else { 500 };
        let mut counts = [0u32; 6];
        (0..draws).for_each(|position| counts[sample(isa, p, &logits, position)] += 1);
        for (count, w) in counts.iter().zip(&weights) {
            let (q, n) = (w / total, f64::from(draws));
            let deviation = (f64::from(*count) - n * q).abs();
            assert!(deviation <= 5.0 * (n * q * (1.0 - q)).sqrt() + 1.0, "{isa}: {counts:?}");
        }
    }
    let other = Sampling { seed: 43, ..p };
    let isa = Level::GENERIC;
    assert!(
        (0..100).any(|at| sample(isa, p, &logits, at) != sample(isa, other, &logits, at)),
        "the seed does not matter"
    );
}

/// Covers every part of the logits that a warp of the CUDA kernel processes.
#[test]
fn every_level_draws_the_same_token() {
    for n in [5, 300, 1000, 5000, 20_000] {
        let logits: Vec<f32> = noise(n, 4).iter().map(|v| (v * 30.0).round() / 10.0).collect();
        for top_k in [0, 40] {
            let p = Sampling { top_k, temperature: 2.0, seed: 9, ..Sampling::default() };
            for position in 0..6 {
                let wanted = sample(Level::GENERIC, p, &logits, position);
                for isa in levels() {
                    assert_eq!(
                        sample(isa, p, &logits, position),
                        wanted,
                        "{isa}: {n} logits, position {position}"
                    );
                }
            }
        }
    }
}

#[test]
fn next_token_is_a_draw_and_advance() {
    let mut dice = Dice(3);
    for isa in levels() {
        let mut rows = dice.rows(3, 100, false);
        (rows[0].position, rows[1].position, rows[2].position) = (10, -4, i32::MAX);
        let after = step(isa, &rows, 0, [4, 0]);
        let mut tokens: Vec<i32> = after.iter().map(|s| s.token).collect();
        let mut positions: Vec<i32> = rows.iter().map(|r| r.position).collect();
        let mut counts: Vec<u32> = rows.iter().map(|r| r.count).collect();
        let mut ring = [TOKEN; 3 * 4];
        let p = AdvanceParams { rows: 3, step: 1, ring: 4 };
        let words = [bind(&mut tokens), bind(&mut positions), bind(&mut ring), bind(&mut counts)];
        run(isa, "advance", &p, &words);
        for (r, after) in after.iter().enumerate() {
            assert_eq!((positions[r], counts[r]), (after.position, after.count), "{isa}: row {r}");
            assert_eq!(ring[4 * r..][..4], after.ring, "{isa}: row {r}");
        }
        assert_eq!(positions, [11, -4, i32::MIN]);
    }
}

#[test]
fn a_position_advances_by_a_whole_prompt() {
    for isa in levels() {
        let (mut token, mut position, mut ring, mut count) = ([5i32], [0i32], [0i32; 2], [3u32]);
        let bindings = [bind(&mut token), bind(&mut position), bind(&mut ring), bind(&mut count)];
        run(isa, "advance", &AdvanceParams { rows: 1, step: 17, ring: 2 }, &bindings);
        assert_eq!((position, ring, count), ([17], [0, 5], [4]));
    }
    assert_eq!(DType::from_raw(3), None);
}

#[test]
fn a_rule_beyond_its_limits_has_no_record() {
    let rule = Sampling::default();
    assert_eq!(rule.record().unwrap().top_p, 1.0);
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for (name, bad) in [
        ("temperature", Sampling { temperature: nan, ..rule }),
        ("temperature", Sampling { temperature: -0.1, ..rule }),
        ("temperature", Sampling { temperature: inf, ..rule }),
        ("top_p", Sampling { top_p: nan, ..rule }),
        ("top_p", Sampling { top_p: 0.0, ..rule }),
        ("top_p", Sampling { top_p: 1.001, ..rule }),
        ("min_p", Sampling { min_p: nan, ..rule }),
        ("min_p", Sampling { min_p: -0.1, ..rule }),
        ("min_p", Sampling { min_p: 1.001, ..rule }),
        ("log_probabilities", Sampling { log_probabilities: 21, ..rule }),
    ] {
        let error = bad.record().unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("give"), "{error}");
    }
}

/// The factor divides logits above zero and multiplies others, for what was seen; what is banned
/// has the lowest logit. The token joins what was seen, and an idle row stays.
#[test]
fn logits_are_penalised_as_transformers_does_it() {
    for isa in levels() {
        let n = 40;
        let logits: Vec<f32> = (0..3 * n).map(|i| if i % 2 == 0 { 3.0 } else { -3.0 }).collect();
        let (mut after, mut seen) = (logits.clone(), vec![0b1011_u32, 1, 0b11, 0, 0b11, 0]);
        let (banned, position) = (vec![0b1000_u32, 0, 0b100, 0, 0b100, 1 << 7], [5_i32, 0, -1]);
        let (factors, tokens) = ([2.0_f32, 0.0, 2.0], [33_i32, -1, 2]);
        let p = RowParams { rows: 3, n: n as u32, ldx: n as u32, ..Default::default() };
        let bindings = [
            bind(&mut after),
            bind_read(&factors),
            bind_read(&tokens),
            bind_read(&position),
            bind(&mut seen),
            bind_read(&banned),
        ];
        run(isa, "penalise", &p, &bindings);
        let mut wanted = logits;
        for (id, logit) in
            [(0, 1.5), (1, -6.0), (3, f32::MIN), (32, 1.5), (33, -6.0), (n + 2, f32::MIN)]
        {
            wanted[id] = logit;
        }
        assert_eq!(after, wanted, "{isa}");
        assert_eq!(seen, [0b1011, 0b11, 0b11, 0, 0b11, 0], "{isa}");
    }
}
