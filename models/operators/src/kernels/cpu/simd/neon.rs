//! Advanced SIMD of aarch64: four lanes. Half precision is converted lane by lane, because the
//! baseline has no vector conversion.

use std::arch::aarch64::*;

use half::f16;

use super::super::isa::Isa;
use super::{InRegisters, Simd, Task};

/// Advanced SIMD.
#[derive(Debug, Clone, Copy)]
pub struct Neon(());

type V = float32x4_t;

/// An instruction of the level.
macro_rules! isa {
    ($e:expr) => {{
        // SAFETY: every aarch64 target of this crate has the feature. Instructions that take a
        // pointer rely on their caller's conditions.
        unsafe { $e }
    }};
}

/// The lanes of a comparison as bits.
#[inline(always)]
fn bits(lanes: uint32x4_t) -> u32 {
    const WEIGHTS: [u32; 4] = [1, 2, 4, 8];
    isa!(vaddvq_u32(vandq_u32(lanes, vld1q_u32(WEIGHTS.as_ptr()))))
}

impl Simd for Neon {
    type V = V;
    const N: usize = 4;
    type Square = [V; 4];
    const PANELS: bool = true;
    const GEMM_M: usize = 6;
    const ISA: Isa = Isa::Neon;

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
        task.run::<Self, 6, 4>(self);
    }
    #[inline(always)]
    fn splat(self, x: f32) -> V {
        isa!(vdupq_n_f32(x))
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        isa!(vaddq_f32(a, b))
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        isa!(vsubq_f32(a, b))
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        isa!(vmulq_f32(a, b))
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        isa!(vdivq_f32(a, b))
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        isa!(vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        isa!(vbslq_f32(vcgtq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        isa!(vbslq_f32(vcltq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn pow2(self, n: V) -> V {
        isa!({
            let biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
        })
    }
    #[inline(always)]
    fn reduce_add(self, v: V) -> f32 {
        isa!(vaddvq_f32(v))
    }
    #[inline(always)]
    fn reduce_add4(self, v: [V; 4]) -> [f32; 4] {
        isa!({
            let q = vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
            let mut out = [0.0; 4];
            vst1q_f32(out.as_mut_ptr(), q);
            out
        })
    }
    #[inline(always)]
    fn reduce_max(self, v: V) -> f32 {
        isa!(vmaxvq_f32(v))
    }
    #[inline(always)]
    fn mask_eq(self, a: V, b: V) -> u32 {
        bits(isa!(vceqq_f32(a, b)))
    }
    #[inline(always)]
    fn mask_ge(self, a: V, b: V) -> u32 {
        bits(isa!(vcgeq_f32(a, b)))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        isa!(vld1q_f32(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V) {
        isa!(vst1q_f32(p, v))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        isa!(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p))))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: V) {
        isa!({
            let bits = vreinterpretq_u32_f32(v);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let number = vceqq_f32(v, v);
            vst1_u16(p, vshrn_n_u32::<16>(vbslq_u32(number, rounded, quiet)));
        })
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        // SAFETY: the caller vouches for 4 readable words; the read requires no alignment.
        let words = unsafe { p.cast::<[u16; 4]>().read_unaligned() };
        let lanes = words.map(|w| f16::from_bits(w).to_f32());
        isa!(vld1q_f32(lanes.as_ptr()))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: V) {
        let mut lanes = [0.0_f32; 4];
        isa!(vst1q_f32(lanes.as_mut_ptr(), v));
        // SAFETY: the caller vouches for 4 writable words; the write requires no alignment.
        unsafe { p.cast::<[u16; 4]>().write_unaligned(lanes.map(|x| f16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn load_pair_bf16(self, p: *const u16) -> [V; 2] {
        isa!({
            let words = vld1q_u16(p);
            [
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(words))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(words)),
            ]
        })
    }
    #[inline(always)]
    fn halves_bf16(self, words: V) -> [V; 2] {
        isa!({
            let words = vreinterpretq_u32_f32(words);
            let odd = vandq_u32(words, vdupq_n_u32(0xffff_0000));
            [vreinterpretq_f32_u32(vshlq_n_u32::<16>(words)), vreinterpretq_f32_u32(odd)]
        })
    }
    #[inline(always)]
    fn square(self) -> [V; 4] {
        [self.zero(); 4]
    }
    #[inline(always)]
    fn transpose(self, v: [V; 4]) -> [V; 4] {
        isa!({
            let [a, b] = [vzip1q_f32(v[0], v[2]), vzip2q_f32(v[0], v[2])];
            let [c, d] = [vzip1q_f32(v[1], v[3]), vzip2q_f32(v[1], v[3])];
            [vzip1q_f32(a, c), vzip2q_f32(a, c), vzip1q_f32(b, d), vzip2q_f32(b, d)]
        })
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}
