//! Attention, over prompts and over one row.

use leasehold_operators::kernels::cpu::attention::AttentionParams;
use leasehold_operators::kernels::cpu::cache::CacheLayout;
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::rope::{RopeParams, table};
use leasehold_operators::kernels::cpu::tile::{NONE, bind};
use proptest::prelude::*;

use super::rope::frequencies;
use super::{
    Level, Tensor, cases, close, dtypes, emulated, levels, noise, rounding, run, run_scattered,
};

/// Attention of row `r` of `q` with head `h`, over the first `len` positions.
fn attend(q: &[f64], keys: &[f64], values: &[f64], dim: usize, scale: f64) -> Vec<f64> {
    let scores: Vec<f64> = keys
        .chunks(dim)
        .map(|k| k.iter().zip(q).map(|(a, b)| a * b).sum::<f64>() * scale)
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    (0..dim)
        .map(|d| weights.iter().zip(values.chunks(dim)).map(|(w, v)| w * v[d]).sum::<f64>() / total)
        .collect()
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    m: usize,
    kv_heads: usize,
    group: usize,
    dim: usize,
    at: usize,
    x: DType,
    cache: DType,
}

/// Positions of a cache: more than two tiles of every kernel.
const POSITIONS: usize = 300;

/// Shapes that kernels for tensor cores take.
fn tiled_shape() -> impl Strategy<Value = Shape> {
    let dim = prop_oneof![Just(64usize), Just(80), Just(96), Just(128)];
    let at = prop_oneof![Just(0usize), Just(63), 0usize..290];
    let half = prop_oneof![Just(DType::Bf16), Just(DType::F16)];
    let m = prop_oneof![Just(16usize), Just(128), 16usize..140];
    (m, 1usize..3, 1usize..3, dim, at, half).prop_map(|(m, kv_heads, group, dim, at, x)| Shape {
        m,
        kv_heads,
        group,
        dim,
        at,
        x,
        cache: x,
    })
}

/// The error that a result of attention may have beside `4e-6` and its own rounding: kernels for
/// tensor cores round the weights, whose sum is 1, to the type of the values.
fn weights_rounding(s: &Shape) -> f64 {
    if s.x == s.cache && s.x != DType::F32 && s.m >= 16 { rounding(s.x) } else { 0.0 }
}

fn shape() -> impl Strategy<Value = Shape> {
    let dim = prop_oneof![
        Just(8usize),
        Just(16),
        Just(32),
        Just(64),
        Just(48),
        Just(80),
        Just(128),
        (1usize..20).prop_map(|d| 2 * d)
    ];
    // (128 is the first position of a part of its own in CUDA's kernel for a step.)
    let at = prop_oneof![Just(0usize), Just(63), Just(64), Just(128), 0usize..290];
    (
        prop_oneof![Just(1usize), 1usize..24],
        1usize..5,
        prop_oneof![1usize..5, Just(17)],
        dim,
        at,
        dtypes(),
        dtypes(),
    )
        .prop_map(|(m, kv_heads, group, dim, at, x, cache)| Shape {
            m,
            kv_heads,
            group,
            dim,
            at,
            x,
            cache,
        })
}

fn params(s: &Shape) -> AttentionParams {
    let wide = (s.kv_heads * s.group * s.dim) as u32;
    AttentionParams {
        m: s.m as u32,
        heads: (s.kv_heads * s.group) as u32,
        kv_heads: s.kv_heads as u32,
        head_dim: s.dim as u32,
        positions: POSITIONS as u32,
        ldq: wide + 3,
        ldo: wide + 1,
        scale: (s.dim as f32).sqrt().recip(),
        x: s.x as u32,
        cache: s.cache as u32,
        rotary: 0,
        layout: CacheLayout::contiguous(s.kv_heads as u32, POSITIONS as u32),
    }
}

fn causal_and_grouped(s: Shape, seed: u64) -> Result<(), TestCaseError> {
    let heads = s.kv_heads * s.group;
    let wide = heads * s.dim;
    // Keys of sufficient size, so that the running maximum changes between blocks.
    let keys: Vec<f32> =
        noise(s.kv_heads * POSITIONS * s.dim, seed).iter().map(|v| 3.0 * v).collect();
    let mut keys = Tensor::new(s.cache, &keys);
    let mut values = Tensor::new(s.cache, &noise(s.kv_heads * POSITIONS * s.dim, seed + 1));
    let mut q = Tensor::new(s.x, &noise(s.m * (wide + 3), seed + 2));
    let mut position = [s.at as i32];
    let at = bind(&mut position);
    let (k, v, queries) = (keys.values(), values.values(), q.values());
    let mut wanted = vec![Tensor::junk(s.x, 1).values()[0]; s.m * (wide + 1)];
    for r in 0..s.m {
        for h in 0..heads {
            let len = s.at + r + 1;
            let base = h / s.group * POSITIONS * s.dim;
            let to = r * (wide + 1) + h * s.dim;
            let row = if len <= POSITIONS {
                let head = &queries[r * (wide + 3) + h * s.dim..][..s.dim];
                attend(
                    head,
                    &k[base..base + len * s.dim],
                    &v[base..base + len * s.dim],
                    s.dim,
                    1.0 / (s.dim as f64).sqrt(),
                )
            } else {
                vec![f64::NAN; s.dim]
            };
            wanted[to..to + s.dim].copy_from_slice(&row);
        }
    }
    // Devices of the generation before have another kernel for some shapes.
    let older = emulated::cuda().map(|_| Level::Cuda("cuda/sm_80"));
    for isa in levels().into_iter().chain(older) {
        let mut out = Tensor::junk(s.x, s.m * (wide + 1));
        run(
            isa,
            "attention",
            &params(&s),
            &[q.bind(), keys.bind(), values.bind(), at, out.bind(), NONE],
        );
        close(isa.name(), &out.values(), &wanted, |i| {
            4e-6 + wanted[i].abs() * rounding(s.x) + weights_rounding(&s)
        });
        let mut again = Tensor::junk(s.x, s.m * (wide + 1));
        run_scattered(
            isa,
            "attention",
            &params(&s),
            &[q.bind(), keys.bind(), values.bind(), at, again.bind(), NONE],
        );
        prop_assert!(again.bits() == out.bits(), "{isa}: the order of tiles shows in the result");
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn attention_of_many_rows_is_causal_and_grouped(s in tiled_shape(), seed in 0u64..99) {
        causal_and_grouped(s, seed)?;
    }
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn attention_is_causal_and_grouped(s in shape(), seed in 0u64..99) {
        causal_and_grouped(s, seed)?;
    }

    #[test]
    fn decode_attention_is_rope_append_and_attention(s in shape(), seed in 0u64..99) {
        let s = Shape { m: 1, group: s.group.min(16), dim: s.dim.next_multiple_of(2), ..s };
        let (heads, kv) = (s.kv_heads * s.group, s.kv_heads * s.dim);
        let wide = heads * s.dim;
        let cache = |seed| Tensor::new(s.cache, &noise(s.kv_heads * POSITIONS * s.dim, seed));
        let mut q = Tensor::new(s.x, &noise(wide, seed));
        let (mut k, mut v) = (Tensor::new(s.x, &noise(kv, seed + 1)), Tensor::new(s.x, &noise(kv, seed + 2)));
        let mut angles = Tensor::new(DType::F32, &table(&frequencies(s.dim), POSITIONS));
        let mut position = [s.at as i32];
        let at = bind(&mut position);
        let dim = s.dim as u32;
        let rope = RopeParams {
            m: 1, heads: heads as u32, kv_heads: s.kv_heads as u32, head_dim: dim, rotary: dim, positions: POSITIONS as u32,
            ld: [wide as u32, kv as u32, kv as u32], x: s.x as u32, cache: s.cache as u32,
            layout: CacheLayout::contiguous(s.kv_heads as u32, POSITIONS as u32),
        };
        let p = AttentionParams { rotary: dim, ldq: wide as u32, ldo: wide as u32, ..params(&s) };
        for isa in levels() {
            let (mut keys, mut values, mut turned) = (cache(seed + 3), cache(seed + 4), q.clone());
            let mut wanted = Tensor::junk(s.x, wide);
            run(isa, "rope_append", &rope, &[turned.bind(), k.bind(), v.bind(), angles.bind(), keys.bind(), values.bind(), at, NONE]);
            run(isa, "attention", &p, &[turned.bind(), keys.bind(), values.bind(), at, wanted.bind(), NONE]);
            let (mut keys2, mut values2, mut out) = (cache(seed + 3), cache(seed + 4), Tensor::junk(s.x, wide));
            let mut scratch = Tensor::new(DType::F32, &vec![0.0; p.scratch_bytes() as usize / 4]);
            // The second launch finds the scratch memory as the first one left it.
            for again in [false, true] {
                let before = out.bits().to_vec();
                run(isa, "decode_attention", &p, &[q.bind(), k.bind(), v.bind(), angles.bind(), keys2.bind(), values2.bind(), at, out.bind(), scratch.bind(), NONE]);
                prop_assert!(!again || before == out.bits());
            }
            prop_assert!(keys2.bits() == keys.bits() && values2.bits() == values.bits());
            // The separate kernels round the rotated query to its type; the fused one does not.
            close(isa.name(), &out.values(), &wanted.values(), |i| 1e-5 + wanted.values()[i].abs() * rounding(s.x) + 4.0 * rounding(s.x));
        }
    }
}

/// Rows of several sequences: the sizes of all, and a position for each.
fn rows() -> impl Strategy<Value = (Shape, Vec<i32>)> {
    let position =
        prop_oneof![4 => 0i32..POSITIONS as i32, 1 => Just(-1), 1 => Just(POSITIONS as i32)];
    (shape(), prop::collection::vec(position, 1..5))
}

proptest! {
    #![proptest_config(cases(40))]

    /// Each row gives the bits that it gives alone, in its own caches. A row outside its caches
    /// leaves them as they are and is NaN. The bytes between rows are not written.
    #[test]
    fn decode_attention_of_several_rows_is_that_of_each_alone((s, at) in rows(), seed in 0u64..99) {
        let (m, group, dim) = (at.len(), s.group.min(16), s.dim.next_multiple_of(2));
        let (wide, kv) = (s.kv_heads * group * dim, s.kv_heads * dim);
        let part = |n: usize, row: usize, from: u64| noise(n, seed + 10 * row as u64 + from);
        let all = |n: usize, from| (0..m).flat_map(|row| part(n, row, from)).collect::<Vec<_>>();
        let s = Shape { group, dim, ..s };
        let one = AttentionParams { m: 1, rotary: dim as u32, ..params(&s) };
        let p = AttentionParams { m: m as u32, ..one };
        let mut angles = Tensor::new(DType::F32, &table(&frequencies(dim), POSITIONS));
        for isa in levels() {
            let scratch = |p: &AttentionParams| Tensor::new(DType::F32, &vec![0.0; p.scratch_bytes() as usize / 4]);
            let mut q = Tensor::new(s.x, &all(wide + 3, 0));
            let (mut k, mut v) = (Tensor::new(s.x, &all(kv, 1)), Tensor::new(s.x, &all(kv, 2)));
            let (mut keys, mut values) = (Tensor::new(s.cache, &all(kv * POSITIONS, 3)), Tensor::new(s.cache, &all(kv * POSITIONS, 4)));
            let (mut out, mut parts, mut positions) = (Tensor::junk(s.x, m * (wide + 1)), scratch(&p), at.clone());
            // The second launch finds the scratch memory as the first one left it.
            for _ in 0..2 {
                run(isa, "decode_attention", &p, &[q.bind(), k.bind(), v.bind(), angles.bind(), keys.bind(), values.bind(), bind(&mut positions), out.bind(), parts.bind(), NONE]);
            }
            let (keys, values, out) = (keys.values(), values.values(), out.values());
            let bits = |v: &[f64]| v.iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect::<Vec<_>>();
            for row in 0..m {
                let mut q = Tensor::new(s.x, &part(wide + 3, row, 0));
                let (mut k, mut v) = (Tensor::new(s.x, &part(kv, row, 1)), Tensor::new(s.x, &part(kv, row, 2)));
                let cache = |from| Tensor::new(s.cache, &part(kv * POSITIONS, row, from));
                let (mut own_keys, mut own_values, mut own) = (cache(3), cache(4), Tensor::junk(s.x, wide + 1));
                let (mut position, mut own_parts) = ([at[row]], scratch(&one));
                run(isa, "decode_attention", &one, &[q.bind(), k.bind(), v.bind(), angles.bind(), own_keys.bind(), own_values.bind(), bind(&mut position), own.bind(), own_parts.bind(), NONE]);
                let cut = |all: &[f64], n: usize| bits(&all[row * n..(row + 1) * n]);
                prop_assert_eq!(cut(&keys, kv * POSITIONS), bits(&own_keys.values()), "{} keys of row {}", isa, row);
                prop_assert_eq!(cut(&values, kv * POSITIONS), bits(&own_values.values()), "{} values of row {}", isa, row);
                prop_assert_eq!(cut(&out, wide + 1), bits(&own.values()), "{} row {}", isa, row);
                let words = one.scratch_bytes() as usize / 4;
                prop_assert_eq!(cut(&parts.values(), words), bits(&own_parts.values()), "{} scratch of row {}", isa, row);
                if !(0..POSITIONS as i32).contains(&at[row]) {
                    prop_assert_eq!(bits(&own_keys.values()), bits(&cache(3).values()));
                    prop_assert!(own.values()[..wide].iter().all(|x| x.is_nan()));
                }
            }
        }
    }
}

#[test]
fn a_later_row_never_shows_in_an_earlier_one() {
    let s =
        Shape { m: 5, kv_heads: 1, group: 2, dim: 16, at: 60, x: DType::F32, cache: DType::F32 };
    let wide = s.group * s.dim;
    for isa in levels() {
        let outputs: Vec<Vec<f64>> = [0.5, f32::NAN]
            .iter()
            .map(|&last| {
                let (mut k, mut v) = (noise(POSITIONS * s.dim, 1), noise(POSITIONS * s.dim, 2));
                k[64 * s.dim..65 * s.dim].fill(last);
                v[64 * s.dim..65 * s.dim].fill(last);
                let (mut k, mut v) = (Tensor::new(s.cache, &k), Tensor::new(s.cache, &v));
                let mut q = Tensor::new(s.x, &noise(s.m * (wide + 3), 3));
                let mut out = Tensor::junk(s.x, s.m * (wide + 1));
                let mut position = [s.at as i32];
                run(
                    isa,
                    "attention",
                    &params(&s),
                    &[q.bind(), k.bind(), v.bind(), bind(&mut position), out.bind(), NONE],
                );
                out.values()
            })
            .collect();
        let whole = 4 * (wide + 1);
        assert_eq!(outputs[0][..whole], outputs[1][..whole], "{isa}");
        assert!(outputs[1][whole..whole + wide].iter().all(|v| v.is_nan()), "{isa}");
    }
}
