//! The two functions of PyTorch's plug-in interface (`CUDAPluggableAllocator`): memory by ordinal,
//! size and stream, and null for a failure.
//!
//! A device is opened at its first use as `cuda:N`, unless
//! [`leasehold_plugin_set_device`] named another one. [`leasehold_last_error`] has the text of a
//! failure.
//!
//! [`leasehold_last_error`]: crate::ffi::leasehold_last_error

use crate::device::DEVICES;
use crate::ffi::{DEVICE_DEFAULTS, open};
use crate::status::border;
use leasehold::{Error, Result};
use leasehold_core::sync::RwLock;
use std::ffi::{c_int, c_void};

/// The devices by ordinal; 0 for none.
static ORDINALS: RwLock<Vec<u64>> = RwLock::new(Vec::new());

/// The largest ordinal: more devices have no machine.
const MOST: c_int = 1024;

fn index(ordinal: c_int) -> Result<usize> {
    let valid = (0..MOST).contains(&ordinal);
    if valid { Ok(ordinal as usize) } else { Err(Error::invalid(format!("device {ordinal}"))) }
}

fn known(at: usize) -> u64 {
    ORDINALS.read().get(at).copied().unwrap_or(0)
}

fn device(ordinal: c_int) -> Result<u64> {
    let at = index(ordinal)?;
    let found = known(at);
    if found != 0 {
        return Ok(found);
    }
    // Two threads that come first open two, of which one is closed again.
    let opened = open(&format!("cuda:{ordinal}"), DEVICE_DEFAULTS)?;
    let mut ordinals = ORDINALS.write();
    if ordinals.len() <= at {
        ordinals.resize(at + 1, 0);
    }
    if ordinals[at] == 0 {
        ordinals[at] = opened;
        return Ok(opened);
    }
    let first = ordinals[at];
    drop(ordinals);
    DEVICES.remove(opened)?;
    Ok(first)
}

/// Makes an open device the one of an ordinal; 0 takes it back.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_plugin_set_device(ordinal: c_int, device: u64) -> c_int {
    border(|| {
        let at = index(ordinal)?;
        if device != 0 {
            DEVICES.get(device)?;
        }
        let mut ordinals = ORDINALS.write();
        if ordinals.len() <= at {
            ordinals.resize(at + 1, 0);
        }
        ordinals[at] = device;
        Ok(())
    })
}

/// Allocates a block. Null for a failure, and for no bytes.
///
/// # Safety
/// - As [`leasehold_malloc`](crate::ffi::leasehold_malloc), for `stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_plugin_alloc(
    size: isize,
    ordinal: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let mut addr = 0;
    border(|| {
        let bytes =
            u64::try_from(size).map_err(|_| Error::invalid(format!("a size of {size} bytes")))?;
        let device = DEVICES.get(device(ordinal)?)?;
        // SAFETY: the caller vouches for the stream.
        addr = unsafe { device.alloc(None, bytes, stream as u64) }?;
        Ok(())
    });
    addr as *mut c_void
}

/// Frees a block.
///
/// # Safety
/// - As [`leasehold_free`](crate::ffi::leasehold_free).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_plugin_free(
    block: *mut c_void,
    size: isize,
    ordinal: c_int,
    stream: *mut c_void,
) {
    // The block knows its size and its stream.
    let _ = (size, stream);
    border(|| DEVICES.get(device(ordinal)?)?.free(block as u64));
}

/// Notes that another stream of the block's device uses a block.
///
/// # Safety
/// - As [`leasehold_record_stream`](crate::ffi::leasehold_record_stream), for the device of the
///   block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_plugin_record_stream(block: *mut c_void, stream: *mut c_void) {
    border(|| {
        if block.is_null() {
            return Ok(());
        }
        let opened = ORDINALS.read().clone();
        for device in opened.into_iter().filter(|&device| device != 0) {
            let device = DEVICES.get(device)?;
            if device.pool_of(block as u64).is_ok() {
                // SAFETY: the caller vouches for the stream.
                return unsafe { device.record_stream(block as u64, &device, stream as u64) };
            }
        }
        Err(Error::invalid(format!("no device of PyTorch has a block at {block:p}")))
    });
}
