//! The allocator's glue: where its memory comes from. Fills the cells of the device's memory.
//!
//! This module must not know how blocks are placed.

pub mod device;
pub mod pinned_host;

use crate::manager::context::Memory;
use crate::manager::device::DeviceState;
use leasehold_alloc::{Allocator, AllocatorConfig, Backing, HostKind};
use leasehold_core::sync::Arc;
use leasehold_core::{Result, Text};

/// Says to a device's primary context where its pinned memory comes from. Any number of times.
pub(crate) fn install(device: &DeviceState) {
    let memory = device.memory().clone();
    device.primary().core().set_pinned(Box::new(move || pinned_host::of(&memory).cloned()));
}

/// An allocator for one kind of memory of a device.
fn make(memory: &Memory, what: &'static str, kind: HostKind, backing: Box<dyn Backing>) -> Result<Allocator> {
    let config = AllocatorConfig {
        name: Text::Owned(format!("{} {what}", memory.door.id())),
        host_kind: kind,
        debug: memory.shared.config.debug,
        trace_events: memory.shared.config.trace_events,
        ..AllocatorConfig::default()
    };
    let allocator = Allocator::new(backing, config)?;
    // Every line publishes itself when somebody sleeps for it.
    allocator.set_waiter(Arc::new(|point, timeout| point.line().wait(point.value(), timeout)));
    Ok(allocator)
}
