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
mod tests {
    use super::*;

    const PAGE: usize = 4096;
    const SIZES: [usize; 12] = [0, 1, 63, 64, 2047, 2048, 2049, 2079, 2176, 4095, 4128, 9001];

    /// Offsets about the borders of a page, its middle, and all near its start.
    fn offsets() -> impl Iterator<Item = usize> {
        (0..130).chain([255, 1024, 2047, 2048, 2049]).chain(PAGE - 70..PAGE)
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect()
    }

    /// A copy from `from` to `to` within one block, beside what a copy by way of a third is.
    #[track_caller]
    fn check(block: &mut [u8], from: usize, to: usize, bytes: usize) {
        let mut expect = block.to_vec();
        expect.copy_within(from..from + bytes, to);
        let base = block.as_mut_ptr();
        // SAFETY: both ranges lie in the block.
        unsafe { copy_bytes(base.add(from), base.add(to), bytes) };
        assert!(*block == *expect, "{bytes} bytes from {from} to {to}");
    }

    #[test]
    fn every_offset_within_a_page_arrives_whole() {
        let mut block = pattern(6 * PAGE + 16_000);
        let near = 3 * PAGE - block.as_ptr() as usize % PAGE;
        for bytes in SIZES {
            for offset in offsets() {
                // Far enough apart, in both directions.
                check(&mut block, near - 2 * PAGE, near + PAGE + offset, bytes.min(2 * PAGE));
                check(&mut block, near + PAGE + offset, near - 2 * PAGE, bytes.min(2 * PAGE));
            }
        }
    }

    #[test]
    fn overlapping_ranges_move_as_if_by_way_of_a_third() {
        let mut block = pattern(8 * PAGE);
        for bytes in SIZES.into_iter().chain([3 * PAGE]) {
            for apart in [0, 1, 16, 31, 32, 63, 64, 100, 2048, PAGE, PAGE + 16, PAGE + 63] {
                check(&mut block, PAGE, PAGE + apart, bytes);
                check(&mut block, PAGE + apart, PAGE, bytes);
            }
        }
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[test]
    fn either_kind_of_vectors_copies_all_and_nothing_else() {
        type Copy = unsafe fn(*const u8, *mut u8, usize);
        let src = pattern(5000);
        let ways = [x86::by_vectors as Copy, x86::by_sse];
        for (at, bytes) in
            (0..70).flat_map(|at| [64, 65, 96, 127, 128, 159, 160, 161, 300, 4097].map(|n| (at, n)))
        {
            for copy in ways {
                let mut dst = vec![0xEE; 5000];
                // SAFETY: both ranges lie in their vectors and have 64 bytes or more.
                unsafe { copy(src.as_ptr().add(at / 2), dst.as_mut_ptr().add(at), bytes) };
                assert!(
                    dst[at..at + bytes] == src[at / 2..at / 2 + bytes],
                    "{bytes} bytes to {at}"
                );
                assert!(
                    dst[..at].iter().chain(&dst[at + bytes..]).all(|&b| b == 0xEE),
                    "beside {at}"
                );
            }
        }
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[test]
    fn only_long_copies_a_little_after_the_source_are_taken_from_the_library() {
        let is_slow = |dst: usize, bytes| {
            x86::is_slow(std::ptr::null::<u8>().wrapping_add(PAGE), dst as *mut u8, bytes)
        };
        let far = 100 * PAGE;
        assert!(is_slow(far + 1, 2048) && is_slow(far + 16, PAGE) && is_slow(far + 63, 2048));
        assert!(!is_slow(far, PAGE) && !is_slow(far + 64, PAGE) && !is_slow(far - 1, PAGE));
        assert!(!is_slow(far + 16, 2047), "too short for string moves");
        assert!(!is_slow(2 * PAGE + 16, 2 * PAGE), "they overlap");
    }
}
