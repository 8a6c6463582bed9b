//! The part of the library's own calls that `leasehold-workbench bench collective` needs (feature
//! `bench`).

#[cfg(feature = "cuda")]
pub use crate::driver::raw::RawNccl;

use leasehold::Result;
use std::time::Duration;

/// Waits until all communicators of this process that were dropped are given back to their library,
/// for `limit` at most.
///
/// # Errors
/// `Timeout`.
pub fn wait_for_retired(limit: Duration) -> Result<()> {
    crate::native::wait_for_retired(limit)
}
