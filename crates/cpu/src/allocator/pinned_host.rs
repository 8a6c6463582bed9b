//! Host memory for transfers. Nothing is pinned on this device: its "transfers" are copies by the same processors. The memory is pageable and its
//! buffers say so ([`HostKind::Pageable`](leasehold_alloc::HostKind)); it has an allocator of its own, so that it can be told apart in statistics.
//!
//! This module must not know how blocks are placed.

use crate::manager::device::DeviceState;
use leasehold_alloc::Allocator;
use leasehold_core::Result;

/// The allocator of host memory; the first call makes it.
///
/// # Errors
/// `OutOfMemory`.
#[doc(alias = "DevicePinnedHostAllocator")]
pub fn of(device: &DeviceState) -> Result<&Allocator> {
    device.pinned_memory.get_or_make(|| super::make(device, "host memory"))
}
