//! Tests of copies by the host.

use super::*;
use crate::Error;

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect()
}

/// Every size around the thresholds, from and to every alignment, copies all bytes and no
/// others.
#[test]
fn all_bytes_and_no_others() {
    let most = 2 * SHARE + 77;
    let src = pattern(most + 64);
    let mut dst = vec![0u8; most + 256];
    for bytes in
        [0, 1, 63, PAST_CACHES / 2, PAST_CACHES - 1, PAST_CACHES, PAST_CACHES + 65, 2 * SHARE, most]
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

/// For each number of threads, bytes that become ready chunk by chunk go through a ring: a
/// chunk enters only when the one before it in its place is done, and all arrive.
#[test]
fn bytes_go_through_a_ring_by_any_number_of_threads() {
    const RING: usize = 3 * CHUNK;
    let src = pattern(7 * CHUNK + 77);
    for threads in [1, 2, 3, 8] {
        for bytes in [0, 1, CHUNK, CHUNK + 1, RING, src.len()] {
            let (mut ring, mut dst) = (vec![0u8; RING], vec![0u8; bytes]);
            let (ring, to) = (ring.as_mut_ptr(), dst.as_mut_ptr());
            let up = CopyRequest {
                src: src.as_ptr(),
                src_ring: None,
                dst: ring,
                dst_ring: Some(RING),
                bytes,
            };
            // Takes what has arrived in the ring, as a device would.
            let taken = std::cell::Cell::new(0);
            let ready = |_| Ok(taken.get() + RING);
            let mut told = Vec::new();
            let done = |now: usize| {
                told.push(now);
                while taken.get() < now {
                    let at = taken.get();
                    let some = (now - at).min(CHUNK);
                    // SAFETY: `some` bytes at `at` are done, and lie within a chunk.
                    unsafe { copy(ring.add(at % RING), to.add(at), some) };
                    taken.set(at + some);
                }
                Ok(())
            };
            // SAFETY: the ring and the source are long enough, and a place of the ring is ready
            // once its bytes were taken.
            unsafe { copy_by(threads, up, ready, done) }.unwrap();
            assert!(dst == src[..bytes], "{bytes} bytes by {threads} threads");
            assert!(told.is_sorted() && told.last().copied().unwrap_or(0) == bytes, "{told:?}");
        }
    }
}

/// A thread waits only when nothing is left to copy, and no chunk is copied before it is ready.
#[test]
fn a_wait_comes_when_all_that_is_ready_is_done() {
    let src = pattern(4 * CHUNK);
    let mut dst = vec![0u8; src.len()];
    let request = CopyRequest {
        src: src.as_ptr(),
        src_ring: None,
        dst: dst.as_mut_ptr(),
        dst_ring: None,
        bytes: src.len(),
    };
    let (given, copied) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let ready = |idle: bool| {
        assert_eq!(idle, copied.get() == given.get());
        given.set(given.get() + if idle { CHUNK } else { 0 });
        // A part of the next chunk is there too.
        Ok(given.get() + 1)
    };
    let done = |now| {
        assert!(now <= given.get());
        copied.set(now);
        Ok(())
    };
    // SAFETY: both vectors have this length.
    unsafe { copy_by(3, request, ready, done) }.unwrap();
    assert!(src == dst);
}

#[test]
fn an_error_ends_a_copy_whose_helpers_wait() {
    let src = pattern(4 * CHUNK);
    let mut dst = vec![0u8; src.len()];
    let request = CopyRequest {
        src: src.as_ptr(),
        src_ring: None,
        dst: dst.as_mut_ptr(),
        dst_ring: None,
        bytes: src.len(),
    };
    let refuse = || Error::state("enough");
    let late = |idle: bool| {
        if !idle {
            return Ok(CHUNK);
        }
        // The helpers park meanwhile.
        thread::sleep(std::time::Duration::from_millis(20));
        Err(refuse())
    };
    // SAFETY: both vectors have this length.
    let ended = unsafe { copy_by(3, request, late, |_| Ok(())) };
    assert!(matches!(ended, Err(Error::InvalidState(_))), "{ended:?}");
    // SAFETY: both vectors have this length.
    let ended = unsafe { copy_by(3, request, |_| Ok(CHUNK), |_| Err(refuse())) };
    assert!(matches!(ended, Err(Error::InvalidState(_))), "{ended:?}");
    assert!(dst[..CHUNK] == src[..CHUNK] && dst[CHUNK..].iter().all(|&b| b == 0));
}
