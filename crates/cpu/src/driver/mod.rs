//! The CPU's counterpart of a vendor's driver: the machine's description, memory, queues, tiles and
//! graphs.
//!
//! | module | content |
//! |---|---|
//! | [`topology`], [`isa`] | the machine, and the share that this process may use |
//! | [`memory`] | address space and pages |
//! | `float` | the floating-point state of threads that run kernels |
//! | `jobs` | the lock-free core of the tile pool |
//! | `pool`, `advice` | threads around the jobs, and the advice when to wake them |
//! | `work` | operations as ranges of tiles: kernels, copies, fills |
//! | `queue` | ordered queues and their workers |
//! | `graph` | replay of plans |
//!
//! This module must not know managers, leases of devices, or allocators.

#[cfg(not(loom))]
pub(crate) mod advice;
#[cfg(not(loom))]
mod float;
#[cfg(not(loom))]
pub(crate) mod graph;
#[cfg(not(loom))]
pub mod isa;
pub(crate) mod jobs;
#[cfg(all(test, loom))]
#[path = "../../tests/unit/jobs_model.rs"]
mod jobs_model;
#[cfg(not(loom))]
pub mod memory;
#[cfg(not(loom))]
pub(crate) mod pool;
#[cfg(not(loom))]
pub(crate) mod queue;
#[cfg(not(loom))]
pub mod topology;
#[cfg(not(loom))]
pub(crate) mod work;

/// Nanoseconds of the process's own monotonic clock; never 0.
#[cfg(not(loom))]
pub(crate) fn now_nanos() -> u64 {
    use leasehold_core::sync::OnceLock;
    use std::time::Instant;
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1
}

/// The processor that currently runs this thread; `u32::MAX` if the system does not report it. A
/// few instructions.
#[cfg(not(loom))]
pub(crate) fn current_cpu() -> u32 {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: the call has no arguments and no side effects.
        u32::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(u32::MAX)
    }
    #[cfg(not(target_os = "linux"))]
    {
        u32::MAX
    }
}
