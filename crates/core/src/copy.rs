//! Copies in host memory that are fast for every pair of addresses.
//!
//! From 2 KiB to about one mebibyte the C library copies with string moves (`rep movsb`) if the
//! processor reports them as fast. On AMD's Zen 3 and Zen 4 these moves are slow if the destination
//! lies less than 64 bytes after the source modulo a page. Then they move one byte at a time.
//!
//! An ordinary download meets exactly this case: the C library puts large blocks 16 bytes after a
//! page's start, and device blocks start at a page. This module makes such copies with vector
//! registers and leaves all others to the C library.
//!
//! This module must not know devices.

/// Copies `bytes` bytes from `src` to `dst`. The ranges may overlap. Does not allocate or block.
///
/// ```
/// let (from, mut to) = (vec![7u8; 10_000], vec![0u8; 10_016]);
/// // SAFETY: both ranges lie in their vectors.
/// unsafe { leasehold_core::copy_bytes(from.as_ptr(), to.as_mut_ptr().add(16), 10_000) };
/// assert!(to[16..] == from[..] && to[..16] == [0; 16]);
/// ```
///
/// # Safety
/// - `src` is valid for reads and `dst` for writes of `bytes` bytes. During the call no other
///   thread writes to the source or accesses the destination.
#[inline]
pub unsafe fn copy_bytes(src: *const u8, dst: *mut u8, bytes: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if x86::is_slow(src, dst, bytes) {
        // SAFETY: the caller vouches for both ranges; `is_slow` is false for ranges that overlap
        // and for less than 2 KiB.
        return unsafe { x86::by_vectors(src, dst, bytes) };
    }
    // SAFETY: the caller vouches for both ranges, which may overlap here.
    unsafe { std::ptr::copy(src, dst, bytes) };
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_loadu_si128, _mm_storeu_si128, _mm256_loadu_si256,
        _mm256_store_si256, _mm256_storeu_si256,
    };

    const PAGE: usize = 4096;
    /// The least number of bytes for which the C library uses string moves.
    const STRING_MOVES: usize = 2 << 10;
    /// The distance after the source, modulo a page, within which a destination is slow.
    const NEAR: usize = 64;

    /// Returns whether string moves may be slow for this copy. `false` for ranges that overlap.
    #[inline]
    pub(super) fn is_slow(src: *const u8, dst: *mut u8, bytes: usize) -> bool {
        let after = (dst as usize).wrapping_sub(src as usize);
        let near = (after % PAGE).wrapping_sub(1) < NEAR - 1;
        bytes >= STRING_MOVES && near && after >= bytes && after.wrapping_neg() >= bytes
    }

    /// # Safety
    /// - As [`copy_bytes`](super::copy_bytes), for ranges that do not overlap, of 64 bytes at
    ///   least.
    pub(super) unsafe fn by_vectors(src: *const u8, dst: *mut u8, bytes: usize) {
        if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: the ranges are valid and apart, of 64 bytes at least, as the caller vouches;
            // the processor has AVX.
            unsafe { by_avx(src, dst, bytes) }
        } else {
            // SAFETY: the ranges are valid and apart, of 64 bytes at least, as the caller vouches;
            // every x86-64 has SSE2.
            unsafe { by_sse(src, dst, bytes) }
        }
    }

    /// # Safety
    /// - As [`by_vectors`]. The processor has AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn by_avx(src: *const u8, dst: *mut u8, bytes: usize) {
        const WIDTH: usize = 32;
        let load = |at: usize| {
            // SAFETY: each call below names a vector within the source.
            unsafe { _mm256_loadu_si256(src.add(at).cast::<__m256i>()) }
        };
        let (first, last) = (load(0), load(bytes - WIDTH));
        // Up to the destination's next aligned address. The first vector covers the bytes before
        // it.
        let mut at = WIDTH - dst as usize % WIDTH;
        // SAFETY: `at` plus the bytes of each store stays within `bytes`. The aligned stores go to
        // aligned addresses of the destination. The two unaligned stores are its first and its last
        // vector.
        unsafe {
            while at + 4 * WIDTH <= bytes {
                let (a, b, c, d) =
                    (load(at), load(at + WIDTH), load(at + 2 * WIDTH), load(at + 3 * WIDTH));
                let to = dst.add(at).cast::<__m256i>();
                _mm256_store_si256(to, a);
                _mm256_store_si256(to.add(1), b);
                _mm256_store_si256(to.add(2), c);
                _mm256_store_si256(to.add(3), d);
                at += 4 * WIDTH;
            }
            while at + WIDTH <= bytes {
                _mm256_store_si256(dst.add(at).cast::<__m256i>(), load(at));
                at += WIDTH;
            }
            _mm256_storeu_si256(dst.cast::<__m256i>(), first);
            _mm256_storeu_si256(dst.add(bytes - WIDTH).cast::<__m256i>(), last);
        }
    }

    /// # Safety
    /// - As [`by_vectors`].
    pub(super) unsafe fn by_sse(src: *const u8, dst: *mut u8, bytes: usize) {
        const WIDTH: usize = 16;
        // SAFETY: all addresses lie within the ranges: whole vectors from the beginning, then the
        // vector that ends with the ranges. Every x86-64 processor has these instructions, which
        // need no alignment.
        unsafe {
            let move_at = |at: usize| {
                let vector = _mm_loadu_si128(src.add(at).cast::<__m128i>());
                _mm_storeu_si128(dst.add(at).cast::<__m128i>(), vector);
            };
            (0..bytes / WIDTH).for_each(|i| move_at(i * WIDTH));
            move_at(bytes - WIDTH);
        }
    }
}

#[cfg(test)]
#[path = "../tests/unit/copy.rs"]
mod tests;
