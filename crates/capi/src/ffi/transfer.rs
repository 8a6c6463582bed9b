//! Copies, fills, uploads and downloads.

use super::convert::list;
use super::operand::{LEASEHOLD_READ, LEASEHOLD_WRITE, LeaseholdOperand};
use super::point::LeaseholdPoint;
use crate::kinds::STREAMS;
use crate::status::ffi_guard;
use leasehold::ops::{Pattern, Rows};
use leasehold::{BufferView, Error, Result, Stream};
use std::ffi::{c_int, c_void};

/// Rows of bytes that lie apart.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdRows {
    /// Bytes of a row.
    pub width: u64,
    /// How many.
    pub rows: u64,
    /// Bytes from one row of the destination to the next.
    pub to_pitch: u64,
    /// Bytes from one row of the source to the next.
    pub from_pitch: u64,
}

/// Submits an operation that writes an operand, and gives its point.
///
/// # Safety
/// - `point` is null or can be written.
unsafe fn write(
    stream: u64,
    to: LeaseholdOperand,
    point: *mut LeaseholdPoint,
    submit: impl FnOnce(&Stream, BufferView<'_>) -> Result<()>,
) -> Result<()> {
    let (held, buffer) = (STREAMS.get(stream)?, to.held()?);
    submit(held.stream(), to.only(&buffer, LEASEHOLD_WRITE)?)?;
    // SAFETY: by the contract.
    unsafe { LeaseholdPoint::give(point, held.stream()) };
    Ok(())
}

/// Copies bytes between buffers.
///
/// # Safety
/// - `point` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_copy(
    stream: u64,
    to: LeaseholdOperand,
    from: LeaseholdOperand,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        let source = from.held()?;
        let source = from.only(&source, LEASEHOLD_READ)?;
        // SAFETY: by the contract.
        unsafe { write(stream, to, point, |stream, to| stream.copy(to, source)) }
    })
}

/// Copies rows of bytes that lie apart.
///
/// # Safety
/// - `rows` is null or can be read; `point` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_copy_rows(
    stream: u64,
    to: LeaseholdOperand,
    from: LeaseholdOperand,
    rows: *const LeaseholdRows,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        // SAFETY: the caller vouches for the struct.
        let [rows] = *(unsafe { list(rows, 1, "rows")? }) else {
            return Err(Error::invalid("no rows"));
        };
        let shape = Rows::new(rows.width, rows.rows).src_pitch(rows.from_pitch);
        let shape = shape.dst_pitch(rows.to_pitch);
        let source = from.held()?;
        let source = from.only(&source, LEASEHOLD_READ)?;
        // SAFETY: by the contract.
        unsafe { write(stream, to, point, |stream, to| stream.copy_2d(to, source, shape)) }
    })
}

/// Fills bytes with a number of 1, 2 or 4 bytes.
///
/// # Safety
/// - `point` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_fill(
    stream: u64,
    to: LeaseholdOperand,
    value: u32,
    width: u32,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        let large = || Error::invalid(format!("{value:#x} is no number of {width} bytes"));
        let pattern = match width {
            1 => Pattern::U8(u8::try_from(value).map_err(|_| large())?),
            2 => Pattern::U16(u16::try_from(value).map_err(|_| large())?),
            4 => Pattern::U32(value),
            other => {
                return Err(Error::invalid(format!(
                    "a pattern of {other} bytes; it has 1, 2 or 4"
                )));
            }
        };
        // SAFETY: by the contract.
        unsafe { write(stream, to, point, |stream, to| stream.fill(to, pattern)) }
    })
}

/// Copies host bytes to the device, which are taken during the call.
///
/// # Safety
/// - `from` has `bytes` bytes; `point` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_upload(
    stream: u64,
    to: LeaseholdOperand,
    from: *const c_void,
    bytes: usize,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        // SAFETY: the caller vouches for the bytes during the call.
        let from = unsafe { list(from.cast::<u8>(), bytes, "bytes")? };
        // SAFETY: by the contract.
        unsafe { write(stream, to, point, |stream, to| stream.upload(to, from)) }
    })
}

/// As [`leasehold_stream_upload`], and waits for the copy and all earlier work of the stream.
///
/// # Safety
/// - `from` has `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_upload_blocking(
    stream: u64,
    to: LeaseholdOperand,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    ffi_guard(|| {
        // SAFETY: the caller vouches for the bytes during the call.
        let from = unsafe { list(from.cast::<u8>(), bytes, "bytes")? };
        let null = std::ptr::null_mut();
        // SAFETY: nobody wants the point.
        unsafe { write(stream, to, null, |stream, to| stream.upload_blocking(to, from)) }
    })
}

/// Copies device bytes to the host and waits for them.
///
/// # Safety
/// - `to` has `bytes` bytes that can be written, and nobody else touches them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stream_download_blocking(
    stream: u64,
    to: *mut c_void,
    bytes: usize,
    from: LeaseholdOperand,
) -> c_int {
    ffi_guard(|| {
        let (held, buffer) = (STREAMS.get(stream)?, from.held()?);
        let source = from.only(&buffer, LEASEHOLD_READ)?;
        // SAFETY: the check of the list is that of these bytes.
        unsafe { list(to.cast::<u8>().cast_const(), bytes, "bytes")? };
        let to = if bytes == 0 {
            &mut []
        } else {
            // SAFETY: the caller vouches for the bytes, and pointer and length were checked.
            unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) }
        };
        held.stream().download(to, source)
    })
}
