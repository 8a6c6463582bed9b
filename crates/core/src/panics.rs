//! Panics of the program's code: of host calls, kernels, destructors and the texts of errors.
//!
//! A thread of the runtime must outlive such a panic. The drop of a panic's payload may panic too.
//!
//! This module must not know where the code runs.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// How many payloads may throw the next one before the last one is leaked.
const PAYLOADS: usize = 8;

/// Runs `f`; `None` if it panicked. Never unwinds, so destructors may call it while the thread
/// unwinds.
///
/// ```
/// use leasehold_core::panics::quietly;
/// assert_eq!(quietly(|| 7), Some(7));
/// assert_eq!(quietly(|| panic!("on purpose")), None::<u8>);
/// ```
#[cfg(not(loom))]
#[inline]
pub fn quietly<T>(f: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(f)).map_err(discard).ok()
}

/// Runs `f`. A model reports its findings by a panic, which must not be caught.
#[cfg(loom)]
pub fn quietly<T>(f: impl FnOnce() -> T) -> Option<T> {
    Some(f())
}

/// Runs `f`. Never unwinds.
///
/// # Errors
/// The [text](text()) of a panic.
#[inline]
pub fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(text)
}

/// The text of a panic, for a fault: `panicked: index out of bounds`. Never unwinds.
#[must_use]
pub fn text(payload: Box<dyn Any + Send>) -> String {
    let said = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let text = format!("panicked: {}", said.unwrap_or("without a message"));
    discard(payload);
    text
}

/// A value of the program's code, whose destructor may panic. The panic stops here.
///
/// ```
/// use leasehold_core::panics::Kept;
/// struct Bomb;
/// impl Drop for Bomb {
///     fn drop(&mut self) {
///         panic!("on purpose");
///     }
/// }
/// drop((Kept::new(Bomb), Kept::new(Bomb)));
/// ```
#[derive(Clone)]
pub struct Kept<T>(ManuallyDrop<T>);

impl<T> Kept<T> {
    /// Keeps the value.
    pub fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T> Deref for Kept<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for Kept<T> {
    fn drop(&mut self) {
        // SAFETY: the value is dropped here alone, and nothing uses it afterwards.
        let _ = quietly(|| unsafe { ManuallyDrop::drop(&mut self.0) });
    }
}

impl<T: fmt::Debug> fmt::Debug for Kept<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Drops the payload of a panic.
#[cold]
fn discard(mut payload: Box<dyn Any + Send>) {
    for _ in 0..PAYLOADS {
        match catch_unwind(AssertUnwindSafe(|| drop(payload))) {
            Ok(()) => return,
            Err(next) => payload = next,
        }
    }
    // The drop of each payload throws another one whose drop throws. A leak ends the loop.
    std::mem::forget(payload);
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/panics.rs"]
mod tests;
