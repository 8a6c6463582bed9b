//! Leasehold: a device runtime for CPU and CUDA.
//!
//! The layer between a tensor framework, an inference engine or a JIT compiler and the vendors' drivers. Managers own every
//! device resource; everyone else holds a [`Lease`]. One API hides the differences between the backends.
//!
//! ```
//! use leasehold::{Context, DeviceId, View};
//! # fn main() -> leasehold::Result<()> {
//! let context = Context::new();
//! let runtime = context.runtime(DeviceId::cpu(0))?;
//! let a = runtime.upload(&[1.0f32, 2.0, 3.0])?;
//! let b = runtime.alloc(12)?;
//! runtime.stream().copy(b.view(), a.view())?;
//! assert_eq!(runtime.download::<f32>(&b)?, [1.0, 2.0, 3.0]);
//! # Ok(())
//! # }
//! ```
//!
//! * [`Context`] owns the runtimes; [`Runtime`] is one device: memory, streams, events, kernels, graphs.
//! * [`ops`] has waits, signals, copies, fills and host calls.
//! * [`kernel`] launches kernels of one's own; [`graph`] records, plans and replays.
//!
//! Nothing waits for work that is pending when `main` returns: a program ends with [`Runtime::close`].
//!
//! This crate must not own native objects; those live in the backends' managers.

pub mod array;
pub mod context;
pub mod event;
pub mod gate;
pub mod graph;
pub mod infini;
pub mod kernel;
#[doc(alias = "stream_ops")]
pub mod ops;
pub mod runtime;
pub mod stream;
pub mod view;

pub use array::{Array, ArrayView};
/// Plain data: what may be copied to and from a device byte by byte, and what parameters are made of. Derive `NoUninit` for what goes
/// to the device, `AnyBitPattern` for what comes back and for parameters that a kernel reads, `Pod` for both.
pub use bytemuck;
pub use context::{BackendReport, Context, ContextGuard, Current};
pub use event::{Event, EventFlags};
pub use gate::Gate;
pub use graph::{Graph, GraphOperator, GraphUpdate};
pub use kernel::{Grid, KernelBase, KernelSession};
pub use leasehold_alloc::{AllocStats, Allocator, Buffer, HostKind, Layout, Protection};
/// The ground floor: handles, leases, pools, managers, timelines.
pub use leasehold_core as core;
pub use leasehold_core::{
    AnyLease, BufferHandle, Claim, DeviceHandle, Error, EventHandle, Fault, GraphHandle, Handle, Lease, OutOfMemory,
    Point, PoolStats, Result, StreamHandle, UniqueLease, WeakLease,
};
/// The border to the backends, for those who write one.
pub use leasehold_hal as hal;
pub use leasehold_hal::{Access, Backend, BackendKind, DeviceId, DeviceInfo, MemoryKind};
pub use runtime::Runtime;
pub use stream::Stream;
pub use view::{BufferView, Operand, View};

/// The CPU backend's own settings.
#[cfg(feature = "cpu")]
pub use leasehold_cpu as cpu;
#[cfg(feature = "cuda")]
pub use leasehold_cuda as cuda;
