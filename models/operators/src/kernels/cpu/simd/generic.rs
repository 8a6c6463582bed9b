//! The portable level: eight lanes in an array, compiled for the target's baseline. The reference
//! of the other levels.

use half::{bf16, f16};

use super::super::isa::Isa;
use super::{InRegisters, Simd, Task};

/// The portable level.
#[derive(Debug, Clone, Copy)]
pub struct Generic(());

type V = [f32; 8];

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// Lanes as a mask.
#[inline(always)]
fn mask(a: V, b: V, f: impl Fn(f32, f32) -> bool) -> u32 {
    (0..8).fold(0, |bits, i| bits | (u32::from(f(a[i], b[i])) << i))
}

impl Simd for Generic {
    type V = V;
    const N: usize = 8;
    type Square = [V; 8];
    const PANELS: bool = true;
    const GEMM_M: usize = 2;
    const ISA: Isa = Isa::Generic;

    #[inline(always)]
    unsafe fn assume() -> Self {
        Self(())
    }
    #[inline(never)]
    fn run<T: Task>(self, task: T) -> T::Out {
        task.run(self)
    }
    #[inline(always)]
    fn in_registers<T: InRegisters>(self, task: T) {
        task.run::<Self, 2, 2>(self);
    }
    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; 8]
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // Two roundings: without the instruction, a fused product would call the C library.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn pow2(self, n: V) -> V {
        n.map(|n| f32::from_bits((((n as i32) + 127) as u32) << 23))
    }
    #[inline(always)]
    fn reduce_add(self, v: V) -> f32 {
        let h: [f32; 4] = std::array::from_fn(|i| v[i] + v[i + 4]);
        (h[0] + h[2]) + (h[1] + h[3])
    }
    #[inline(always)]
    fn reduce_add4(self, v: [V; 4]) -> [f32; 4] {
        v.map(|v| self.reduce_add(v))
    }
    #[inline(always)]
    fn reduce_max(self, v: V) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    fn mask_eq(self, a: V, b: V) -> u32 {
        mask(a, b, |a, b| a == b)
    }
    #[inline(always)]
    fn mask_ge(self, a: V, b: V) -> u32 {
        mask(a, b, |a, b| a >= b)
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: the caller vouches for 8 readable f32; the read requires no alignment.
        unsafe { p.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V) {
        // SAFETY: the caller vouches for 8 writable f32; the write requires no alignment.
        unsafe { p.cast::<V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        // SAFETY: the caller vouches for 8 readable words; the read requires no alignment.
        let words = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        words.map(|w| f32::from_bits(u32::from(w) << 16))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: V) {
        // SAFETY: the caller vouches for 8 writable words; the write requires no alignment.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(v.map(|x| bf16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        // SAFETY: the caller vouches for 8 readable words; the read requires no alignment.
        let words = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        words.map(|w| f16::from_bits(w).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: V) {
        // SAFETY: the caller vouches for 8 writable words; the write requires no alignment.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(v.map(|x| f16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    fn halves_bf16(self, words: V) -> [V; 2] {
        let bits = words.map(f32::to_bits);
        [bits.map(|w| f32::from_bits(w << 16)), bits.map(|w| f32::from_bits(w & 0xffff_0000))]
    }
    #[inline(always)]
    fn square(self) -> [V; 8] {
        [[0.0; 8]; 8]
    }
    #[inline(always)]
    fn transpose(self, rows: [V; 8]) -> [V; 8] {
        std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]))
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}
