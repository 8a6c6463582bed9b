//! A device runtime for CPU, CUDA and Metal: leases, streams, events, an allocator, kernels and
//! graphs behind one API.
//!
//! It is the layer between a tensor framework, an inference engine or a JIT compiler, and the
//! vendors' drivers. Managers own every device resource; everyone else holds a [`Lease`]. One API
//! hides the differences between the backends.
//!
//! ```
//! use leasehold::prelude::*;
//! # fn main() -> Result<()> {
//! let runtime = Runtime::open(DeviceId::cpu(0))?;
//! let a = runtime.upload(&[1.0f32, 2.0, 3.0])?;
//! let b = runtime.zeros::<f32>(3)?;
//! runtime.stream().copy(b.view(), a.view())?;
//! assert_eq!(runtime.to_vec(&b)?, [1.0, 2.0, 3.0]);
//! # Ok(())
//! # }
//! ```
//!
//! Three types to know:
//!
//! * [`Runtime`] is one device: memory, streams, events, kernels, graphs. A [`Context`] owns the
//!   runtimes.
//! * [`Stream`] is an ordered queue of work: copies, fills, launches, waits. No call on it waits
//!   for the device unless its documentation says so, and operations on a common buffer are ordered
//!   across streams.
//! * [`Array`] is typed memory, a [`Lease`] of a [`Buffer`]: counted, and free for reuse with the
//!   last clone.
//!
//! [`kernel`] has kernels of one's own, [`graph`] records and replays, [`prelude`] has what most
//! programs use. Nothing waits for work that is pending when `main` returns: a program ends with
//! [`Runtime::close`].
//!
//! # Features
//!
//! - `cpu`. Default: yes. Provides the CPU backend: `cpu:0`.
//! - `future`. Default: no. Adds futures of streams, timepoints, events and downloads.
//! - `half`. Default: no. Adds `f16` and `bf16`, numbers of 16 bits that are plain data.
//! - `cuda`. Default: no. Provides the CUDA backend: `cuda:0` and so on. Needs nothing at build
//!   time; the driver is looked for at run time.
//! - `mps`. Default: no. Provides the Metal backend: `mps:0` and so on. Metal has devices on
//!   Apple's systems only; elsewhere the backend says so.
//!
//! # Modules for others than users
//!
//! [`backend`] is for implementers of backends. `cpu`, `cuda` and `mps` are for backends with a
//! configuration, `cuda` also for other libraries on the same device. [`infini`] has the names of
//! the design documents where they differ.
//!
//! This crate must not own native objects; those live in the backends' managers.

pub mod array;
pub mod backend;
pub mod context;
#[cfg(feature = "cpu")]
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod event;
#[cfg(feature = "future")]
pub mod future;
pub mod graph;
pub mod growing;
pub mod host_timeline;
pub mod infini;
pub mod kernel;
#[cfg(feature = "mps")]
pub mod mps;
#[doc(alias = "stream_ops")]
pub mod ops;
pub mod partition;
pub mod pinned;
pub mod pool;
pub mod prelude;
pub mod runtime;
pub mod share;
pub mod stream;
pub mod trace;
pub mod view;

/// Plain data: what may be copied to and from a device byte by byte, and what parameters are made
/// of. Derive `NoUninit` for what goes to the device, `AnyBitPattern` for what comes back and for
/// parameters that a kernel reads, `Pod` for both.
pub use bytemuck;
#[cfg(feature = "half")]
pub use half::{bf16, f16};

#[doc(inline)]
pub use array::{Array, ArrayView};
#[doc(inline)]
pub use context::{BackendReport, Context, ContextGuard, Current};
#[doc(inline)]
pub use event::{Event, EventFlags};
#[doc(inline)]
pub use graph::{Graph, GraphOperator, GraphUpdate};
#[doc(inline)]
pub use growing::Growing;
#[doc(inline)]
pub use host_timeline::HostTimeline;
#[doc(inline)]
pub use kernel::{Grid, KernelBase, KernelSession};
#[doc(inline)]
pub use leasehold_alloc::{AllocStats, Allocator, Buffer, HostKind, Layout, Protection};
#[doc(inline)]
pub use leasehold_core::{
    BufferHandle, Claim, DeviceHandle, Error, EventHandle, Fault, Finding, GraphHandle, Handle,
    Lease, Mismatch, Name, NameScope, OutOfMemory, PoolStats, Result, StreamHandle, Timepoint,
    UniqueLease, WeakLease,
};
#[doc(inline)]
pub use leasehold_hal::{
    Access, Backend, BackendKind, DeviceId, DeviceInfo, MemoryKind, Partition, PartitionSize,
    StreamDesc,
};
#[doc(inline)]
pub use partition::Divide;
#[doc(inline)]
pub use pinned::{PinnedArray, PinnedValues};
#[doc(inline)]
pub use pool::{Pool, PoolKind};
#[doc(inline)]
pub use runtime::Runtime;
#[doc(inline)]
pub use stream::Stream;
#[doc(inline)]
pub use trace::{Trace, TraceEvents};
#[doc(inline)]
pub use view::{BufferView, Operand, View};
