//! Rotary embedding and the caches.

use leasehold_operators::kernels::cpu::cache::CacheLayout;
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::rope::{RopeParams, table};
use leasehold_operators::kernels::cpu::tile::NONE;
use proptest::prelude::*;

use super::{Tensor, cases, close, dtypes, levels, noise, rounding, run};

pub fn frequencies(rotary: usize) -> Vec<f64> {
    (0..rotary / 2).map(|i| 1e4_f64.powf(-2.0 * i as f64 / rotary as f64)).collect()
}

/// Rotates one head, as `transformers` does.
pub fn rotated(head: &[f64], position: usize, rotary: usize) -> Vec<f64> {
    let half = rotary / 2;
    let angles: Vec<f64> = frequencies(rotary).iter().map(|f| f * position as f64).collect();
    (0..head.len())
        .map(|i| match i {
            i if i < half => head[i] * angles[i].cos() - head[i + half] * angles[i].sin(),
            i if i < rotary => {
                head[i] * angles[i - half].cos() + head[i - half] * angles[i - half].sin()
            }
            _ => head[i],
        })
        .collect()
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn rope_append_is_rope_and_cache_append(
        m in 1usize..9, heads in 1usize..5, kv_heads in 1usize..4, half in 1usize..20, rest in 0usize..6, at in 0usize..12,
        x in dtypes(), cache in dtypes(), seed in 0u64..99,
    ) {
        let (rotary, dim, positions) = (2 * half, 2 * half + rest, 16);
        let (wide, kv) = (heads * dim, kv_heads * dim);
        let p = RopeParams {
            m: m as u32, heads: heads as u32, kv_heads: kv_heads as u32, head_dim: dim as u32, rotary: rotary as u32,
            positions: positions as u32, ld: [wide as u32 + 1, kv as u32, kv as u32 + 2], x: x as u32, cache: cache as u32,
            layout: CacheLayout::contiguous(kv_heads as u32, positions as u32),
        };
        let mut table = Tensor::new(DType::F32, &table(&frequencies(rotary), positions));
        let mut position = [at as i32];
        let at_b = leasehold_operators::kernels::cpu::tile::bind(&mut position);
        let q0 = Tensor::new(x, &noise(m * (wide + 1), seed));
        let (mut k, mut v) = (Tensor::new(x, &noise(m * kv, seed + 1)), Tensor::new(x, &noise(m * (kv + 2), seed + 2)));
        let empty = Tensor::new(cache, &vec![7.0; kv * positions]);
        let tolerance = |dtype: DType, w: f64| w.abs() * rounding(dtype) + 1e-6;

        let mut q_wanted = q0.values();
        let (mut k_wanted, mut v_wanted) = (empty.values(), empty.values());
        for r in 0..m {
            for h in 0..heads {
                let from = r * (wide + 1) + h * dim;
                let head = if at + r < positions { rotated(&q_wanted[from..from + dim], at + r, rotary) } else { vec![f64::NAN; dim] };
                q_wanted[from..from + dim].copy_from_slice(&head);
            }
            if at + r < positions {
                for h in 0..kv_heads {
                    let to = (h * positions + at + r) * dim;
                    k_wanted[to..to + dim].copy_from_slice(&rotated(&k.values()[r * kv + h * dim..][..dim], at + r, rotary));
                    v_wanted[to..to + dim].copy_from_slice(&v.values()[r * (kv + 2) + h * dim..][..dim]);
                }
            }
        }
        for isa in levels() {
            let (mut q, mut keys, mut values) = (q0.clone(), empty.clone(), empty.clone());
            run(isa, "rope_append", &p, &[q.bind(), k.bind(), v.bind(), table.bind(), keys.bind(), values.bind(), at_b, NONE]);
            close("queries", &q.values(), &q_wanted, |i| tolerance(x, q_wanted[i]));
            close("keys", &keys.values(), &k_wanted, |i| tolerance(cache, k_wanted[i]));
            close("values", &values.values(), &v_wanted, |i| tolerance(cache, v_wanted[i]));
            // The same result with separate kernels.
            let (mut q2, mut values2) = (q0.clone(), empty.clone());
            run(isa, "rope", &p, &[q2.bind(), table.bind(), at_b]);
            prop_assert!(q2.bits() == q.bits());
            let append = RopeParams { ld: [kv as u32 + 2, 0, 0], ..p };
            run(isa, "cache_append", &append, &[v.bind(), values2.bind(), at_b]);
            prop_assert!(values2.bits() == values.bits());
        }
    }
}

#[test]
fn a_negative_position_writes_nothing_to_a_cache() {
    let p = RopeParams {
        m: 2,
        heads: 1,
        kv_heads: 1,
        head_dim: 4,
        rotary: 4,
        positions: 3,
        ld: [4, 4, 4],
        layout: CacheLayout::contiguous(1, 3),
        ..Default::default()
    };
    for isa in levels() {
        let mut position = [-2];
        let (mut x, mut cache) =
            (Tensor::new(DType::F32, &[1.0; 8]), Tensor::new(DType::F32, &[5.0; 12]));
        let at = leasehold_operators::kernels::cpu::tile::bind(&mut position);
        run(isa, "cache_append", &p, &[x.bind(), cache.bind(), at]);
        assert!(cache.values().iter().all(|&v| v == 5.0));
    }
}
