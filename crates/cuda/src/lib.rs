//! The CUDA backend: NVIDIA's driver behind managers, loaded at run time. A build needs nothing of
//! NVIDIA's.
//!
//! Three types to know: [`CudaBackend`] gives the devices of a driver, [`CudaConfig`] has its
//! settings, and a [`driver`] is the vendor's or a simulated one.
//!
//! ```
//! use leasehold_cuda::CudaBackend;
//! use leasehold_hal::Backend;
//! match CudaBackend::new().devices() {
//!     Ok(devices) => println!("{} devices", devices.len()),
//!     Err(why) => println!("{why}"), // no driver, for example
//! }
//! ```
//!
//! # Floors
//! `driver` ← `engine` ← `allocator` ← `manager` ← `backend`. Everything above the
//! [`driver`] is the same code over the real driver and over the simulated one. The
//! `engine` implements streams: submission, deferred work, completion and graphs. The
//! `encoder` translates operations to driver calls.
//!
//! This crate must not hold operators. A program needs it by name only for a configuration of its
//! own, or for native objects.

pub(crate) mod allocator;
pub mod backend;
pub mod config;
pub(crate) mod conv;
pub mod driver;
mod encoder;
pub(crate) mod engine;
pub mod manager;

pub use backend::CudaBackend;
pub use config::{CompletionSource, CudaConfig, MemorySource};
