//! The product of a block of many rows.
//!
//! Most levels take panels ([`Simd::PANELS`]), which are an outer product. A block takes [`KC`]
//! columns at a time. Its rows of `x` are widened once and stay in the second cache. Its weights
//! are widened once too, in panels of as many outputs as the level keeps in registers, column
//! after column ([`Pack`]): a panel stays in the first cache while all rows pass it. A step loads
//! one column of a panel and multiplies it by one element of each row, so every sum has a lane of
//! its own ([`multiply`]). A sum adds the products of a chunk of columns in their order, and the
//! chunks' sums in their order. So it depends neither on the rows beside it nor on the number of
//! lanes: AVX2 and NEON, whose [`Simd::fma`] rounds once, give equal bits.
//!
//! Other levels, and f32 weights of no more rows than [`STREAMED`], multiply rows side by side
//! ([`Panel`]).

use std::mem::MaybeUninit;

use super::dot::{Panel, words_part};
use super::elem::{DType, Elem, load_part};
use super::input::Input;
use super::row;
use super::simd::{InRegisters, Simd, Task};

/// The maximum number of rows of `x` for which 16-bit weights are streamed instead.
pub(super) const STREAMED: usize = 24;
/// Rows of a block: a multiple of the rows that each level keeps in registers.
pub(super) const MB: usize = 96;
/// Outputs of a block, over all matrices: a multiple of those that each level keeps in registers.
pub(super) const NB: usize = 64;
/// Columns of a chunk: a multiple of those that [`Pack`] takes at a time.
const KC: usize = 256;
/// Elements from one widened row to the next. Not a power of two, so that rows do not share one set
/// of the cache.
const LDX: usize = KC + 16;
/// Rows of `x` from one that is widened to one that is prefetched.
const AHEAD: usize = 8;
/// Outputs of the widest panel.
const NR: usize = 32;

/// Columns of a chunk of rows side by side.
const KP: usize = 512;
/// Elements from one such row to the next.
const LDP: usize = KP + 16;
/// The most rows of `x` that are taken side by side ([`Simd::GEMM_M`]).
const MR: usize = 6;

/// Room for a panel, whose vectors do not cross lines of the cache.
#[repr(align(64))]
struct Room(MaybeUninit<[f32; NR * KC]>);

/// `out[m][g · NB / G + r] = Σ_k w[g][r][k] · x[m][k]`, in f32, for `mc` rows from `m0` on and
/// `rows` outputs of each of `G` matrices.
pub(super) struct Block<'a, W, const G: usize> {
    pub(super) input: &'a Input<'a>,
    pub(super) w: [*const W; G],
    pub(super) rows: usize,
    pub(super) m0: usize,
    pub(super) mc: usize,
    /// Room for [`MB`] rows of [`NB`] elements.
    pub(super) out: *mut f32,
}

impl<W: Elem, const G: usize> Task for Block<'_, W, G> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if S::PANELS && self.input.rows() > STREAMED {
            return s.in_registers(self);
        }
        // SAFETY: only `many` makes this value, from its tile.
        unsafe { self.side_by_side(s) }
    }
}

impl<W: Elem, const G: usize> Block<'_, W, G> {
    /// Four rows of weights beside some rows of `x`, both widened, or in place if they are f32.
    #[inline(always)]
    unsafe fn side_by_side<S: Simd>(&self, s: S) {
        let k = self.input.columns();
        let mut panel = MaybeUninit::<[f32; NB / 2 * LDP]>::uninit();
        let panel = panel.as_mut_ptr().cast::<f32>();
        let mut buffer = MaybeUninit::<[f32; MR * LDP]>::uninit();
        let buffer = buffer.as_mut_ptr().cast::<f32>();
        // SAFETY: the caller vouches for the weights, the rows of x and the sums; at + n is at most
        // k.
        unsafe {
            for g in 0..G {
                for first in (0..self.rows).step_by(NB / 2) {
                    let rows = (NB / 2).min(self.rows - first);
                    let w = self.w[g].add(first * k);
                    let out = self.out.add(g * NB / G + first);
                    for at in (0..k).step_by(KP) {
                        let n = KP.min(k - at);
                        let weights = if W::DTYPE == DType::F32 {
                            (w.cast::<f32>().add(at), k, rows)
                        } else {
                            for r in 0..rows {
                                let from = (W::DTYPE, w.cast(), r * k + at);
                                row::widen(s, from, panel.add(r * LDP), n, 1.0);
                            }
                            (panel.cast_const(), LDP, rows)
                        };
                        for m in (0..self.mc).step_by(S::GEMM_M) {
                            let few = S::GEMM_M.min(self.mc - m);
                            let x = if let Some(x) = self.input.wide(self.m0 + m) {
                                (x.0.add(at), x.1, few)
                            } else {
                                for i in 0..few {
                                    let to = buffer.add(i * LDP);
                                    self.input.widen(s, self.m0 + m + i, at, n, 1.0, to);
                                }
                                (buffer.cast_const(), LDP, few)
                            };
                            s.run(Panel::new(weights, x, n, (out.add(m * NB), NB), at != 0));
                        }
                    }
                }
            }
        }
    }
}

impl<W: Elem, const G: usize> InRegisters for Block<'_, W, G> {
    /// All chunks. What is missing beside whole registers is computed as zero.
    #[inline(always)]
    fn run<S: Simd, const M: usize, const V: usize>(self, s: S) {
        const { assert!(MB.is_multiple_of(M) && (NB / 2).is_multiple_of(V * S::N) && V * S::N <= NR) }
        let k = self.input.columns();
        let mut x = MaybeUninit::<[f32; MB * LDX]>::uninit();
        let x = x.as_mut_ptr().cast::<f32>();
        let mut panel = Room(MaybeUninit::uninit());
        let panel = panel.0.as_mut_ptr().cast::<f32>();
        // SAFETY: only `many` makes this value: the block has the rows of x and of the weights, and
        // at + n is at most k. There is room for whole registers of rows and outputs.
        unsafe {
            for at in (0..k).step_by(KC) {
                let n = KC.min(k - at);
                for m in 0..self.mc {
                    let ahead = (m + AHEAD).min(self.mc - 1);
                    self.input.prefetch(s, self.m0 + ahead, at, n);
                    self.input.widen(s, self.m0 + m, at, n, 1.0, x.add(m * LDX));
                }
                for m in self.mc..self.mc.next_multiple_of(M) {
                    x.add(m * LDX).write_bytes(0, n);
                }
                for g in 0..G {
                    for r in (0..self.rows).step_by(V * S::N) {
                        let w = (self.w[g].add(r * k + at), k, self.rows - r);
                        s.run(Pack::<W, V> { w, n, to: panel });
                        let out = self.out.add(g * (NB / G) + r);
                        s.run(Multiply::<M, V> { x: (x, self.mc), panel, n, out, first: at == 0 });
                    }
                }
            }
        }
    }
}

/// The first `n` columns of rows of weights (a pointer, elements from one row to the next, rows),
/// widened: each column has `V` vectors, those of missing rows zero.
struct Pack<W, const V: usize> {
    w: (*const W, usize, usize),
    n: usize,
    to: *mut f32,
}

impl<W: Elem, const V: usize> Task for Pack<W, V> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (w, ldw, rows) = self.w;
        // A lane holds two bf16 until the lanes have their places.
        let pairs = matches!(W::DTYPE, DType::Bf16);
        let step = if pairs { 2 * S::N } else { S::N };
        for v in 0..V {
            let live = rows.saturating_sub(v * S::N).min(S::N);
            for i in (0..self.n).step_by(step) {
                let mut square = s.square();
                // SAFETY: only [`Block`] makes this value: rows and columns are the block's. The
                // panel has room for whole steps.
                unsafe {
                    for r in 0..S::N {
                        if r >= live {
                            continue;
                        }
                        let from = w.add((v * S::N + r) * ldw + i);
                        square[r] = match (pairs, i + step <= self.n) {
                            (true, true) => s.load(from.cast()),
                            (true, false) => words_part(s, from.cast(), self.n - i),
                            (false, true) => W::load(s, from),
                            (false, false) => load_part(s, from, self.n - i),
                        };
                    }
                    let square = s.transpose(square);
                    let to = self.to.add((i * V + v) * S::N);
                    for c in 0..S::N {
                        if pairs {
                            let [even, odd] = s.halves_bf16(square[c]);
                            s.store(to.add(2 * c * V * S::N), even);
                            s.store(to.add((2 * c + 1) * V * S::N), odd);
                        } else {
                            s.store(to.add(c * V * S::N), square[c]);
                        }
                    }
                }
            }
        }
    }
}

/// The products of `n` columns of a panel with rows of `x`, as many as whole registers have.
struct Multiply<const M: usize, const V: usize> {
    x: (*const f32, usize),
    panel: *const f32,
    n: usize,
    out: *mut f32,
    /// The sums of earlier chunks are not in `out`.
    first: bool,
}

impl<const M: usize, const V: usize> Task for Multiply<M, V> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for m in (0..self.x.1).step_by(M) {
            // SAFETY: only [`Block`] makes this value: x and out have whole registers of rows.
            unsafe {
                let x = self.x.0.add(m * LDX);
                let sums = multiply::<S, M, V>(s, x, self.panel, self.n);
                for i in 0..M {
                    for v in 0..V {
                        let out = self.out.add((m + i) * NB + v * S::N);
                        let sum = sums[i][v];
                        s.store(out, if self.first { sum } else { s.add(s.load(out), sum) });
                    }
                }
            }
        }
    }
}

/// `M` rows of `x` by `V` vectors of outputs.
#[inline(always)]
unsafe fn multiply<S: Simd, const M: usize, const V: usize>(
    s: S,
    x: *const f32,
    panel: *const f32,
    n: usize,
) -> [[S::V; V]; M] {
    let mut acc = [[s.zero(); V]; M];
    // SAFETY: the caller vouches for n elements of M rows, and for n columns of the panel.
    unsafe {
        for i in 0..n {
            let mut w = [s.zero(); V];
            for v in 0..V {
                w[v] = s.load(panel.add((i * V + v) * S::N));
            }
            for m in 0..M {
                let x = s.splat(x.add(m * LDX + i).read());
                for v in 0..V {
                    acc[m][v] = s.fma(w[v], x, acc[m][v]);
                }
            }
        }
    }
    acc
}
