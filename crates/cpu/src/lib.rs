//! The CPU backend: the host's processors as a device with ordered queues, a tile pool, host
//! timelines, graphs and `mmap`ed memory.
//!
//! ```
//! use leasehold_cpu::CpuBackend;
//! use leasehold_hal::{Backend, DeviceId};
//! let backend = CpuBackend::new();
//! let device = backend.open(DeviceId::cpu(0))?;
//! assert!(device.info().units >= 1);
//! # Ok::<(), leasehold_core::Error>(())
//! ```
//!
//! # Floors
//! `driver` ← `manager` ← `allocator` ← `backend`. The [`driver`] takes the place of a
//! vendor's driver: it describes the machine, maps memory, and runs queues, tiles and graphs.
//! The [`manager`]s own resources and expose them. The [`allocator`]s' backings get memory
//! from the driver. [`backend`] is the implementation of `hal`.
//!
//! # Threads
//! A stream has one worker thread, which runs its operations in order. The stream's first
//! submission starts the worker. The worker shares a dispatch of more than one tile with the pool's
//! helpers. `threads` in the configuration is the most threads of one dispatch, including the
//! stream's worker. Tiles are independent, so results do not depend on that number.
//!
//! All of these threads have the same floating-point state: rounding to nearest, subnormal numbers
//! are zero. Host calls and foreign calls run in the state that threads start with.
//!
//! This crate must not hold operators. A program needs it by name only for a configuration of its
//! own, or for native objects.

#[cfg(not(loom))]
pub mod allocator;
#[cfg(not(loom))]
pub mod backend;
#[cfg(not(loom))]
pub mod config;
pub mod driver;
#[cfg(not(loom))]
pub mod manager;

#[cfg(not(loom))]
pub use backend::CpuBackend;
#[cfg(not(loom))]
pub use config::{CpuConfig, HugePages};
#[cfg(not(loom))]
pub use manager::execution::CpuExecutionManager;
