//! Caches that grow by positions, in parts: the bits are those of contiguous caches, and nothing
//! beyond a limit is touched.

use leasehold_operators::kernels::cpu::attention::AttentionParams;
use leasehold_operators::kernels::cpu::cache::CacheLayout;
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::rope::{RopeParams, table};
use leasehold_operators::kernels::cpu::tile::{NONE, bind};
use proptest::prelude::*;

use super::rope::frequencies;
use super::{Level, Tensor, cases, dtypes, emulated, levels, noise, run};

const POSITIONS: usize = 150;

/// Sequences with caches in parts: for each a part of keys and one of values for some layers.
#[derive(Debug, Clone)]
struct Parts {
    kv_heads: usize,
    dim: usize,
    layers: usize,
    layer: usize,
    /// Positions of each sequence that have memory.
    room: Vec<usize>,
    cache: DType,
}

impl Parts {
    fn layout(&self) -> CacheLayout {
        let position = self.layers * self.kv_heads;
        CacheLayout {
            position: position as u32,
            head: 1,
            part: (position * POSITIONS + 5) as u32,
            offset: (self.layer * self.kv_heads) as u32,
            keys: 0,
            values: 1,
            next: 3,
            limits: 3 * self.room.len() as u32,
        }
    }

    /// The limits: keys have a little more than the positions, and values exactly them.
    fn limits(&self) -> Vec<u64> {
        let bytes = |positions: usize| {
            positions * self.layers * self.kv_heads * self.dim * self.cache.bytes()
        };
        let each = |&room: &usize| [bytes(room) + 1, bytes(room), 0].map(|bytes| bytes as u64);
        let mut words: Vec<_> = self.room.iter().flat_map(each).collect();
        // (Nothing is shared.)
        words.resize(2 * words.len(), 0);
        words
    }

    /// The words when the first positions of every sequence are shared, by its values alone.
    fn sharing(&self, positions: usize) -> Vec<u64> {
        let mut words = self.limits();
        let (limits, shared) = words.split_at_mut(3 * self.room.len());
        let bytes = positions * self.layers * self.kv_heads * self.dim * self.cache.bytes();
        shared.chunks_exact_mut(3).for_each(|part| part[1] = bytes as u64);
        assert_eq!(limits.len(), shared.len());
        words
    }

    /// The element of a position of a head, in keys (0) or values (1).
    fn at(&self, sequence: usize, which: usize, head: usize, position: usize) -> usize {
        let l = self.layout();
        let part = (3 * sequence + which) * l.part as usize;
        (part + l.offset as usize + head + position * l.position as usize) * self.dim
    }

    /// All parts: the keys and values of contiguous caches at their places, and noise elsewhere.
    fn memory(&self, keys: &Tensor, values: &Tensor) -> Tensor {
        let l = self.layout();
        let all = l.limits as usize * l.part as usize * self.dim;
        let mut memory = Tensor::new(self.cache, &noise(all, 77)).values();
        let contents = [keys.values(), values.values()];
        self.each(|which, at, from| {
            memory[at..at + self.dim].copy_from_slice(&contents[which][from..from + self.dim]);
        });
        Tensor::new(self.cache, &memory.iter().map(|&v| v as f32).collect::<Vec<_>>())
    }

    /// Calls `f` with each head's place in the parts and in contiguous caches.
    fn each(&self, mut f: impl FnMut(usize, usize, usize)) {
        for sequence in 0..self.room.len() {
            for head in 0..self.kv_heads {
                for position in 0..POSITIONS {
                    let from =
                        ((sequence * self.kv_heads + head) * POSITIONS + position) * self.dim;
                    (0..2)
                        .for_each(|which| f(which, self.at(sequence, which, head, position), from));
                }
            }
        }
    }

    /// The parts have what the contiguous caches have, and else what they had before.
    fn check(&self, what: &str, now: &Tensor, before: &Tensor, [keys, values]: [&Tensor; 2]) {
        let (now, mut wanted) = (now.values(), before.values());
        let contents = [keys.values(), values.values()];
        self.each(|which, at, from| {
            wanted[at..at + self.dim].copy_from_slice(&contents[which][from..from + self.dim]);
        });
        let bits = |v: &[f64]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&now) == bits(&wanted), "{what}: other bytes of the parts");
    }
}

fn parts(sequences: impl Strategy<Value = usize>) -> impl Strategy<Value = Parts> {
    let dim = prop_oneof![Just(8usize), Just(64), Just(80), Just(128), Just(6)];
    let room = prop_oneof![Just(0usize), Just(POSITIONS), 1..POSITIONS];
    let rooms = sequences.prop_flat_map(move |n| prop::collection::vec(room.clone(), n));
    (1usize..3, dim, 1usize..4, 0usize..3, rooms, dtypes()).prop_map(
        |(kv_heads, dim, layers, layer, room, cache)| Parts {
            kv_heads,
            dim,
            layers,
            layer: layer % layers,
            room,
            cache,
        },
    )
}

/// The levels, and CUDA's kernels for devices of the generation before.
fn all_levels() -> impl Iterator<Item = Level> {
    let older = emulated::cuda().map(|_| Level::Cuda("cuda/sm_80"));
    levels().into_iter().chain(older)
}

fn same(what: &str, a: &Tensor, b: &Tensor) {
    // (Any NaN is as good as any other.)
    let bits = |t: &Tensor| {
        let bits = |v: f64| if v.is_nan() { u64::MAX } else { v.to_bits() };
        t.values().into_iter().map(bits).collect::<Vec<_>>()
    };
    assert!(bits(a) == bits(b), "{what}");
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn decode_attention_in_parts_is_that_of_contiguous_caches(
        p in parts(1usize..4), group in 1usize..4, x in dtypes(), from in 0usize..POSITIONS, seed in 0u64..99,
    ) {
        let (m, heads) = (p.room.len(), p.kv_heads * group);
        let (wide, kv) = (heads * p.dim, p.kv_heads * p.dim);
        let params = AttentionParams {
            m: m as u32, heads: heads as u32, kv_heads: p.kv_heads as u32, head_dim: p.dim as u32, positions: POSITIONS as u32,
            ldq: wide as u32, ldo: wide as u32, scale: 0.2, x: x as u32, cache: p.cache as u32, rotary: p.dim as u32,
            layout: CacheLayout::contiguous(p.kv_heads as u32, POSITIONS as u32),
        };
        // The last position with memory, the first one without, or any.
        let at: Vec<i32> = p.room.iter().enumerate().map(|(i, &room)| match (seed as usize + i) % 3 {
            0 => room as i32 - 1,
            1 => room as i32,
            _ => from as i32,
        }).collect();
        // A row that would write what is shared is one without memory.
        let shared = if seed % 2 == 0 { 0 } else { seed as usize % POSITIONS };
        let has = |at: i32, room: usize| at < room as i32 && at >= shared as i32;
        let contiguous: Vec<i32> = at.iter().zip(&p.room).map(|(&at, &room)| if has(at, room) { at } else { -1 }).collect();
        let mut angles = Tensor::new(DType::F32, &table(&frequencies(p.dim), POSITIONS));
        let mut q = Tensor::new(x, &noise(m * wide, seed));
        let (mut k, mut v) = (Tensor::new(x, &noise(m * kv, seed + 1)), Tensor::new(x, &noise(m * kv, seed + 2)));
        let caches = [3, 4].map(|i| Tensor::new(p.cache, &noise(m * kv * POSITIONS, seed + i)));
        for isa in all_levels() {
            let scratch = || Tensor::new(DType::F32, &vec![0.0; params.scratch_bytes() as usize / 4]);
            let [mut keys, mut values] = caches.clone();
            let (mut out, mut positions, mut parts) = (Tensor::junk(x, m * wide), contiguous.clone(), scratch());
            run(isa, "decode_attention", &params, &[q.bind(), k.bind(), v.bind(), angles.bind(), keys.bind(), values.bind(), bind(&mut positions), out.bind(), parts.bind(), NONE]);
            let before = p.memory(&caches[0], &caches[1]);
            let (mut memory, mut limits, mut own) = (before.clone(), p.sharing(shared), Tensor::junk(x, m * wide));
            let (mut positions, mut parts) = (at.clone(), scratch());
            let grown = AttentionParams { layout: p.layout(), ..params };
            run(isa, "decode_attention", &grown, &[q.bind(), k.bind(), v.bind(), angles.bind(), memory.bind(), NONE, bind(&mut positions), own.bind(), parts.bind(), bind(&mut limits)]);
            same(&format!("{isa}: {at:?}"), &own, &out);
            p.check(&format!("{isa}"), &memory, &before, [&keys, &values]);
        }
    }

    #[test]
    fn prompts_in_parts_are_those_of_contiguous_caches(
        p in parts(Just(1usize)), group in 1usize..3, m in prop_oneof![1usize..9, 16usize..40], from in 0usize..POSITIONS, seed in 0u64..99,
    ) {
        let x = p.cache;
        let (heads, room) = (p.kv_heads * group, p.room[0]);
        let (wide, kv) = (heads * p.dim, p.kv_heads * p.dim);
        let rope = RopeParams {
            m: m as u32, heads: heads as u32, kv_heads: p.kv_heads as u32, head_dim: p.dim as u32, rotary: p.dim as u32,
            positions: POSITIONS as u32, ld: [wide as u32, kv as u32, kv as u32], x: x as u32, cache: x as u32,
            layout: CacheLayout::contiguous(p.kv_heads as u32, POSITIONS as u32),
        };
        let params = AttentionParams {
            m: m as u32, heads: heads as u32, kv_heads: p.kv_heads as u32, head_dim: p.dim as u32, positions: POSITIONS as u32,
            ldq: wide as u32, ldo: wide as u32, scale: 0.2, x: x as u32, cache: x as u32, rotary: 0, layout: rope.layout,
        };
        // The rows end beyond the memory, or anywhere.
        let from = if seed % 2 == 0 { room.saturating_sub(m / 2) } else { from } as i32;
        let mut position = [from];
        let at = bind(&mut position);
        let mut angles = Tensor::new(DType::F32, &table(&frequencies(p.dim), POSITIONS));
        let q = Tensor::new(x, &noise(m * wide, seed));
        let (mut k, mut v) = (Tensor::new(x, &noise(m * kv, seed + 1)), Tensor::new(x, &noise(m * kv, seed + 2)));
        let caches = [3, 4].map(|i| Tensor::new(x, &noise(kv * POSITIONS, seed + i)));
        // Rows with memory are those of a launch with so many; the others are NaN and append
        // nothing.
        let rows = (room as i32 - from).clamp(0, m as i32) as usize;
        for isa in all_levels() {
            let [mut keys, mut values] = caches.clone();
            let (mut turned, mut out) = (q.clone(), Tensor::junk(x, m * wide));
            run(isa, "rope_append", &rope, &[turned.bind(), k.bind(), v.bind(), angles.bind(), keys.bind(), values.bind(), at, NONE]);
            run(isa, "attention", &params, &[turned.bind(), keys.bind(), values.bind(), at, out.bind(), NONE]);
            let before = p.memory(&caches[0], &caches[1]);
            let (mut memory, mut limits) = (before.clone(), p.limits());
            let limits = bind(&mut limits);
            let (mut own_turned, mut own) = (q.clone(), Tensor::junk(x, m * wide));
            let grown = RopeParams { layout: p.layout(), ..rope };
            run(isa, "rope_append", &grown, &[own_turned.bind(), k.bind(), v.bind(), angles.bind(), memory.bind(), NONE, at, limits]);
            let grown = AttentionParams { layout: p.layout(), ..params };
            run(isa, "attention", &grown, &[own_turned.bind(), memory.bind(), NONE, at, own.bind(), limits]);
            // If all positions are shared, nothing is appended.
            let (mut kept, mut shared, mut none) = (before.clone(), p.sharing(POSITIONS), q.clone());
            let grown = RopeParams { layout: p.layout(), ..rope };
            run(isa, "rope_append", &grown, &[none.bind(), k.bind(), v.bind(), angles.bind(), kept.bind(), NONE, at, bind(&mut shared)]);
            prop_assert!(none.values().iter().all(|v| v.is_nan()), "{isa}: queries of shared positions");
            same(&format!("{isa}: shared"), &kept, &before);
            let (out, own) = (out.values(), own.values());
            let bits = |v: &[f64]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert!(bits(&own[..rows * wide]) == bits(&out[..rows * wide]), "{isa}: {rows} of {m} rows from {from} on");
            prop_assert!(own[rows * wide..].iter().all(|v| v.is_nan()), "{isa}: rows without memory");
            prop_assert!(own_turned.values()[rows * wide..].iter().all(|v| v.is_nan()), "{isa}: queries without memory");
            // Positions of the contiguous caches beyond the memory are not written.
            let [old_keys, old_values] = &caches;
            let cut = |new: &Tensor, old: &Tensor| {
                let (new, mut all) = (new.values(), old.values());
                for head in 0..p.kv_heads {
                    let begin = head * POSITIONS * p.dim;
                    all[begin..begin + room * p.dim].copy_from_slice(&new[begin..begin + room * p.dim]);
                }
                Tensor::new(x, &all.iter().map(|&v| v as f32).collect::<Vec<_>>())
            };
            p.check(&format!("{isa}"), &memory, &before, [&cut(&keys, old_keys), &cut(&values, old_values)]);
        }
    }
}
