//! The part of a backend that is the same over every driver.
//!
//! | module | content |
//! |---|---|
//! | [`host_timeline`] | host timelines, over an object of the driver or none |
//! | [`stream_pool`] | the pool of a device's streams: recycling, retirement, the limit |
//! | [`buffers`] | the buffers of one kind of memory, over its allocator |
//! | [`waits`] | waits of streams for timepoints, and of threads for a whole device |
//! | [`panics`] | panics of the program's code |
//! | [`forward_device!`] | the methods of `hal::Device` that expose a state's description |
//!
//! A backend gives each of them its own part through a small trait. The functions are generic: no
//! call of a hot path goes through a table of functions.
//!
//! This crate must not know a driver.

pub mod buffers;
mod forward;
pub mod host_timeline;
pub mod panics;
pub mod stream_pool;
pub mod waits;

/// The types that the expansion of [`forward_device!`] names.
#[doc(hidden)]
pub mod forwarded {
    pub use leasehold_core::PoolStats;
    pub use leasehold_hal::{Caps, DeviceInfo, Limits};
}
