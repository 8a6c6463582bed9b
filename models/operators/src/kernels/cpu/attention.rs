//! Causal grouped-query attention over a key-value cache, or over one for each row. A
//! [layout](super::cache) says where a cache has its keys and values.
//!
//! Scores, softmax and sums are f32. The softmax is computed online over blocks of `POSITIONS`
//! positions (running maximum, rescaled sum). So no buffer of the context's length is needed. A
//! tile computes some rows for the queries of some heads of one group, which share their keys and
//! values. Row `i` attends to positions 0 to `position + i`; `position` is read from device memory.
//! Rows at positions outside the cache give NaN, and so do rows whose scores are NaN or all −∞.

use std::mem::MaybeUninit;

use leasehold::kernel::CpuArgs;

use super::cache::{CacheLayout, Sizes};
use super::dot::Panel;
use super::elem::{DType, Elem, with_elem};
use super::math::exp;
use super::rope::{MAX_HEAD_DIM, extent, head_shape, position, rotary_shape, rotate, rotate_to};
use super::row;
use super::simd::{Simd, Task};
use super::tile::{
    Extent, Kernel, Launch, Operand, Refusal, accepted, dtype, params, positive, ptr, read, times,
    update, write,
};

/// Positions of a block: a multiple of any vector's lanes.
const POSITIONS: usize = 64;
/// The maximum number of queries of a tile, and so the largest group of [`DecodeAttention`].
pub const QUERIES: usize = 16;
/// The fewest positions of a part of the context, those for small heads, the largest of the small
/// heads, and the most parts, on a device that splits the context of [`DecodeAttention`].
pub(crate) const PART: u32 = 128;
pub(crate) const SMALL_PART: u32 = 512;
pub(crate) const SMALL_DIM: u32 = 32;
pub(crate) const PARTS: u32 = 64;
/// Query heads that share the keys and values of a part, unless their group has one head.
pub(crate) const PART_HEADS: u32 = 4;
/// The minimum number of tiles of heads in a launch, if it has so many heads.
const HEAD_TILES: usize = 4;

params! {
    /// Parameters of [`Attention`] and [`DecodeAttention`].
    pub struct AttentionParams {
        /// Rows of queries: consecutive positions of a sequence, or a row of each of several
        /// sequences ([`DecodeAttention`]).
        pub m: u32,
        /// Heads of queries.
        pub heads: u32,
        /// Heads of keys and values; divides `heads`.
        pub kv_heads: u32,
        /// Elements of a head.
        pub head_dim: u32,
        /// Positions of a cache.
        pub positions: u32,
        /// Elements from one row of queries to the next.
        pub ldq: u32,
        /// Elements from one row of the output to the next.
        pub ldo: u32,
        /// The factor of the scores: usually one over the root of `head_dim`.
        pub scale: f32,
        /// Element type of queries and output (and of new keys and values).
        pub x: u32,
        /// Element type of the caches.
        pub cache: u32,
        /// Elements of a head that are rotated ([`DecodeAttention`] only).
        pub rotary: u32,
        /// The places in the caches.
        pub layout: CacheLayout,
    }
}

impl AttentionParams {
    /// The parts of the context, and the blocks for the query heads of a group.
    #[must_use]
    pub fn split(&self) -> (u32, u32) {
        let least = if self.head_dim <= SMALL_DIM { SMALL_PART } else { PART };
        let part = self.positions.div_ceil(PARTS).max(least);
        let group = self.heads / self.kv_heads.max(1);
        (self.positions.div_ceil(part), group.div_ceil(PART_HEADS))
    }

    /// Words of a row's scratch memory in [`DecodeAttention`]: counters, then a maximum, a sum and
    /// a weighted sum for each head and part. None for a context of one part.
    fn row_scratch(&self) -> usize {
        let (parts, blocks) = self.split();
        if parts <= 1 {
            return 0;
        }
        let counters = self.kv_heads as usize * blocks as usize;
        counters + self.heads as usize * parts as usize * (self.head_dim as usize + 2)
    }

    /// Bytes of the scratch memory of all rows. Saturates.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        (4 * self.row_scratch() as u64).saturating_mul(self.m.into())
    }
}

/// Attention of rotated queries, over a cache that holds their keys and values.
pub struct Attention;
/// Attention for a row of each of `m` sequences after the projections: rotates queries and keys,
/// appends keys and values to the caches, and attends. Row `i` has the position `position[i]` and
/// the `i`th sequence's caches. Rows of keys and values follow each other. A row at a position
/// outside its cache writes nothing to it and gives NaN.
///
/// A device may split a long context, and keep what its parts give in the scratch memory, which
/// must be zero before the first launch. Every launch leaves its counters zero.
pub struct DecodeAttention;

/// The division of queries into tiles.
struct Cut {
    /// Heads of a tile: a divisor of the group.
    heads: usize,
    /// Rows of a tile.
    rows: usize,
}

impl Cut {
    #[inline(always)]
    fn of(p: &AttentionParams) -> Self {
        let (heads, group) = (p.heads as usize, (p.heads / p.kv_heads) as usize);
        let mut of_tile = group.min(QUERIES);
        while of_tile > 1 && (!group.is_multiple_of(of_tile) || heads / of_tile < HEAD_TILES) {
            of_tile -= 1;
        }
        Self { heads: of_tile, rows: (QUERIES / of_tile).min(p.m as usize) }
    }
}

/// The state of a tile's queries, on the stack.
struct SoftmaxState {
    /// Scaled queries, `head_dim` apart.
    queries: MaybeUninit<[f32; QUERIES * MAX_HEAD_DIM]>,
    /// Sums of values, `head_dim` apart.
    sums: MaybeUninit<[f32; QUERIES * MAX_HEAD_DIM]>,
    /// Scores of a block, `POSITIONS` apart.
    scores: MaybeUninit<[f32; QUERIES * POSITIONS]>,
    /// Running maximum of each query's scores.
    top: [f32; QUERIES],
    /// Sum of the exponentials relative to that maximum.
    total: [f32; QUERIES],
}

/// The keys and values of a tile's queries: those of one head.
#[derive(Clone, Copy)]
struct Cache<T> {
    keys: *const T,
    values: *const T,
    dim: usize,
    /// Elements from one position to the next.
    pitch: usize,
}

/// Attends with `heads` queries for each of `lens.len()` rows; row `r` attends to the first
/// `lens[r]` positions.
struct Attend<'a, T> {
    state: &'a mut SoftmaxState,
    cache: Cache<T>,
    heads: usize,
    lens: &'a [usize],
}

impl<T: Elem> Task for Attend<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { state, cache, heads, lens } = self;
        let (dim, pitch, queries) = (cache.dim, cache.pitch, heads * lens.len());
        let longest = lens.iter().copied().max().unwrap_or(0);
        let (q, sums) =
            (state.queries.as_ptr().cast::<f32>(), state.sums.as_mut_ptr().cast::<f32>());
        let scores = state.scores.as_mut_ptr().cast::<f32>();
        state.top = [f32::NEG_INFINITY; QUERIES];
        state.total = [0.0; QUERIES];
        // SAFETY: the tile has queries * dim queries and sums and queries * POSITIONS scores; the
        // cache has `longest` positions.
        unsafe {
            sums.write_bytes(0, queries * dim);
            for at in (0..longest).step_by(POSITIONS) {
                let block = POSITIONS.min(longest - at);
                // Prefetched during the computation of the scores.
                let (rows, of_row) = if pitch == dim { (1, block * dim) } else { (block, dim) };
                for row in 0..rows {
                    let row = cache.values.add((at + row) * pitch).cast::<u8>();
                    (0..of_row * size_of::<T>())
                        .step_by(64)
                        .for_each(|line| s.prefetch(row.add(line)));
                }
                let keys = (cache.keys.add(at * pitch), pitch, block);
                s.run(Panel::new(keys, (q, dim, queries), dim, (scores, POSITIONS), false));
                for (row, &len) in lens.iter().enumerate() {
                    if at >= len {
                        continue;
                    }
                    let seen = block.min(len - at);
                    let first = row * heads;
                    for query in first..first + heads {
                        let scale = soften(
                            s,
                            scores.add(query * POSITIONS),
                            seen,
                            &mut state.top[query],
                            &mut state.total[query],
                        );
                        rescale(s, sums.add(query * dim), dim, scale);
                    }
                    let values = Cache { values: cache.values.add(at * pitch), ..cache };
                    let (weights, sums) =
                        (scores.add(first * POSITIONS).cast_const(), sums.add(first * dim));
                    for query in (0..heads).step_by(2) {
                        let (weights, sums) =
                            (weights.add(query * POSITIONS), sums.add(query * dim));
                        if query + 1 < heads {
                            weigh::<S, T, 2>(s, values, weights, seen, sums);
                        } else {
                            weigh::<S, T, 1>(s, values, weights, seen, sums);
                        }
                    }
                }
            }
            for query in 0..queries {
                rescale(s, sums.add(query * dim), dim, 1.0 / state.total[query]);
            }
        }
    }
}

/// Turns a block's first `seen` scores into exponentials relative to the running maximum. Returns
/// the factor by which earlier sums must be multiplied.
#[inline(always)]
unsafe fn soften<S: Simd>(
    s: S,
    scores: *mut f32,
    seen: usize,
    top: &mut f32,
    total: &mut f32,
) -> f32 {
    let whole = seen.next_multiple_of(S::N);
    // SAFETY: a row of scores has POSITIONS elements, a multiple of N. The elements after `seen`
    // are written before they are read.
    unsafe {
        for i in seen..whole {
            scores.add(i).write(f32::NEG_INFINITY);
        }
        let mut max = s.splat(*top);
        for i in (0..whole).step_by(S::N) {
            max = s.max(s.load(scores.add(i)), max);
        }
        let max = s.reduce_max(max);
        let factor = if *top == max { 1.0 } else { (*top - max).exp() };
        let mut sum = s.zero();
        for i in (0..whole).step_by(S::N) {
            let e = exp(s, s.sub(s.load(scores.add(i)), s.splat(max)));
            s.store(scores.add(i), e);
            sum = s.add(sum, e);
        }
        *top = max;
        *total = *total * factor + s.reduce_add(sum);
        factor
    }
}

/// Multiplies `n` elements.
#[inline(always)]
unsafe fn rescale<S: Simd>(s: S, x: *mut f32, n: usize, factor: f32) {
    if factor != 1.0 {
        // SAFETY: the caller vouches for n elements. In-place widening of f32 reads each vector
        // before it writes it.
        unsafe { row::widen(s, (DType::F32, x.cast_const().cast(), 0), x, n, factor) }
    }
}

/// `sums[q] += Σ_j weights[q][j] · values[j]` for `Q` queries (rows of `POSITIONS` weights, of
/// `dim` sums).
#[inline(always)]
unsafe fn weigh<S: Simd, T: Elem, const Q: usize>(
    s: S,
    cache: Cache<T>,
    weights: *const f32,
    seen: usize,
    sums: *mut f32,
) {
    let dim = cache.dim;
    let mut d = 0;
    // SAFETY: columns d to d + 4 N, d + 2 N, d + N or dim of rows of dim elements; `seen` of them.
    unsafe {
        while d + 4 * S::N <= dim {
            columns::<S, T, Q, 4, 1>(s, cache, weights, seen, sums, d);
            d += 4 * S::N;
        }
        if d + 2 * S::N <= dim {
            columns::<S, T, Q, 2, 2>(s, cache, weights, seen, sums, d);
            d += 2 * S::N;
        }
        if d + S::N <= dim {
            columns::<S, T, Q, 1, 2>(s, cache, weights, seen, sums, d);
            d += S::N;
        }
        for d in d..dim {
            for q in 0..Q {
                let sum = sums.add(q * dim + d);
                for j in 0..seen {
                    let product = weights.add(q * POSITIONS + j).read()
                        * cache.values.add(j * cache.pitch + d).read().to_f32();
                    sum.write(sum.read() + product);
                }
            }
        }
    }
}

/// `C` vectors of columns from `d` on, over `U` positions at a time: enough chains to hide the
/// latency.
#[inline(always)]
unsafe fn columns<S: Simd, T: Elem, const Q: usize, const C: usize, const U: usize>(
    s: S,
    cache: Cache<T>,
    weights: *const f32,
    seen: usize,
    sums: *mut f32,
    d: usize,
) {
    let (dim, pitch) = (cache.dim, cache.pitch);
    let mut acc = [[[s.zero(); C]; Q]; U];
    // SAFETY: the caller vouches for the columns and for `seen` positions.
    unsafe {
        for q in 0..Q {
            for c in 0..C {
                acc[0][q][c] = s.load(sums.add(q * dim + d + c * S::N));
            }
        }
        let mut j = 0;
        while j + U <= seen {
            for u in 0..U {
                for c in 0..C {
                    let v = T::load(s, cache.values.add((j + u) * pitch + d + c * S::N));
                    for q in 0..Q {
                        acc[u][q][c] = s.fma(
                            s.splat(weights.add(q * POSITIONS + j + u).read()),
                            v,
                            acc[u][q][c],
                        );
                    }
                }
            }
            j += U;
        }
        for j in j..seen {
            for c in 0..C {
                let v = T::load(s, cache.values.add(j * pitch + d + c * S::N));
                for q in 0..Q {
                    acc[0][q][c] =
                        s.fma(s.splat(weights.add(q * POSITIONS + j).read()), v, acc[0][q][c]);
                }
            }
        }
        for q in 0..Q {
            for c in 0..C {
                let mut sum = acc[0][q][c];
                for u in 1..U {
                    sum = s.add(sum, acc[u][q][c]);
                }
                s.store(sums.add(q * dim + d + c * S::N), sum);
            }
        }
    }
}

/// The sizes of the caches of so many sequences.
#[inline(always)]
fn sizes(p: &AttentionParams, sequences: usize) -> Sizes {
    Sizes {
        sequences,
        kv_heads: p.kv_heads,
        positions: p.positions,
        head_dim: p.head_dim,
        bytes: accepted(p.cache).bytes(),
    }
}

/// The grid, and the extents of the operands that both kernels have.
struct Shape {
    grid: [usize; 3],
    q: Extent,
    out: Extent,
    /// Keys, values and limits.
    cache: [Extent; 3],
}

/// The shape for the caches of so many sequences.
fn shape(p: &AttentionParams, sequences: usize) -> Result<Shape, Refusal> {
    let m = positive("the number of rows", p.m)?;
    positive("the number of positions", p.positions)?;
    let wide = head_shape(p.heads, p.head_dim)?;
    head_shape(p.kv_heads, p.head_dim)?;
    if !p.heads.is_multiple_of(p.kv_heads) {
        return Err(format!(
            "{} heads of queries do not share {} heads of keys evenly",
            p.heads, p.kv_heads
        )
        .into());
    }
    let cut = Cut::of(p);
    let x = dtype("the queries", p.x)?.bytes();
    let grid = [p.heads as usize / cut.heads, m.div_ceil(cut.rows), 1];
    dtype("the caches", p.cache)?;
    let (q, out) = ((extent(m, wide, p.ldq)?, x), (extent(m, wide, p.ldo)?, x));
    Ok(Shape { grid, q, out, cache: p.layout.extents(sizes(p, sequences))? })
}

/// A state with uninitialised queries.
#[inline(always)]
fn state() -> SoftmaxState {
    SoftmaxState {
        queries: MaybeUninit::uninit(),
        sums: MaybeUninit::uninit(),
        scores: MaybeUninit::uninit(),
        top: [0.0; QUERIES],
        total: [0.0; QUERIES],
    }
}

/// The keys and values of a head of a sequence, in the operands of a launch.
///
/// # Safety
/// - The operands have what the plan requires, and the sequence and the head are of the launch.
#[inline(always)]
unsafe fn cache<T>(
    p: &AttentionParams,
    (t, [keys, values]): (&CpuArgs<'_>, [usize; 2]),
    sequence: usize,
    head: usize,
) -> Cache<T> {
    let (layout, dim) = (&p.layout, p.head_dim);
    let values = layout.values_in(keys, values);
    // SAFETY: the caller vouches for the operands.
    unsafe {
        Cache {
            keys: ptr::<T>(t, keys).add(layout.at(layout.keys, sequence, head, dim)),
            values: ptr::<T>(t, values).add(layout.at(layout.values, sequence, head, dim)),
            dim: dim as usize,
            pitch: layout.pitch(dim),
        }
    }
}

impl Kernel for Attention {
    const NAME: &'static str = "attention";
    const OPERANDS: &'static [Operand] = &[
        read("queries"),
        read("key cache"),
        read("value cache"),
        read("position"),
        write("output"),
        read("limits"),
    ];
    type Params = AttentionParams;

    fn plan(p: &AttentionParams) -> Result<Launch, Refusal> {
        let Shape { grid, q, out, cache: [keys, values, limits] } = shape(p, 1)?;
        let launch = Launch::new(grid, &[q, keys, values, (1, 4), out, limits])?;
        Ok(p.layout.exact(launch, 1, 5))
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &AttentionParams, t: &CpuArgs<'_>) {
        let cut = Cut::of(p);
        let (dim, elem) = (p.head_dim as usize, accepted(p.x));
        let head = t.tile()[0] as usize * cut.heads;
        let kv = head / (p.heads / p.kv_heads) as usize;
        let first = t.tile()[1] as usize * cut.rows;
        let rows = cut.rows.min(p.m as usize - first);
        let mut state = state();
        let mut lens = [0; QUERIES];
        // SAFETY: `plan` requires the rows and the caches; the state has room for heads * rows
        // queries.
        unsafe {
            let queries = state.queries.as_mut_ptr().cast::<f32>();
            let room = p.layout.own(sizes(p, 1), 0, (t, 5)).end;
            for r in 0..rows {
                lens[r] = position(ptr(t, 3), first + r, room).map_or(0, |at| at + 1);
                let q =
                    (elem, ptr::<u8>(t, 0).cast_const(), (first + r) * p.ldq as usize + head * dim);
                row::widen(s, q, queries.add(r * cut.heads * dim), cut.heads * dim, p.scale);
            }
            with_elem!(accepted(p.cache), T => {
                let cache = cache::<T>(p, (t, [1, 2]), 0, kv);
                s.run(Attend { state: &mut state, cache, heads: cut.heads, lens: &lens[..rows] });
            });
            let sums = state.sums.as_ptr().cast::<f32>();
            for r in 0..rows {
                let out = (elem, ptr(t, 4), (first + r) * p.ldo as usize + head * dim);
                row::narrow(s, sums.add(r * cut.heads * dim), out, cut.heads * dim);
            }
        }
    }
}

impl Kernel for DecodeAttention {
    const NAME: &'static str = "decode_attention";
    const OPERANDS: &'static [Operand] = &[
        read("queries"),
        read("keys"),
        read("values"),
        read("table"),
        update("key cache"),
        update("value cache"),
        read("position"),
        write("output"),
        update("scratch"),
        read("limits"),
    ];
    type Params = AttentionParams;

    fn plan(p: &AttentionParams) -> Result<Launch, Refusal> {
        let (m, group) = (p.m as usize, p.heads / p.kv_heads.max(1));
        let Shape { q, out, cache: [keys, values, limits], .. } = shape(p, m)?;
        if group > QUERIES as u32 {
            return Err(
                format!("groups of {group} heads: it takes groups of {QUERIES} at most").into()
            );
        }
        let rotary = rotary_shape(p.rotary, p.head_dim)?;
        let kv = (times(p.kv_heads as usize * p.head_dim as usize, m)?, q.1);
        let table = (rotary * p.positions as usize, 4);
        let scratch = (times(p.row_scratch(), m)?, 4);
        let operands = [q, kv, kv, table, keys, values, (m, 4), out, scratch, limits];
        Ok(p.layout.exact(Launch::new([p.kv_heads as usize, m, 1], &operands)?, 4, 9))
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &AttentionParams, t: &CpuArgs<'_>) {
        let (dim, elem, stored) = (p.head_dim as usize, accepted(p.x), accepted(p.cache));
        let (kv, row) = (t.tile()[0] as usize, t.tile()[1] as usize);
        let (group, rotary) = ((p.heads / p.kv_heads) as usize, p.rotary as usize);
        let (query_at, out_at) = {
            let head = kv * group * dim;
            (row * p.ldq as usize + head, row * p.ldo as usize + head)
        };
        let new_at = (row * p.kv_heads as usize + kv) * dim;
        let mut state = state();
        // SAFETY: `plan` requires the rows, the table, the positions and the rows' caches. Only
        // this tile accesses this head of the row's caches.
        unsafe {
            let out = ptr::<u8>(t, 7).add(out_at * elem.bytes());
            let word = ptr::<i32>(t, 6).add(row).cast_const();
            let own = p.layout.own(sizes(p, p.m as usize), row, (t, 9));
            let Some(at) = position(word, 0, own.end).filter(|at| own.contains(at)) else {
                return row::poison(elem, out, group * dim);
            };
            let angles = ptr::<f32>(t, 3).add(at * rotary).cast_const();
            let queries = state.queries.as_mut_ptr().cast::<f32>();
            row::widen(s, (elem, ptr(t, 0), query_at), queries, group * dim, p.scale);
            let layout = &p.layout;
            let place = |operand, part| {
                let first = layout.at(part, row, kv, p.head_dim);
                (stored, ptr(t, operand), first + at * layout.pitch(p.head_dim))
            };
            let (keys, values) =
                (place(4, layout.keys), place(layout.values_in(4, 5), layout.values));
            rotate_to(s, (elem, ptr(t, 1), new_at), keys, dim, angles, rotary);
            rotate_to(s, (elem, ptr(t, 2), new_at), values, dim, angles, 0);
            for query in 0..group {
                rotate(s, queries.add(query * dim), angles, rotary / 2);
            }
            with_elem!(stored, T => {
                let cache = cache::<T>(p, (t, [4, 5]), row, kv);
                s.run(Attend { state: &mut state, cache, heads: group, lens: &[at + 1] });
            });
            row::narrow(s, state.sums.as_ptr().cast::<f32>(), (elem, out, 0), group * dim);
        }
    }
}
