//! The compared launches: every kernel, every element type, and sizes at every boundary of warps,
//! vectors, tiles and blocks.

use super::{Bench, Bound, Data, attention, within};
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

pub(super) const TYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Uniform numbers in −1…1.
pub(super) fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Numbers that a kernel must overwrite.
pub(super) fn junk(n: usize) -> Vec<f32> {
    vec![-777.0; n]
}

/// All kernels; `large` adds the sizes of real models.
pub fn all(bench: &mut Bench<'_>, large: bool) {
    linear(bench, large);
    norm(bench, large);
    rope(bench);
    attention::all(bench, large);
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
    // The same by boxes, where columns are a multiple of 64.
    for (i, m) in [2, 3, 8, 9, 16, 17, 32, 33, 64].into_iter().enumerate() {
        for (j, (k, n)) in [(64, 33), (320, 70), (4672, 19), (64, 2120)].into_iter().enumerate() {
            let w = DType::Bf16;
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
    // The longest rows that a thread keeps as two, four and eight pieces, and longer ones.
    sizes.extend([(2, 31), (3, 2048), (2, 35), (3, 4092), (2, 37), (2, 8192), (1, 39), (2, 8196)]);
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

/// The angles of rotary embeddings at each position.
pub(super) fn angles(rotary: usize, positions: usize) -> Data {
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
    for n in [1_usize, 31, 32, 100, 9000] {
        let p = RowParams { rows: 3, n: n as u32, ldx: n as u32 + 3, ..Default::default() };
        let mut logits = noise(3 * (n + 3), 9);
        (logits[0], logits[n + 3]) = (f32::NAN, f32::NEG_INFINITY);
        let words = 3 * n.div_ceil(32);
        let set = |seed: u64| -> Vec<i32> {
            let bits = noise(words, seed).into_iter().map(|v| v.to_bits().cast_signed());
            bits.enumerate().map(|(i, bits)| if i % 3 == 0 { bits } else { 0 }).collect()
        };
        let last = n as i32 - 1;
        for factor in [1.3, 0.7, 0.0, -1.0, f32::NAN, f32::INFINITY] {
            let operands = [
                Some(Data::written(DType::F32, &logits, 0, Bound::Exact)),
                Some(Data::read(DType::F32, &[factor, 1.1, factor], 0)),
                Some(Data::words(&[last, last / 2, i32::MAX])),
                Some(Data::words(&[0, -1, i32::MAX])),
                Some(Data::words(&set(3))),
                Some(Data::words(&set(4))),
            ];
            bench.case("penalise", &format!("{p:?}, {factor}"), &p, &operands);
        }
    }
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
