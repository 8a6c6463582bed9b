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
#[path = "../../tests/unit/probe.rs"]
mod tests;
