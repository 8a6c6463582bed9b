//! Tools that measure and test the allocator core: workloads, recorded traces and their replay,
//! memory without a device, and streams without work.
//!
//! It uses the allocator through its public API alone, and no program that only wants memory needs
//! it.
//!
//! - [`workload`]: patterns of allocations and frees, timed, for any allocator.
//! - [`trace`]: traces of real programs: reading, also PyTorch's snapshots; writing, recording from
//!   a snapshot.
//! - [`memory_viz`]: snapshots for PyTorch's viewer of allocators.
//! - [`replay`]: a trace played against an allocator, and what it cost.
//! - `system`: [`System`]: the process's own heap, as a peer.
//! - `fake`: [`FakeBacking`]: addresses without memory, faults on demand, a check of its caller.
//! - `virtual_stream`: [`VirtualStream`]: work that is over when somebody says so.
//!
//! Models under loom have no use for it, and it is empty there.
#![cfg(not(loom))]

mod fake;
pub mod memory_viz;
mod pickle;
pub mod replay;
mod system;
mod torch_snapshot;
pub mod trace;
mod virtual_stream;
pub mod workload;

pub use fake::{Call, FakeBacking, Fault};
pub use system::System;
pub use virtual_stream::{VirtualStream, pass};
