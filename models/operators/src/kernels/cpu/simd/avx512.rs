//! The level `x86-64-v4`, and the level above it with products of bf16: sixteen lanes.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::transmute;

use super::super::isa::Isa;
use super::{InRegisters, Simd, Task};

/// AVX-512 F, BW, DQ and VL.
pub type Avx512 = Lanes16<V4>;
/// The same, and AVX-512 BF16.
pub type Avx512Bf16 = Lanes16<V4Bf16>;
/// The same, and the tiles of AMX.
pub type Amx = Lanes16<V4Amx>;

/// A level with AVX-512, whose instructions beyond `x86-64-v4` are those of `X`.
#[derive(Debug, Clone, Copy)]
pub struct Lanes16<X>(PhantomData<X>);

type V = __m512;

/// The differences between the levels with AVX-512.
pub trait Extension: Copy + Send + Sync + 'static {
    /// The level.
    const ISA: Isa;
    /// [`Simd::DOTS`].
    const DOTS: bool;
    /// [`Simd::run`].
    fn run<T: Task>(s: Lanes16<Self>, task: T) -> T::Out;
    /// [`Simd::dot_bf16`].
    fn dot_bf16(a: V, b: V, acc: V) -> V;
}

/// Nothing beyond `x86-64-v4`.
#[derive(Debug, Clone, Copy)]
pub struct V4;
/// AVX-512 BF16.
#[derive(Debug, Clone, Copy)]
pub struct V4Bf16;
/// AVX-512 BF16 and AMX, whose instructions are assembly and need no feature of the compiler's.
#[derive(Debug, Clone, Copy)]
pub struct V4Amx;

/// An instruction of the level.
macro_rules! isa {
    ($e:expr) => {{
        // SAFETY: a value of `Lanes16` exists only on machines with the features. Instructions that
        // take a pointer rely on their caller's conditions.
        unsafe { $e }
    }};
}

impl Extension for V4 {
    const ISA: Isa = Isa::Avx512;
    const DOTS: bool = false;

    #[inline(always)]
    fn run<T: Task>(s: Lanes16<Self>, task: T) -> T::Out {
        #[target_feature(
            enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt"
        )]
        #[inline(never)]
        fn compiled<T: Task>(s: Avx512, task: T) -> T::Out {
            task.run(s)
        }
        isa!(compiled(s, task))
    }
    #[inline(always)]
    fn dot_bf16(a: V, b: V, acc: V) -> V {
        let ([a, c], [b, d]) = (halves(a), halves(b));
        isa!(_mm512_fmadd_ps(c, d, _mm512_fmadd_ps(a, b, acc)))
    }
}

impl Extension for V4Bf16 {
    const ISA: Isa = Isa::Avx512Bf16;
    const DOTS: bool = true;

    #[inline(always)]
    fn run<T: Task>(s: Lanes16<Self>, task: T) -> T::Out {
        #[target_feature(
            enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt"
        )]
        #[inline(never)]
        fn compiled<T: Task>(s: Avx512Bf16, task: T) -> T::Out {
            task.run(s)
        }
        isa!(compiled(s, task))
    }
    #[inline(always)]
    fn dot_bf16(a: V, b: V, acc: V) -> V {
        // SAFETY: both types are 512 bits without invalid values.
        let (a, b): (__m512bh, __m512bh) =
            unsafe { (transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b)) };
        isa!(_mm512_dpbf16_ps(acc, a, b))
    }
}

impl Extension for V4Amx {
    const ISA: Isa = Isa::Amx;
    const DOTS: bool = true;

    #[inline(always)]
    fn run<T: Task>(s: Lanes16<Self>, task: T) -> T::Out {
        #[target_feature(
            enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt"
        )]
        #[inline(never)]
        fn compiled<T: Task>(s: Amx, task: T) -> T::Out {
            task.run(s)
        }
        isa!(compiled(s, task))
    }
    #[inline(always)]
    fn dot_bf16(a: V, b: V, acc: V) -> V {
        V4Bf16::dot_bf16(a, b, acc)
    }
}

/// The even and the odd ones of 32 bf16, widened: a shift, and a mask.
#[inline(always)]
fn halves(words: V) -> [V; 2] {
    isa!({
        let words = _mm512_castps_si512(words);
        let even = _mm512_slli_epi32::<16>(words);
        let odd = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
        [_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)]
    })
}

impl<X: Extension> Simd for Lanes16<X> {
    type V = V;
    const N: usize = 16;
    type Square = [V; 16];
    const PANELS: bool = false;
    const GEMM_M: usize = 6;
    const PAIRED: bool = true;
    const DOTS: bool = X::DOTS;
    const ISA: Isa = X::ISA;

    #[inline(always)]
    unsafe fn assume() -> Self {
        Self(PhantomData)
    }
    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Out {
        X::run(self, task)
    }
    #[inline(always)]
    fn in_registers<T: InRegisters>(self, task: T) {
        task.run::<Self, 8, 2>(self);
    }
    #[inline(always)]
    fn splat(self, x: f32) -> V {
        isa!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        isa!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        isa!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        isa!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        isa!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        isa!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        isa!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        isa!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn pow2(self, n: V) -> V {
        isa!({
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        })
    }
    #[inline(always)]
    fn reduce_add(self, v: V) -> f32 {
        isa!({
            let h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let d = _mm256_add_ps(h, _mm256_movehdup_ps(h));
            let q = _mm256_add_ps(d, _mm256_permute_ps::<0b10>(d));
            _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(q), _mm256_extractf128_ps::<1>(q)))
        })
    }
    #[inline(always)]
    fn reduce_add4(self, v: [V; 4]) -> [f32; 4] {
        isa!({
            let h =
                v.map(|v| _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)));
            let q = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
            let q = _mm_add_ps(_mm256_castps256_ps128(q), _mm256_extractf128_ps::<1>(q));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), q);
            out
        })
    }
    #[inline(always)]
    fn reduce_max(self, v: V) -> f32 {
        isa!(_mm512_reduce_max_ps(v))
    }
    #[inline(always)]
    fn mask_eq(self, a: V, b: V) -> u32 {
        u32::from(isa!(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b)))
    }
    #[inline(always)]
    fn mask_ge(self, a: V, b: V) -> u32 {
        u32::from(isa!(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b)))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        isa!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V) {
        isa!(_mm512_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        isa!({
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        })
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: V) {
        isa!({
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let words = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(words));
        })
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        isa!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: V) {
        isa!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }
    #[inline(always)]
    unsafe fn load_pair_bf16(self, p: *const u16) -> [V; 2] {
        // One load and no shuffle for 32 weights.
        halves(isa!(_mm512_loadu_ps(p.cast())))
    }
    #[inline(always)]
    fn pair_bf16(self, x: [V; 2]) -> [V; 2] {
        isa!({
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            [_mm512_permutex2var_ps(x[0], even, x[1]), _mm512_permutex2var_ps(x[0], odd, x[1])]
        })
    }
    #[inline(always)]
    fn dot_bf16(self, a: V, b: V, acc: V) -> V {
        X::dot_bf16(a, b, acc)
    }
    #[inline(always)]
    fn halves_bf16(self, words: V) -> [V; 2] {
        halves(words)
    }
    #[inline(always)]
    fn square(self) -> [V; 16] {
        [self.zero(); 16]
    }
    #[inline(always)]
    fn transpose(self, v: [V; 16]) -> [V; 16] {
        isa!({
            // Lanes of two vectors beside each other, then of four, in each quarter; then quarters.
            let mut pairs = [_mm512_setzero_pd(); 16];
            for i in 0..8 {
                let (a, b) = (v[2 * i], v[2 * i + 1]);
                pairs[2 * i] = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                pairs[2 * i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
            }
            let mut fours = [self.zero(); 16];
            for i in 0..4 {
                for h in 0..2 {
                    let (a, b) = (pairs[4 * i + h], pairs[4 * i + 2 + h]);
                    fours[4 * i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                    fours[4 * i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                }
            }
            // `fours[4 i + c]` has, in quarter q, lane 4 q + c of vectors 4 i to 4 i + 3.
            let mut out = [self.zero(); 16];
            for c in 0..4 {
                let (a, b, d, e) = (fours[c], fours[4 + c], fours[8 + c], fours[12 + c]);
                let low = [
                    _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
                    _mm512_shuffle_f32x4::<0b10_00_10_00>(d, e),
                ];
                let high = [
                    _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
                    _mm512_shuffle_f32x4::<0b11_01_11_01>(d, e),
                ];
                out[c] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low[0], low[1]);
                out[4 + c] = _mm512_shuffle_f32x4::<0b10_00_10_00>(high[0], high[1]);
                out[8 + c] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low[0], low[1]);
                out[12 + c] = _mm512_shuffle_f32x4::<0b11_01_11_01>(high[0], high[1]);
            }
            out
        })
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        isa!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
}
