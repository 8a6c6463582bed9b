//! Host timelines.

use super::convert::{check_out, give, text};
use super::point::LeaseholdPoint;
use crate::kinds::{HOST_TIMELINES, RUNTIMES};
use crate::status::{ffi_guard, ffi_guard_release};
use leasehold::Error;
use std::ffi::{c_char, c_int};

/// Makes a host timeline.
///
/// # Safety
/// - `timeline` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_host_timeline_create(runtime: u64, timeline: *mut u64) -> c_int {
    ffi_guard(|| {
        check_out(timeline, "the host timeline's place")?;
        let made = RUNTIMES.get(runtime)?.runtime.create_host_timeline()?;
        let handle = HOST_TIMELINES.add(made)?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(timeline, handle, "the host timeline's place") }
    })
}

/// Adds a holder of a host timeline.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_host_timeline_retain(timeline: u64) -> c_int {
    ffi_guard(|| HOST_TIMELINES.retain(timeline))
}

/// Lets go of a host timeline.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_host_timeline_release(timeline: u64) -> c_int {
    ffi_guard_release(|| HOST_TIMELINES.release(timeline))
}

/// The point after the one that a host timeline stands at.
///
/// # Safety
/// - `point` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_host_timeline_next(
    timeline: u64,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        let value = HOST_TIMELINES.get(timeline)?.next().value();
        // SAFETY: the caller says that it can be written.
        unsafe { give(point, LeaseholdPoint { timeline, value }, "the point's place") }
    })
}

/// Raises a host timeline to a value.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_host_timeline_signal(timeline: u64, value: u64) -> c_int {
    ffi_guard_release(|| HOST_TIMELINES.get(timeline)?.signal(value))
}

/// Fails a host timeline.
///
/// # Safety
/// - `why` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_host_timeline_fail(timeline: u64, why: *const c_char) -> c_int {
    ffi_guard_release(|| {
        // SAFETY: the caller vouches for the C string.
        let why = unsafe { text(why, "the cause")? };
        HOST_TIMELINES.get(timeline)?.fail(Error::other(why.to_owned()));
        Ok(())
    })
}
