//! Errors as numbers and texts, and the guard around each function: no panic passes it.
//!
//! This module must not know what functions do.

use crate::reserve;
use leasehold::{Error, Result};
use leasehold_core::OutOfMemory;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::thread_end::ThreadEnd;
use std::any::Any;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

/// Success.
pub const OK: c_int = 0;
/// An argument is never valid, or a handle or pointer is unknown.
pub const INVALID_ARGUMENT: c_int = 1;
/// No memory; the text is the report.
pub const OUT_OF_MEMORY: c_int = 2;
/// The request is larger than the budget.
pub const OVER_BUDGET: c_int = 3;
/// No such device.
pub const NOT_FOUND: c_int = 4;
/// No driver, or no backend.
pub const UNAVAILABLE: c_int = 5;
/// The device or backend cannot do this.
pub const UNSUPPORTED: c_int = 6;
/// The call is valid at another time.
pub const INVALID_STATE: c_int = 7;
/// The pool is suspended.
pub const SUSPENDED: c_int = 8;
/// The object is in use.
pub const IN_USE: c_int = 9;
/// The deadline passed.
pub const TIMEOUT: c_int = 10;
/// The device is lost.
pub const DEVICE_LOST: c_int = 11;
/// The vendor's driver refused a call.
pub const DRIVER: c_int = 12;
/// A defect of this library.
pub const INTERNAL: c_int = 13;
/// A kernel's source does not compile; the text is the compiler's.
pub const COMPILE: c_int = 14;
/// Work of a stream failed: a kernel, a check, a function of the caller's. The stream is poisoned.
pub const FAILED: c_int = 15;
/// Another rank is gone, or has ended the communicator.
pub const PEER_LOST: c_int = 16;
/// Two ranks make different calls; the text has both.
pub const MISMATCH: c_int = 17;

/// The status of an error.
pub(crate) fn code(error: &Error) -> c_int {
    match error {
        Error::InvalidArgument(_) | Error::StaleHandle { .. } => INVALID_ARGUMENT,
        Error::OutOfMemory(_) => OUT_OF_MEMORY,
        Error::OverBudget { .. } => OVER_BUDGET,
        Error::NotFound(_) => NOT_FOUND,
        Error::Unavailable(_) => UNAVAILABLE,
        Error::Unsupported(_) => UNSUPPORTED,
        Error::InvalidState(_) | Error::Recording { .. } => INVALID_STATE,
        Error::Suspended(_) => SUSPENDED,
        Error::LeasesOutstanding { .. } | Error::Occupied { .. } => IN_USE,
        Error::Timeout(_) => TIMEOUT,
        Error::DeviceLost { .. } => DEVICE_LOST,
        Error::Driver { .. } => DRIVER,
        Error::Compile { .. } => COMPILE,
        Error::Fault(_) | Error::Check(_) | Error::Other(_) => FAILED,
        Error::PeerLost { .. } => PEER_LOST,
        Error::Mismatch(_) => MISMATCH,
        _ => INTERNAL,
    }
}

/// The names of Rust in the library's texts, and what C has in their place.
const NAMES: &[(&str, &str)] = &[
    ("make one with it (Context::with_backends)", "take another device"),
    ("CommConfig::sends(true)", "sends (without LEASEHOLD_COMM_NO_SENDS)"),
    (", or give one (CommConfig::ops)", ""),
    ("Check::Each", "LEASEHOLD_COMM_CHECK_EACH"),
    ("KernelSource::CudaC", "LEASEHOLD_SOURCE_CUDA_C"),
    ("Reduce::Sum", "LEASEHOLD_SUM"),
    ("Runtime::alloc_pinned", "leasehold_buffer_alloc_pinned"),
    ("Runtime::create_event", "leasehold_event_create with LEASEHOLD_EVENT_TIMING"),
    ("Runtime::open", "leasehold_runtime_open"),
    ("Rust and C functions", "C functions (LEASEHOLD_SOURCE_C_FUNCTION)"),
    ("Stream::copy", "leasehold_stream_copy"),
    ("Stream::record", "leasehold_event_record"),
    ("Stream::wait", "leasehold_stream_wait_point"),
    ("World::threads", "leasehold_world_open_threads"),
    ("upload or upload_owned keep", "leasehold_stream_upload keeps"),
];

/// Keeps the text of a failure, in words of C, and gives its status.
pub(crate) fn kept(error: &Error) -> c_int {
    let mut text = error.to_string();
    for (rust, c) in NAMES {
        // The host may have no memory for another copy.
        if text.contains(rust) {
            text = text.replace(rust, c);
        }
    }
    keep(text);
    code(error)
}

/// The status of what has failed or not; the text of a failure is kept.
pub(crate) fn of_failure(failure: Option<Error>) -> c_int {
    failure.map_or(OK, |cause| kept(&cause))
}

/// That the host has no memory for a table of this library's.
#[cold]
pub(crate) fn no_memory(table: &str, bytes: usize) -> Error {
    OutOfMemory::new(format!("host memory for {table}"), bytes as u64).into()
}

thread_local! {
    /// The text of the last failure, which this thread owns; null before the first.
    static LAST: Cell<*mut c_char> = const { Cell::new(null_mut()) };
}

/// Frees the text at the end of a thread.
static END: ThreadEnd = ThreadEnd::new(|| replace(null_mut()));

/// The text of a failure where the host has no memory for its own.
const NO_TEXT: &CStr = c"the host has no memory for the text of this failure";

/// Owns another text from now on.
fn replace(text: *mut c_char) {
    let former = LAST.replace(text);
    if !former.is_null() && former != NO_TEXT.as_ptr().cast_mut() {
        // SAFETY: the text came from `CString::into_raw` in `keep`, and this thread alone has it.
        drop(unsafe { CString::from_raw(former) });
    }
}

/// Keeps the text of a thread's last failure.
pub(crate) fn keep(text: String) {
    // A zero byte would end the C string early.
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    replace(if END.watch() { text.into_raw() } else { NO_TEXT.as_ptr().cast_mut() });
}

/// The text of this thread's last failure.
pub(crate) fn last() -> *const c_char {
    let text = LAST.get();
    if text.is_null() { c"".as_ptr() } else { text }
}

/// Puts words before the text of this thread's last failure.
pub(crate) fn prefix(words: &str) {
    // SAFETY: the text is this thread's own until `keep` below.
    let text = unsafe { CStr::from_ptr(last()) }.to_string_lossy().into_owned();
    keep(words.to_owned() + &text);
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text")
}

/// Whether this process is a child of `fork()` whose parent opened a device.
static CHILD: AtomicBool = AtomicBool::new(false);

/// Notes that this process opens a device. Its children may use none: a lock that another thread
/// held in a fork is held in the child for good.
///
/// # Errors
/// `OutOfMemory` for host memory.
#[cfg(unix)]
pub(crate) fn watch_forks() -> Result<()> {
    extern "C" fn in_child() {
        CHILD.store(true, Ordering::Relaxed);
    }
    // Two threads that come first may both register the handler.
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if !WATCHED.load(Ordering::Relaxed) {
        // SAFETY: the handler does nothing but store to an atomic, which is allowed in a child.
        if unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0 {
            return Err(no_memory("a handler of forks", 0));
        }
        WATCHED.store(true, Ordering::Relaxed);
    }
    Ok(())
}

#[cfg(not(unix))]
pub(crate) fn watch_forks() -> Result<()> {
    Ok(())
}

#[cold]
fn refuse_child() -> c_int {
    keep(
        "a process that was made by fork() cannot use the devices of its parent: let it call \
         exec, or use the start method \"spawn\""
            .to_owned(),
    );
    INVALID_STATE
}

thread_local! {
    /// Whether this thread runs a function of the caller's that may call nothing here.
    static ALONE: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function of the caller's inside a call that holds locks: what it calls of this library is
/// refused, since it might wait for itself.
pub(crate) fn alone<R>(call: impl FnOnce() -> R) -> R {
    let before = ALONE.replace(true);
    let result = call();
    ALONE.set(before);
    result
}

#[cold]
fn refuse_inside() -> c_int {
    keep(
        "a kernel's check and the function of a foreign call cannot call this library: do it \
         before or after the call that runs them"
            .to_owned(),
    );
    INVALID_STATE
}

/// Runs a function of the ABI that takes memory: the status is its result, and the text of a
/// failure is kept. A panic ends here. In a child of `fork()`, and on a host without memory,
/// nothing runs.
pub fn ffi_guard(call: impl FnOnce() -> Result<()>) -> c_int {
    if reserve::is_low() {
        keep("the host has no memory: give some back, and try again".to_owned());
        return OUT_OF_MEMORY;
    }
    ffi_guard_release(call)
}

/// As [`ffi_guard`], for a function that gives something back: it also runs on a host without
/// memory.
pub(crate) fn ffi_guard_release(call: impl FnOnce() -> Result<()>) -> c_int {
    if CHILD.load(Ordering::Relaxed) {
        return refuse_child();
    }
    if ALONE.get() {
        return refuse_inside();
    }
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => OK,
        Ok(Err(error)) => kept(&error),
        Err(panic) => {
            keep(format!("a defect of this library: {}", panic_text(&*panic)));
            // The payload's own destructor may panic too.
            std::mem::forget(panic);
            INTERNAL
        }
    }
}
