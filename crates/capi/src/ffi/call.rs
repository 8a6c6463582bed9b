//! Functions of the caller's in stream order.

use super::operand::{LeaseholdOperand, with_operands};
use super::point::LeaseholdPoint;
use crate::callback::{Callback, LeaseholdRelease};
use crate::kinds::STREAMS;
use crate::status::{alone, ffi_guard};
use leasehold::backend::Binding;
use leasehold::backend::sync::Arc;
use leasehold::{Error, Result, Stream};
use std::ffi::{c_int, c_void};
use std::mem::offset_of;

/// The place of an operand.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdBinding {
    /// The address of its first byte.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// Metal's spanning buffer; 0 elsewhere.
    pub native: u64,
    /// `LEASEHOLD_READ`, `_WRITE` or `_READ_WRITE`.
    pub access: u32,
    /// Not specified.
    pub reserved: u32,
}

// A list of the runtime's bindings is a list of these: the reserved field is padding there.
const _: () = assert!(
    size_of::<Binding>() == size_of::<LeaseholdBinding>()
        && offset_of!(Binding, addr) == offset_of!(LeaseholdBinding, address)
        && offset_of!(Binding, len) == offset_of!(LeaseholdBinding, bytes)
        && offset_of!(Binding, native) == offset_of!(LeaseholdBinding, native)
        && offset_of!(Binding, access) == offset_of!(LeaseholdBinding, access)
);

/// A function of the host's. 0 for success.
pub type LeaseholdHostCall = unsafe extern "C" fn(context: *mut c_void) -> c_int;

/// A function that enqueues work on a native stream. 0 for success.
pub type LeaseholdForeignCall = unsafe extern "C" fn(
    context: *mut c_void,
    native: usize,
    bindings: *const LeaseholdBinding,
    count: usize,
) -> c_int;

fn ended(status: c_int, what: &str) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Error::other(format!("{what} returned {status}"))) }
}

fn null() -> Error {
    Error::invalid("the function is null")
}

/// Submits work that calls a function of the caller's. The function's context is kept from then on.
///
/// # Safety
/// - As [`leasehold_stream_host_call`], for `release`, `context` and `point`.
unsafe fn submit(
    stream: u64,
    release: Option<LeaseholdRelease>,
    context: *mut c_void,
    point: *mut LeaseholdPoint,
    work: impl FnOnce(&Stream, Arc<Callback>) -> Result<()>,
) -> Result<()> {
    let held = STREAMS.get(stream)?;
    // SAFETY: the caller vouches for the function and its context.
    let callback = unsafe { Callback::new(context, release) };
    work(held.stream(), callback.clone())?;
    callback.keep();
    // SAFETY: by the contract.
    unsafe { LeaseholdPoint::give(point, held.stream()) };
    Ok(())
}

/// Runs a function on the host, in stream order.
///
/// # Safety
/// - Any thread may call `call` with `context`, at each launch if it is recorded. It returns.
/// - `release` is null, or may be called with `context` once, by any thread. It returns.
/// - `point` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_host_call(
    stream: u64,
    call: Option<LeaseholdHostCall>,
    release: Option<LeaseholdRelease>,
    context: *mut c_void,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        let call = call.ok_or_else(null)?;
        let work = |stream: &Stream, kept: Arc<Callback>| {
            stream.host_call("from C", move || {
                // SAFETY: the caller vouches for the function and its context.
                ended(unsafe { call(kept.context()) }, "a host call")
            })
        };
        // SAFETY: by the contract.
        unsafe { submit(stream, release, context, point, work) }
    })
}

/// Runs a library call that enqueues its own work on the native stream.
///
/// # Safety
/// - As [`leasehold_stream_host_call`], for the functions; `operands` is null, or points to `count`
///   operands.
/// - The call touches only the operands' memory, at the addresses that it is given, as their access
///   says, and only through work on the native stream that it is given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_foreign_call(
    stream: u64,
    operands: *const LeaseholdOperand,
    count: usize,
    call: Option<LeaseholdForeignCall>,
    release: Option<LeaseholdRelease>,
    context: *mut c_void,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        let call = call.ok_or_else(null)?;
        let work = |stream: &Stream, kept: Arc<Callback>| {
            let foreign = move |native: u64, bindings: &[Binding]| {
                let list = bindings.as_ptr().cast::<LeaseholdBinding>();
                // SAFETY: the caller vouches for the function and its context; the list is valid
                // during the call.
                let run = || unsafe { call(kept.context(), native as usize, list, bindings.len()) };
                ended(alone(run), "a foreign call")
            };
            // SAFETY: the caller vouches for the operands' list, and that the call touches them
            // alone.
            unsafe {
                with_operands(operands, count, |operands| {
                    stream.foreign_call("from C", operands, foreign)
                })
            }
        };
        // SAFETY: by the contract.
        unsafe { submit(stream, release, context, point, work) }
    })
}
