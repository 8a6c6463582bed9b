//! The hardware abstraction layer: the interface between the runtime and its backends.
//!
//! Above this layer the code is the same for every device; below it each backend has its own
//! managers. Objects with behaviour are `dyn` ([`Backend`], [`Device`], [`Stream`], [`Gate`],
//! [`GraphExec`]). Objects without behaviour are plain structs with a native word ([`Pipeline`],
//! [`Timestamp`], [`Binding`]). So a launch needs no associated types and no downcasts.
//!
//! A backend implements one hot call, [`Stream::submit`], which takes a slice of [`Op`]s. Eager
//! launches, recordings, replays, the simulated device and the wrappers all use this call.
//!
//! # Object mapping
//! | here | CPU | CUDA | Metal |
//! |---|---|---|---|
//! | [`Device`] | a machine (or a NUMA node) | primary context | `MTLDevice` |
//! | [`Stream`] | ordered queue with a worker | `CUstream`, non-blocking | a timeline over a leased `MTLCommandQueue` |
//! | completed value | atomic store by the worker | completion word in pinned memory | `MTLSharedEvent` |
//! | [`Op::Wait`] | the queue stands still | `cuStreamWaitEvent` | `encodeWaitForEvent` between command buffers |
//! | [`Pipeline`] | function pointer | `CUfunction` | `MTLComputePipelineState` |
//! | [`Binding`] | address | address | spanning `MTLBuffer` + offset |
//! | [`Timestamp`] | monotonic clock | `CUevent` with timing | counter sample |
//! | [`GraphExec`] | flat list | `CUgraphExec` | re-encoded command buffer |
//! | [`Gate`] | atomic | unsupported at first (host deferral) | `MTLSharedEvent` |
//!
//! This crate must hold no policy, no cache and no pool.

pub mod backend;
mod check;
pub mod hazard;
pub mod id;
pub mod info;
pub mod kernel;
pub mod list;
pub mod null;
pub mod op;
pub mod plan;
pub mod traced;
pub mod validated;
mod wrapper;

#[cfg(test)]
mod tests;

pub use backend::{Backend, Device, Former, Gate, GraphExec, NodePatch, Stream, StreamDesc};
pub use id::{BackendKind, DeviceId};
pub use info::{Caps, DeviceInfo, Limits, MemoryInfo, MemoryKind};
pub use kernel::{
    Access, Binding, CpuArgs, CpuFn, KernelCheck, KernelDesc, KernelSource, LaunchInfo, Overlap, Pipeline,
};
/// The allocator core, which backends connect to their memory.
pub use leasehold_alloc as alloc;
pub use list::OpList;
pub use null::NullBackend;
pub use op::{Copy2d, Dispatch, Download, Fill, ForeignCall, HostCall, Keep, Op, Timestamp, Upload};
pub use plan::Plan;
pub use traced::Traced;
pub use validated::Validated;
