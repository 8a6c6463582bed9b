//! Environment variables, read without allocation. The C ABI must not end the process if memory is
//! short.
//!
//! This module must not know what the variables mean.

use std::ffi::CStr;

/// The result of `read` for the value of `name`; `None` if the variable is not set.
pub(crate) fn get<R>(name: &CStr, read: impl FnOnce(&CStr) -> R) -> Option<R> {
    // SAFETY: the name ends with a NUL. Code that changes the environment while threads run must
    // exclude readers; this is its contract in C and in Rust alike.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: `getenv` returns null or a string that ends with a NUL and stays until the
    // environment changes.
    (!value.is_null()).then(|| read(unsafe { CStr::from_ptr(value) }))
}

/// The value of `name` as a number.
pub(crate) fn number(name: &CStr) -> Option<u64> {
    get(name, |value| value.to_str().ok()?.trim().parse().ok())?
}
