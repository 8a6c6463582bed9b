//! Blocks of memory, by address.

use super::convert::{check_out, give, text};
use crate::device::DEVICES;
use crate::status::{ffi_guard, ffi_guard_release};
use leasehold::Name;
use std::ffi::{c_char, c_int, c_void};

/// Allocates a block of a device's memory for a stream.
///
/// # Safety
/// - `stream` is a stream of the device, as the header says; `block` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_malloc(
    device: u64,
    bytes: usize,
    stream: usize,
    block: *mut *mut c_void,
) -> c_int {
    ffi_guard(|| {
        check_out(block, "the block's place")?;
        // SAFETY: the caller vouches for the stream.
        let addr = unsafe { DEVICES.get(device)?.alloc(None, bytes as u64, stream as u64) }?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(block, addr as *mut c_void, "the block's place") }
    })
}

/// Frees a block.
///
/// # Safety
/// - All work that uses the block was submitted to the stream of its allocation and to the streams
///   that were recorded for it. No later work uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_free(device: u64, block: *mut c_void) -> c_int {
    ffi_guard_release(|| DEVICES.get(device)?.free(block as u64))
}

/// Notes that another stream uses a block.
///
/// # Safety
/// - `stream` is a stream of the device, as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_record_stream(
    device: u64,
    block: *mut c_void,
    stream: usize,
) -> c_int {
    ffi_guard(|| {
        let device = DEVICES.get(device)?;
        // SAFETY: the caller vouches for the stream.
        unsafe { device.record_stream(block as u64, &device, stream as u64) }
    })
}

/// Notes that a stream of another device uses a block.
///
/// # Safety
/// - `stream` is a stream of the device `peer`, as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_record_peer_stream(
    device: u64,
    block: *mut c_void,
    peer: u64,
    stream: usize,
) -> c_int {
    ffi_guard(|| {
        let (device, peer) = (DEVICES.get(device)?, DEVICES.get(peer)?);
        // SAFETY: the caller vouches for the stream.
        unsafe { device.record_stream(block as u64, &peer, stream as u64) }
    })
}

/// Ends a stream, before its owner destroys it.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_stream_end(device: u64, stream: usize) -> c_int {
    ffi_guard_release(|| {
        let device = DEVICES.get(device)?;
        device.sources.end(&device.runtime, stream as u64)
    })
}

/// Finds the block that holds an address.
///
/// # Safety
/// - `base`, `bytes` and `pool` are null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_block_find(
    device: u64,
    address: *const c_void,
    base: *mut *mut c_void,
    bytes: *mut usize,
    pool: *mut u64,
) -> c_int {
    ffi_guard(|| {
        let device = DEVICES.get(device)?;
        let (addr, len) = device.block_of(address as u64)?;
        let of = device.pool_of(addr)?;
        // SAFETY: the caller says that they are null or can be written.
        unsafe {
            if !base.is_null() {
                base.write(addr as *mut c_void);
            }
            if !bytes.is_null() {
                bytes.write(len as usize);
            }
            if !pool.is_null() {
                pool.write(of);
            }
        }
        Ok(())
    })
}

/// Names a block in reports and snapshots.
///
/// # Safety
/// - `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_block_set_name(
    device: u64,
    block: *mut c_void,
    name: *const c_char,
) -> c_int {
    ffi_guard(|| {
        // SAFETY: the caller vouches for the C string.
        let name = unsafe { text(name, "the name")? };
        DEVICES.get(device)?.set_name(block as u64, Name::new(name))
    })
}
