//! The operands of products of bf16 by bf16, for the levels that multiply them as they are.
//!
//! This file must not know how a level multiplies.

use half::bf16;

/// Rows of weights that [`Dots`] takes at most, and the multiple of rows that its result has.
pub(super) const BLOCK: usize = 32;

/// `out[m][r] = Σ_k w[r][k] · x[m][k]` of bf16 by bf16, in f32, as
/// [`Simd::dot_bf16`](super::simd::Simd::dot_bf16) sums. Each sum has one accumulator, so its order
/// depends only on the level and on `k`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dots {
    pub(super) w: *const bf16,
    pub(super) ldw: usize,
    pub(super) rows: usize,
    pub(super) x: *const bf16,
    pub(super) ldx: usize,
    pub(super) m: usize,
    pub(super) k: usize,
    pub(super) out: *mut f32,
    pub(super) ldo: usize,
}

impl Dots {
    /// The products of `rows` rows of `k` weights, `ldw` elements apart, from `w`, with `m` rows of
    /// `x`, `ldx` apart. Row `m` of the result starts at `out + m * ldo`.
    ///
    /// # Safety
    /// - There are at most [`BLOCK`] rows of weights. The rows described are readable until the
    ///   products are made.
    /// - Until then `out` is writable for a multiple of [`BLOCK`] rows, at least `m`, each of
    ///   [`BLOCK`] elements. Elements beside the result may be written.
    #[inline(always)]
    #[must_use]
    pub(super) unsafe fn new(
        (w, ldw, rows): (*const bf16, usize, usize),
        (x, ldx, m): (*const bf16, usize, usize),
        k: usize,
        (out, ldo): (*mut f32, usize),
    ) -> Self {
        Self { w, ldw, rows, x, ldx, m, k, out, ldo }
    }
}
