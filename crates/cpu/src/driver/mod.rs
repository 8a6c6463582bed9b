//! What a vendor's driver is elsewhere: the machine's description, memory, queues, tiles and graphs.
//!
//! | module | what |
//! |---|---|
//! | [`topology`], [`cgroup`], [`isa`] | what the machine is and how much of it this process may use |
//! | [`memory`] | address space and pages |
//! | `float` | the floating-point state of threads that run kernels |
//! | `crew` | the lock-free core of the tile pool |
//! | `pool`, `advice` | threads around it, and when it is worth waking them |
//! | `work` | operations as ranges of tiles: kernels, copies, fills |
//! | `queue` | ordered queues and their workers |
//! | `graph` | replay of plans |
//!
//! This module must not know managers, leases of devices, or allocators.

#[cfg(not(loom))]
pub(crate) mod advice;
#[cfg(not(loom))]
pub mod cgroup;
pub(crate) mod crew;
#[cfg(all(test, loom))]
mod crew_model;
#[cfg(not(loom))]
mod float;
#[cfg(not(loom))]
pub(crate) mod graph;
#[cfg(not(loom))]
pub mod isa;
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

/// The processor that this thread runs on at the moment; `u32::MAX` where the system cannot say. A few instructions.
#[cfg(not(loom))]
pub(crate) fn current_cpu() -> u32 {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: no arguments, no side effects.
        u32::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(u32::MAX)
    }
    #[cfg(not(target_os = "linux"))]
    {
        u32::MAX
    }
}
