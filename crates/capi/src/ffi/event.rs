//! Events.

use super::convert::{check_out, give, limit};
use super::point::LeaseholdPoint;
use crate::kinds::{EVENTS, HeldEvent, RUNTIMES, STREAMS};
use crate::status::{ffi_guard, ffi_guard_release};
use leasehold::{Error, EventFlags};
use std::ffi::c_int;

/// The event keeps a time of the device.
pub const LEASEHOLD_EVENT_TIMING: u32 = 1;
/// A thread that waits for the event sleeps at once.
pub const LEASEHOLD_EVENT_SLEEPS: u32 = 2;

/// Makes an event.
///
/// # Safety
/// - `event` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_event_create(
    runtime: u64,
    flags: u32,
    event: *mut u64,
) -> c_int {
    ffi_guard(|| {
        check_out(event, "the event's place")?;
        if flags & !(LEASEHOLD_EVENT_TIMING | LEASEHOLD_EVENT_SLEEPS) != 0 {
            return Err(Error::invalid(format!("{flags:#x}: unknown flags of an event")));
        }
        let flags = EventFlags {
            timing: flags & LEASEHOLD_EVENT_TIMING != 0,
            blocking_sync: flags & LEASEHOLD_EVENT_SLEEPS != 0,
        };
        let runtime = RUNTIMES.get(runtime)?.runtime.clone();
        let made = runtime.create_event_with(flags)?;
        let handle = EVENTS.add(HeldEvent { event: made, _runtime: runtime })?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(event, handle, "the event's place") }
    })
}

/// Adds a holder of an event.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_event_retain(event: u64) -> c_int {
    ffi_guard(|| EVENTS.retain(event))
}

/// Lets go of an event.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_event_release(event: u64) -> c_int {
    ffi_guard_release(|| EVENTS.release(event))
}

/// Records an event at a stream's present end.
///
/// # Safety
/// - `point` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_event_record(
    event: u64,
    stream: u64,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        let (event, held) = (EVENTS.get(event)?, STREAMS.get(stream)?);
        held.stream().record(&event.event)?;
        // SAFETY: by the contract.
        unsafe { LeaseholdPoint::give(point, held.stream()) };
        Ok(())
    })
}

/// Says whether the last record of an event is over.
///
/// # Safety
/// - `over` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_event_query(event: u64, over: *mut c_int) -> c_int {
    ffi_guard(|| {
        let found = EVENTS.get(event)?.event.query()?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(over, c_int::from(found), "the place of the answer") }
    })
}

/// Blocks until the last record of an event is over.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_event_synchronize(event: u64, timeout_ns: u64) -> c_int {
    ffi_guard(|| {
        let event = EVENTS.get(event)?;
        match limit(timeout_ns) {
            Some(limit) => event.event.synchronize_timeout(limit),
            None => event.event.synchronize(),
        }
    })
}

/// The time of the device between the last records of two events. Blocks until both are over.
///
/// # Safety
/// - `nanoseconds` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_event_elapsed_blocking(
    from: u64,
    to: u64,
    nanoseconds: *mut u64,
) -> c_int {
    ffi_guard(|| {
        check_out(nanoseconds, "the place of the answer")?;
        let (from, to) = (EVENTS.get(from)?, EVENTS.get(to)?);
        let time = to.event.elapsed_since(&from.event)?;
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: the caller says that it can be written.
        unsafe { give(nanoseconds, time, "the place of the answer") }
    })
}

/// The point of an event's last record.
///
/// # Safety
/// - `point` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_event_point(event: u64, point: *mut LeaseholdPoint) -> c_int {
    ffi_guard(|| {
        let found = EVENTS.get(event)?.event.timepoint()?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(point, found.into(), "the point's place") }
    })
}
