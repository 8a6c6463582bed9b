//! Vector functions without an instruction of their own.

use super::simd::Simd;

/// `1 / ln 2`.
const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// The upper ten bits of `ln 2`: their product with an integral exponent is exact.
const LN2_HI: f32 = 355.0 / 512.0;
/// `ln 2` minus [`LN2_HI`].
const LN2_LO: f32 = -2.121_944_4e-4;
/// A constant whose addition and subtraction round to an integer (|x| < 2^22, rounding to nearest).
const ROUND: f32 = 12_582_912.0;

/// `e^x`, within 2 units in the last place. Results below 2⁻¹²⁵ are zero (so `e^−∞` is
/// exactly 0); results above the range are infinite. A NaN stays a NaN.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // `x` is the second operand, so a NaN passes.
    let x = s.max(s.splat(-87.33), x);
    let x = s.min(s.splat(89.0), x);
    let n = s.sub(s.fma(x, s.splat(LOG2_E), s.splat(ROUND)), s.splat(ROUND));
    let r = s.fma(n, s.splat(-LN2_HI), x);
    let r = s.fma(n, s.splat(-LN2_LO), r);
    // Taylor's series to the seventh power: |r| ≤ ln 2 / 2, and the first omitted term is below
    // 6e-9.
    let mut p = s.splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    // 2^n in two factors: n is 128 just below the end of the range, and −126 must give zero.
    s.mul(s.add(p, p), s.pow2(s.sub(n, s.splat(1.0))))
}

/// `x / (1 + e^−x)`: SiLU, or swish. −∞ gives NaN as in IEEE arithmetic (∞ / ∞ does
/// not arise: −∞ / ∞ does).
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    let e = exp(s, s.sub(s.zero(), x));
    s.div(x, s.add(s.splat(1.0), e))
}
