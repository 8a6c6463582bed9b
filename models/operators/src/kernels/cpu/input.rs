//! The parameters of matrix products, and the rows that they multiply.

use super::elem::DType;
use super::row;
use super::simd::Simd;
use super::tile::{accepted, params};

/// Flag: `x` is normalised ([`RmsNorm`](super::norm::RmsNorm)) with the operand `norm` and `eps`.
pub const NORM: u32 = 1;
/// Flag: a bias is added to each product.
pub const BIAS: u32 = 2;

params! {
    /// Parameters of the matrix products.
    pub struct LinearParams {
        /// Rows of `x`.
        pub m: u32,
        /// Columns of `x` and of each `W`.
        pub k: u32,
        /// Rows of each `W`; zero for matrices that the kernel does not have.
        pub n: [u32; 3],
        /// Elements from one row of `x` to the next.
        pub ldx: u32,
        /// Elements from one row of each `y` to the next.
        pub ldy: [u32; 3],
        /// Added to the mean square, with [`NORM`].
        pub eps: f32,
        /// Element type of `x`.
        pub x: u32,
        /// Element type of the weights.
        pub w: u32,
        /// Element type of the outputs.
        pub y: u32,
        /// Element type of `norm` and of the biases.
        pub vector: u32,
        /// [`NORM`] and [`BIAS`].
        pub flags: u32,
    }
}

/// The rows of `x` that a tile multiplies.
pub(super) struct Input<'a> {
    pub(super) p: &'a LinearParams,
    pub(super) x: *const u8,
    pub(super) norm: *const u8,
}

impl Input<'_> {
    /// Columns of each row.
    #[inline(always)]
    pub(super) fn columns(&self) -> usize {
        self.p.k as usize
    }

    /// Row `m`.
    #[inline(always)]
    pub(super) unsafe fn row(&self, m: usize) -> *const u8 {
        // SAFETY: m is a row of x, which `plan` requires.
        unsafe { self.x.add(m * self.p.ldx as usize * accepted(self.p.x).bytes()) }
    }

    /// Rows of the whole launch.
    #[inline(always)]
    pub(super) fn rows(&self) -> usize {
        self.p.m as usize
    }

    /// Row `m` and the elements to the next one, if rows can be multiplied without a copy.
    #[inline(always)]
    pub(super) fn wide(&self, m: usize) -> Option<(*const f32, usize)> {
        // SAFETY: m is a row of x, which `plan` requires.
        self.direct().then(|| (unsafe { self.row(m) }.cast(), self.p.ldx as usize))
    }

    /// Prefetches columns `at..at + n` of row `m`.
    #[inline(always)]
    pub(super) unsafe fn prefetch<S: Simd>(&self, s: S, m: usize, at: usize, n: usize) {
        let bytes = accepted(self.p.x).bytes();
        for line in (at * bytes..(at + n) * bytes).step_by(64) {
            // SAFETY: the columns are within the row.
            unsafe { s.prefetch(self.row(m).add(line)) }
        }
    }

    /// Widens columns `at..at + n` of row `m`, with the row's `scale` if the launch normalises.
    #[inline(always)]
    pub(super) unsafe fn widen<S: Simd>(
        &self,
        s: S,
        m: usize,
        at: usize,
        n: usize,
        scale: f32,
        to: *mut f32,
    ) {
        // SAFETY: the columns are within the row; `to` has room for n.
        unsafe {
            row::widen(s, (accepted(self.p.x), self.row(m), at), to, n, scale);
            if self.p.flags & NORM != 0 {
                row::mul_by(s, to, (accepted(self.p.vector), self.norm, at), n);
            }
        }
    }

    /// Returns whether the rows can be multiplied without a copy.
    #[inline(always)]
    pub(super) fn direct(&self) -> bool {
        self.p.flags & NORM == 0 && accepted(self.p.x) == DType::F32
    }
}
