//! Element types of kernels: f32, bf16 and f16, all with computation in f32.

use half::{bf16, f16};

use super::simd::{MAX_LANES, Simd};

/// An element type, in the form of a parameter word (`repr(u32)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u32)]
pub enum DType {
    /// IEEE single precision.
    #[default]
    F32 = 0,
    /// The upper half of a single: 8 bits of exponent, 7 of fraction.
    Bf16 = 1,
    /// IEEE half precision.
    F16 = 2,
}

impl DType {
    /// The type of a parameter word; `None` if the word names no type.
    #[must_use]
    pub fn from_raw(raw: u32) -> Option<Self> {
        match raw {
            0 => Some(Self::F32),
            1 => Some(Self::Bf16),
            2 => Some(Self::F16),
            _ => None,
        }
    }

    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The name in safetensors files: `F32`, `BF16`, `F16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
        }
    }
}

/// The name in messages: `f32`, `bf16`, `f16`.
impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

/// An element type that converts from and to vectors of f32.
pub trait Elem: Copy + Default + Send + Sync + 'static {
    /// The type's code.
    const DTYPE: DType;
    /// The element, widened.
    fn to_f32(self) -> f32;
    /// The element, rounded to nearest even.
    fn from_f32(x: f32) -> Self;
    /// `N` elements.
    ///
    /// # Safety
    /// - `p` points to `N` readable elements.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;
    /// `N` elements, rounded.
    ///
    /// # Safety
    /// - `p` points to `N` writable elements.
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V);
    /// `2 N` elements in the level's pair order.
    ///
    /// # Safety
    /// - `p` points to `2 N` readable elements.
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(s: S, p: *const Self) -> [S::V; 2] {
        // SAFETY: the caller vouches for 2 N elements.
        unsafe { [Self::load(s, p), Self::load(s, p.add(S::N))] }
    }
    /// `2 N` consecutive f32 in the order of [`load_pair`](Elem::load_pair).
    #[inline(always)]
    fn pair<S: Simd>(_: S, x: [S::V; 2]) -> [S::V; 2] {
        x
    }
}

impl Elem for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V {
        // SAFETY: the caller's bullets are the same.
        unsafe { s.load(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V) {
        // SAFETY: the caller's bullets are the same.
        unsafe { s.store(p, v) }
    }
}

impl Elem for bf16 {
    const DTYPE: DType = DType::Bf16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V {
        // SAFETY: the caller's bullets are the same; a bf16 is its 16 bits.
        unsafe { s.load_bf16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V) {
        // SAFETY: the caller's bullets are the same; a bf16 is its 16 bits.
        unsafe { s.store_bf16(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(s: S, p: *const Self) -> [S::V; 2] {
        // SAFETY: the caller's bullets are the same; a bf16 is its 16 bits.
        unsafe { s.load_pair_bf16(p.cast()) }
    }
    #[inline(always)]
    fn pair<S: Simd>(s: S, x: [S::V; 2]) -> [S::V; 2] {
        s.pair_bf16(x)
    }
}

impl Elem for f16 {
    const DTYPE: DType = DType::F16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V {
        // SAFETY: the caller's bullets are the same; an f16 is its 16 bits.
        unsafe { s.load_f16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V) {
        // SAFETY: the caller's bullets are the same; an f16 is its 16 bits.
        unsafe { s.store_f16(p.cast(), v) }
    }
}

/// The first `n < N` lanes from memory, the others zero.
///
/// # Safety
/// - `p` points to `n` readable elements, `n` at most [`MAX_LANES`].
#[inline(always)]
pub unsafe fn load_part<T: Elem, S: Simd>(s: S, p: *const T, n: usize) -> S::V {
    let mut lanes = [T::default(); MAX_LANES];
    // SAFETY: the caller vouches for n elements. The copy holds MAX_LANES elements, at least N.
    unsafe {
        for i in 0..n {
            lanes[i] = p.add(i).read();
        }
        T::load(s, lanes.as_ptr())
    }
}

/// Stores the first `n < N` lanes; memory after them is not accessed.
///
/// # Safety
/// - `p` points to `n` writable elements, `n` at most [`MAX_LANES`].
#[inline(always)]
pub unsafe fn store_part<T: Elem, S: Simd>(s: S, p: *mut T, v: S::V, n: usize) {
    let mut lanes = [T::default(); MAX_LANES];
    // SAFETY: the copy holds MAX_LANES elements, at least N; the caller vouches for n of the
    // destination.
    unsafe {
        T::store(s, lanes.as_mut_ptr(), v);
        for i in 0..n {
            p.add(i).write(lanes[i]);
        }
    }
}

/// The lanes `i..i + N` of `n` elements; lanes beyond the end are zero.
///
/// # Safety
/// - `p` points to `n` readable elements, `i < n`.
#[inline(always)]
pub unsafe fn load_at<T: Elem, S: Simd>(s: S, p: *const T, i: usize, n: usize) -> S::V {
    // SAFETY: i + N elements are readable in the first case, n in the second.
    unsafe { if i + S::N <= n { T::load(s, p.add(i)) } else { load_part(s, p.add(i), n - i) } }
}

/// Stores the lanes `i..i + N` of `n` elements; lanes beyond the end are omitted.
///
/// # Safety
/// - `p` points to `n` writable elements, `i < n`.
#[inline(always)]
pub unsafe fn store_at<T: Elem, S: Simd>(s: S, p: *mut T, i: usize, n: usize, v: S::V) {
    // SAFETY: i + N elements are writable in the first case, n in the second.
    unsafe {
        if i + S::N <= n { T::store(s, p.add(i), v) } else { store_part(s, p.add(i), v, n - i) }
    }
}

/// Runs `$body` with `$T` naming the element type of `$dtype`.
macro_rules! with_elem {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::kernels::cpu::elem::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::kernels::cpu::elem::DType::Bf16 => {
                type $T = half::bf16;
                $body
            }
            $crate::kernels::cpu::elem::DType::F16 => {
                type $T = half::f16;
                $body
            }
        }
    };
}
pub(crate) use with_elem;
