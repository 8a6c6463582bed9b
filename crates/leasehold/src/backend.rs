//! What an implementer of a backend, of a source of memory or of a stream needs, and nobody else.
//!
//! A backend implements the unsafe traits [`Backend`], [`Device`], [`Stream`] and [`GraphExec`], and
//! [`Gate`] where it has gates; each says what its implementer vouches for. Its allocator is
//! [`Allocator`] over a [`Backing`]. The owner's half of a timeline is [`LineOwner`], whose
//! documentation has a stream in thirty lines. [`Validated`] and [`Traced`] wrap a backend.
//! [`SlotPool`], [`PoolManager`] and [`FixedSlotStore`] give its resources a life cycle.
//!
//! A program uses such a backend by [`Context::with_backends`](crate::Context::with_backends). The
//! crate `leasehold-conformance` checks it.
//!
//! ```
//! use leasehold::backend::{Backend, NullBackend};
//! use leasehold::{BackendKind, Context, DeviceId};
//! use std::sync::Arc;
//! let context = Context::with_backends(vec![Arc::new(NullBackend) as Arc<dyn Backend>]);
//! assert!(context.runtime(DeviceId::new(BackendKind::Null, 0)).is_err(), "it supports nothing");
//! ```

pub use leasehold_alloc::{
    Allocator, AllocatorConfig, ArenaState, Backing, BackingCaps, Bindings, BlockInfo, BlockState, Buffer, Chunk,
    DebugAids, Finding, FindingKind, GraphArena, Holding, HostKind, LaunchGuard, Layout, LeakReport, Lifetime,
    LiveBuffer, On, Protection, Reclaimer, SYMBOLIC, Segment, Snapshot, TagTotal,
};
pub use leasehold_core::{
    Birth, Budgeted, CommandQueueHandle, ContextHandle, DeviceHandle, Fate, FenceHandle, FixedSlotStore, GateHandle,
    Handle, HeapHandle, HostLine, Index, LibraryHandle, LifeCycle, Line, LineId, LineOwner, Miss, PipelineHandle,
    PoolConfig, PoolManager, PoolStats, Publisher, Resource, RetireList, SlotPool, Stamp, TagOf, Tagged, Text,
    Timeline, TimestampHandle, VALUE_LIMIT, copy_bytes, defects, handle, sync, tags,
};
pub use leasehold_hal::{
    Access, Backend, BackendKind, Binding, Caps, Copy2d, CpuArgs, CpuFn, Device, DeviceId, DeviceInfo, Dispatch,
    Download, Fill, ForeignCall, Former, Gate, GraphExec, HostCall, Keep, KernelCheck, KernelDesc, KernelSource,
    LaunchInfo, Limits, MemoryInfo, MemoryKind, NodePatch, NullBackend, Op, OpList, Overlap, Pipeline, Plan, Stream,
    StreamDesc, Timestamp, Traced, Upload, Validated, hazard,
};
