//! Copies from pinned memory to the caller's memory.
//!
//! A copy larger than the caches bypasses them with streaming stores: no reader follows at once,
//! and a line that is overwritten whole need not be fetched. A copy of milliseconds is divided
//! among a few threads, because one thread does not saturate the memory.
//!
//! This module must not know streams.

use leasehold_core::sync::OnceLock;
use std::thread;

/// Copies of this many bytes and more bypass the caches.
#[cfg(any(test, target_arch = "x86_64"))]
const PAST_CACHES: usize = 4 << 20;
/// The least bytes per thread.
const SHARE: usize = 16 << 20;
/// The most threads, including the caller; at most every fourth processor.
const THREADS: usize = 4;

/// A part of a copy.
#[derive(Clone, Copy)]
struct CopyShare {
    src: *const u8,
    dst: *mut u8,
    bytes: usize,
}

// SAFETY: one thread copies a part while the caller of `copy` waits. The caller has both ranges to
// itself.
unsafe impl Send for CopyShare {}

/// Copies `bytes`. Blocks until all bytes are copied.
///
/// # Safety
/// - `src` is readable and `dst` writable for `bytes`, both by any thread. The ranges do not
///   overlap, and no other thread uses them meanwhile.
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, bytes: usize) {
    // SAFETY: both sides are `bytes` long and no other thread uses the destination (the contract of
    // this function).
    unsafe { copy_by((bytes / SHARE).min(threads()).max(1), src, dst, bytes) };
}

/// As [`copy`], with the given number of threads.
///
/// # Safety
/// - As [`copy`].
unsafe fn copy_by(threads: usize, src: *const u8, dst: *mut u8, bytes: usize) {
    let whole = CopyShare { src, dst, bytes };
    if threads == 1 {
        // SAFETY: the whole range is what the caller vouches for.
        return unsafe { whole.copy() };
    }
    let each = (bytes / threads).next_multiple_of(4096);
    thread::scope(|scope| {
        for at in (each..bytes).step_by(each) {
            // SAFETY: both offsets lie within their ranges.
            let part = unsafe {
                CopyShare { src: src.add(at), dst: dst.add(at), bytes: each.min(bytes - at) }
            };
            // SAFETY: a part of the ranges that the caller vouches for. Parts do not overlap.
            let run = move || unsafe { CopyShare::copy(part) };
            if thread::Builder::new()
                .name("leasehold copy".into())
                .spawn_scoped(scope, run)
                .is_err()
            {
                // SAFETY: a part of the ranges that the caller vouches for, which no thread has
                // taken.
                unsafe { part.copy() };
            }
        }
        // SAFETY: the first part of the ranges that the caller vouches for. The other parts begin
        // behind it.
        unsafe { CopyShare { bytes: each, ..whole }.copy() };
    });
}

/// The most threads of a copy on this machine.
fn threads() -> usize {
    static FOUND: OnceLock<usize> = OnceLock::new();
    *FOUND.get_or_init(|| {
        thread::available_parallelism().map_or(1, |n| (n.get() / 4).clamp(1, THREADS))
    })
}

impl CopyShare {
    /// # Safety
    /// - As [`copy`].
    unsafe fn copy(self) {
        let CopyShare { src, dst, bytes } = self;
        #[cfg(target_arch = "x86_64")]
        if bytes >= PAST_CACHES {
            // SAFETY: both sides are `bytes` long (the contract of this function).
            return unsafe { past_caches(src, dst, bytes) };
        }
        // SAFETY: both sides are `bytes` long (the contract of this function).
        unsafe { leasehold_core::copy_bytes(src, dst, bytes) };
    }
}

/// As [`copy`], with streaming stores that bypass the caches.
///
/// # Safety
/// - As [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn past_caches(src: *const u8, dst: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let head = dst.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: all accesses lie within the ranges. Every x86-64 processor has these instructions.
    // The streaming stores are to aligned addresses. The fence makes the stores visible before
    // anything that follows.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        for line in 0..lines {
            let at = head + line * LINE;
            let (from, to) = (src.add(at).cast::<__m128i>(), dst.add(at).cast::<__m128i>());
            let quarters = [0, 1, 2, 3].map(|i| _mm_loadu_si128(from.add(i)));
            for (i, quarter) in quarters.into_iter().enumerate() {
                _mm_stream_si128(to.add(i), quarter);
            }
        }
        _mm_sfence();
        std::ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), bytes - tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every size around the thresholds, from and to every alignment, copies all bytes and no
    /// others.
    #[test]
    fn all_bytes_and_no_others() {
        let pattern = |i: usize| (i.wrapping_mul(0x9E37_79B9) >> 13) as u8;
        let most = 2 * SHARE + 5000;
        let src: Vec<u8> = (0..most + 64).map(pattern).collect();
        let mut dst = vec![0u8; most + 256];
        for bytes in
            [0, 1, 63, 4096, PAST_CACHES - 1, PAST_CACHES, PAST_CACHES + 65, 2 * SHARE, most]
        {
            for (from, to) in [(0, 64), (1, 64), (3, 65), (0, 127)] {
                dst.fill(0xEE);
                // SAFETY: within both vectors.
                unsafe { copy(src.as_ptr().add(from), dst.as_mut_ptr().add(to), bytes) };
                assert!(
                    dst[to..to + bytes] == src[from..from + bytes],
                    "{bytes} bytes from {from} to {to}"
                );
                let others = dst[..to].iter().chain(&dst[to + bytes..]);
                assert!(
                    others.into_iter().all(|&b| b == 0xEE),
                    "beside {bytes} bytes from {from} to {to}"
                );
            }
        }
    }

    /// For each number of threads, the parts together are the whole range.
    #[test]
    fn parts_are_copied_by_threads_of_their_own() {
        let src: Vec<u8> = (0..3 * SHARE + 77).map(|i| i as u8 ^ (i >> 8) as u8).collect();
        let mut dst = vec![0u8; src.len()];
        for threads in [1, 2, 3, 4] {
            dst.fill(0);
            // SAFETY: both vectors have the same length.
            unsafe { copy_by(threads, src.as_ptr(), dst.as_mut_ptr(), src.len()) };
            assert!(src == dst, "{threads} threads");
        }
    }
}
