//! Tools that measure and test the allocator core: workloads, recorded traces and their replay,
//! memory without a device, and streams without work.
//!
//! It uses the allocator through its public API alone, and no program that only wants memory needs
//! it.
//!
//! - [`workload`]: patterns of allocations and frees, timed, for any allocator.
//! - [`trace`]: traces of real programs, read from files, also from PyTorch's snapshots.
//! - [`memory_viz`]: snapshots for PyTorch's viewer of allocators, of `leasehold-report`.
//! - [`replay`]: a trace played against an allocator, and what it cost.
//! - `system`: [`System`]: the process's own heap, as a peer.
//! - `fake`: [`FakeBacking`]: addresses without memory, faults on demand, a check of its caller.
//! - `virtual_stream`: [`VirtualStream`]: work that is over when somebody says so.
//!
//! Models under loom have no use for it, and it is empty there.
#![cfg(not(loom))]

mod fake;
mod pickle;
pub mod replay;
mod system;
mod torch_snapshot;
pub mod trace;
mod virtual_stream;
pub mod workload;

pub use leasehold_report::memory_viz;

pub use fake::{Call, FakeBacking, Fault};
pub use system::System;
pub use virtual_stream::{VirtualStream, pass};
