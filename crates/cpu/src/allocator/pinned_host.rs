//! The allocator of host memory for transfers. Nothing is pinned on this device: the same
//! processors make its "transfers" as copies. The memory is pageable, and its buffers report this
//! ([`HostKind::Pageable`](leasehold_alloc::HostKind)). The memory has an allocator of its own, so
//! that statistics show it separately.
//!
//! This module must not know how blocks are placed.

use super::device::make;
use crate::manager::device::DeviceState;
use leasehold_alloc::Allocator;
use leasehold_core::Result;

/// The allocator of host memory. The first call makes it.
///
/// # Errors
/// `OutOfMemory`.
#[doc(alias = "DevicePinnedHostAllocator")]
pub fn of(device: &DeviceState) -> Result<&Allocator> {
    device.pinned_memory.get_or_make(|| make(device, "host memory"))
}
