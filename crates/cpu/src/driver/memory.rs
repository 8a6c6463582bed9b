//! Address space and pages: `mmap` and related calls.
//!
//! Reservations are `PROT_NONE` and cost nothing. A commitment makes a part accessible and asks for
//! huge pages. Pages appear at the first touch, on the NUMA node of the thread that touches them. A
//! decommitment replaces the part by an empty mapping in one call. This gives the pages back and
//! removes protection and advice, so that the kernel can merge the part with its neighbours.
//!
//! This module must not know allocators.

use leasehold_core::{Error, OutOfMemory, Result};
use std::io;
use std::ptr;

#[cfg(any(target_os = "linux", target_os = "android"))]
const RESERVE_FLAGS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const RESERVE_FLAGS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANON;

/// Reserves `bytes` of addresses, aligned to `align` (a power of two, at least a page).
///
/// # Errors
/// `OutOfMemory` if the system refuses: `RLIMIT_AS`, a memory checker, a full address space.
pub(crate) fn reserve(bytes: u64, align: u64) -> Result<u64> {
    map(bytes, align, libc::PROT_NONE)
}

/// Maps `bytes` of accessible memory at an address aligned to `align`.
///
/// # Errors
/// As [`reserve`].
pub(crate) fn map_segment(bytes: u64, align: u64, huge: bool) -> Result<u64> {
    let at = map(bytes, align, libc::PROT_READ | libc::PROT_WRITE)?;
    advise(at, bytes, huge);
    Ok(at)
}

fn map(bytes: u64, align: u64, protection: libc::c_int) -> Result<u64> {
    let refused = || OutOfMemory::new("address space", bytes);
    // The mapping is larger, so that it contains an aligned part. The rest is given back.
    let span = bytes
        .checked_add(align)
        .filter(|&s| s < 1 << 60 && bytes != 0)
        .ok_or_else(|| Error::from(refused()))?;
    // SAFETY: the system chooses the address of the new mapping, so no existing memory is touched.
    let at =
        unsafe { libc::mmap(ptr::null_mut(), span as usize, protection, RESERVE_FLAGS, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(refused().note(format!("mmap: {}", io::Error::last_os_error())).into());
    }
    let (from, to) = (at as u64, at as u64 + span);
    let aligned = from.next_multiple_of(align);
    for (cut, len) in [(from, aligned - from), (aligned + bytes, to - (aligned + bytes))] {
        if len != 0 {
            // SAFETY: whole pages at the ends of the mapping that was just made. No other code
            // knows these addresses.
            unsafe { libc::munmap(cut as *mut libc::c_void, len as usize) };
        }
    }
    Ok(aligned)
}

/// Unmaps a range of addresses with its memory.
///
/// # Errors
/// `Driver`: the range is still mapped after the error.
///
/// # Safety
/// - The range was mapped by this module, and nothing uses it any more.
pub(crate) unsafe fn unmap(at: u64, bytes: u64) -> Result<()> {
    // SAFETY: the range is a mapping of this module without users (the contract of this function).
    check("munmap", unsafe { libc::munmap(at as *mut libc::c_void, bytes as usize) })
}

/// Makes a part of a reservation accessible.
///
/// # Errors
/// `OutOfMemory` if the system refuses to account for the part or has no entry for the mapping.
///
/// # Safety
/// - The range lies in a reservation of this module.
pub(crate) unsafe fn commit(at: u64, bytes: u64, huge: bool) -> Result<()> {
    // SAFETY: the range lies in a reservation of this module (the contract of this function).
    let rc = unsafe {
        libc::mprotect(at as *mut libc::c_void, bytes as usize, libc::PROT_READ | libc::PROT_WRITE)
    };
    if rc != 0 {
        let error = io::Error::last_os_error();
        return Err(OutOfMemory::new("memory", bytes).note(format!("mprotect: {error}")).into());
    }
    advise(at, bytes, huge);
    Ok(())
}

/// Gives the pages of a part of a reservation back and makes it inaccessible. Its addresses stay
/// reserved.
///
/// # Errors
/// `Driver`: nothing has changed after the error.
///
/// # Safety
/// - The range lies in a reservation of this module, and nothing uses it any more.
pub(crate) unsafe fn decommit(at: u64, bytes: u64) -> Result<()> {
    let address = at as *mut libc::c_void;
    // SAFETY: the call replaces a mapping of this module in one step. Nothing uses the range (the
    // contract of this function).
    let now = unsafe {
        libc::mmap(address, bytes as usize, libc::PROT_NONE, RESERVE_FLAGS | libc::MAP_FIXED, -1, 0)
    };
    if now == libc::MAP_FAILED {
        // The system has no entry left for a mapping, so only the pages are given back.
        // SAFETY: the range is a mapping of this module, and nothing uses its bytes. Later reads of
        // the range give zero.
        return check("madvise", unsafe {
            libc::madvise(address, bytes as usize, libc::MADV_DONTNEED)
        });
    }
    Ok(())
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn advise(at: u64, bytes: u64, huge: bool) {
    if huge {
        // SAFETY: advice on a mapping of this module. A kernel without huge pages refuses without
        // harm.
        unsafe { libc::madvise(at as *mut libc::c_void, bytes as usize, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn advise(_: u64, _: u64, _: bool) {}

fn check(api: &'static str, rc: libc::c_int) -> Result<()> {
    if rc == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(Error::Driver {
        api,
        code: error.raw_os_error().unwrap_or(0),
        name: error.to_string().into_boxed_str(),
    })
}
