//! Loops over one row: widening, narrowing, sums and products, in f32.
//!
//! Each loop is a separate function at each level ([`Simd::run`]), which all kernels share. A
//! kernel calls it once for a row or a part of one. Inlining for every combination of element types
//! would make most of the binary.

use super::elem::{DType, Elem, load_at, store_at, with_elem};
use super::simd::{Simd, Task};

/// `dst = src · scale`, widened from element `at` of the row `src` on.
///
/// # Safety
/// - `src` is readable for `at + n` elements of the type, `dst` writable for `n`; they are the same
///   or do not overlap.
#[inline(always)]
pub unsafe fn widen<S: Simd>(
    s: S,
    (dtype, src, at): (DType, *const u8, usize),
    dst: *mut f32,
    n: usize,
    scale: f32,
) {
    s.run(Widen { dtype, src, at, dst, n, scale });
}

struct Widen {
    dtype: DType,
    src: *const u8,
    at: usize,
    dst: *mut f32,
    n: usize,
    scale: f32,
}

impl Task for Widen {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { dtype, src, at, dst, n, scale } = self;
        let scale = s.splat(scale);
        // SAFETY: `widen`'s caller vouches for n elements of both.
        with_elem!(dtype, T => unsafe {
            let src = src.cast::<T>().add(at);
            for i in (0..n).step_by(S::N) {
                store_at(s, dst, i, n, s.mul(load_at(s, src, i, n), scale));
            }
        });
    }
}

/// `dst = src`, rounded, from element `at` of the row `dst` on.
///
/// # Safety
/// - `src` is readable for `n` elements, `dst` writable for `at + n` elements of the type; they are
///   the same or do not overlap.
#[inline(always)]
pub unsafe fn narrow<S: Simd>(
    s: S,
    src: *const f32,
    (dtype, dst, at): (DType, *mut u8, usize),
    n: usize,
) {
    s.run(Narrow { src, dtype, dst, at, n });
}

struct Narrow {
    src: *const f32,
    dtype: DType,
    dst: *mut u8,
    at: usize,
    n: usize,
}

impl Task for Narrow {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { src, dtype, dst, at, n } = self;
        // SAFETY: `narrow`'s caller vouches for n elements of both.
        with_elem!(dtype, T => unsafe {
            let dst = dst.cast::<T>().add(at);
            for i in (0..n).step_by(S::N) {
                store_at(s, dst, i, n, load_at(s, src, i, n));
            }
        });
    }
}

/// `dst *= src`, from element `at` of the row `src` on.
///
/// # Safety
/// - `src` is readable for `at + n` elements of the type, `dst` for `n` f32 and writable.
#[inline(always)]
pub unsafe fn mul_by<S: Simd>(
    s: S,
    dst: *mut f32,
    (dtype, src, at): (DType, *const u8, usize),
    n: usize,
) {
    s.run(MulBy { dst, dtype, src, at, n });
}

struct MulBy {
    dst: *mut f32,
    dtype: DType,
    src: *const u8,
    at: usize,
    n: usize,
}

impl Task for MulBy {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { dst, dtype, src, at, n } = self;
        // SAFETY: `mul_by`'s caller vouches for n elements of both.
        with_elem!(dtype, T => unsafe {
            let src = src.cast::<T>().add(at);
            for i in (0..n).step_by(S::N) {
                store_at(s, dst, i, n, s.mul(load_at(s, dst, i, n), load_at(s, src, i, n)));
            }
        });
    }
}

/// `dst += src`, from element `at` of the row `src` on.
///
/// # Safety
/// - `src` is readable for `at + n` elements of the type, `dst` for `n` f32 and writable.
#[inline(always)]
pub unsafe fn add_from<S: Simd>(
    s: S,
    dst: *mut f32,
    (dtype, src, at): (DType, *const u8, usize),
    n: usize,
) {
    s.run(AddFrom { dst, dtype, src, at, n });
}

struct AddFrom {
    dst: *mut f32,
    dtype: DType,
    src: *const u8,
    at: usize,
    n: usize,
}

impl Task for AddFrom {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { dst, dtype, src, at, n } = self;
        // SAFETY: `add_from`'s caller vouches for n elements of both.
        with_elem!(dtype, T => unsafe {
            let src = src.cast::<T>().add(at);
            for i in (0..n).step_by(S::N) {
                store_at(s, dst, i, n, s.add(load_at(s, dst, i, n), load_at(s, src, i, n)));
            }
        });
    }
}

/// `1 / sqrt(mean(x²) + eps)`; squares are summed in f32.
///
/// # Safety
/// - `x` is readable for `n` elements of the type.
#[inline(always)]
pub unsafe fn rms_scale<S: Simd>(s: S, dtype: DType, x: *const u8, n: usize, eps: f32) -> f32 {
    let sum = s.run(SquareSum { dtype, x, n });
    1.0 / (sum / n as f32 + eps).sqrt()
}

struct SquareSum {
    dtype: DType,
    x: *const u8,
    n: usize,
}

impl Task for SquareSum {
    type Out = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let n = self.n;
        let mut acc = [s.zero(); 4];
        let mut i = 0;
        // SAFETY: `rms_scale`'s caller vouches for n elements.
        with_elem!(self.dtype, T => unsafe {
            let x = self.x.cast::<T>();
            while i + 4 * S::N <= n {
                for (lane, acc) in acc.iter_mut().enumerate() {
                    let v = T::load(s, x.add(i + lane * S::N));
                    *acc = s.fma(v, v, *acc);
                }
                i += 4 * S::N;
            }
            while i < n {
                let v = load_at(s, x, i, n);
                acc[0] = s.fma(v, v, acc[0]);
                i += S::N;
            }
        });
        s.reduce_add(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])))
    }
}

/// Fills a row with quiet NaN, the result for an invalid position or id.
///
/// # Safety
/// - `dst` is writable for `n` elements of the type.
#[cold]
pub unsafe fn poison(dtype: DType, dst: *mut u8, n: usize) {
    with_elem!(dtype, T => for i in 0..n {
        // SAFETY: i is below n.
        unsafe { dst.cast::<T>().add(i).write(T::from_f32(f32::NAN)) }
    });
}
