//! The version, and the text of a failure.

use crate::status;
use std::ffi::{CStr, CString, c_char};

/// The version of the ABI: a function or field more is a higher number.
pub const LEASEHOLD_ABI_VERSION: u32 = 2;

/// The version of the ABI of this library.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_abi_version() -> u32 {
    LEASEHOLD_ABI_VERSION
}

/// The text of the calling thread's last failure, until its next one.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_last_error() -> *const c_char {
    status::last()
}

/// Writes the text of the calling thread's last failure, cut to fit, and a zero byte. Returns the
/// length of the full text, without the zero byte.
///
/// # Safety
/// - `buffer` is null or has `size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_error_text(buffer: *mut c_char, size: usize) -> usize {
    // SAFETY: the text is this thread's until its next failure, which is not in this function.
    let text = unsafe { CStr::from_ptr(status::last()) };
    let full = text.to_str().unwrap_or("");
    if !buffer.is_null() && size > 0 {
        // A letter of several bytes is not cut.
        let mut cut = full.len().min(size - 1);
        while !full.is_char_boundary(cut) {
            cut -= 1;
        }
        // SAFETY: the caller vouches for the buffer, in which the text and its end have room.
        unsafe {
            std::ptr::copy_nonoverlapping(full.as_ptr().cast(), buffer, cut);
            buffer.add(cut).write(0);
        }
    }
    full.len()
}

/// Frees a text that a function returned. Null is no error.
///
/// # Safety
/// - `text` is null, or came from this library and is freed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the text came from `convert::owned` and is freed once.
        drop(unsafe { CString::from_raw(text) });
    }
}
