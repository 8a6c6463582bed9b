//! Matrix products `y = x · Wᵀ (+ bias)` with `W` stored as `[out, in]`, and the operations that
//! are fused with them.
//!
//! The number of rows of `x` and the type of the weights select one of two methods:
//! - few rows ([`streams`]): the weights stream through the core once and are widened in registers.
//!   A tile is a block of output rows. Its size keeps a tile's overhead small compared with reading
//!   its weights (`rows_per_tile`);
//! - more rows: a tile is a block of outputs by rows, whose weights are widened once. If rows
//!   and weights are bf16 and the level multiplies bf16 ([`Simd::DOTS`]), it multiplies them as
//!   they are.
//!
//! A launch may also normalise `x` ([`NORM`], few rows only): each tile repeats the norm of the
//! rows. For narrow models this costs less than a separate kernel between two barriers.

use std::mem::MaybeUninit;

use half::bf16;
use leasehold::kernel::CpuArgs;

use super::block::{Block, MB, NB, STREAMED};
use super::dot::Panel;
use super::dots::{BLOCK, Dots};
use super::elem::{DType, Elem, load_at, store_at, with_elem};
use super::input::Input;
pub use super::input::{BIAS, LinearParams, NORM};
use super::isa::follows_streams;
use super::math::silu;
use super::row;
use super::simd::{Simd, Task};
use super::stream::{Stream, arrange};
use super::tile::{
    Extent, Kernel, Launch, Operand, Refusal, accepted, dtype, positive, ptr, read, update, write,
};

/// The maximum number of rows of `x` that a product normalises itself, and for which f32 weights
/// are streamed.
pub const FEW: usize = 8;
/// The fewest bytes of weights that one row takes in the order of their addresses. Smaller matrices
/// are in a cache, where four rows side by side are as fast and need no arranged row.
const LARGE: usize = 1 << 20;

/// The longest row whose weights are taken in order. A longer one would not stay in the first
/// cache, where four rows of weights share what is read of it.
fn longest() -> usize {
    if follows_streams() { LONGEST } else { LONGEST / 2 }
}

/// Rows of `x` that are computed together if `x` has few rows.
const MC: usize = 4;
/// Outputs that a tile of few rows completes at a time.
const RC: usize = 64;
/// Elements of the longest row of `x` that is taken alone over weights in order.
const LONGEST: usize = 16384;
/// Elements of `x` on the stack of a tile of few rows.
const XC: usize = 4096;

/// Room for a row of `x` whose vectors do not cross lines of the cache.
#[repr(align(64))]
struct Row(MaybeUninit<[f32; LONGEST]>);

/// `y = x · Wᵀ (+ bias)`.
pub struct Linear;
/// `y += x · Wᵀ (+ bias)`: a projection back into the residual stream.
pub struct LinearAdd;
/// Three products of one `x`: queries, keys and values.
pub struct Linear3;
/// `y = silu(x · Gᵀ (+ bias)) · (x · Uᵀ (+ bias))`: the gated half of a feed-forward block.
pub struct LinearGated;

/// Returns whether weights of this type are streamed for `m` rows. Beyond this number it is cheaper
/// to widen a panel once (16-bit weights) or to use the larger register block (f32). Measurements
/// gave the crossing point (`bench/peers/gemm`).
#[must_use]
pub fn streams(w: DType, m: usize) -> bool {
    m <= if w == DType::F32 { FEW } else { STREAMED }
}

/// The number of rows of weights, of `row_bytes` each, in a tile of few rows: a thirty-second of
/// all `rows`. The result is at least 16 KiB, at most 256 KiB, and a multiple of four rows.
fn rows_per_tile(row_bytes: usize, rows: usize) -> usize {
    let target = (row_bytes.saturating_mul(rows) / 32).clamp(16 << 10, 256 << 10);
    (target / row_bytes).next_multiple_of(4).max(4)
}

/// The grid: few or many rows, over matrices of `n` rows, each of which stands for `weight_rows`
/// rows of weights.
struct Cut {
    few: bool,
    step: usize,
}

impl Cut {
    #[inline(always)]
    fn of(p: &LinearParams, weight_rows: usize) -> Self {
        if streams(accepted(p.w), p.m as usize) {
            let rows = p.n.iter().map(|&n| n as usize).sum();
            Self {
                few: true,
                step: rows_per_tile(p.k as usize * accepted(p.w).bytes() * weight_rows, rows),
            }
        } else {
            // A matrix alone has all outputs of a block, unless the rows are too few for several
            // blocks: then more tiles have work for more threads.
            let alone = weight_rows == 1 && p.m as usize > MB;
            Self { few: false, step: if alone { NB } else { NB / 2 } }
        }
    }

    /// The matrix of tile `x` of the grid, and the rows that the tile computes.
    #[inline(always)]
    fn locate(&self, p: &LinearParams, x: u32) -> (usize, usize, usize) {
        let mut tile = x as usize;
        for (i, &n) in p.n.iter().enumerate() {
            let tiles = (n as usize).div_ceil(self.step);
            if tile < tiles {
                let first = tile * self.step;
                return (i, first, self.step.min(n as usize - first));
            }
            tile -= tiles;
        }
        (0, 0, 0)
    }
}

/// The shape and the operands of a launch.
struct Shape {
    grid: [usize; 3],
    x: Extent,
    norm: Extent,
    /// Weight, bias and output of each matrix.
    matrices: [[Extent; 3]; 3],
}

/// Checks the parameters that the kernels share.
fn shape(p: &LinearParams, matrices: usize, weight_rows: usize) -> Result<Shape, Refusal> {
    let (m, k) = (positive("the number of rows", p.m)?, positive("the inner dimension", p.k)?);
    let (x, w) = (dtype("the activations", p.x)?.bytes(), dtype("the weights", p.w)?.bytes());
    let (y, vector) = (dtype("the outputs", p.y)?.bytes(), dtype("the biases", p.vector)?.bytes());
    if p.flags & !(NORM | BIAS) != 0 {
        return Err(format!("flags {:#x} are unknown", p.flags & !(NORM | BIAS)).into());
    }
    if p.flags & NORM != 0 && m > FEW {
        return Err(format!(
            "{m} rows are normalised by a kernel of their own: a product does so for {FEW} at most"
        )
        .into());
    }
    if (p.ldx as usize) < k {
        return Err("rows of x overlap: their stride is smaller than the inner dimension".into());
    }
    let mut operands = [[(0, 1); 3]; 3];
    let mut tiles = 0;
    let cut = Cut::of(p, weight_rows);
    for i in 0..3 {
        if i >= matrices {
            if p.n[i] != 0 {
                return Err(
                    format!("the kernel has {matrices} outputs, but n[{i}] is not zero").into()
                );
            }
            continue;
        }
        let n = positive("the number of outputs", p.n[i])?;
        if (p.ldy[i] as usize) < n {
            return Err(
                "rows of y overlap: their stride is smaller than the number of outputs".into()
            );
        }
        tiles += n.div_ceil(cut.step);
        let bias = if p.flags & BIAS != 0 { n } else { 0 };
        operands[i] = [(n * k, w), (bias, vector), ((m - 1) * p.ldy[i] as usize + n, y)];
    }
    // Tiles of the same weights follow each other, so that memory gives the weights once.
    let grid = if cut.few { [tiles, 1, 1] } else { [m.div_ceil(MB), tiles, 1] };
    let norm = if p.flags & NORM != 0 { k } else { 0 };
    Ok(Shape {
        grid,
        x: ((m - 1) * p.ldx as usize + k, x),
        norm: (norm, vector),
        matrices: operands,
    })
}

/// `rows` rows of weights from `w` over all `MC` or fewer rows of `x` from `m0`, into `out` (rows
/// of `RC`).
struct Few<'a, W> {
    input: &'a Input<'a>,
    w: *const W,
    rows: usize,
    m0: usize,
    mc: usize,
    /// The rows after conversion (`k` apart) if they fit, else room for [`XC`] elements.
    buffer: *mut f32,
    fits: bool,
    scales: [f32; MC],
    out: *mut f32,
}

impl<W: Elem> Few<'_, W> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let k = self.input.p.k as usize;
        // SAFETY: the weights, the rows of x and the result are those of the tile.
        unsafe {
            let rows = (self.w, k, self.rows);
            if self.input.direct() {
                let x = (self.input.row(self.m0).cast::<f32>(), self.input.p.ldx as usize, self.mc);
                s.run(Panel::new(rows, x, k, (self.out, RC), false));
            } else if self.fits {
                let x = (self.buffer.cast_const(), k, self.mc);
                s.run(Panel::new(rows, x, k, (self.out, RC), false));
            } else {
                let chunk = XC / MC;
                for at in (0..k).step_by(chunk) {
                    let n = chunk.min(k - at);
                    for m in 0..self.mc {
                        self.input.widen(
                            s,
                            self.m0 + m,
                            at,
                            n,
                            self.scales[m],
                            self.buffer.add(m * chunk),
                        );
                    }
                    let part = (self.w.add(at), k, self.rows);
                    let x = (self.buffer.cast_const(), chunk, self.mc);
                    s.run(Panel::new(part, x, n, (self.out, RC), at != 0));
                }
            }
        }
    }
}

/// One output of a tile: its destination, and the values that are added.
struct Output {
    y: *mut u8,
    ldy: usize,
    bias: Option<*const u8>,
    add: bool,
}

impl Output {
    #[inline(always)]
    unsafe fn bias<S: Simd>(&self, s: S, p: &LinearParams, sums: *mut f32, at: usize, n: usize) {
        if let Some(bias) = self.bias {
            // SAFETY: the bias has a value for each output.
            unsafe { row::add_from(s, sums, (accepted(p.vector), bias, at), n) }
        }
    }

    /// Stores `n` finished sums of row `m` from output `at` on.
    #[inline(always)]
    unsafe fn store<S: Simd>(
        &self,
        s: S,
        p: &LinearParams,
        sums: *mut f32,
        m: usize,
        at: usize,
        n: usize,
    ) {
        let dtype = accepted(p.y);
        // SAFETY: outputs at..at + n of row m are the tile's own.
        unsafe {
            let y = self.y.add(m * self.ldy * dtype.bytes());
            if self.add {
                row::add_from(s, sums, (dtype, y, at), n);
            }
            row::narrow(s, sums, (dtype, y, at), n);
        }
    }
}

/// `silu(gate) · up`, into `gate`.
#[inline(always)]
unsafe fn gate<S: Simd>(s: S, gate: *mut f32, up: *const f32, n: usize) {
    for i in (0..n).step_by(S::N) {
        // SAFETY: both have n elements.
        unsafe {
            store_at(s, gate, i, n, s.mul(silu(s, load_at(s, gate, i, n)), load_at(s, up, i, n)))
        }
    }
}

/// A tile of few rows: `rows` outputs from `first` on of the matrices `w` (one, or gate and up).
#[inline(always)]
unsafe fn few<S: Simd, const G: usize>(
    s: S,
    input: &Input<'_>,
    w: [*const u8; G],
    outputs: &[Output; G],
    first: usize,
    rows: usize,
) {
    let p = input.p;
    let (m, k) = (p.m as usize, p.k as usize);
    if m == 1 && k <= longest() {
        let all: usize = p.n.iter().map(|&n| n as usize).sum();
        if all.saturating_mul(G * k * accepted(p.w).bytes()) >= LARGE {
            return s.run(Single { input, w, outputs, first, rows });
        }
    }
    let mut sums = MaybeUninit::<[[f32; MC * RC]; G]>::uninit();
    let sums = sums.as_mut_ptr().cast::<f32>();
    let mut buffer = MaybeUninit::<[f32; XC]>::uninit();
    let buffer = buffer.as_mut_ptr().cast::<f32>();
    // SAFETY: the caller vouches for the tile; rows of sums are RC apart, matrices MC * RC.
    unsafe {
        for m0 in (0..m).step_by(MC) {
            let mc = MC.min(m - m0);
            let mut scales = [1.0; MC];
            if p.flags & NORM != 0 {
                for i in 0..mc {
                    scales[i] = row::rms_scale(s, accepted(p.x), input.row(m0 + i), k, p.eps);
                }
            }
            let fits = !input.direct() && mc * k <= XC;
            if fits {
                for i in 0..mc {
                    input.widen(s, m0 + i, 0, k, scales[i], buffer.add(i * k));
                }
            }
            for r in (first..first + rows).step_by(RC) {
                let n = RC.min(first + rows - r);
                for g in 0..G {
                    let out = sums.add(g * MC * RC);
                    with_elem!(accepted(p.w), W => {
                        let w = w[g].cast::<W>().add(r * k);
                        Few::<W> { input, w, rows: n, m0, mc, buffer, fits, scales, out }.run(s);
                    });
                    for i in 0..mc {
                        outputs[g].bias(s, p, out.add(i * RC), r, n);
                    }
                }
                for i in 0..mc {
                    let out = sums.add(i * RC);
                    if G == 2 {
                        gate(s, out, sums.add(MC * RC + i * RC), n);
                    }
                    outputs[0].store(s, p, out, m0 + i, r, n);
                }
            }
        }
    }
}

/// A tile of one row over weights that come from memory, as a separate function: its row is on the
/// stack only during the call.
struct Single<'a, const G: usize> {
    input: &'a Input<'a>,
    w: [*const u8; G],
    outputs: &'a [Output; G],
    first: usize,
    rows: usize,
}

impl<const G: usize> Task for Single<'_, G> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { input, w, outputs, first, rows } = self;
        let p = input.p;
        let k = p.k as usize;
        let mut sums = MaybeUninit::<[[f32; RC]; G]>::uninit();
        let sums = sums.as_mut_ptr().cast::<f32>();
        let mut x = Row(MaybeUninit::uninit());
        let x = x.0.as_mut_ptr().cast::<f32>();
        // SAFETY: only `few` makes this value, from its tile. The row has k elements, at most the
        // room for one.
        unsafe {
            let norm = p.flags & NORM != 0;
            let scale =
                if norm { row::rms_scale(s, accepted(p.x), input.row(0), k, p.eps) } else { 1.0 };
            input.widen(s, 0, 0, k, scale, x);
            arrange(s, accepted(p.w), x, k);
            for r in (first..first + rows).step_by(RC) {
                let n = RC.min(first + rows - r);
                for g in 0..G {
                    let out = sums.add(g * RC);
                    with_elem!(accepted(p.w), W => {
                        s.run(Stream::new((w[g].cast::<W>().add(r * k), n), (x, k), out));
                    });
                    outputs[g].bias(s, p, out, r, n);
                }
                if G == 2 {
                    gate(s, sums, sums.add(RC), n);
                }
                outputs[0].store(s, p, sums, 0, r, n);
            }
        }
    }
}

/// A tile of many rows.
#[inline(always)]
unsafe fn many<S: Simd, const G: usize>(
    s: S,
    input: &Input<'_>,
    w: [*const u8; G],
    outputs: &[Output; G],
    (first, rows): (usize, usize),
    m0: usize,
) {
    let p = input.p;
    let k = p.k as usize;
    let mc = MB.min(p.m as usize - m0);
    let mut sums = MaybeUninit::<[f32; MB * NB]>::uninit();
    let sums = sums.as_mut_ptr().cast::<f32>();
    // SAFETY: the caller vouches for the tile; rows of sums are NB apart, matrices NB / G.
    unsafe {
        if S::DOTS && accepted(p.w) == DType::Bf16 && accepted(p.x) == DType::Bf16 {
            for g in 0..G {
                for r in (0..rows).step_by(BLOCK) {
                    let w = (w[g].cast::<bf16>().add((first + r) * k), k, BLOCK.min(rows - r));
                    let x = (input.row(m0).cast::<bf16>(), p.ldx as usize, mc);
                    s.run(Dots::new(w, x, k, (sums.add(g * NB / G + r), NB)));
                }
            }
        } else {
            with_elem!(accepted(p.w), W => {
                let w = w.map(|w| w.cast::<W>().add(first * k));
                s.run(Block::<W, G> { input, w, rows, m0, mc, out: sums });
            });
        }
        for i in 0..mc {
            let out = sums.add(i * NB);
            for g in 0..G {
                outputs[g].bias(s, p, out.add(g * NB / G), first, rows);
            }
            if G == 2 {
                gate(s, out, out.add(NB / G), rows);
            }
            outputs[0].store(s, p, out, m0 + i, first, rows);
        }
    }
}

/// A tile of `G` matrices. `operands(matrix, g)` returns the operand numbers of a weight and of its
/// output.
///
/// # Safety
/// - The conditions of [`Kernel::tile`].
#[inline(always)]
unsafe fn project<S: Simd, const G: usize>(
    s: S,
    p: &LinearParams,
    t: &CpuArgs<'_>,
    add: bool,
    operands: impl Fn(usize, usize) -> (usize, usize),
) {
    let cut = Cut::of(p, G);
    let [at, y, _] = t.tile();
    let (tile, m0) = if cut.few { (at, None) } else { (y, Some(at as usize * MB)) };
    let (matrix, first, rows) = cut.locate(p, tile);
    let input = Input { p, x: ptr(t, 0), norm: ptr(t, 1) };
    let mut w = [std::ptr::null(); G];
    let mut outputs =
        [const { Output { y: std::ptr::null_mut(), ldy: 0, bias: None, add: false } }; G];
    for g in 0..G {
        let (weight, y) = operands(matrix, g);
        w[g] = ptr::<u8>(t, weight).cast_const();
        let bias = (p.flags & BIAS != 0).then(|| ptr::<u8>(t, weight + 1).cast_const());
        outputs[g] = Output { y: ptr(t, y), ldy: p.ldy[matrix] as usize, bias, add };
    }
    s.run(Outputs { input: &input, w, outputs: &outputs, first, rows, m0 });
}

/// The outputs of a tile, as a function that the kernels share.
struct Outputs<'a, const G: usize> {
    input: &'a Input<'a>,
    w: [*const u8; G],
    outputs: &'a [Output; G],
    first: usize,
    rows: usize,
    /// The first row, in a tile of many rows.
    m0: Option<usize>,
}

impl<const G: usize> Task for Outputs<'_, G> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: only `project` makes this value, from its tile.
        unsafe {
            match self.m0 {
                None => few(s, self.input, self.w, self.outputs, self.first, self.rows),
                Some(m0) => many(s, self.input, self.w, self.outputs, (self.first, self.rows), m0),
            }
        }
    }
}

impl Kernel for Linear {
    const NAME: &'static str = "linear";
    const OPERANDS: &'static [Operand] =
        &[read("x"), read("norm"), read("weight"), read("bias"), write("y")];
    type Params = LinearParams;
    const PRODUCT: bool = true;

    fn plan(p: &LinearParams) -> Result<Launch, Refusal> {
        let Shape { grid, x, norm, matrices: [[w, b, y], ..] } = shape(p, 1, 1)?;
        Launch::new(grid, &[x, norm, w, b, y])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &LinearParams, t: &CpuArgs<'_>) {
        // SAFETY: the caller keeps the conditions of `Kernel::tile`.
        unsafe { project::<S, 1>(s, p, t, false, |_, _| (2, 4)) }
    }
}

impl Kernel for LinearAdd {
    const NAME: &'static str = "linear_add";
    const OPERANDS: &'static [Operand] =
        &[read("x"), read("norm"), read("weight"), read("bias"), update("y")];
    type Params = LinearParams;
    const PRODUCT: bool = true;

    fn plan(p: &LinearParams) -> Result<Launch, Refusal> {
        Linear::plan(p)
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &LinearParams, t: &CpuArgs<'_>) {
        // SAFETY: the caller keeps the conditions of `Kernel::tile`.
        unsafe { project::<S, 1>(s, p, t, true, |_, _| (2, 4)) }
    }
}

impl Kernel for Linear3 {
    const NAME: &'static str = "linear3";
    const OPERANDS: &'static [Operand] = &[
        read("x"),
        read("norm"),
        read("weight 0"),
        read("bias 0"),
        write("y 0"),
        read("weight 1"),
        read("bias 1"),
        write("y 1"),
        read("weight 2"),
        read("bias 2"),
        write("y 2"),
    ];
    type Params = LinearParams;
    const PRODUCT: bool = true;

    fn plan(p: &LinearParams) -> Result<Launch, Refusal> {
        let Shape { grid, x, norm, matrices: [a, b, c] } = shape(p, 3, 1)?;
        Launch::new(grid, &[x, norm, a[0], a[1], a[2], b[0], b[1], b[2], c[0], c[1], c[2]])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &LinearParams, t: &CpuArgs<'_>) {
        // SAFETY: the caller keeps the conditions of `Kernel::tile`.
        unsafe { project::<S, 1>(s, p, t, false, |matrix, _| (2 + 3 * matrix, 4 + 3 * matrix)) }
    }
}

impl Kernel for LinearGated {
    const NAME: &'static str = "linear_gated";
    const OPERANDS: &'static [Operand] = &[
        read("x"),
        read("norm"),
        read("gate weight"),
        read("gate bias"),
        read("up weight"),
        read("up bias"),
        write("y"),
    ];
    type Params = LinearParams;
    const PRODUCT: bool = true;

    fn plan(p: &LinearParams) -> Result<Launch, Refusal> {
        let Shape { grid, x, norm, matrices: [[w, b, y], ..] } = shape(p, 1, 2)?;
        Launch::new(grid, &[x, norm, w, b, w, b, y])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &LinearParams, t: &CpuArgs<'_>) {
        // SAFETY: the caller keeps the conditions of `Kernel::tile`.
        unsafe { project::<S, 2>(s, p, t, false, |_, g| (2 + 2 * g, 6)) }
    }
}
