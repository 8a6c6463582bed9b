//! The Metal backend: Metal behind managers. No Apple GPU has run it yet.
//!
//! Three types to know: [`MpsBackend`] gives the devices of a driver, [`MpsConfig`] has its
//! settings, and a [`driver`] is Metal itself or a simulated one.
//!
//! ```
//! use leasehold_hal::Backend;
//! use leasehold_mps::MpsBackend;
//! match MpsBackend::new().devices() {
//!     Ok(devices) => println!("{} devices", devices.len()),
//!     Err(why) => println!("{why}"), // no system of Apple's, for example
//! }
//! ```
//!
#![doc = include_str!("../README.md")]
//!
//! # Floors
//! `driver` ← `spans` ← `manager` ← `allocator`, `engine` ← `manager::device` ←
//! `backend`. Everything above the [`driver`] is the same code over the real driver and
//! over the simulated one. The `allocator` takes its heaps and buffers from their
//! managers, and the `engine` its queues, events and fences. The managers of a device
//! include its memory and its streams.
//!
//! This crate must not hold operators. A program needs it by name only for a configuration of its
//! own, or for native objects.

pub(crate) mod allocator;
pub mod backend;
pub mod config;
pub mod driver;
pub(crate) mod engine;
pub mod manager;
pub mod shared;
pub mod spans;
pub mod transfer;

pub use backend::MpsBackend;
pub use config::MpsConfig;
pub use manager::execution::MpsExecutionManager;
