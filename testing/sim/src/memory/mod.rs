//! Instruments for the allocator core: memory without a device, and streams without work.
//!
//! The feature `workloads` adds allocations of programs, recorded or made.
//!
//! It uses the allocator through its public interface alone.
//!
//! - [`FakeBacking`]: addresses without memory, faults on demand, a check of its caller.
//! - [`VirtualStream`]: work that is over when somebody says so.
//! - `workload`: patterns of allocations and frees, timed, for any allocator.
//! - `trace`: traces of real programs, read from files, also from PyTorch's snapshots.
//! - `memory_viz`: snapshots for PyTorch's viewer of allocators, of `leasehold-report`.
//! - `replay`: a trace played against an allocator, and what it cost.
//! - `System`: the process's own heap, as a peer.

mod fake;
#[cfg(feature = "workloads")]
mod pickle;
#[cfg(feature = "workloads")]
pub mod replay;
#[cfg(feature = "workloads")]
mod system;
#[cfg(feature = "workloads")]
mod torch_snapshot;
#[cfg(feature = "workloads")]
pub mod trace;
mod virtual_stream;
#[cfg(feature = "workloads")]
pub mod workload;

#[cfg(feature = "workloads")]
pub use leasehold_report::memory_viz;

pub use fake::{Call, FakeBacking, Fault};
#[cfg(feature = "workloads")]
pub use system::System;
pub use virtual_stream::{VirtualStream, pass};
