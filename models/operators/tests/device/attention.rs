//! The compared launches of attention: over a cache, over the caches of several sequences, and over
//! caches in parts that grow.

use super::cases::{TYPES, angles, junk, noise};
use super::{Bench, Bound, Data, within};
use leasehold_operators::kernels::cpu::attention::AttentionParams;
use leasehold_operators::kernels::cpu::cache::CacheLayout;
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::rope::RopeParams;

/// All of them; `large` adds the sizes of real models.
pub(super) fn all(bench: &mut Bench<'_>, large: bool) {
    contiguous(bench, large);
    decode_rows(bench, large);
    parts(bench, large);
}

/// Parameters of so many rows, heads, queries for each head, and elements of a head.
fn params(
    (m, kv_heads, group, dim): (usize, usize, usize, usize),
    positions: usize,
    (x, cache): (DType, DType),
    layout: CacheLayout,
) -> AttentionParams {
    let wide = (kv_heads * group * dim) as u32;
    AttentionParams {
        m: m as u32,
        heads: (kv_heads * group) as u32,
        kv_heads: kv_heads as u32,
        head_dim: dim as u32,
        positions: positions as u32,
        ldq: wide + 3,
        ldo: wide + 1,
        scale: (dim as f32).sqrt().recip(),
        x: x as u32,
        cache: cache as u32,
        rotary: 0,
        layout,
    }
}

fn contiguous(bench: &mut Bench<'_>, large: bool) {
    let mut sizes = vec![
        (1, 1, 1, 8, 0, 70),
        (1, 2, 4, 32, 255, 300),
        (5, 2, 3, 64, 254, 300),
        (9, 1, 2, 47, 60, 70),
        (1, 3, 1, 128, 299, 300),
        (6, 1, 1, 256, 65, 70),
        (2, 2, 2, 80, 69, 70),
        (1, 1, 2, 16, -1, 70),
        (1, 1, 5, 64, 128, 300),
        (1, 2, 1, 80, 640, 700),
        (16, 2, 2, 64, 33, 70),
        (35, 1, 3, 80, 40, 70),
        (133, 1, 2, 96, 0, 130),
        (130, 2, 1, 128, 100, 240),
    ];
    if large {
        sizes.extend([
            (1, 8, 4, 128, 4000, 4096),
            (1, 2, 16, 64, 9999, 20_000),
            (300, 4, 4, 64, 0, 512),
        ]);
        sizes.extend([(1000, 4, 4, 128, 1000, 2048), (1000, 4, 4, 64, 7, 2048)]);
    }
    for (m, kv_heads, group, dim, at, positions) in sizes {
        for x in TYPES {
            for cache in TYPES {
                let (wide, kv) = (kv_heads * group * dim, kv_heads * dim);
                let p = params(
                    (m, kv_heads, group, dim),
                    positions,
                    (x, cache),
                    CacheLayout::contiguous(kv_heads as u32, positions as u32),
                );
                let what = format!("{p:?} at {at}");
                let position = Some(Data::words(&[at]));
                // Keys of sufficient size, so that the running maximum changes.
                let keys: Vec<f32> = noise(kv * positions, 2).iter().map(|v| 3.0 * v).collect();
                let values = noise(kv * positions, 3);
                let read = |v: &[f32]| Some(Data::read(cache, v, 0));
                // Kernels for tensor cores round the weights, whose sum is 1, to the cache's type.
                let weights = if m >= 16 && x == cache { super::rounding(x) } else { 0.0 };
                let out = |n| Some(Data::written(x, &junk(n), 0, within(x, 2e-5 + weights)));
                let q = Some(Data::read(x, &noise(m * (wide + 3), 1), 1));
                let operands =
                    [q, read(&keys), read(&values), position.clone(), out(m * (wide + 1)), None];
                bench.case("attention", &what, &p, &operands);
                if m > 1 || dim % 2 == 1 {
                    continue;
                }
                let p =
                    AttentionParams { rotary: dim as u32, ldq: wide as u32, ldo: wide as u32, ..p };
                let row = |n, seed| Some(Data::read(x, &noise(n, seed), 1));
                let operands = [
                    row(wide, 4),
                    row(kv, 5),
                    row(kv, 6),
                    Some(angles(dim, positions)),
                    Some(Data::written(cache, &keys, 0, within(cache, 1e-7))),
                    Some(Data::written(cache, &values, 0, Bound::Exact)),
                    position,
                    // A key that is rounded differently changes its weight, by the rounding error
                    // of the cache's type for a score of up to 10.
                    Some(Data::written(
                        x,
                        &junk(wide),
                        0,
                        within(x, 2e-5 + 0.1 * super::rounding(cache)),
                    )),
                    Some(Data::scratch(p.scratch_bytes())),
                    None,
                ];
                bench.case("decode_attention", &what, &p, &operands);
            }
        }
    }
}

/// Rows of several sequences, each at a position of its own.
fn decode_rows(bench: &mut Bench<'_>, large: bool) {
    // More rows than a list has places for.
    let most: Vec<i32> = (0..515).map(|row| row * 37 % 143 - 1).collect();
    let mut sizes: Vec<(_, _, _, &[i32], _)> = vec![
        (2, 4, 32, &[255, -1, 3, 256], 300),
        (2, 9, 64, &[128, 31, 699, 256, 640], 700),
        (1, 2, 128, &[511, -1, 17], 520),
        (1, 1, 64, &most, 142),
        (1, 1, 64, &[0, 69], 70),
        (3, 5, 48, &[640, 128, 700], 700),
        (2, 2, 128, &[i32::MIN, 299, 300, 127, 0], 300),
    ];
    if large {
        sizes.push((8, 4, 128, &[4000, 17, -1, 4095, 1000, 129, 2500, 4096], 4096));
    }
    for (kv_heads, group, dim, at, positions) in sizes {
        for x in TYPES {
            for cache in TYPES {
                let n = at.len() * kv_heads * dim * positions;
                let keys: Vec<f32> = noise(n, 2).iter().map(|v| 3.0 * v).collect();
                let keys = Data::written(cache, &keys, 0, within(cache, 1e-7));
                let values = Data::written(cache, &noise(n, 3), 0, Bound::Exact);
                let layout = CacheLayout::contiguous(kv_heads as u32, positions as u32);
                let step = Step { kv_heads, group, dim, at, positions, layout };
                step.case(bench, (x, cache), [Some(keys), Some(values), None]);
            }
        }
    }
}

/// Caches in parts that grow by positions, of one layer of three. Memory beyond the limits is NaN.
struct InParts {
    kv_heads: usize,
    dim: usize,
    positions: usize,
    /// The positions of each sequence that have memory.
    room: &'static [usize],
    /// The first positions of each sequence, which it shares with others: nobody writes them.
    shared: usize,
    cache: DType,
}

impl InParts {
    const LAYERS: usize = 3;
    /// Parts of a sequence: keys, values, and one of other layers.
    const EACH: usize = 3;

    fn layout(&self) -> CacheLayout {
        let position = (Self::LAYERS * self.kv_heads) as u32;
        CacheLayout {
            position,
            head: 1,
            part: position * self.positions as u32 + 5,
            offset: self.kv_heads as u32,
            keys: 0,
            values: 1,
            next: Self::EACH as u32,
            limits: (Self::EACH * self.room.len()) as u32,
        }
    }

    /// The elements of so many positions of a part.
    fn of_positions(&self, positions: usize) -> usize {
        positions * Self::LAYERS * self.kv_heads * self.dim
    }

    /// The elements of each part that have memory. Keys have one more than whole positions.
    fn elements(&self) -> impl Iterator<Item = usize> + '_ {
        let of = |&room: &usize| [self.of_positions(room) + 1, self.of_positions(room), 0];
        self.room.iter().flat_map(of)
    }

    /// The bytes of each part that have memory, and behind them those that are shared.
    fn limits(&self) -> Option<Data> {
        let shared = self.of_positions(self.shared);
        let shared = self.room.iter().flat_map(|_| [shared, shared, 0]);
        let words = self.elements().chain(shared).map(|n| (n * self.cache.bytes()) as u64);
        Some(Data::bytes(&words.flat_map(u64::to_le_bytes).collect::<Vec<_>>(), 0))
    }

    /// The values are with the keys.
    fn no_values(&self) -> Option<Data> {
        Some(Data::read(self.cache, &[], 0))
    }

    /// All parts. Keys are of sufficient size, so that the running maximum changes.
    fn memory(&self, bound: Bound) -> Option<Data> {
        let part = self.layout().part as usize * self.dim;
        let mut memory = Vec::new();
        for (i, n) in self.elements().enumerate() {
            let size = if i % Self::EACH == 0 { 3.0 } else { 1.0 };
            memory.extend(noise(n, i as u64 + 9).iter().map(|v| size * v));
            memory.resize((i + 1) * part, f32::NAN);
        }
        Some(Data::written(self.cache, &memory, 0, bound))
    }
}

fn parts(bench: &mut Bench<'_>, large: bool) {
    // Rows, heads, sharing queries, elements, the first position, positions, those of memory, and
    // those that are shared.
    type Prompt = (usize, usize, usize, usize, i32, usize, &'static [usize], usize);
    let mut prompts: Vec<Prompt> = vec![
        (1, 2, 2, 64, 69, 70, &[70], 0),
        (1, 1, 3, 128, 40, 70, &[40], 0),
        (5, 2, 1, 47, 30, 70, &[33], 0),
        (16, 2, 2, 64, 33, 70, &[49], 0),
        (35, 1, 3, 80, 20, 70, &[41], 0),
        (133, 1, 2, 128, 0, 150, &[131], 0),
        (130, 2, 1, 64, 100, 240, &[230], 0),
        (70, 1, 1, 128, 3, 80, &[0], 0),
        (5, 2, 1, 48, 30, 70, &[70], 32),
    ];
    // Heads, sharing queries, elements, a position for each row, positions, those of memory, and
    // those that are shared.
    type Rows = (usize, usize, usize, &'static [i32], usize, &'static [usize], usize);
    let mut steps: Vec<Rows> = vec![
        (2, 4, 64, &[255, -1, 3, 256], 300, &[300, 4, 3, 257], 0),
        (1, 2, 128, &[0, 69, 68], 70, &[0, 70, 68], 0),
        (3, 3, 6, &[128, 129], 150, &[129, 129], 0),
        (2, 1, 80, &[640, 699], 700, &[700, 1], 0),
        (2, 2, 64, &[5, 6, 69], 70, &[70, 70, 70], 6),
        (1, 3, 64, &[599, 2, 600, 69, 70], 700, &[600, 6, 600, 70, 70], 3),
    ];
    if large {
        prompts.push((1000, 4, 4, 128, 1000, 2048, &[1999], 0));
        prompts.push((1000, 4, 4, 64, 7, 2048, &[1007], 0));
        steps.push((8, 4, 128, &[4000, 17, 2500, 4095], 4096, &[4096, 18, 2500, 4096], 0));
    }
    for (m, kv_heads, group, dim, at, positions, room, shared) in prompts {
        for (x, cache) in TYPES.into_iter().flat_map(|x| TYPES.map(|cache| (x, cache))) {
            let caches = InParts { kv_heads, dim, positions, room, shared, cache };
            let wide = kv_heads * group * dim;
            let p = params((m, kv_heads, group, dim), positions, (x, cache), caches.layout());
            let what = format!("{p:?} at {at}, {room:?} with memory");
            let position = Some(Data::words(&[at]));
            let weights = if m >= 16 && x == cache { super::rounding(x) } else { 0.0 };
            let q = Some(Data::read(x, &noise(m * (wide + 3), 1), 1));
            let out = Data::written(x, &junk(m * (wide + 1)), 0, within(x, 2e-5 + weights));
            let memory = caches.memory(Bound::Exact);
            let operands =
                [q, memory, caches.no_values(), position.clone(), Some(out), caches.limits()];
            bench.case("attention", &what, &p, &operands);
            if dim % 2 == 1 {
                continue;
            }
            let kv = kv_heads * dim;
            let p = RopeParams {
                m: m as u32,
                heads: p.heads,
                kv_heads: p.kv_heads,
                head_dim: p.head_dim,
                rotary: p.head_dim,
                positions: p.positions,
                ld: [wide as u32 + 1, kv as u32, kv as u32 + 2],
                x: p.x,
                cache: p.cache,
                layout: p.layout,
            };
            let operands = [
                Some(Data::written(x, &noise(m * (wide + 1), 1), 0, within(x, 1e-7))),
                Some(Data::read(x, &noise(m * kv, 2), 0)),
                Some(Data::read(x, &noise(m * (kv + 2), 3), 1)),
                Some(angles(dim, positions)),
                caches.memory(within(cache, 1e-7)),
                caches.no_values(),
                position,
                caches.limits(),
            ];
            bench.case("rope_append", &what, &p, &operands);
        }
    }
    for (kv_heads, group, dim, at, positions, room, shared) in steps {
        for (x, cache) in TYPES.into_iter().flat_map(|x| TYPES.map(|cache| (x, cache))) {
            let caches = InParts { kv_heads, dim, positions, room, shared, cache };
            let layout = caches.layout();
            let memory = caches.memory(within(cache, 1e-7));
            let step = Step { kv_heads, group, dim, at, positions, layout };
            step.case(bench, (x, cache), [memory, caches.no_values(), caches.limits()]);
        }
    }
}

/// Rows of a step, each of another sequence.
struct Step<'a> {
    kv_heads: usize,
    group: usize,
    dim: usize,
    at: &'a [i32],
    positions: usize,
    layout: CacheLayout,
}

impl Step<'_> {
    /// A case with these keys, values and limits.
    fn case(&self, bench: &mut Bench<'_>, (x, cache): (DType, DType), caches: [Option<Data>; 3]) {
        let &Self { kv_heads, group, dim, at, positions, layout } = self;
        let (m, wide, kv) = (at.len(), kv_heads * group * dim, kv_heads * dim);
        let p = AttentionParams {
            rotary: dim as u32,
            ..params((m, kv_heads, group, dim), positions, (x, cache), layout)
        };
        let rows = |n, seed| Some(Data::read(x, &noise(n, seed), 1));
        let out = within(x, 2e-5 + 0.1 * super::rounding(cache));
        let [keys, values, limits] = caches;
        let operands = [
            rows((m - 1) * (wide + 3) + wide, 4),
            rows(m * kv, 5),
            rows(m * kv, 6),
            Some(angles(dim, positions)),
            keys,
            values,
            Some(Data::words(at)),
            Some(Data::written(x, &junk((m - 1) * (wide + 1) + wide), 0, out)),
            Some(Data::scratch(p.scratch_bytes())),
            limits,
        ];
        bench.case("decode_attention", &format!("{p:?} at {at:?}"), &p, &operands);
    }
}
