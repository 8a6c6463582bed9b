//! Panics of the program's code: of host calls, foreign calls and destructors.
//!
//! This module must not know where the code runs.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Drops an object that may be the user's. A panic of its destructor must not end the thread.
pub fn drop_quietly<T>(it: T) {
    if catch_unwind(AssertUnwindSafe(|| drop(it))).is_err() {
        tracing::error!("something that an operation held panicked as it was given up");
    }
}

/// The message of a panic.
#[must_use]
pub fn panic_text(panic: Box<dyn Any + Send>) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = format!("panicked: {}", text.unwrap_or("without a message"));
    drop_quietly(panic);
    text
}
