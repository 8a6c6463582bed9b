//! Rotary position embedding, and the append of rotated keys to the key-value cache.
//!
//! The convention is Hugging Face's ("rotate half"): element `i` of a head is paired with element
//! `i + rotary / 2`. Cosines and sines come from a table with a row for each position: `rotary / 2`
//! cosines, then as many sines ([`table`] makes one). The position of the first row is read from
//! device memory, so that a recorded step can be replayed for every token.
//!
//! A [layout](super::cache) says where a cache has its keys and values. A row whose position lies
//! outside the table or the cache writes nothing to the cache; its results are NaN.

use leasehold::kernel::CpuArgs;

use super::cache::{CacheLayout, Sizes};
use super::elem::{DType, load_at, store_at};
use super::row;
use super::simd::{Simd, Task};
use super::tile::{
    Kernel, Launch, Operand, Refusal, accepted, dtype, params, positive, ptr, read, update,
};

/// The maximum width of a head.
pub const MAX_HEAD_DIM: usize = 256;
/// The approximate number of elements of a tile.
const TILE: usize = 4096;

params! {
    /// Parameters of [`Rope`], [`CacheAppend`] and [`RopeAppend`].
    pub struct RopeParams {
        /// Rows; row `i` is at the position of the first row plus `i`.
        pub m: u32,
        /// Heads of `x` or of the queries.
        pub heads: u32,
        /// Heads of keys and values.
        pub kv_heads: u32,
        /// Elements of a head.
        pub head_dim: u32,
        /// Elements of a head that are rotated: even, the first of the head.
        pub rotary: u32,
        /// Positions of the table and of a cache.
        pub positions: u32,
        /// Elements from one row to the next: of `x` or the queries, of the keys, and of the
        /// values.
        pub ld: [u32; 3],
        /// Element type of the rows.
        pub x: u32,
        /// Element type of the caches.
        pub cache: u32,
        /// The places in the caches; nothing in [`Rope`].
        pub layout: CacheLayout,
    }
}

/// Rotates the heads of `x` in place.
pub struct Rope;
/// Copies rows of `kv_heads · head_dim` elements to a cache, at their positions: to the places
/// that the layout has for keys. The cache has all of its memory.
pub struct CacheAppend;
/// Rotates queries in place, and appends rotated keys, and values, to their caches.
pub struct RopeAppend;

/// The table for `positions` positions: `cos(p · f)` and `sin(p · f)` of each inverse frequency,
/// computed in f64.
#[must_use]
pub fn table(inverse_frequencies: &[f64], positions: usize) -> Vec<f32> {
    let mut table = Vec::with_capacity(2 * inverse_frequencies.len() * positions);
    for position in 0..positions {
        push_position(&mut table, position, inverse_frequencies, 1.0);
    }
    table
}

/// Adds a position to a table: the cosine and sine of each inverse frequency's angle there, times a
/// factor, computed in f64.
pub fn push_position(table: &mut Vec<f32>, position: usize, inverse: &[f64], factor: f64) {
    let angle = |f: &f64| position as f64 * f;
    table.extend(inverse.iter().map(|f| (angle(f).cos() * factor) as f32));
    table.extend(inverse.iter().map(|f| (angle(f).sin() * factor) as f32));
}

/// The position of row `row` of a launch, if the device word holds a valid one.
///
/// # Safety
/// - `word` is a readable i32.
#[inline(always)]
pub unsafe fn position(word: *const i32, row: usize, limit: usize) -> Option<usize> {
    // SAFETY: the caller vouches for a readable word.
    let first = unsafe { word.read() };
    let at = usize::try_from(first).ok()?.checked_add(row)?;
    (at < limit).then_some(at)
}

/// Rotates a head of f32.
///
/// # Safety
/// - `head` has `2 * half` writable elements, `angles` as many readable ones.
#[inline(always)]
pub unsafe fn rotate<S: Simd>(s: S, head: *mut f32, angles: *const f32, half: usize) {
    s.run(Rotate { head, angles, half });
}

struct Rotate {
    head: *mut f32,
    angles: *const f32,
    half: usize,
}

impl Task for Rotate {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { head, angles, half } = self;
        // SAFETY: lanes below half of four rows of that length, for which `rotate`'s caller
        // vouches.
        unsafe {
            for i in (0..half).step_by(S::N) {
                let (c, d) = (load_at(s, angles, i, half), load_at(s, angles.add(half), i, half));
                let (a, b) = (load_at(s, head, i, half), load_at(s, head.add(half), i, half));
                let first = s.sub(s.mul(a, c), s.mul(b, d));
                let second = s.fma(b, c, s.mul(a, d));
                store_at(s, head, i, half, first);
                store_at(s, head.add(half), i, half, second);
            }
        }
    }
}

/// Widens a head to f32, rotates it, and stores it in another type.
///
/// # Safety
/// - Both rows have `dim` elements of their types from the given one on; `dim` is at most
///   [`MAX_HEAD_DIM`].
/// - `angles` has `rotary` elements, at most `dim`.
#[inline(always)]
pub unsafe fn rotate_to<S: Simd>(
    s: S,
    from: (DType, *const u8, usize),
    to: (DType, *mut u8, usize),
    dim: usize,
    angles: *const f32,
    rotary: usize,
) {
    let mut head = std::mem::MaybeUninit::<[f32; MAX_HEAD_DIM]>::uninit();
    let head = head.as_mut_ptr().cast::<f32>();
    // SAFETY: the caller vouches for the rows; the head on the stack is as long as the longest.
    unsafe {
        row::widen(s, from, head, dim, 1.0);
        rotate(s, head, angles, rotary / 2);
        row::narrow(s, head, to, dim);
    }
}

/// Checks the dimensions of heads; returns the elements of a row of `heads` heads.
pub(crate) fn head_shape(heads: u32, head_dim: u32) -> Result<usize, Refusal> {
    let (heads, dim) =
        (positive("the number of heads", heads)?, positive("the width of a head", head_dim)?);
    if dim > MAX_HEAD_DIM {
        return Err(format!("a head of {dim} elements is wider than {MAX_HEAD_DIM}").into());
    }
    Ok(heads * dim)
}

/// Checks a rotation.
pub(crate) fn rotary_shape(rotary: u32, head_dim: u32) -> Result<usize, Refusal> {
    if rotary == 0 || !rotary.is_multiple_of(2) || rotary > head_dim {
        return Err(format!(
            "{rotary} elements of a head of {head_dim} cannot be rotated: an even number up to all can"
        )
        .into());
    }
    Ok(rotary as usize)
}

/// Elements of `m` rows of `width`, `ld` apart.
pub(crate) fn extent(m: usize, width: usize, ld: u32) -> Result<usize, Refusal> {
    if (ld as usize) < width {
        return Err(format!("rows of {width} elements overlap: their stride is {ld}").into());
    }
    Ok((m - 1) * ld as usize + width)
}

/// Rows of `width` elements in a tile.
fn rows_per_tile(width: usize) -> usize {
    (TILE / width).max(1)
}

/// Elements of a row that a tile of any of the kernels reads; they determine the tiles' size.
#[inline(always)]
fn width(p: &RopeParams) -> usize {
    (p.heads as usize + 2 * p.kv_heads as usize) * p.head_dim as usize
}

#[inline(always)]
fn rows_of(p: &RopeParams, t: &CpuArgs<'_>) -> std::ops::Range<usize> {
    let step = rows_per_tile(width(p));
    let first = t.tile()[0] as usize * step;
    first..(first + step).min(p.m as usize)
}

/// Rotates the heads of row `m` of operand 0 in place.
#[inline(always)]
unsafe fn rotate_row<S: Simd>(
    s: S,
    p: &RopeParams,
    t: &CpuArgs<'_>,
    m: usize,
    at: Option<usize>,
    table: *const f32,
) {
    let (dim, elem) = (p.head_dim as usize, accepted(p.x));
    // SAFETY: `plan` requires the row and the table's rows below `positions`.
    unsafe {
        let x = ptr::<u8>(t, 0).add(m * p.ld[0] as usize * elem.bytes());
        let Some(at) = at else { return row::poison(elem, x, p.heads as usize * dim) };
        let angles = table.add(at * p.rotary as usize);
        for head in 0..p.heads as usize {
            rotate_to(
                s,
                (elem, x, head * dim),
                (elem, x, head * dim),
                dim,
                angles,
                p.rotary as usize,
            );
        }
    }
}

/// The sizes of the caches, of the one sequence of a launch.
#[inline(always)]
fn sizes(p: &RopeParams) -> Sizes {
    Sizes {
        sequences: 1,
        kv_heads: p.kv_heads,
        positions: p.positions,
        head_dim: p.head_dim,
        bytes: accepted(p.cache).bytes(),
    }
}

/// Appends row `from` to a part of a cache at position `at`; rotates the row if angles are given.
///
/// # Safety
/// - `from` is a row of `kv_heads` heads; the cache has that part.
/// - `at` is one of its positions, and has memory.
#[inline(always)]
unsafe fn append<S: Simd>(
    s: S,
    p: &RopeParams,
    from: *const u8,
    (cache, part): (*mut u8, u32),
    at: usize,
    angles: Option<*const f32>,
) {
    let (dim, elem, stored) = (p.head_dim as usize, accepted(p.x), accepted(p.cache));
    // SAFETY: the caller vouches for the row and the cache.
    unsafe {
        for head in 0..p.kv_heads as usize {
            let first = p.layout.at(part, 0, head, p.head_dim);
            let to = (stored, cache, first + at * p.layout.pitch(p.head_dim));
            let (angles, rotary) =
                angles.map_or((std::ptr::null(), 0), |angles| (angles, p.rotary as usize));
            rotate_to(s, (elem, from, head * dim), to, dim, angles, rotary);
        }
    }
}

impl Kernel for Rope {
    const NAME: &'static str = "rope";
    const OPERANDS: &'static [Operand] = &[update("x"), read("table"), read("position")];
    type Params = RopeParams;

    fn plan(p: &RopeParams) -> Result<Launch, Refusal> {
        let (m, positions) = (
            positive("the number of rows", p.m)?,
            positive("the number of positions", p.positions)?,
        );
        let rotary = rotary_shape(p.rotary, p.head_dim)?;
        let x = extent(m, head_shape(p.heads, p.head_dim)?, p.ld[0])?;
        Launch::new(
            [m.div_ceil(rows_per_tile(width(p))), 1, 1],
            &[(x, dtype("the rows", p.x)?.bytes()), (positions * rotary, 4), (1, 4)],
        )
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &RopeParams, t: &CpuArgs<'_>) {
        for m in rows_of(p, t) {
            // SAFETY: the caller keeps the conditions of `Kernel::tile`.
            unsafe {
                rotate_row(s, p, t, m, position(ptr(t, 2), m, p.positions as usize), ptr(t, 1))
            }
        }
    }
}

impl Kernel for CacheAppend {
    const NAME: &'static str = "cache_append";
    const OPERANDS: &'static [Operand] = &[read("x"), update("cache"), read("position")];
    type Params = RopeParams;

    fn plan(p: &RopeParams) -> Result<Launch, Refusal> {
        let m = positive("the number of rows", p.m)?;
        positive("the number of positions", p.positions)?;
        let wide = head_shape(p.kv_heads, p.head_dim)?;
        dtype("the cache", p.cache)?;
        if p.layout.limits != 0 {
            return Err("it appends to caches that have all of their memory".into());
        }
        let [cache, ..] = p.layout.extents(sizes(p))?;
        Launch::new(
            [m.div_ceil(rows_per_tile(width(p))), 1, 1],
            &[(extent(m, wide, p.ld[0])?, dtype("the rows", p.x)?.bytes()), cache, (1, 4)],
        )
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &RopeParams, t: &CpuArgs<'_>) {
        for m in rows_of(p, t) {
            // SAFETY: the caller keeps the conditions of `Kernel::tile`; the position is within the
            // cache.
            unsafe {
                if let Some(at) = position(ptr(t, 2), m, p.positions as usize) {
                    let from = ptr::<u8>(t, 0).add(m * p.ld[0] as usize * accepted(p.x).bytes());
                    append(s, p, from, (ptr(t, 1), p.layout.keys), at, None);
                }
            }
        }
    }
}

impl Kernel for RopeAppend {
    const NAME: &'static str = "rope_append";
    const OPERANDS: &'static [Operand] = &[
        update("queries"),
        read("keys"),
        read("values"),
        read("table"),
        update("key cache"),
        update("value cache"),
        read("position"),
        read("limits"),
    ];
    type Params = RopeParams;

    fn plan(p: &RopeParams) -> Result<Launch, Refusal> {
        let (m, positions) = (
            positive("the number of rows", p.m)?,
            positive("the number of positions", p.positions)?,
        );
        let rotary = rotary_shape(p.rotary, p.head_dim)?;
        let (q, kv) = (head_shape(p.heads, p.head_dim)?, head_shape(p.kv_heads, p.head_dim)?);
        let x = dtype("the rows", p.x)?.bytes();
        dtype("the caches", p.cache)?;
        let [keys, values, limits] = p.layout.extents(sizes(p))?;
        let launch = Launch::new(
            [m.div_ceil(rows_per_tile(width(p))), 1, 1],
            &[
                (extent(m, q, p.ld[0])?, x),
                (extent(m, kv, p.ld[1])?, x),
                (extent(m, kv, p.ld[2])?, x),
                (positions * rotary, 4),
                keys,
                values,
                (1, 4),
                limits,
            ],
        )?;
        Ok(p.layout.exact(launch, 4, 7))
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &RopeParams, t: &CpuArgs<'_>) {
        let (bytes, layout) = (accepted(p.x).bytes(), &p.layout);
        // SAFETY: `plan` requires the words of each part.
        let own = unsafe { layout.own(sizes(p), 0, (t, 7)) };
        for m in rows_of(p, t) {
            // SAFETY: the caller keeps the conditions of `Kernel::tile`; the position is within
            // table and cache.
            unsafe {
                let at = position(ptr(t, 6), m, own.end).filter(|at| own.contains(at));
                rotate_row(s, p, t, m, at, ptr(t, 3));
                let Some(at) = at else { continue };
                let angles = ptr::<f32>(t, 3).add(at * p.rotary as usize).cast_const();
                append(
                    s,
                    p,
                    ptr::<u8>(t, 1).add(m * p.ld[1] as usize * bytes),
                    (ptr(t, 4), layout.keys),
                    at,
                    Some(angles),
                );
                append(
                    s,
                    p,
                    ptr::<u8>(t, 2).add(m * p.ld[2] as usize * bytes),
                    (ptr(t, layout.values_in(4, 5)), layout.values),
                    at,
                    None,
                );
            }
        }
    }
}
