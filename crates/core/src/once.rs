//! A place for a value that is made at its first use, where making it may fail.
//!
//! # Protocol
//! A caller that finds the place empty takes `making` and looks again. So one caller makes the
//! value while others wait for it; a failure leaves the place as it was. A reader of a filled place
//! takes no lock.

use crate::Result;
use crate::sync::{Mutex, OnceLock};

/// A value that is made at its first use: what a backend's device keeps for each kind of memory.
///
/// ```
/// use leasehold_core::{Error, TryOnceLock};
/// let place = TryOnceLock::default();
/// // A failure is forgotten.
/// assert!(place.get_or_make(|| Err(Error::state("not yet"))).is_err());
/// assert!(place.get().is_none());
/// assert_eq!(place.get_or_make(|| Ok(7))?, &7);
/// assert_eq!(place.get(), Some(&7));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct TryOnceLock<T> {
    made: OnceLock<T>,
    making: Mutex<()>,
}

impl<T> Default for TryOnceLock<T> {
    fn default() -> Self {
        Self { made: OnceLock::new(), making: Mutex::new(()) }
    }
}

impl<T> TryOnceLock<T> {
    /// The value. The first caller makes it; others that come meanwhile block until it is made.
    ///
    /// # Errors
    /// The error of `make`. The next caller tries again.
    #[inline]
    pub fn get_or_make(&self, make: impl FnOnce() -> Result<T>) -> Result<&T> {
        match self.made.get() {
            Some(value) => Ok(value),
            None => self.make(make),
        }
    }

    #[cold]
    #[inline(never)]
    fn make(&self, make: impl FnOnce() -> Result<T>) -> Result<&T> {
        let _turn = self.making.lock();
        if let Some(value) = self.made.get() {
            return Ok(value);
        }
        let value = make()?;
        Ok(self.made.get_or_init(|| value))
    }

    /// The value, if it was made.
    #[must_use]
    pub fn get(&self) -> Option<&T> {
        self.made.get()
    }
}
