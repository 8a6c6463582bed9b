//! Whether this process can read an address, without a risk: for numbers that another library calls
//! handles.
//!
//! The kernel reads the address on this thread's behalf, and answers `EFAULT` where it cannot. The
//! call is one that changes nothing: `rt_sigprocmask` reads the new mask before it looks at the
//! command, and refuses an unknown command. It needs no privilege, no descriptor and no memory, and
//! costs a tenth of a microsecond, so nothing is remembered: what was readable may be unmapped
//! since.
//!
//! This module must not call the vendor's driver.

/// Whether the eight bytes at an address can be read. On systems without this question: `true`.
#[cfg(target_os = "linux")]
pub(crate) fn is_readable(addr: u64) -> bool {
    /// No command of `rt_sigprocmask`.
    const UNKNOWN: libc::c_long = -1;
    /// Bytes of the kernel's mask.
    const MASK: libc::c_long = 8;
    let none = std::ptr::null_mut::<libc::c_void>();
    let Ok(addr) = libc::c_long::try_from(addr) else { return false };
    if addr == 0 {
        // The kernel takes it for no mask.
        return false;
    }
    // SAFETY: the kernel checks the address, and changes nothing for a command that it does not
    // know.
    let refused =
        unsafe { libc::syscall(libc::SYS_rt_sigprocmask, UNKNOWN, addr, none, MASK) } != 0;
    !(refused && std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT))
}

/// Whether the eight bytes at an address can be read. On systems without this question: `true`.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_readable(_: u64) -> bool {
    true
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
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
}
