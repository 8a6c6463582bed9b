//! Handles, leases, slot pools, managers, timelines and errors: the ground floor of the Leasehold device runtime.
//!
//! This crate must not know any device, do I/O or log.
//!
//! * [`Handle`] names a resource; [`Lease`], [`UniqueLease`], [`Claim`] and [`WeakLease`] are the ways to hold it.
//! * [`SlotPool`] keeps resources and their control blocks; [`PoolManager`] and [`FixedSlotStore`] give it a life cycle.
//! * [`Line`], [`Point`], [`Stamp`] and [`Timeline`] say what comes after what.
//! * [`Birth`] tells a forked child from its parent.
//! * [`copy_bytes`] copies host memory, fast for every pair of addresses.
//! * [`Error`] is the only error that crosses a public border.
//! * [`sync`] is the only door to atomics and locks.
//!
//! # Contracts
#![doc = include_str!("contracts.md")]

pub mod barrier;
#[cfg(feature = "bench")]
pub mod bench;
mod copy;
#[cfg(not(loom))]
pub mod crew;
#[doc(hidden)]
pub mod defects;
pub mod error;
#[cfg(not(loom))]
pub mod fork;
pub mod handle;
pub mod lease;
pub mod lifecycle;
pub mod manager;
pub mod pool;
pub mod retire;
pub mod sync;
pub mod timeline;

pub use copy::copy_bytes;
pub use error::{Budgeted, Error, Fault, OutOfMemory, Result, Text};
#[cfg(not(loom))]
pub use fork::Birth;
pub use handle::{
    BufferHandle, CommandQueueHandle, ContextHandle, DeviceHandle, EventHandle, FenceHandle, GateHandle, GraphHandle,
    Handle, HeapHandle, Index, LibraryHandle, PipelineHandle, StreamHandle, Tagged, TimestampHandle, tags,
};
pub use lease::{AnyLease, Claim, Header, HeaderView, Lease, Miss, Owner, OwnerOps, UniqueLease, WeakLease};
pub use lifecycle::LifeCycle;
pub use manager::{FixedSlotStore, PoolManager};
pub use pool::{Fate, PoolConfig, PoolStats, Resource, SlotPool, TagOf};
pub use retire::RetireList;
#[cfg(not(loom))]
pub use timeline::Publisher;
pub use timeline::{HostLine, Line, LineId, LineOwner, Point, Stamp, Timeline, VALUE_LIMIT};
