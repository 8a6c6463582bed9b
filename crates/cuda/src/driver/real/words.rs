//! The driver's own words about a call that failed (CUDA 12.9 and later). The driver tells them to
//! a function, on the thread of the call, before the call returns. The last words of a call are
//! `Returning CODE (NAME) from FUNCTION`.
//!
//! This module must not know managers.

use super::plausible::text;
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};

/// The most bytes that are kept of a call's words.
const MOST: usize = 600;

/// The words of one call.
#[derive(Default)]
struct Words {
    before: String,
    /// The code and the function, once the call has ended.
    ended: Option<(i32, String)>,
}

thread_local! {
    static WORDS: RefCell<Words> = RefCell::default();
}

impl Words {
    fn hear(&mut self, words: String) {
        if self.ended.is_some() {
            *self = Self::default();
        }
        if let Some(ended) = end(&words) {
            self.ended = Some(ended);
            return;
        }
        if !self.before.is_empty() {
            self.before += "; ";
        }
        self.before += words.trim_end_matches('.');
        let end =
            (0..=MOST.min(self.before.len())).rev().find(|at| self.before.is_char_boundary(*at));
        self.before.truncate(end.unwrap_or_default());
    }
}

/// The code and the function of the last words of a call.
fn end(words: &str) -> Option<(i32, String)> {
    let (code, function) = words.strip_prefix("Returning ")?.split_once(" (")?;
    let (_, function) = function.split_once(") from ")?;
    Some((code.parse().ok()?, function.to_owned()))
}

/// The driver calls this.
///
/// # Safety
/// - `message` has `length` bytes, or is null.
pub(super) unsafe extern "C" fn hear(
    _data: *mut c_void,
    _level: c_int,
    message: *const c_char,
    length: usize,
) {
    if message.is_null() || length > 1 << 20 {
        return;
    }
    // SAFETY: the message has so many bytes (the contract of this function).
    let message = unsafe { std::slice::from_raw_parts(message.cast::<u8>(), length) };
    let words = text(message);
    // A thread that ends has no words any more, and no words are heard while others are taken.
    let _ = WORDS.try_with(|kept| kept.try_borrow_mut().map(|mut kept| kept.hear(words)));
}

/// Takes the words that came before this thread's last failure, if that was of this call.
pub(super) fn take(function: &str, code: i32) -> Option<String> {
    let words =
        WORDS.try_with(|kept| kept.try_borrow_mut().map(|mut kept| std::mem::take(&mut *kept)));
    let words = words.ok()?.ok()?;
    let of_this_call = words.ended.is_some_and(|(c, f)| c == code && f == function);
    (of_this_call && !words.before.is_empty()).then_some(words.before)
}

#[cfg(test)]
#[path = "../../../tests/unit/words.rs"]
mod tests;
