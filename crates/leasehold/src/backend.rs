//! The items that only implementers of a backend, of a source of memory or of a stream need.
//!
//! A backend implements the unsafe traits [`Backend`], [`Device`], [`Stream`] and [`GraphExec`],
//! and [`HostTimeline`] where it has host timelines; each says what its implementer vouches for.
//! Its allocator is [`Allocator`] over a [`Backing`]. The owner's half of a timeline is
//! [`TimelineOwner`], and the documentation of [`TimelineSource`] has a stream in thirty lines.
//! `Stream::submit` calls [`Op::check`] for each operation, and `Device::pipeline` calls
//! [`KernelDesc::validate`]: so all backends refuse the same mistakes. [`Validated`] and [`Traced`]
//! wrap a backend. [`SlotPool`], [`PoolManager`] and [`FixedSlotStore`] give its
//! resources a life cycle.
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
    Allocator, AllocatorConfig, Backing, BackingCaps, Bindings, BlockInfo, BlockState, Buffer,
    Chunk, DebugOptions, Finding, FindingKind, GraphArena, Holding, HostKind, LaunchGuard, Layout,
    LeakReport, Lifetime, LiveBuffer, On, Protection, Reclaimer, SYMBOLIC, Segment, Snapshot,
    TagTotal,
};
pub use leasehold_core::{
    AcquireError, Budgeted, CommandQueueHandle, ContextHandle, DeviceHandle, FenceHandle,
    FixedSlotStore, ForkGuard, Handle, HeapHandle, HostTimelineHandle, HostTimelineOwner, Index,
    LibraryHandle, LifeCycle, PackedTimepoint, PipelineHandle, PoolConfig, PoolManager, PoolStats,
    Publisher, Recycle, Resource, RetireList, SlotPool, TagOf, Tagged, Text, Timeline, TimelineId,
    TimelineOwner, TimelineSource, TimestampHandle, VALUE_LIMIT, copy_bytes, handle, panics, sync,
    tags, threads,
};
pub use leasehold_hal::{
    Access, Backend, BackendKind, Binding, Caps, Copies, Copy1d, Copy2d, CpuArgs, CpuFn,
    Description, Device, DeviceId, DeviceInfo, Dispatch, Download, Fill, ForeignCall, Former,
    GraphExec, HostCall, HostTimeline, KeepAlive, KernelCheck, KernelDesc, KernelSource,
    LaunchInfo, Limits, MemoryInfo, MemoryKind, NodePatch, NullBackend, Op, OpList, Overlap,
    Partition, PartitionSize, Pipeline, Plan, SharedSegment, Sharing, Stream, StreamDesc,
    TimestampQuery, Traced, Upload, Validated, hazard,
};
