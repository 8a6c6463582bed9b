//! The level `x86-64-v3`: eight lanes.

use std::arch::x86_64::*;

use super::super::isa::Isa;
use super::{InRegisters, Simd, Task};

/// AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

type V = __m256;

/// An instruction of the level.
macro_rules! isa {
    ($e:expr) => {{
        // SAFETY: a value of `Avx2` exists only on machines with the features. Instructions that
        // take a pointer rely on their caller's conditions.
        unsafe { $e }
    }};
}

impl Simd for Avx2 {
    type V = V;
    const N: usize = 8;
    type Square = [V; 8];
    const PANELS: bool = true;
    const GEMM_M: usize = 2;
    const ISA: Isa = Isa::Avx2;

    #[inline(always)]
    unsafe fn assume() -> Self {
        Self(())
    }
    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Out {
        #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
        #[inline(never)]
        fn compiled<T: Task>(s: Avx2, task: T) -> T::Out {
            task.run(s)
        }
        isa!(compiled(self, task))
    }
    #[inline(always)]
    fn in_registers<T: InRegisters>(self, task: T) {
        task.run::<Self, 6, 2>(self);
    }
    #[inline(always)]
    fn splat(self, x: f32) -> V {
        isa!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        isa!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        isa!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        isa!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        isa!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        isa!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        isa!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        isa!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn pow2(self, n: V) -> V {
        isa!({
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        })
    }
    #[inline(always)]
    fn reduce_add(self, v: V) -> f32 {
        isa!({
            let d = _mm256_add_ps(v, _mm256_movehdup_ps(v));
            let q = _mm256_add_ps(d, _mm256_permute_ps::<0b10>(d));
            _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(q), _mm256_extractf128_ps::<1>(q)))
        })
    }
    #[inline(always)]
    fn reduce_add4(self, v: [V; 4]) -> [f32; 4] {
        isa!({
            let q = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
            let q = _mm_add_ps(_mm256_castps256_ps128(q), _mm256_extractf128_ps::<1>(q));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), q);
            out
        })
    }
    #[inline(always)]
    fn reduce_max(self, v: V) -> f32 {
        isa!({
            let q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let d = _mm_max_ps(q, _mm_movehl_ps(q, q));
            _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)))
        })
    }
    #[inline(always)]
    fn mask_eq(self, a: V, b: V) -> u32 {
        isa!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, b))).cast_unsigned()
    }
    #[inline(always)]
    fn mask_ge(self, a: V, b: V) -> u32 {
        isa!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(a, b))).cast_unsigned()
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        isa!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V) {
        isa!(_mm256_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        isa!({
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        })
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: V) {
        isa!({
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let words = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(words, words));
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
        })
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        isa!(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: V) {
        isa!(_mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }
    #[inline(always)]
    fn halves_bf16(self, words: V) -> [V; 2] {
        isa!({
            let words = _mm256_castps_si256(words);
            let even = _mm256_slli_epi32::<16>(words);
            let odd = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            [_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd)]
        })
    }
    #[inline(always)]
    fn square(self) -> [V; 8] {
        [self.zero(); 8]
    }
    #[inline(always)]
    fn transpose(self, v: [V; 8]) -> [V; 8] {
        isa!({
            // Lanes of two vectors beside each other, then of four, in each half; then halves.
            let mut pairs = v;
            for i in 0..4 {
                pairs[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
                pairs[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
            }
            let mut fours = v;
            for i in 0..2 {
                for h in 0..2 {
                    let (a, b) = (pairs[4 * i + h], pairs[4 * i + 2 + h]);
                    fours[4 * i + 2 * h] = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
                    fours[4 * i + 2 * h + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(a, b);
                }
            }
            // `fours[4 i + c]` has, in half h, lane 4 h + c of vectors 4 i to 4 i + 3.
            let mut out = v;
            for c in 0..4 {
                out[c] = _mm256_permute2f128_ps::<0x20>(fours[c], fours[4 + c]);
                out[4 + c] = _mm256_permute2f128_ps::<0x31>(fours[c], fours[4 + c]);
            }
            out
        })
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        isa!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
}
