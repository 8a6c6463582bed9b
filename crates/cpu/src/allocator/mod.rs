//! The device's allocators and their backings. This module fills the cells of the device's state.
//!
//! This module must not know how blocks are placed.

pub mod device;
pub mod pinned_host;

use crate::manager::device::DeviceState;
use leasehold_alloc::{Allocator, AllocatorConfig, HostKind};
use leasehold_core::{Result, Text};

/// Makes a backing of pages of the system. All backings of a device share the machine's memory.
pub(crate) fn backing(device: &DeviceState) -> device::MmapBacking {
    device::MmapBacking::new(
        device.topology(),
        device.config().huge_pages,
        device.committed.clone(),
    )
}

/// Makes an allocator over pages of the system, for one kind of memory of a device.
fn make(device: &DeviceState, what: &'static str) -> Result<Allocator> {
    let config = AllocatorConfig {
        name: Text::Owned(format!("{} {what}", device.id())),
        host_kind: HostKind::Pageable,
        debug: device.config().debug,
        trace_events: device.config().trace_events,
        ..AllocatorConfig::default()
    };
    Allocator::new(Box::new(backing(device)), config)
}
