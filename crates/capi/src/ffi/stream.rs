//! Streams: making them, asking them, waiting for them and in them.

use super::convert::{check_out, give, limit, text};
use super::point::LeaseholdPoint;
use crate::callback::Callback;
use crate::kinds::{EVENTS, HeldStream, RUNTIMES, STREAMS};
use crate::status::{ffi_guard, ffi_guard_release, of_failure};
use leasehold::{Error, Name, Result, StreamDesc, cuda};
use leasehold_core::TimelineSource;
use leasehold_core::sync::Arc;
use std::ffi::{c_char, c_int, c_void};
use std::mem::size_of;

/// The settings of a stream.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdStreamOptions {
    /// `sizeof` this struct.
    pub size: usize,
    /// The stream's name in reports, or null.
    pub name: *const c_char,
    /// A greater number is more urgent; 0 is the default. Clamped to the device's range.
    pub priority: c_int,
    /// 0.
    pub reserved: u32,
}

/// Is told how a stream's work ended.
pub type LeaseholdCompletion = unsafe extern "C" fn(context: *mut c_void, status: c_int);

/// Makes a stream.
///
/// # Safety
/// - `options` is null or a struct that begins with its size, whose name is null or a C string;
///   `stream` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_create(
    runtime: u64,
    options: *const LeaseholdStreamOptions,
    stream: *mut u64,
) -> c_int {
    const DEFAULTS: LeaseholdStreamOptions = LeaseholdStreamOptions {
        size: size_of::<LeaseholdStreamOptions>(),
        name: std::ptr::null(),
        priority: 0,
        reserved: 0,
    };
    ffi_guard(|| {
        check_out(stream, "the stream's place")?;
        // SAFETY: the caller vouches for the struct.
        let options = unsafe { super::convert::options(options, DEFAULTS, "options")? };
        let name = if options.name.is_null() {
            None
        } else {
            // SAFETY: the caller vouches for the C string.
            Some(Name::new(unsafe { text(options.name, "the name")? }))
        };
        let desc = StreamDesc::priority(options.priority);
        let made = RUNTIMES.get(runtime)?.runtime.create_stream_with(&desc)?;
        if let Some(name) = name {
            made.set_name(name);
        }
        let handle = STREAMS.add(HeldStream::live(&made))?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(stream, handle, "the stream's place") }
    })
}

/// Adds a holder of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_stream_retain(stream: u64) -> c_int {
    ffi_guard(|| STREAMS.retain(stream))
}

/// Lets go of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_stream_release(stream: u64) -> c_int {
    ffi_guard_release(|| STREAMS.release(stream))
}

/// The driver's stream.
///
/// # Safety
/// - `native` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_native(stream: u64, native: *mut usize) -> c_int {
    ffi_guard(|| {
        check_out(native, "the place of the answer")?;
        let held = STREAMS.get(stream)?;
        let found = match cuda::device_state(&held.runtime) {
            Some(_) => cuda::raw_stream(held.stream())?,
            None => held.stream().native(),
        };
        // SAFETY: the caller says that it can be written.
        unsafe { give(native, found as usize, "the place of the answer") }
    })
}

/// Says whether all work of a stream is over.
///
/// # Safety
/// - `over` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_query(stream: u64, over: *mut c_int) -> c_int {
    ffi_guard(|| {
        let found = STREAMS.get(stream)?.stream().query()?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(over, c_int::from(found), "the place of the answer") }
    })
}

/// Blocks until all work of a stream is over.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_stream_synchronize(stream: u64, timeout_ns: u64) -> c_int {
    ffi_guard(|| {
        let held = STREAMS.get(stream)?;
        match limit(timeout_ns) {
            Some(limit) => held.stream().synchronize_timeout(limit),
            None => held.stream().synchronize(),
        }
    })
}

/// The point of all work of a stream so far.
///
/// # Safety
/// - `point` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_now(stream: u64, point: *mut LeaseholdPoint) -> c_int {
    ffi_guard(|| {
        let now = LeaseholdPoint::now(STREAMS.get(stream)?.stream());
        // SAFETY: the caller says that it can be written.
        unsafe { give(point, now, "the point's place") }
    })
}

/// Lets later work of a stream begin after a point.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_stream_wait_point(stream: u64, point: LeaseholdPoint) -> c_int {
    ffi_guard(|| {
        let held = STREAMS.get(stream)?;
        let checked = point.check()?;
        checked.point.map_or(Ok(()), |point| held.stream().wait(point))
    })
}

/// Lets later work of a stream begin after the last record of an event.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_stream_wait_event(stream: u64, event: u64) -> c_int {
    ffi_guard(|| STREAMS.get(stream)?.stream().wait_event(&EVENTS.get(event)?.event))
}

/// The stream of another library on a runtime's device; `None` on a device without such streams.
///
/// # Errors
/// `Recording` for a recording's stream: the graph would wait for today's work at each launch.
///
/// # Safety
/// - As [`cuda::external_stream`].
unsafe fn outside(held: &HeldStream, native: usize) -> Result<Option<Arc<cuda::ExternalStream>>> {
    if held.stream().is_recording() {
        return Err(Error::recording(
            "streams of other libraries are not recorded; use leasehold_stream_foreign_call",
        ));
    }
    if cuda::device_state(&held.runtime).is_none() {
        return Ok(None);
    }
    // SAFETY: by the contract.
    unsafe { cuda::external_stream(&held.runtime, native as u64) }.map(Some)
}

/// Lets later work of a stream begin after all that another library's stream has now.
///
/// # Safety
/// - `native` is a stream of the device's primary context, or 0, 1 or 2, and its owner calls
///   `leasehold_stream_end` before destroying it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_wait_native(stream: u64, native: usize) -> c_int {
    ffi_guard(|| {
        let held = STREAMS.get(stream)?;
        // SAFETY: by the contract.
        match unsafe { outside(&held, native) }? {
            Some(other) => held.stream().wait(other.now()),
            // Work of a host thread is over once the thread calls.
            None => Ok(()),
        }
    })
}

/// Lets later work of another library's stream begin after all work of a stream so far.
///
/// # Safety
/// - As [`leasehold_stream_wait_native`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_precede_native(stream: u64, native: usize) -> c_int {
    ffi_guard(|| {
        let held = STREAMS.get(stream)?;
        // SAFETY: by the contract.
        let Some(other) = unsafe { outside(&held, native) }? else {
            return Err(Error::Unsupported(
                "this device has no streams of other libraries; synchronize the stream".into(),
            ));
        };
        held.stream().flush()?;
        other.wait(held.stream().now())
    })
}

/// Makes sure that all work of a stream is on its way to the device.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_stream_flush(stream: u64) -> c_int {
    ffi_guard(|| STREAMS.get(stream)?.stream().flush())
}

/// The failure of a stream.
///
/// # Safety
/// - `status` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_failure(stream: u64, status: *mut c_int) -> c_int {
    ffi_guard(|| {
        check_out(status, "the place of the answer")?;
        let found = of_failure(STREAMS.get(stream)?.stream().failure());
        // SAFETY: the caller says that it can be written.
        unsafe { give(status, found, "the place of the answer") }
    })
}

/// Names a stream in reports.
///
/// # Safety
/// - `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_set_name(stream: u64, name: *const c_char) -> c_int {
    ffi_guard(|| {
        // SAFETY: the caller vouches for the C string.
        let name = Name::new(unsafe { text(name, "the name")? });
        STREAMS.get(stream)?.stream().set_name(name);
        Ok(())
    })
}

/// Calls a function once, when all work of a stream so far is over.
///
/// # Safety
/// - Any thread may call `call` with `context`, once. It returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_on_complete(
    stream: u64,
    call: Option<LeaseholdCompletion>,
    context: *mut c_void,
) -> c_int {
    ffi_guard(|| {
        let call = call.ok_or_else(|| Error::invalid("the function is null"))?;
        let held = STREAMS.get(stream)?;
        // SAFETY: the caller lets any thread use the context.
        let callback = unsafe { Callback::new(context, None) };
        held.stream().on_complete(move |ended| {
            let status = of_failure(ended.err());
            // SAFETY: the caller vouches for the function and its context.
            unsafe { call(callback.context(), status) }
        });
        Ok(())
    })
}
