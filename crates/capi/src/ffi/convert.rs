//! Texts and structs of the caller, read and written.
//!
//! This module must not know any function.

use leasehold::{Error, Result};
use std::ffi::{CStr, CString, c_char};
use std::mem::{align_of, size_of};
use std::time::Duration;

/// Reads a text of the caller's.
///
/// # Safety
/// - `text` is null or a C string that lives as long as the result.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::invalid(format!("{what} is null")));
    }
    // SAFETY: the caller vouches for the C string.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Error::invalid(format!("{what} is no UTF-8")))
}

/// Reads a struct of the caller's, which may be shorter than today's. `default` fills the rest.
///
/// # Safety
/// - `from` is null, or points to a struct that begins with its size.
pub(crate) unsafe fn options<T: Copy>(from: *const T, default: T, what: &str) -> Result<T> {
    if from.is_null() {
        return Ok(default);
    }
    // SAFETY: the struct begins with its size.
    let size = unsafe { from.cast::<usize>().read() };
    if size < size_of::<usize>() * 2 {
        return Err(Error::invalid(format!("{what}: a size of {size} bytes")));
    }
    let mut read = default;
    // SAFETY: the caller's struct has `size` bytes, and this one as many as its type.
    unsafe {
        std::ptr::copy_nonoverlapping(
            from.cast::<u8>(),
            (&raw mut read).cast::<u8>(),
            size.min(size_of::<T>()),
        );
    }
    Ok(read)
}

/// Writes a struct to the caller's, which may be shorter than today's. Its size field stays.
///
/// # Safety
/// - `to` is null, or points to a struct that begins with its size and can be written.
pub(crate) unsafe fn answer<T: Copy>(to: *mut T, value: &T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(Error::invalid(format!("{what} is null")));
    }
    // SAFETY: the struct begins with its size.
    let size = unsafe { to.cast::<usize>().read() };
    let head = size_of::<usize>();
    if size < head * 2 {
        return Err(Error::invalid(format!("{what}: a size of {size} bytes")));
    }
    // SAFETY: the caller's struct has `size` bytes, and this one as many as its type.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(value).cast::<u8>().add(head),
            to.cast::<u8>().add(head),
            size.min(size_of::<T>()) - head,
        );
    }
    Ok(())
}

/// Writes an answer through a pointer.
///
/// # Safety
/// - `to` is null or can be written.
pub(crate) unsafe fn give<T>(to: *mut T, value: T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(Error::invalid(format!("{what} is null")));
    }
    // SAFETY: the caller says that it can be written.
    unsafe { to.write(value) };
    Ok(())
}

pub(crate) fn check_out<T>(to: *mut T, what: &str) -> Result<()> {
    if to.is_null() { Err(Error::invalid(format!("{what} is null"))) } else { Ok(()) }
}

/// A text for the caller, freed by `leasehold_text_free`.
pub(crate) fn owned(text: String) -> Result<*mut c_char> {
    CString::new(text).map(CString::into_raw).map_err(|_| Error::state("a text with a zero byte"))
}

/// Reads a list of the caller's.
///
/// # Errors
/// `InvalidArgument` for a null pointer to values, one that is not aligned for them, and for more
/// of them than there are addresses.
///
/// # Safety
/// - `values` is null, or points to `count` values that nobody writes while the result is used.
pub(crate) unsafe fn list<'a, T: Copy>(
    values: *const T,
    count: usize,
    what: &str,
) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if values.is_null() {
        return Err(Error::invalid(format!("{what} are null")));
    }
    let fits = count.checked_mul(size_of::<T>()).is_some_and(|n| n <= isize::MAX as usize);
    if !fits || !values.addr().is_multiple_of(align_of::<T>()) {
        return Err(Error::invalid(format!("{what}: {count} of them cannot lie at {values:p}")));
    }
    // SAFETY: the caller vouches for the values; pointer and length were checked above.
    Ok(unsafe { std::slice::from_raw_parts(values, count) })
}

/// A time limit in nanoseconds; `None` for [`LEASEHOLD_FOREVER`](super::LEASEHOLD_FOREVER).
pub(crate) fn limit(nanoseconds: u64) -> Option<Duration> {
    (nanoseconds != u64::MAX).then(|| Duration::from_nanos(nanoseconds))
}
