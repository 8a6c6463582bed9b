//! Vectors of f32: one trait, with an implementation for each instruction set level.
//!
//! A kernel is written once, generic over [`Simd`], and all its functions are `#[inline(always)]`.
//! [`Simd::run`] is compiled with the features of the level, and the kernel is inlined into it. A
//! value of an implementing type proves that the machine has the features. So arithmetic is safe to
//! call; only functions that take a pointer are unsafe.
//!
//! This module must not know any kernel, shape or parameter.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod generic;
#[cfg(target_arch = "aarch64")]
mod neon;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::{Amx, Avx512, Avx512Bf16};
pub use generic::Generic;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;

use std::ops::IndexMut;

use super::isa::Isa;

/// Lanes of the widest vector: the size of stack buffers for parts of a vector.
pub const MAX_LANES: usize = 16;

/// Work that is compiled for a level. `run`, and all functions that it calls, must be
/// `#[inline(always)]`. Otherwise the work is compiled without the level's instructions, which is
/// slow but not wrong.
pub trait Task {
    /// The result of the work.
    type Out;
    /// Does the work.
    fn run<S: Simd>(self, s: S) -> Self::Out;
}

/// Work of the size of the level's registers.
pub trait InRegisters {
    /// Does the work, with sums of `M` rows by `V` vectors in registers.
    fn run<S: Simd, const M: usize, const V: usize>(self, s: S);
}

/// A level's vector of [`N`](Simd::N) f32 lanes.
///
/// Rounding is to nearest even and denormals are kept (no kernel changes the floating-point control
/// register). `max` and `min` return their **second** operand when either is a NaN, on every level.
pub trait Simd: Copy + Send + Sync + 'static {
    /// The vector.
    type V: Copy;
    /// Lanes of `V`.
    const N: usize;
    /// `N` vectors: the array.
    type Square: IndexMut<usize, Output = Self::V>;
    /// Rows of activations that a product keeps in registers beside four rows of weights.
    const GEMM_M: usize;
    /// Says whether [`load_pair_bf16`](Simd::load_pair_bf16) is cheaper than two loads.
    const PAIRED: bool = false;
    /// Says whether [`dot_bf16`](Simd::dot_bf16) is cheaper than the widening of both rows.
    const DOTS: bool = false;
    /// Says whether many rows share transposed panels of weights. With twice the registers, or
    /// more, rows side by side are as fast, and need no transposition.
    const PANELS: bool;
    /// The level.
    const ISA: Isa;

    /// A value without the check.
    ///
    /// # Safety
    /// - [`Isa::available`] is true for [`ISA`](Self::ISA).
    unsafe fn assume() -> Self;

    /// Runs `task` in a function compiled with the level's features. This function is never
    /// inlined, which bounds the size of the code and costs one call.
    fn run<T: Task>(self, task: T) -> T::Out;

    /// Runs `task` with as many sums as the level has registers for, beside `V` vectors of one
    /// operand and an element of the other.
    fn in_registers<T: InRegisters>(self, task: T);

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// All lanes zero.
    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(0.0)
    }
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once if the level has a fused instruction.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b`.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Two to the power of `n`, for integral `n` in −127…127; zero for −127.
    fn pow2(self, n: Self::V) -> Self::V;
    /// Sum of the lanes, in a fixed order, which is that of [`reduce_add4`](Simd::reduce_add4).
    fn reduce_add(self, v: Self::V) -> f32;
    /// The sums of four vectors, at half the cost of four calls of
    /// [`reduce_add`](Simd::reduce_add).
    fn reduce_add4(self, v: [Self::V; 4]) -> [f32; 4];
    /// The largest lane; no lane may be NaN.
    fn reduce_max(self, v: Self::V) -> f32;
    /// Bit `i` is set if lane `i` of `a` equals that of `b`.
    fn mask_eq(self, a: Self::V, b: Self::V) -> u32;
    /// Bit `i` is set if lane `i` of `a` is at least that of `b`.
    fn mask_ge(self, a: Self::V, b: Self::V) -> u32;

    /// `N` f32 from any readable address.
    ///
    /// # Safety
    /// - `p` points to `N` readable f32; no alignment is asked.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// `N` f32 to any writable address.
    ///
    /// # Safety
    /// - `p` points to `N` writable f32; no alignment is asked.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// `N` bf16, widened.
    ///
    /// # Safety
    /// - `p` points to `N` readable 16-bit words; no alignment is asked.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// `N` bf16, rounded to nearest even; a NaN stays a NaN.
    ///
    /// # Safety
    /// - `p` points to `N` writable 16-bit words; no alignment is asked.
    unsafe fn store_bf16(self, p: *mut u16, v: Self::V);
    /// `N` IEEE half-precision numbers, widened.
    ///
    /// # Safety
    /// - `p` points to `N` readable 16-bit words; no alignment is asked.
    unsafe fn load_f16(self, p: *const u16) -> Self::V;
    /// `N` IEEE half-precision numbers, rounded to nearest even. A NaN stays a NaN; a number beyond
    /// the range becomes infinite.
    ///
    /// # Safety
    /// - `p` points to `N` writable 16-bit words; no alignment is asked.
    unsafe fn store_f16(self, p: *mut u16, v: Self::V);
    /// `2 N` bf16 in the order that the level widens fastest; [`pair_bf16`](Simd::pair_bf16) brings
    /// f32 into the same order.
    ///
    /// # Safety
    /// - `p` points to `2 N` readable 16-bit words; no alignment is asked.
    #[inline(always)]
    unsafe fn load_pair_bf16(self, p: *const u16) -> [Self::V; 2] {
        // SAFETY: the caller vouches for 2 N words.
        unsafe { [self.load_bf16(p), self.load_bf16(p.add(Self::N))] }
    }
    /// `2 N` consecutive f32 in the order of [`load_pair_bf16`](Simd::load_pair_bf16).
    #[inline(always)]
    fn pair_bf16(self, x: [Self::V; 2]) -> [Self::V; 2] {
        x
    }
    /// `acc` plus the products of two rows of `2 N` bf16, which are the bits of `a` and `b`. A lane
    /// takes two of the products, those of the same places at each call. A level that has an
    /// instruction ([`DOTS`](Simd::DOTS)) takes denormals as zero and rounds as it does.
    #[inline(always)]
    fn dot_bf16(self, a: Self::V, b: Self::V, acc: Self::V) -> Self::V {
        let mut words = [[0_u16; 2 * MAX_LANES]; 2];
        // SAFETY: each array has room for the bits of a vector, which are 2 N words.
        unsafe {
            self.store(words[0].as_mut_ptr().cast(), a);
            self.store(words[1].as_mut_ptr().cast(), b);
            let ([a, c], [b, d]) =
                (self.load_pair_bf16(words[0].as_ptr()), self.load_pair_bf16(words[1].as_ptr()));
            self.fma(c, d, self.fma(a, b, acc))
        }
    }
    /// The even and the odd ones of `2 N` bf16, which are the bits of `words`, widened.
    fn halves_bf16(self, words: Self::V) -> [Self::V; 2];
    /// `N` vectors, all zero.
    fn square(self) -> Self::Square;
    /// Lane `i` of vector `j` becomes lane `j` of vector `i`.
    fn transpose(self, rows: Self::Square) -> Self::Square;
    /// Prefetches the cache line at `p`; any address is allowed, mapped or not.
    fn prefetch(self, p: *const u8);
}
