//! The CPU backend: the host's processors as a device with ordered queues, a tile pool, gates, graphs and `mmap`ed memory.
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
//! `driver` ← `manager` ← `allocator` ← `backend`. The [`driver`] is what a vendor's driver is elsewhere: it finds out what the
//! machine is, maps memory, and runs queues, tiles and graphs. The [`manager`]s own and expose; the [`allocator`]s' backings ask the driver
//! for memory; [`backend`] is the implementation of `hal`.
//!
//! # What runs where
//! A stream has one worker thread, started by its first submission, that runs its operations in order. A dispatch of more than one
//! tile is shared with the pool's helpers: `threads` in the configuration is the number of threads that one dispatch can use, the
//! stream's worker included. Tiles are independent, so results do not depend on that number.
//!
//! All of these threads have the same floating-point state: rounding to nearest, subnormal numbers are zero. Host calls and foreign
//! calls run in the state that threads start with.
//!
//! This crate must not hold operators, and nothing but the registration of backends may name it.

#[cfg(not(loom))]
pub mod allocator;
#[cfg(not(loom))]
pub mod backend;
#[cfg(all(feature = "bench", not(loom)))]
pub mod bench;
pub mod driver;
#[cfg(not(loom))]
pub mod manager;

#[cfg(not(loom))]
pub use backend::CpuBackend;
#[cfg(not(loom))]
pub use manager::execution::{CpuConfig, CpuExecutionManager, HugePages};
