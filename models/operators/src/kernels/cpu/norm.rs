//! Root-mean-square normalisation.

use std::mem::MaybeUninit;

use leasehold::kernel::CpuArgs;

use super::row;
use super::simd::Simd;
use super::tile::{
    Extent, Kernel, Launch, Operand, Refusal, accepted, dtype, params, positive, ptr, read, update,
    write,
};

/// The number of elements of a tile's rows together.
const TILE: usize = 4096;
/// Elements on the stack in f32 at a time.
const CHUNK: usize = 1024;

params! {
    /// Parameters of [`RmsNorm`] and [`AddRmsNorm`].
    pub struct NormParams {
        /// Rows.
        pub rows: u32,
        /// Elements of a row.
        pub k: u32,
        /// Elements from one row of the input to the next.
        pub ldx: u32,
        /// Elements from one row of the output to the next.
        pub ldy: u32,
        /// Added to the mean square.
        pub eps: f32,
        /// Element type of input and output.
        pub x: u32,
        /// Element type of the weights.
        pub weight: u32,
    }
}

/// `y = x / sqrt(mean(x²) + eps) · weight`, row by row; sums and products in f32.
pub struct RmsNorm;

/// `h += delta`, then [`RmsNorm`] of `h`. The norm uses the stored values of `h`, rounded to its
/// type.
pub struct AddRmsNorm;

fn rows_per_tile(k: usize) -> usize {
    (TILE / k).max(1)
}

fn shape(p: &NormParams) -> Result<([usize; 3], Extent, Extent, Extent), Refusal> {
    let (rows, k) = (positive("the number of rows", p.rows)?, positive("the width", p.k)?);
    if (p.ldx as usize) < k || (p.ldy as usize) < k {
        return Err("rows overlap: a stride is smaller than the width".into());
    }
    let x = dtype("the activations", p.x)?.bytes();
    let extent = |ld: u32| (rows - 1) * ld as usize + k;
    let weight = (k, dtype("the weights", p.weight)?.bytes());
    Ok(([rows.div_ceil(rows_per_tile(k)), 1, 1], (extent(p.ldx), x), weight, (extent(p.ldy), x)))
}

/// Normalises the row `x` into `y`.
#[inline(always)]
unsafe fn normalise<S: Simd>(s: S, p: &NormParams, x: *const u8, weight: *const u8, y: *mut u8) {
    let mut buffer = MaybeUninit::<[f32; CHUNK]>::uninit();
    let buffer = buffer.as_mut_ptr().cast::<f32>();
    let (k, elem) = (p.k as usize, accepted(p.x));
    // SAFETY: x, weight and y are rows of k elements; a chunk is at most CHUNK.
    unsafe {
        let scale = row::rms_scale(s, elem, x, k, p.eps);
        for at in (0..k).step_by(CHUNK) {
            let n = CHUNK.min(k - at);
            row::widen(s, (elem, x, at), buffer, n, scale);
            row::mul_by(s, buffer, (accepted(p.weight), weight, at), n);
            row::narrow(s, buffer, (elem, y, at), n);
        }
    }
}

/// The rows of a tile.
#[inline(always)]
fn rows_of(p: &NormParams, t: &CpuArgs<'_>) -> std::ops::Range<usize> {
    let step = rows_per_tile(p.k as usize);
    let first = t.tile()[0] as usize * step;
    first..(first + step).min(p.rows as usize)
}

impl Kernel for RmsNorm {
    const NAME: &'static str = "rms_norm";
    const OPERANDS: &'static [Operand] = &[read("x"), read("weight"), write("y")];
    type Params = NormParams;

    fn plan(p: &NormParams) -> Result<Launch, Refusal> {
        let (grid, x, weight, y) = shape(p)?;
        Launch::new(grid, &[x, weight, y])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &NormParams, t: &CpuArgs<'_>) {
        let bytes = accepted(p.x).bytes();
        for r in rows_of(p, t) {
            // SAFETY: `plan` requires these rows.
            unsafe {
                let x = ptr::<u8>(t, 0).add(r * p.ldx as usize * bytes);
                let y = ptr::<u8>(t, 2).add(r * p.ldy as usize * bytes);
                normalise(s, p, x, ptr(t, 1), y);
            }
        }
    }
}

impl Kernel for AddRmsNorm {
    const NAME: &'static str = "add_rms_norm";
    const OPERANDS: &'static [Operand] = &[update("h"), read("delta"), read("weight"), write("y")];
    type Params = NormParams;

    fn plan(p: &NormParams) -> Result<Launch, Refusal> {
        let (grid, x, weight, y) = shape(p)?;
        Launch::new(grid, &[x, x, weight, y])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &NormParams, t: &CpuArgs<'_>) {
        let (k, elem) = (p.k as usize, accepted(p.x));
        let mut buffer = MaybeUninit::<[f32; CHUNK]>::uninit();
        let buffer = buffer.as_mut_ptr().cast::<f32>();
        for r in rows_of(p, t) {
            // SAFETY: `plan` requires these rows; a chunk is at most CHUNK.
            unsafe {
                let h = ptr::<u8>(t, 0).add(r * p.ldx as usize * elem.bytes());
                let delta = ptr::<u8>(t, 1).add(r * p.ldx as usize * elem.bytes());
                for at in (0..k).step_by(CHUNK) {
                    let n = CHUNK.min(k - at);
                    row::widen(s, (elem, h, at), buffer, n, 1.0);
                    row::add_from(s, buffer, (elem, delta, at), n);
                    row::narrow(s, buffer, (elem, h, at), n);
                }
                normalise(
                    s,
                    p,
                    h,
                    ptr(t, 2),
                    ptr::<u8>(t, 3).add(r * p.ldy as usize * elem.bytes()),
                );
            }
        }
    }
}
