//! Tests of huge pages.

use super::*;

#[test]
fn pages_are_zero_aligned_and_writable_to_the_last_byte() {
    for bytes in [1, 4097, (96 << 20) + 12_345_u64] {
        let pages = Pages::new(bytes).unwrap();
        assert!(pages.addr().is_multiple_of(HUGE as u64));
        // SAFETY: the pages are of this test.
        let memory =
            unsafe { std::slice::from_raw_parts_mut(pages.addr() as *mut u8, bytes as usize) };
        assert!(memory.iter().all(|&b| b == 0));
        memory.fill(7);
        assert!(memory.iter().all(|&b| b == 7));
    }
}

#[test]
fn more_than_there_is_is_refused_and_takes_nothing() {
    for bytes in [u64::MAX, u64::MAX / 2, 1 << 60, host_memory::info().free] {
        assert!(Pages::new(bytes).is_none(), "{bytes}");
    }
}
