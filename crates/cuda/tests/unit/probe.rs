//! Tests of reading an address without a risk.

use super::*;

#[test]
fn what_is_mapped_readable_is_told_from_what_is_not() {
    let value = Box::new([1_u64; 512]);
    assert!(is_readable(value.as_ptr() as u64));
    assert!(is_readable(is_readable as fn(u64) -> bool as usize as u64));
    for none in [0, 8, 0xdead0, 1 << 46, 0x8000_0000_0000_0000, 1 << 48, u64::MAX - 7] {
        assert!(!is_readable(none), "{none:#x}");
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
    for (protection, readable) in [(libc::PROT_READ, true), (libc::PROT_NONE, false)] {
        // SAFETY: a new private mapping, at no address in particular.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 8192, protection, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(is_readable(at as u64), readable);
        // SAFETY: the mapping is this test's own.
        assert_eq!(unsafe { libc::munmap(at, 8192) }, 0);
        assert!(!is_readable(at as u64), "it was unmapped");
    }
}
