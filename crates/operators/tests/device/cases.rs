//! The compared launches: every kernel, every element type, and sizes at every boundary of warps,
//! vectors, tiles and blocks.

use super::{Bench, Bound, Data, within};
use leasehold_operators::kernels::cpu::attention::AttentionParams;
use leasehold_operators::kernels::cpu::cache::CacheLayout;
use leasehold_operators::kernels::cpu::check::NotFiniteParams;
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::elementwise::{CopyParams, ElementwiseParams, FillParams};
use leasehold_operators::kernels::cpu::embedding::EmbeddingParams;
use leasehold_operators::kernels::cpu::linear::{BIAS, LinearParams, NORM};
use leasehold_operators::kernels::cpu::norm::NormParams;
use leasehold_operators::kernels::cpu::rope::{RopeParams, table};
use leasehold_operators::kernels::cpu::sampling::{
    AdvanceParams, LogProbabilities, NextTokenParams, RowParams, SamplingRecord,
};

const TYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Uniform numbers in −1…1.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn junk(n: usize) -> Vec<f32> {
    vec![-777.0; n]
}

/// All kernels; `large` adds the sizes of real models.
pub fn all(bench: &mut Bench<'_>, large: bool) {
    linear(bench, large);
    norm(bench, large);
    rope(bench);
    attention(bench, large);
    decode_rows(bench, large);
    parts(bench, large);
    embedding(bench);
    elementwise(bench, large);
    bytes(bench, large);
    rows(bench, large);
    sampling(bench, large);
    not_finite(bench, large);
}

/// A product's sizes, types and flags.
#[derive(Debug, Clone, Copy)]
struct Product {
    m: usize,
    k: usize,
    n: usize,
    gap: usize,
    skew: usize,
    types: [DType; 3],
    flags: u32,
}

impl Product {
    fn params(&self) -> LinearParams {
        let [x, w, y] = self.types;
        LinearParams {
            m: self.m as u32,
            k: self.k as u32,
            n: [self.n as u32, 0, 0],
            ldx: (self.k + self.gap) as u32,
            ldy: [(self.n + self.gap) as u32, 0, 0],
            eps: 1e-5,
            x: x as u32,
            w: w as u32,
            y: y as u32,
            vector: w as u32,
            flags: self.flags,
        }
    }

    /// Error of a sum of `k` products of numbers up to 1, each a quarter on average.
    fn error(&self) -> f64 {
        let k = self.k as f64;
        0.25 * k * (2.0 + k.sqrt()) * 1.2e-7 + 1e-7
    }

    fn x(&self) -> Option<Data> {
        Some(Data::read(
            self.types[0],
            &noise((self.m - 1) * (self.k + self.gap) + self.k, 1),
            self.skew,
        ))
    }

    fn vector(&self, n: usize, flag: u32, seed: u64) -> Option<Data> {
        (self.flags & flag != 0).then(|| Data::read(self.types[1], &noise(n, seed), self.skew))
    }

    fn w(&self, n: usize, seed: u64) -> Option<Data> {
        Some(Data::read(self.types[1], &noise(n * self.k, seed), self.skew))
    }

    fn y(&self, n: usize, bound: Bound) -> Option<Data> {
        let size = (self.m - 1) * (n + self.gap) + n;
        Some(Data::written(self.types[2], &noise(size, 9), self.skew, bound))
    }
}

fn linear(bench: &mut Bench<'_>, large: bool) {
    let mut products = Vec::new();
    let sizes = [
        (1, 33, 9),
        (1, 256, 70),
        (2, 97, 31),
        (8, 1030, 17),
        (9, 40, 65),
        (70, 67, 130),
        (3, 1, 1),
        (65, 1, 1),
    ];
    for (i, &(m, k, n)) in sizes.iter().enumerate() {
        for (j, &w) in TYPES.iter().enumerate() {
            let types = [TYPES[(i + j) % 3], w, TYPES[(i / 2 + j) % 3]];
            let flags = if m > 8 { (i + j) as u32 & BIAS } else { (i + j) as u32 & (NORM | BIAS) };
            products.push(Product { m, k, n, gap: i % 3, skew: (i + j) % 2, types, flags });
            products.push(Product {
                m,
                k,
                n,
                gap: 0,
                skew: 0,
                types: [w; 3],
                flags: if m > 8 { 0 } else { NORM },
            });
        }
    }
    // One long row, whose columns CUDA's blocks hold in registers; aligned, and not.
    for (k, n, flags) in [
        (2048, 9, NORM),
        (2056, 21, NORM | BIAS),
        (4104, 33, NORM),
        (8192, 11, NORM),
        (8200, 13, NORM),
        (8200, 13, 0),
        (14_336, 10, BIAS),
        (17_000, 3, 0),
    ] {
        for (skew, w) in [(0, DType::Bf16), (0, DType::F16), (1, DType::Bf16)] {
            products.push(Product { m: 1, k, n, gap: 0, skew, types: [w; 3], flags });
        }
    }
    // Several rows on tensor cores: few of them, and tiles. Aligned, and not.
    for (i, m) in [2, 3, 8, 9, 16, 17, 27, 32, 33, 65, 129].into_iter().enumerate() {
        for (j, (k, n)) in [(8, 33), (40, 70), (264, 1), (1000, 47)].into_iter().enumerate() {
            let w = TYPES[1 + (i + j) % 2];
            let y = if (i + j) % 4 == 3 { DType::F32 } else { w };
            let (gap, flags) = ((i + j) % 3 * 8, j as u32 % 2 * BIAS);
            for skew in [0, 1 + i % 7] {
                products.push(Product { m, k, n, gap, skew, types: [w, w, y], flags });
            }
        }
    }
    if large {
        for (m, k, n) in [
            (2, 4096, 4096),
            (8, 4096, 14_336),
            (8, 14_336, 4096),
            (8, 896, 4864),
            (16, 4096, 6144),
            (17, 4096, 4096),
            (64, 2048, 8192),
            (100, 4096, 9000),
            (600, 4096, 4096),
        ] {
            for w in [DType::Bf16, DType::F16] {
                products.push(Product { m, k, n, gap: 0, skew: 0, types: [w; 3], flags: 0 });
            }
        }
        for w in TYPES {
            for (m, k, n) in [
                (1, 4096, 11_008),
                (1, 11_008, 4096),
                (5, 4096, 4096),
                (300, 2048, 1030),
                (1, 9000, 3),
            ] {
                products.push(Product {
                    m,
                    k,
                    n,
                    gap: 0,
                    skew: 0,
                    types: [DType::Bf16, w, DType::F32],
                    flags: 0,
                });
            }
        }
    }
    for c in products {
        let (what, p, error) = (format!("{c:?}"), c.params(), c.error());
        let bound = within(c.types[2], error);
        let operands =
            [c.x(), c.vector(c.k, NORM, 2), c.w(c.n, 3), c.vector(c.n, BIAS, 4), c.y(c.n, bound)];
        bench.case("linear", &what, &p, &operands);
        bench.case("linear_add", &what, &p, &operands);
        // Each factor is as large as a sum of k products.
        let gated = within(c.types[2], error * (2.0 + (c.k as f64).sqrt()));
        let operands = [
            c.x(),
            c.vector(c.k, NORM, 2),
            c.w(c.n, 3),
            c.vector(c.n, BIAS, 4),
            c.w(c.n, 5),
            c.vector(c.n, BIAS, 6),
            c.y(c.n, gated),
        ];
        bench.case("linear_gated", &what, &p, &operands);
        let sizes = [c.n, c.n.div_ceil(2), c.n + 3];
        let mut operands = vec![c.x(), c.vector(c.k, NORM, 2)];
        for (i, &n) in sizes.iter().enumerate() {
            operands.extend([
                c.w(n, 10 + i as u64),
                c.vector(n, BIAS, 20 + i as u64),
                c.y(n, bound),
            ]);
        }
        let p = LinearParams {
            n: sizes.map(|n| n as u32),
            ldy: sizes.map(|n| (n + c.gap) as u32),
            ..p
        };
        bench.case("linear3", &what, &p, &operands);
    }
}

fn norm(bench: &mut Bench<'_>, large: bool) {
    let mut sizes = vec![(1, 1), (3, 33), (2, 1024), (5, 1029), (1, 4099)];
    if large {
        sizes.push((300, 4096));
    }
    for (i, (rows, k)) in sizes.into_iter().enumerate() {
        for x in TYPES {
            for weight in TYPES {
                let (gap, skew) = (i % 2 * 3, i % 2);
                let p = NormParams {
                    rows: rows as u32,
                    k: k as u32,
                    ldx: (k + gap) as u32,
                    ldy: (k + gap) as u32,
                    eps: 1e-6,
                    x: x as u32,
                    weight: weight as u32,
                };
                let what = format!("{p:?}");
                let size = (rows - 1) * (k + gap) + k;
                let (input, g) = (noise(size, 1), Data::read(weight, &noise(k, 2), skew));
                // The sum of squares is rounded in another order.
                let y = Data::written(x, &junk(size), skew, within(x, 1e-6));
                let operands =
                    [Some(Data::read(x, &input, skew)), Some(g.clone()), Some(y.clone())];
                bench.case("rms_norm", &what, &p, &operands);
                let h = Data::written(x, &input, skew, Bound::Exact);
                let operands =
                    [Some(h), Some(Data::read(x, &noise(size, 3), skew)), Some(g), Some(y)];
                bench.case("add_rms_norm", &what, &p, &operands);
            }
        }
    }
}

fn angles(rotary: usize, positions: usize) -> Data {
    let frequencies: Vec<f64> =
        (0..rotary / 2).map(|i| 1e4_f64.powf(-2.0 * i as f64 / rotary as f64)).collect();
    Data::read(DType::F32, &table(&frequencies, positions), 0)
}

fn rope(bench: &mut Bench<'_>) {
    let positions = 20;
    let sizes = [
        (1, 2, 1, 8, 8, 0),
        (3, 4, 2, 64, 64, 5),
        (5, 3, 3, 81, 34, 17),
        (4, 9, 1, 256, 256, -2),
        (2, 1, 1, 3, 2, 19),
    ];
    for (m, heads, kv_heads, dim, rotary, at) in sizes {
        for x in TYPES {
            for cache in TYPES {
                let (wide, kv) = (heads * dim, kv_heads * dim);
                let p = RopeParams {
                    m: m as u32,
                    heads: heads as u32,
                    kv_heads: kv_heads as u32,
                    head_dim: dim as u32,
                    rotary: rotary as u32,
                    positions: positions as u32,
                    ld: [wide as u32 + 1, kv as u32, kv as u32 + 2],
                    x: x as u32,
                    cache: cache as u32,
                    layout: CacheLayout::contiguous(kv_heads as u32, positions as u32),
                };
                let what = format!("{p:?} at {at}");
                let position = Some(Data::words(&[at]));
                let q = Data::written(x, &noise(m * (wide + 1), 1), 1, within(x, 1e-7));
                let (k, v) = (
                    Data::read(x, &noise(m * kv, 2), 0),
                    Data::read(x, &noise(m * (kv + 2), 3), 1),
                );
                let stored =
                    |bound| Some(Data::written(cache, &noise(kv * positions, 4), 0, bound));
                let table = Some(angles(rotary, positions));
                bench.case("rope", &what, &p, &[Some(q.clone()), table.clone(), position.clone()]);
                let append = RopeParams { ld: [kv as u32, 0, 0], ..p };
                let operands = [Some(k.clone()), stored(Bound::Exact), position.clone()];
                bench.case("cache_append", &what, &append, &operands);
                let keys = stored(within(cache, 1e-7));
                let operands =
                    [Some(q), Some(k), Some(v), table, keys, stored(Bound::Exact), position, None];
                bench.case("rope_append", &what, &p, &operands);
            }
        }
    }
}

fn attention(bench: &mut Bench<'_>, large: bool) {
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
                let p = AttentionParams {
                    m: m as u32,
                    heads: (kv_heads * group) as u32,
                    kv_heads: kv_heads as u32,
                    head_dim: dim as u32,
                    positions: positions as u32,
                    ldq: wide as u32 + 3,
                    ldo: wide as u32 + 1,
                    scale: (dim as f32).sqrt().recip(),
                    x: x as u32,
                    cache: cache as u32,
                    rotary: 0,
                    layout: CacheLayout::contiguous(kv_heads as u32, positions as u32),
                };
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
    let mut sizes: Vec<(_, _, _, &[i32], _)> = vec![
        (2, 4, 32, &[255, -1, 3, 256], 300),
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

    /// The elements of each part that have memory. Keys have one more than whole positions.
    fn elements(&self) -> impl Iterator<Item = usize> + '_ {
        let of = |&room: &usize| {
            let values = room * Self::LAYERS * self.kv_heads * self.dim;
            [values + 1, values, 0]
        };
        self.room.iter().flat_map(of)
    }

    fn limits(&self) -> Option<Data> {
        let bytes = |n| (n * self.cache.bytes()) as u64;
        let mut words: Vec<u8> = self.elements().flat_map(|n| bytes(n).to_le_bytes()).collect();
        // No part shares its beginning.
        words.resize(2 * words.len(), 0);
        Some(Data::bytes(&words, 0))
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
    // Rows, heads, sharing queries, elements, the first position, positions, and those of memory.
    type Prompt = (usize, usize, usize, usize, i32, usize, &'static [usize]);
    let mut prompts: Vec<Prompt> = vec![
        (1, 2, 2, 64, 69, 70, &[70]),
        (1, 1, 3, 128, 40, 70, &[40]),
        (5, 2, 1, 47, 30, 70, &[33]),
        (16, 2, 2, 64, 33, 70, &[49]),
        (35, 1, 3, 80, 20, 70, &[41]),
        (133, 1, 2, 128, 0, 150, &[131]),
        (130, 2, 1, 64, 100, 240, &[230]),
        (70, 1, 1, 128, 3, 80, &[0]),
    ];
    // Heads, sharing queries, elements, a position for each row, positions, and those of memory.
    type Rows = (usize, usize, usize, &'static [i32], usize, &'static [usize]);
    let mut steps: Vec<Rows> = vec![
        (2, 4, 64, &[255, -1, 3, 256], 300, &[300, 4, 3, 257]),
        (1, 2, 128, &[0, 69, 68], 70, &[0, 70, 68]),
        (3, 3, 6, &[128, 129], 150, &[129, 129]),
        (2, 1, 80, &[640, 699], 700, &[700, 1]),
    ];
    if large {
        prompts.push((1000, 4, 4, 128, 1000, 2048, &[1999]));
        prompts.push((1000, 4, 4, 64, 7, 2048, &[1007]));
        steps.push((8, 4, 128, &[4000, 17, 2500, 4095], 4096, &[4096, 18, 2500, 4096]));
    }
    for (m, kv_heads, group, dim, at, positions, room) in prompts {
        for (x, cache) in TYPES.into_iter().flat_map(|x| TYPES.map(|cache| (x, cache))) {
            let caches = InParts { kv_heads, dim, positions, room, cache };
            let wide = kv_heads * group * dim;
            let p = AttentionParams {
                m: m as u32,
                heads: (kv_heads * group) as u32,
                kv_heads: kv_heads as u32,
                head_dim: dim as u32,
                positions: positions as u32,
                ldq: wide as u32 + 3,
                ldo: wide as u32 + 1,
                scale: (dim as f32).sqrt().recip(),
                x: x as u32,
                cache: cache as u32,
                rotary: 0,
                layout: caches.layout(),
            };
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
    for (kv_heads, group, dim, at, positions, room) in steps {
        for (x, cache) in TYPES.into_iter().flat_map(|x| TYPES.map(|cache| (x, cache))) {
            let caches = InParts { kv_heads, dim, positions, room, cache };
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
            m: m as u32,
            heads: (kv_heads * group) as u32,
            kv_heads: kv_heads as u32,
            head_dim: dim as u32,
            positions: positions as u32,
            ldq: wide as u32 + 3,
            ldo: wide as u32 + 1,
            scale: (dim as f32).sqrt().recip(),
            x: x as u32,
            cache: cache as u32,
            rotary: dim as u32,
            layout,
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

fn embedding(bench: &mut Bench<'_>) {
    let ids = [3, 0, 10, -1, 11, 7];
    for k in [1, 31, 256, 1030] {
        for table in TYPES {
            for y in TYPES {
                let ld = k + 1;
                let p = EmbeddingParams {
                    m: ids.len() as u32,
                    vocabulary: 11,
                    k: k as u32,
                    ldy: ld as u32,
                    table: table as u32,
                    y: y as u32,
                };
                let out = Data::written(y, &junk(ids.len() * ld), 1, Bound::Exact);
                let operands = [
                    Some(Data::words(&ids)),
                    Some(Data::read(table, &noise(11 * k, 1), 0)),
                    Some(out),
                ];
                bench.case("embedding", &format!("{p:?}"), &p, &operands);
            }
        }
    }
}

fn elementwise(bench: &mut Bench<'_>, large: bool) {
    let mut sizes = vec![(1, 1, 0), (3, 1024, 0), (2, 1027, 1), (5, 33, 3), (1, 9001, 0)];
    if large {
        sizes.push((2000, 4096, 0));
    }
    for (rows, k, gap) in sizes {
        for x in TYPES {
            for y in TYPES {
                let ld = [k, k + gap, k + 2 * gap];
                let p = ElementwiseParams {
                    rows: rows as u32,
                    k: k as u32,
                    ld: ld.map(|l| l as u32),
                    x: x as u32,
                    y: y as u32,
                };
                let what = format!("{p:?}");
                let scaled: Vec<f32> = noise(rows * ld[0], 1).iter().map(|v| v * 30.0).collect();
                let (a, b) =
                    (Data::read(x, &scaled, gap), Data::read(x, &noise(rows * ld[1], 2), 0));
                for (name, bound) in
                    [("add", Bound::Exact), ("mul", Bound::Exact), ("silu_mul", within(y, 0.0))]
                {
                    let out = Data::written(y, &junk(rows * ld[2]), gap, bound);
                    bench.case(name, &what, &p, &[Some(a.clone()), Some(b.clone()), Some(out)]);
                }
                let out = Data::written(y, &junk(rows * ld[1]), gap, Bound::Exact);
                bench.case("cast", &what, &p, &[Some(a), Some(out)]);
            }
        }
    }
    casts(bench);
}

/// Every 16-bit pattern, and f32 numbers next to each number that they round to.
fn casts(bench: &mut Bench<'_>) {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let singles: Vec<f32> = (0..=u16::MAX)
        .flat_map(|w| {
            [0u32, 0x7fff, 0x8000, 0x8001, 0x0fff, 0x1000, 0x1001]
                .map(|low| f32::from_bits(u32::from(w) << 16 | low))
        })
        .collect();
    for narrow in [DType::Bf16, DType::F16] {
        let n = 1u32 << 16;
        let p =
            ElementwiseParams { rows: 1, k: n, ld: [n; 3], x: narrow as u32, y: DType::F32 as u32 };
        let input = Data { dtype: narrow, ..Data::bytes(&all, 0) };
        let out = Data::written(DType::F32, &junk(n as usize), 0, Bound::Exact);
        bench.case("cast", &format!("every {}", narrow.name()), &p, &[Some(input), Some(out)]);
        let n = singles.len() as u32;
        let p =
            ElementwiseParams { rows: 1, k: n, ld: [n; 3], x: DType::F32 as u32, y: narrow as u32 };
        let out = Data::written(narrow, &junk(n as usize), 0, Bound::Exact);
        let operands = [Some(Data::read(DType::F32, &singles, 0)), Some(out)];
        bench.case("cast", &format!("singles to {}", narrow.name()), &p, &operands);
    }
}

fn bytes(bench: &mut Bench<'_>, large: bool) {
    let counts = if large {
        vec![0usize, 1, 5, 31, 70_001, 9_000_000]
    } else {
        vec![0usize, 1, 5, 31, 70_001]
    };
    for count in counts {
        for width in [1usize, 2, 4] {
            for skew in [0, 1, 7] {
                let n = count * width;
                let p =
                    FillParams { bytes: [n as u32, 0], width: width as u32, pattern: 0x8765_4321 };
                bench.case(
                    "fill",
                    &format!("{p:?} at {skew}"),
                    &p,
                    &[Some(Data::bytes(&vec![9; n], skew))],
                );
            }
        }
    }
    for (rows, bytes, from_gap, to_gap, skew) in
        [(1, 1, 0, 0, 0), (3, 64, 16, 32, 0), (5, 68, 4, 8, 4), (7, 70_001, 3, 5, 1)]
    {
        let (from_pitch, to_pitch) = (bytes + from_gap, bytes + to_gap);
        let p = CopyParams {
            rows: rows as u32,
            bytes: bytes as u32,
            from_pitch: from_pitch as u32,
            to_pitch: to_pitch as u32,
        };
        let from: Vec<u8> = (0..rows * from_pitch).map(|i| (i * 31 % 251) as u8).collect();
        let operands =
            [Some(Data::bytes(&from, skew)), Some(Data::bytes(&vec![1; rows * to_pitch], skew))];
        bench.case("copy_2d", &format!("{p:?}"), &p, &operands);
    }
}

fn rows(bench: &mut Bench<'_>, large: bool) {
    let mut sizes = vec![(1, 1), (3, 33), (2, 256), (4, 1031)];
    if large {
        sizes.push((3, 128_003));
    }
    for (rows, n) in sizes {
        for x in TYPES {
            let values: Vec<f32> =
                noise(rows * (n + 1), 1).iter().map(|v| (v * 40.0).round() / 4.0).collect();
            let p = RowParams {
                rows: rows as u32,
                n: n as u32,
                ldx: n as u32 + 1,
                ldy: n as u32 + 2,
                x: x as u32,
                y: 0,
            };
            let what = format!("{p:?}");
            let operands = [Some(Data::read(x, &values, 0)), Some(Data::words(&vec![-1; rows]))];
            bench.case("argmax", &what, &p, &operands);
            for y in TYPES {
                let p = RowParams { y: y as u32, ..p };
                let out = Data::written(y, &junk(rows * (n + 2)), 1, within(y, 0.0));
                bench.case("softmax", &what, &p, &[Some(Data::read(x, &values, 1)), Some(out)]);
            }
        }
    }
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for row in [
        vec![nan; 40],
        vec![-inf; 40],
        vec![nan, -inf, -inf],
        vec![-0.0, 0.0],
        vec![1.0, inf, inf, nan],
    ] {
        let n = row.len() as u32;
        let p = RowParams { rows: 1, n, ldx: n, ldy: n, ..Default::default() };
        let input = Some(Data::read(DType::F32, &row, 0));
        bench.case("argmax", &format!("{row:?}"), &p, &[input.clone(), Some(Data::words(&[-9]))]);
        let out = Data::written(DType::F32, &junk(row.len()), 0, within(DType::F32, 0.0));
        bench.case("softmax", &format!("{row:?}"), &p, &[input, Some(out)]);
    }
}

fn not_finite(bench: &mut Bench<'_>, large: bool) {
    let mut counts = vec![1, 3, 4097, 70_001];
    if large {
        counts.push(9_000_001);
    }
    for count in counts {
        for (float, width, exponent) in [
            (DType::F32, 4, 0x7f80_0000),
            (DType::Bf16, 2, 0x7f80),
            (DType::F16, 2, 0x7c00),
            // Pairs of f32, whose second ones have the exponent.
            (DType::F32, 8, 0x7f80_0000),
        ] {
            let mut values = noise(count * if width == 8 { 2 } else { 1 }, 5);
            let last = values.len() - 1;
            for bad in [&[][..], &[last], &[last / 2, last]] {
                bad.iter().for_each(|&i| values[i] = f32::NEG_INFINITY);
                let p = NotFiniteParams::new(count as u64, width, exponent);
                let found = Data::words(&vec![-9; 4 * p.parts() as usize]);
                let what = format!("{p:?}, bad {bad:?}");
                let x = Data::read(float, &values, 0);
                bench.case("not_finite", &what, &p, &[Some(x), Some(found)]);
            }
        }
    }
}

/// A step of `rows` rows, each with one of the records in turn. Some rows are idle.
fn step(
    bench: &mut Bench<'_>,
    logits: &[f32],
    rows: usize,
    records: &[SamplingRecord],
    at: &[i32],
) {
    const RING: usize = 3;
    let n = logits.len() / rows;
    let p = NextTokenParams {
        rows: rows as u32,
        n: n as u32,
        ld: n as u32,
        ring: RING as u32,
        log_ring: 2,
    };
    let turn = |r: usize| records[r % records.len()];
    let words: Vec<i32> = (0..rows).flat_map(|r| -> [i32; 8] { bytemuck::cast(turn(r)) }).collect();
    let positions: Vec<i32> = (0..rows).map(|r| at[r % at.len()]).collect();
    let counts: Vec<i32> = (0..rows).map(|r| 4 + r as i32).collect();
    let what = format!("{p:?}, {records:?} at {at:?}");
    let logs = junk(rows * 2 * size_of::<LogProbabilities>() / 4);
    let operands = [
        Some(Data::read(DType::F32, logits, 0)),
        Some(Data::words(&words)),
        Some(Data::words(&vec![-1; rows])),
        Some(Data::words(&positions)),
        Some(Data::words(&vec![-5; rows * RING])),
        Some(Data::words(&counts)),
        Some(Data::written(DType::F32, &logs, 0, Bound::Logs)),
    ];
    bench.case("next_token", &what, &p, &operands);
}

/// The ids are those of the CPU.
fn sampling(bench: &mut Bench<'_>, large: bool) {
    let mut sizes = vec![1, 31, 257, 1000, 4096];
    if large {
        sizes.extend([32_000, 128_256]);
    }
    let record = SamplingRecord { temperature: 0.7, top_p: 1.0, ..Default::default() };
    for n in sizes {
        // Few distinct values, so that the threshold lies within ties; and many.
        for coarse in [true, false] {
            let mut logits: Vec<f32> = noise(n, n as u64).iter().map(|v| v * 12.0).collect();
            if coarse {
                logits.iter_mut().for_each(|v| *v = v.round() / 2.0);
            }
            if n > 100 {
                (logits[3], logits[50], logits[99]) = (f32::NAN, f32::NEG_INFINITY, 0.0);
            }
            let record = SamplingRecord { seed: [n as u32, 7], ..record };
            for top_k in [0, 1, 40, n as u32 + 1] {
                for temperature in [0.0, 0.7, 4.0] {
                    for position in [0, 1, 77, 4095, i32::MAX] {
                        let record = SamplingRecord { temperature, top_k, ..record };
                        step(bench, &logits, 1, &[record], &[position]);
                    }
                }
            }
            // Several rows, each with another rule.
            let mut rules = Vec::new();
            for (top_k, top_p) in [(0, 0.9), (50, 0.9), (0, 0.3), (3, 0.999), (0, 1e-6)] {
                for (min_p, log_probabilities) in [(0.0, 0), (0.05, 3), (1.0, 20)] {
                    rules.push(SamplingRecord { top_k, top_p, min_p, log_probabilities, ..record });
                }
            }
            let rows = if n > 10_000 { 4 } else { rules.len() };
            let all: Vec<f32> = (0..rows)
                .flat_map(|r| logits.iter().map(move |v| if r % 2 == 0 { *v } else { -v }))
                .collect();
            step(bench, &all, rows, &rules, &[5, 6, -1, 1000, i32::MAX, 0, i32::MIN]);
        }
    }
    // All logits are NaN: no token, neither greedy nor drawn. Infinite ones have no logarithm.
    let odd = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY];
    for (n, value) in [1, 40, 3000].into_iter().flat_map(|n| odd.map(|value| (n, value))) {
        let rules = [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.5)].map(
            |(temperature, top_k, top_p)| SamplingRecord {
                temperature,
                top_k,
                top_p,
                log_probabilities: 2,
                ..record
            },
        );
        step(bench, &vec![value; 4 * n], 4, &rules, &[5]);
    }
    // Words that no host writes.
    let nan = f32::NAN;
    let words = SamplingRecord { log_probabilities: u32::MAX, top_k: u32::MAX, ..record };
    let rules = [
        SamplingRecord { temperature: nan, ..words },
        SamplingRecord { temperature: -1.0, ..words },
        SamplingRecord { temperature: f32::INFINITY, ..words },
        SamplingRecord { top_p: nan, min_p: nan, ..words },
        SamplingRecord { top_p: -1.0, min_p: -1.0, ..words },
        SamplingRecord { top_p: 9.0, min_p: 9.0, reserved: u32::MAX, ..words },
        SamplingRecord { top_p: f32::from_bits(1), min_p: f32::from_bits(1), ..words },
    ];
    step(bench, &noise(7 * 333, 5), 7, &rules, &[3]);
    for ring in [0usize, 1, 5] {
        let p = AdvanceParams { rows: 3, step: 17, ring: ring as u32 };
        let slots: Vec<i32> = (0..3 * ring as i32).map(|i| -i).collect();
        let operands = [
            Some(Data::words(&[9, 8, 7])),
            Some(Data::words(&[100, -3, 0])),
            Some(Data::words(&slots)),
            Some(Data::words(&[-1, 1, 2])),
        ];
        bench.case("advance", &format!("{p:?}"), &p, &operands);
    }
}
