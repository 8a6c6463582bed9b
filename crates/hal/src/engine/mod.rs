//! The part of a backend that is the same over every driver: host timelines, pools of streams and
//! pipelines, buffers, waiting. It holds back work that waits for the host.
//!
//! | module | content |
//! |---|---|
//! | [`host_timeline`] | host timelines, over an object of the driver or none |
//! | [`stream_pool`] | the pool of a device's streams: recycling, retirement, the limit |
//! | [`pipelines`] | the pool of a device's kernels: one pipeline for each source |
//! | [`buffers`] | the buffers of one kind of memory, over its allocator |
//! | [`Engine`] | the streams of a device, and the threads that serve them |
//! | [`stream`] | a stream: submission, deferred work, completion, waiting |
//! | [`driver`] | a driver's part: its streams, the state that they share, its graphs |
//! | [`retired`] | devices and contexts without a lease, until they may end |
//! | [`devices`], [`execution`] | the managers of devices over a driver, and of their backend |
//! | [`backend`] | a backend over a driver, which starts at its first use |
//! | [`staging`] | host memory for bytes that the device cannot move directly |
//! | [`steps`] | the steps of a plan's launch |
//! | [`tables`], [`timelines`] | the timelines of a backend, their signallers and waiting streams |
//! | [`waits`] | waits of streams for timepoints, and of threads for a whole device |
//! | [`payload`] | streams and graphs as payloads of pools, and as `hal`'s |
//! | [`host_memory`], [`cgroup`] | the host's memory, and the share that this process may use |
//! | [`shared_file`] | memory of the host that other processes may map |
//! | [`config_setters!`](crate::config_setters) | setters of settings that configurations share |
//! | [`native_handles!`](crate::native_handles) | handle types of a driver's objects |
//!
//! A backend gives each of them its own part through a small trait. The functions are generic: no
//! call of a hot path goes through a table of functions.
//!
//! # A backend over a driver's streams
//! 1. Implement [`DriverDevice`](driver::DriverDevice) for the state that a device's streams share,
//!    and [`DriverStream`](driver::DriverStream) for a stream.
//! 2. Make one [`Tables`](tables::Tables) for the backend and one [`Engine`] for each device.
//!    [`Engine::stream`] makes streams, which [`StreamPool`](stream_pool::StreamPool) keeps.
//! 3. Host timelines are `HostTimelineManager<Tables<_>>`.
//! 4. Implement [`DeviceSource`](devices::DeviceSource) for what makes the devices' states. The
//!    backend is a [`DriverBackend`](backend::DriverBackend) of it.
//!
//! # Locks
//! A stream's lock is held across driver calls that do not block. Under a stream's lock, a thread
//! takes only the locks of [`timelines`], of the stream's queue of actions and of the driver's
//! part.
//! No thread holds the locks of two streams. User code (host calls, foreign calls, destructors)
//! runs without any lock.
//!
//! # How the files of a stream build on each other
//! A file names only files of the lines above its own, except for the third line.
//!
//! - Values, queues and tables, which know no stream: `partitions`, `steps`, `host_part`, `driver`,
//!   `prepared`, `timelines`, `threads`.
//! - What streams hold, and what a stream gives to the driver: `state`, `stream/issue`.
//! - How work goes on: `deferred`, `stream/complete`, `stream/failure`, `stream/resolve`,
//!   `completion_thread`. These files call each other. Work that is resumed may complete or fail,
//!   and both resume other streams. The threads do the same.
//! - What callers ask for: `stream/submit`, `stream/wait`, `stream`, `tables`, `payload`,
//!   `device_streams`.
//!
//! This module must not know a driver. The rest of the crate must not know this module.

pub mod backend;
pub mod buffers;
pub mod cgroup;
mod completion_thread;
mod deferred;
mod device_streams;
pub mod devices;
pub mod driver;
pub mod execution;
pub mod host_memory;
mod host_part;
pub mod host_timeline;
mod macros;
pub mod partitions;
pub mod payload;
pub mod pipelines;
mod prepared;
pub mod retired;
pub mod shared_file;
pub mod staging;
mod state;
pub mod steps;
pub mod stream;
pub mod stream_pool;
pub mod tables;
#[cfg(test)]
#[path = "../../tests/unit/engine/mod.rs"]
mod tests;
mod threads;
pub mod timelines;
pub mod waits;

pub use device_streams::{Engine, EngineConfig};
pub use stream::StreamCore;
