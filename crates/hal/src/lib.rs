//! The hardware abstraction layer: the interface between the runtime and its backends. Whoever
//! writes a backend implements its traits.
//!
//! Three types to know: a [`Backend`] opens a [`Device`], and a [`Stream`] of the device takes work
//! as a slice of [`Op`]s. [`Validated`] checks the work that any backend gets.
//!
//! ```
//! use leasehold_hal::{Backend, NullBackend, Validated};
//! let backend = Validated::new(NullBackend)?;
//! assert!(backend.devices()?.is_empty());
//! # Ok::<(), leasehold_core::Error>(())
//! ```
//!
//! Above this layer the code is the same for every device; below it each backend has its own
//! managers. Objects with behaviour are `dyn` ([`Backend`], [`Device`], [`Stream`],
//! [`HostTimeline`], [`GraphExec`]). Objects without behaviour are plain structs with a native word
//! ([`Pipeline`], [`TimestampQuery`], [`Binding`]). So a launch needs no associated types and no
//! downcasts.
//!
//! A backend implements one hot call, [`Stream::submit`], which takes a slice of [`Op`]s. Eager
//! launches, recordings, replays, the simulated device and the wrappers all use this call.
//!
//! # Object mapping
//! - [`Device`]. CPU: a machine (or a NUMA node). CUDA: primary context. Metal: `MTLDevice`.
//! - [`Stream`]. CPU: ordered queue with a worker. CUDA: `CUstream`, non-blocking. Metal: a
//!   timeline over a leased `MTLCommandQueue`.
//! - completed value. CPU: atomic store by the worker. CUDA: completion word in pinned memory.
//!   Metal: `MTLSharedEvent`.
//! - [`Op::Wait`]. CPU: the queue stands still. CUDA: `cuStreamWaitEvent`. Metal:
//!   `encodeWaitForEvent` between command buffers.
//! - [`Pipeline`]. CPU: function pointer. CUDA: `CUfunction`. Metal: `MTLComputePipelineState`.
//! - [`Binding`]. CPU: address. CUDA: address. Metal: spanning `MTLBuffer` + offset.
//! - [`TimestampQuery`]. CPU: monotonic clock. CUDA: `CUevent` with timing. Metal: counter sample.
//! - [`GraphExec`]. CPU: flat list. CUDA: `CUgraphExec`. Metal: re-encoded command buffer.
//! - [`Conditional`]. CPU: a loop of the worker. CUDA: conditional node. Metal: unsupported.
//! - [`HostTimeline`]. CPU: atomic. CUDA: unsupported at first (host deferral). Metal:
//!   `MTLSharedEvent`.
//!
//! The module [`engine`] is for authors of backends: it has what is the same over every driver. The
//! rest of this crate does not know it, and must hold no policy, no cache and no pool.

pub mod backend;
mod check;
pub mod conditional;
pub mod copies;
pub mod engine;
pub mod graph;
pub mod hazard;
pub mod id;
pub mod info;
pub mod kernel;
pub mod list;
pub mod null;
pub mod op;
pub mod partition;
pub mod plan;
pub mod sharing;
pub mod traced;
pub mod validated;
mod wrapper;

#[cfg(test)]
#[path = "../tests/unit/mod.rs"]
mod tests;

pub use backend::{Backend, Device, Former, HostTimeline, Stream, StreamDesc};
pub use conditional::{Conditional, ConditionalKind};
pub use copies::{Copies, Copy1d};
pub use graph::{GraphExec, NodePatch};
pub use id::{BackendKind, DeviceId};
pub use info::{Caps, Description, DeviceInfo, Limits, MemoryInfo, MemoryKind};
pub use kernel::{
    Access, Binding, CpuArgs, CpuCFn, CpuFn, CpuTile, Cubin, FromParams, Interleave, KernelCheck,
    KernelDesc, KernelSource, LaunchInfo, MapElement, Overlap, Pipeline, Swizzle, TensorMap,
};
/// The allocator core, which backends connect to their memory.
pub use leasehold_alloc as alloc;
pub use list::OpList;
pub use null::NullBackend;
pub use op::{
    Copy2d, Dispatch, Download, Fill, ForeignCall, HostCall, KeepAlive, Op, TimestampQuery, Upload,
};
pub use partition::{Partition, PartitionSize};
pub use plan::Plan;
pub use sharing::{SharedSegment, Sharing};
pub use traced::Traced;
pub use validated::Validated;
