//! A place for an allocator that is made at its first use.
//!
//! # Protocol
//! A caller that finds the cell empty takes `making` and looks again. So one caller makes the
//! allocator while others wait for it; a failure leaves the cell as it was. A reader of a filled
//! cell takes no lock.
//!
//! This module must not know what allocators are made of.

use crate::Allocator;
use leasehold_core::Result;
use leasehold_core::sync::{Mutex, OnceLock};
use std::fmt;

/// An allocator that is made at its first use: what a backend's device keeps for each kind of its
/// memory.
///
/// ```
/// use leasehold_alloc::{Allocator, AllocatorCell, AllocatorConfig};
/// use leasehold_alloc_bench::FakeBacking;
/// # use leasehold_core::Error;
/// let cell = AllocatorCell::default();
/// // A failure is forgotten.
/// assert!(cell.get_or_make(|| Err(Error::state("not yet"))).is_err());
/// assert!(cell.get().is_none());
/// let made = cell.get_or_make(|| {
///     Allocator::new(Box::new(FakeBacking::new(1 << 20)), AllocatorConfig::default())
/// })?;
/// assert_eq!(made.stats().live, 0);
/// assert!(cell.get().is_some());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Default)]
pub struct AllocatorCell {
    made: OnceLock<Allocator>,
    making: Mutex<()>,
}

impl AllocatorCell {
    /// The allocator. The first caller makes it; others that come meanwhile block until it is made.
    ///
    /// # Errors
    /// The error of `make`. The next caller tries again.
    pub fn get_or_make(&self, make: impl FnOnce() -> Result<Allocator>) -> Result<&Allocator> {
        if let Some(allocator) = self.made.get() {
            return Ok(allocator);
        }
        let _turn = self.making.lock();
        if let Some(allocator) = self.made.get() {
            return Ok(allocator);
        }
        let allocator = make()?;
        Ok(self.made.get_or_init(|| allocator))
    }

    /// The allocator, if it was made.
    #[must_use]
    pub fn get(&self) -> Option<&Allocator> {
        self.made.get()
    }
}

impl fmt::Debug for AllocatorCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AllocatorCell").field(&self.get()).finish()
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/cell.rs"]
mod tests;
