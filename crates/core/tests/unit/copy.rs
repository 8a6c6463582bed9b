//! Tests of the copy for large blocks.

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
            assert!(dst[at..at + bytes] == src[at / 2..at / 2 + bytes], "{bytes} bytes to {at}");
            assert!(dst[..at].iter().chain(&dst[at + bytes..]).all(|&b| b == 0xEE), "beside {at}");
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
