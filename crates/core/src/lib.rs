//! Handles, leases, slot pools, managers, timelines and errors: the lowest layer of the Leasehold
//! device runtime. It knows no device, does no I/O and does not log.
//!
//! Three types to know: a [`Lease`] holds a resource, a [`Timeline`] counts a stream's work, and an
//! [`Error`] says what went wrong.
//!
//! ```
//! use leasehold_core::TimelineOwner;
//! let owner = TimelineOwner::take()?; // a stream's half
//! let point = owner.timeline().at(owner.advance()?); // something was submitted
//! assert!(!point.is_settled());
//! owner.complete(point.value()); // it is over
//! assert!(point.is_settled());
//! # Ok::<(), leasehold_core::Error>(())
//! ```
//!
//! All types:
//!
//! * [`Handle`] names a resource. [`Lease`], [`UniqueLease`], [`Claim`] and [`WeakLease`] hold
//!   resources.
//! * [`SlotPool`] keeps resources and their control blocks. [`PoolManager`] and [`FixedSlotStore`]
//!   add a life cycle.
//! * [`Timeline`], [`Timepoint`], [`PackedTimepoint`] and [`TimelineSource`] express the order of
//!   work.
//! * [`Name`] is a short text for a stream, a buffer or a call site in reports.
//! * [`ForkGuard`] distinguishes a forked child from its parent.
//! * [`copy_bytes`] copies host memory and is fast for every pair of addresses. [`host_copy`] makes
//!   large copies by several threads.
//! * [`Error`] is the only error type of public functions. [`panics`] contains what the program's
//!   code throws.
//! * [`sync`] is the only source of atomics and locks.
//!
//! # Contracts
#![doc = include_str!("contracts.md")]

#[doc(hidden)]
pub mod chunks;
mod copy;
pub mod error;
#[cfg(not(loom))]
pub mod fork;
pub mod handle;
#[cfg(not(loom))]
pub mod host_copy;
pub mod lease;
pub mod lifecycle;
pub mod manager;
pub mod name;
mod once;
pub mod panics;
pub mod pool;
pub mod retire;
pub mod sync;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod thread_end;
#[doc(hidden)]
pub mod thread_number;
#[cfg(not(loom))]
pub mod threads;
pub mod timeline;

pub use copy::copy_bytes;
pub use error::{
    Budgeted, Error, Fault, Finding, Foreign, Mismatch, OutOfMemory, Result, Size, Text,
};
#[cfg(not(loom))]
pub use fork::ForkGuard;
pub use handle::{
    BufferHandle, CommandQueueHandle, ContextHandle, DeviceHandle, EventHandle, FenceHandle,
    GraphHandle, Handle, HeapHandle, HostTimelineHandle, Index, LibraryHandle, PipelineHandle,
    StreamHandle, Tagged, TimestampHandle, tags,
};
pub use lease::{
    AcquireError, Claim, Header, HeaderView, Lease, Owner, OwnerOps, UniqueLease, WeakLease,
};
pub use lifecycle::LifeCycle;
pub use manager::{FixedSlotStore, PoolManager};
pub use name::{Name, NameCell, NameScope, ShownTag};
pub use once::TryOnceLock;
pub use pool::{PoolConfig, PoolStats, Recycle, Resource, SlotPool, TagOf};
pub use retire::RetireList;
#[cfg(not(loom))]
pub use timeline::Publisher;
pub use timeline::{
    HostTimelineOwner, PackedTimepoint, Timeline, TimelineId, TimelineOwner, TimelineSource,
    Timepoint, VALUE_LIMIT,
};
