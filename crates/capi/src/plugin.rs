//! The functions of PyTorch's plug-in interface (`CUDAPluggableAllocator`): memory by ordinal,
//! size and stream.
//!
//! A device is opened at its first use as `cuda:N`, with the settings of
//! [`leasehold_plugin_set_options`], unless [`leasehold_plugin_set_device`] named another one.
//! [`leasehold_last_error`] has the text of a failure.
//!
//! The interface has no way to tell a failure: PyTorch uses a null pointer as if it were memory. So
//! a failure calls a function of the caller's, which throws a C++ exception through the functions
//! here. They hold nothing then that a destructor would have to give back.
//!
//! [`leasehold_last_error`]: crate::ffi::leasehold_last_error

use crate::device::DEVICES;
use crate::ffi::convert::{check_out, give, options};
use crate::ffi::{DEVICE_DEFAULTS, LeaseholdDeviceOptions, close, open, policy};
use crate::status::{
    OK, OUT_OF_MEMORY, OVER_BUDGET, ffi_guard, ffi_guard_release, keep, last, prefix,
};
use leasehold::{Error, Result};
use leasehold_core::sync::RwLock;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use std::ffi::{CStr, c_char, c_int, c_void};

/// Throws a C++ exception in the caller: which function failed, the file and line of that, and the
/// text. PyTorch's `c10::detail::torchCheckFail` is one.
pub type LeaseholdRaise = unsafe extern "C-unwind" fn(
    function: *const c_char,
    file: *const c_char,
    line: u32,
    text: *const c_char,
);

/// The devices by ordinal; 0 for none.
static ORDINALS: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
/// The settings of devices that are opened at their first use.
static OPTIONS: RwLock<LeaseholdDeviceOptions> = RwLock::new(DEVICE_DEFAULTS);
/// The function that a failure calls.
static RAISE: RwLock<Option<LeaseholdRaise>> = RwLock::new(None);

/// How many ordinals there are: no machine has more devices.
const MOST: usize = 1024;

/// The place of an ordinal.
fn place(ordinal: c_int) -> Result<&'static AtomicU64> {
    let place = usize::try_from(ordinal).ok().and_then(|at| ORDINALS.get(at));
    place.ok_or_else(|| Error::invalid(format!("device {ordinal}")))
}

fn device(ordinal: c_int) -> Result<u64> {
    let place = place(ordinal)?;
    let found = place.load(Ordering::Acquire);
    if found != 0 {
        return Ok(found);
    }
    // Two threads that come first open two, of which one is closed again.
    let settings = *OPTIONS.read();
    let opened = open(&format!("cuda:{ordinal}"), settings)?;
    match place.compare_exchange(0, opened, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(opened),
        Err(first) => close(opened).map(|()| first),
    }
}

/// Sets the options of devices that are opened at their first use.
///
/// # Safety
/// - `options` is null or a struct that begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_plugin_set_options(
    options: *const LeaseholdDeviceOptions,
) -> c_int {
    ffi_guard(|| {
        // SAFETY: the caller vouches for the struct.
        let wanted = unsafe { self::options(options, DEVICE_DEFAULTS, "options")? };
        policy(wanted.policy)?;
        *OPTIONS.write() = wanted;
        Ok(())
    })
}

/// The device of an ordinal: 0 if there is none yet, unless `open` says to open it.
///
/// # Safety
/// - `device` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_plugin_get_device(
    ordinal: c_int,
    open: c_int,
    device: *mut u64,
) -> c_int {
    ffi_guard(|| {
        check_out(device, "the device's place")?;
        let known = place(ordinal)?.load(Ordering::Acquire);
        let found = if open == 0 { known } else { self::device(ordinal)? };
        // SAFETY: the caller says that it can be written.
        unsafe { give(device, found, "the device's place") }
    })
}

/// Makes an open device the one of an ordinal; 0 takes it back.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_plugin_set_device(ordinal: c_int, device: u64) -> c_int {
    ffi_guard(|| {
        let place = place(ordinal)?;
        if device != 0 {
            DEVICES.get(device)?;
        }
        place.store(device, Ordering::Release);
        Ok(())
    })
}

/// Sets what a failed allocation calls. `None` for nothing.
///
/// # Safety
/// - The function takes these arguments, and any thread may call it until another one is set and
///   the allocations that began before are over.
/// - It returns, or unwinds as a C++ exception.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_plugin_set_raise(raise: Option<LeaseholdRaise>) -> c_int {
    ffi_guard(|| {
        *RAISE.write() = raise;
        Ok(())
    })
}

/// Raises the text of this thread's last failure.
fn raise(function: &'static CStr) {
    // A reader's guard must not be there while an exception passes.
    let raise = *RAISE.read();
    if let Some(raise) = raise {
        // SAFETY: the caller of `leasehold_plugin_set_raise` vouches for the function. The text is
        // this thread's until its next failure.
        unsafe { raise(function.as_ptr(), c"leasehold".as_ptr(), 0, last()) }
    }
}

/// Raises an error: the plug-in interface has no private pools. For
/// `set_begin_allocate_to_pool`, whose arguments it does not read.
///
/// # Safety
/// - A C++ exception may pass the caller.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn leasehold_plugin_refuse_pool() {
    keep(
        "leasehold: PyTorch's plug-in interface has no private pools, which captured graphs and \
         torch.cuda.MemPool need: install a C++ compiler for the extension"
            .to_owned(),
    );
    raise(c"beginAllocateToPool");
}

/// Allocates a block. A failure is raised, and is null if there is no function for that. No bytes
/// are null too.
///
/// # Safety
/// - As [`leasehold_malloc`](crate::ffi::leasehold_malloc), for `stream`.
/// - A C++ exception may pass the caller if [`leasehold_plugin_set_raise`] named a function that
///   throws one.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn leasehold_plugin_alloc(
    size: isize,
    ordinal: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let mut addr = 0;
    let status = ffi_guard(|| {
        let bytes =
            u64::try_from(size).map_err(|_| Error::invalid(format!("a size of {size} bytes")))?;
        let device = DEVICES.get(device(ordinal)?)?;
        // SAFETY: the caller vouches for the stream.
        addr = unsafe { device.alloc(None, bytes, stream as u64) }?;
        Ok(())
    });
    if status != OK {
        // Programs look for PyTorch's words.
        let full = [OUT_OF_MEMORY, OVER_BUDGET].contains(&status);
        prefix(if full { "CUDA out of memory. " } else { "leasehold: " });
        raise(c"malloc");
    }
    addr as *mut c_void
}

/// Frees a block. In a child of `fork()` it does nothing: the block is its parent's.
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
    ffi_guard_release(|| DEVICES.get(device(ordinal)?)?.free(block as u64));
}

/// Notes that another stream of the block's device uses a block.
///
/// # Safety
/// - As [`leasehold_record_stream`](crate::ffi::leasehold_record_stream), for the device of the
///   block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_plugin_record_stream(block: *mut c_void, stream: *mut c_void) {
    ffi_guard(|| {
        if block.is_null() {
            return Ok(());
        }
        let handles = ORDINALS.iter().map(|place| place.load(Ordering::Acquire));
        // A device that was closed has no blocks.
        for device in handles.filter_map(|handle| DEVICES.get(handle).ok()) {
            if device.pool_of(block as u64).is_ok() {
                // SAFETY: the caller vouches for the stream.
                return unsafe { device.record_stream(block as u64, &device, stream as u64) };
            }
        }
        Err(Error::invalid(format!("no device of PyTorch has a block at {block:p}")))
    });
}
