//! Blocks that go to other processes.

use super::convert::{check_out, give};
use crate::device::DEVICES;
use crate::status::{ffi_guard, ffi_guard_release};
use leasehold::share::SharedBlock;
use leasehold::{Error, Result};
use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

/// Bytes of the description of an exported block.
pub const LEASEHOLD_SHARED_BYTES: usize = 128;

/// Makes a descriptor of a block, and its description, for another process.
///
/// # Safety
/// - `descriptor` can be written; `description` has [`LEASEHOLD_SHARED_BYTES`] that can be written.
/// - Whoever gets the descriptor uses the block only in an order with this process, and the rest of
///   its segment not at all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_block_export(
    device: u64,
    block: *const c_void,
    descriptor: *mut c_int,
    description: *mut u8,
) -> c_int {
    ffi_guard(|| {
        check_out(descriptor, "the descriptor's place")?;
        check_out(description, "the description's place")?;
        // SAFETY: the caller vouches for the other process.
        let (fd, shared) = unsafe { DEVICES.get(device)?.export(block as u64) }?;
        let bytes = shared.to_bytes();
        // SAFETY: the caller says that it can be written, and has room.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), description, LEASEHOLD_SHARED_BYTES);
            give(descriptor, fd.into_raw_fd(), "the descriptor's place")
        }
    })
}

/// Maps a block that another process exported.
///
/// # Safety
/// - `description` has [`LEASEHOLD_SHARED_BYTES`]; `block` can be written.
/// - The work of all processes with the block is ordered. Its owner keeps the block until
///   [`leasehold_block_close`], or has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_block_import(
    device: u64,
    descriptor: c_int,
    description: *const u8,
    block: *mut *mut c_void,
) -> c_int {
    ffi_guard(|| {
        check_out(block, "the block's place")?;
        if description.is_null() {
            return Err(Error::invalid("the description is null"));
        }
        let mut bytes = [0; LEASEHOLD_SHARED_BYTES];
        // SAFETY: the caller vouches for the description's bytes.
        unsafe { std::ptr::copy_nonoverlapping(description, bytes.as_mut_ptr(), bytes.len()) };
        let shared = SharedBlock::from_bytes(&bytes)?;
        let device = DEVICES.get(device)?;
        let descriptor = duplicate(descriptor)?;
        // SAFETY: the caller vouches for the order of the processes' work.
        let addr = unsafe { device.import(descriptor, &shared) }?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(block, addr as *mut c_void, "the block's place") }
    })
}

/// Unmaps a block that [`leasehold_block_import`] mapped. No work uses it any more.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_block_close(device: u64, block: *mut c_void) -> c_int {
    ffi_guard_release(|| DEVICES.get(device)?.end_import(block as u64))
}

/// A descriptor of one's own: the caller's stays the caller's.
fn duplicate(descriptor: c_int) -> Result<OwnedFd> {
    // SAFETY: the call makes a new descriptor, and refuses a number that is none.
    let own = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if own < 0 {
        let why = std::io::Error::last_os_error();
        return Err(Error::invalid(format!("{descriptor} is no descriptor that is open: {why}")));
    }
    // SAFETY: the descriptor is new, and nobody else closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}
