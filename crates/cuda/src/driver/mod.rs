//! The vendor's driver behind one trait.
//!
//! | module | what |
//! |---|---|
//! | [`ops`] | [`CudaSlowOps`](ops::CudaSlowOps), the one door |
//! | [`real`] | the vendor's driver, loaded at run time |
//! | `sim` (feature `sim`) | the vendor's rules over a simulated machine |
//! | `trace` (feature `traces`) | small programs that show what a driver does, and kernels for them |
//! | `figures` (feature `traces`) | what a loop over the driver alone costs |
//! | [`nvrtc`] | the vendor's compiler, loaded at run time |
//! | [`cache`] | compiled kernels on disk |
//! | [`fork`] | telling a forked child from its parent |
//!
//! This module must not know managers.

pub mod cache;
#[cfg(feature = "traces")]
pub mod figures;
pub mod fork;
pub mod nvrtc;
pub mod ops;
pub mod real;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg(feature = "traces")]
pub mod trace;

/// What every call is before [`init`](ops::DeviceOps::init).
#[cold]
fn not_started() -> leasehold_core::Error {
    leasehold_core::Error::state("CUDA is not started: call `init` first")
}
