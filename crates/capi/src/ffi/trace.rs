//! Traces of runtimes.

use super::convert::{limit, text};
use crate::kinds::{OpenRuntime, RUNTIMES, Tracing};
use crate::status::ffi_guard;
use leasehold::{Error, Result, Trace};
use std::ffi::{c_char, c_int};
use std::time::Duration;

/// Starts a trace of a runtime.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_trace_start(runtime: u64) -> c_int {
    ffi_guard(|| {
        let open = RUNTIMES.get(runtime)?;
        change(&open, |tracing| match tracing {
            Tracing::Off => match Trace::start(&open.runtime) {
                Ok(trace) => (Tracing::On(trace), Ok(())),
                Err(e) => (Tracing::Off, Err(e)),
            },
            unwritten @ Tracing::Unwritten(_) => (
                unwritten,
                Err(Error::state(
                    "the events of the last trace are not written; leasehold_trace_stop writes them to another path, or drops them without one",
                )),
            ),
            on => {
                let error = "a trace of this handle is on already; leasehold_trace_stop ends it";
                (on, Err(Error::state(error)))
            }
        })
    })
}

/// Ends a trace and writes its file.
///
/// # Safety
/// - `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_trace_stop(
    runtime: u64,
    path: *const c_char,
    timeout_ns: u64,
) -> c_int {
    ffi_guard(|| {
        let open = RUNTIMES.get(runtime)?;
        let path = if path.is_null() {
            None
        } else {
            // SAFETY: the caller vouches for the path.
            Some(unsafe { text(path, "the path") }?)
        };
        change(&open, |tracing| {
            let events = match tracing {
                Tracing::On(trace) => trace.stop_within(limit(timeout_ns).unwrap_or(Duration::MAX)),
                Tracing::Unwritten(events) => events,
                other => {
                    let error = "no trace of this handle is on; leasehold_trace_start begins one";
                    return (other, Err(Error::state(error)));
                }
            };
            match path.map_or(Ok(()), |path| events.save(path)) {
                Ok(()) => (Tracing::Off, Ok(())),
                Err(e) => (Tracing::Unwritten(events), Err(e)),
            }
        })
    })
}

/// Changes a handle's trace, without a lock while the device or a file is waited for.
///
/// # Errors
/// `Occupied` while another thread does; the error of `how`.
fn change(open: &OpenRuntime, how: impl FnOnce(Tracing) -> (Tracing, Result<()>)) -> Result<()> {
    let former = std::mem::replace(&mut *open.tracing.lock(), Tracing::Busy);
    if matches!(former, Tracing::Busy) {
        return Err(Error::Occupied {
            resource: "trace (another thread starts or stops it; call again)",
        });
    }
    let (next, result) = how(former);
    *open.tracing.lock() = next;
    result
}
