//! The vendor's driver behind one trait.
//!
//! | module | content |
//! |---|---|
//! | [`ops`] | [`CudaSlowOps`](ops::CudaSlowOps), the interface to the driver |
//! | [`vouched`] | the same interface for a program that vouches once for all its handles |
//! | [`real`] | the vendor's driver, loaded at run time |
//! | `sim` (feature `sim`) | the vendor's rules over a simulated machine |
//! | `trace` (feature `traces`) | programs that show a driver's behaviour, and kernels |
//! | `figures` (feature `traces`) | times of loops over the driver alone |
//! | [`nvrtc`] | the vendor's compiler, loaded at run time |
//! | [`cache`] | compiled kernels on disk |
//! | `loader` | the reason why a library cannot be loaded |
//! | `pages` | host memory for large pinned segments |
//! | `probe` | whether this process can read an address |
//!
//! This module must not know managers.

pub mod cache;
#[cfg(feature = "traces")]
pub mod figures;
mod loader;
pub mod nvrtc;
pub mod ops;
pub(crate) mod pages;
pub(crate) mod probe;
pub mod real;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg(feature = "traces")]
pub mod trace;
pub mod vouched;

use leasehold_core::{Error, ForkGuard, Result};

/// Checks that this process is not a fork of the one that started CUDA. CUDA's state does not
/// survive a fork: calls in a child hang or corrupt the parent's work.
///
/// # Errors
/// `InvalidState` in a fork of the process that started CUDA, with both process numbers.
#[inline]
fn check_process(started: ForkGuard) -> Result<()> {
    started.check(|started| {
        format!(
            "CUDA was started in process {} and this is its fork {}: a forked child cannot use CUDA; start it in the child instead, or make \
             children by spawning a program",
            started.process(),
            std::process::id()
        )
        .into()
    })
}

/// The error of every call before [`init`](ops::DeviceOps::init).
#[cold]
fn not_started() -> Error {
    Error::state("CUDA is not started: call `init` first")
}
