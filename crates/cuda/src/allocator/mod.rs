//! A device's memory: one allocator for each kind of memory, and its backing.
//!
//! This module must not know managers, or how blocks are placed.

pub mod device;
pub mod pinned_host;

use crate::driver::ops::DeviceProperties;
use crate::engine::driver_context::DriverContext;
use crate::engine::shared::Shared;
use leasehold_alloc::{Allocator, AllocatorCell, AllocatorConfig, Backing, HostKind};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result, Text};
use leasehold_engine::buffers::outstanding;
use leasehold_hal::MemoryKind;

/// A device's memory, which all its contexts share.
pub(crate) struct Memory {
    /// The primary context.
    pub(crate) context: Arc<DriverContext>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) properties: DeviceProperties,
    device: AllocatorCell,
    pinned: AllocatorCell,
}

impl Memory {
    /// Makes the memory without allocators.
    pub(crate) fn new(
        context: Arc<DriverContext>,
        shared: Arc<Shared>,
        properties: DeviceProperties,
    ) -> Self {
        Self {
            context,
            shared,
            properties,
            device: AllocatorCell::default(),
            pinned: AllocatorCell::default(),
        }
    }

    /// The allocator of a kind of memory. The first call makes it.
    ///
    /// # Errors
    /// `Unsupported` for a kind that the device does not have; `OutOfMemory`; a driver error.
    pub(crate) fn of(&self, kind: MemoryKind) -> Result<&Allocator> {
        self.check(kind)?;
        if kind == MemoryKind::Pinned { pinned_host::of(self) } else { device::of(self) }
    }

    /// The allocator of a kind of memory, if it exists.
    pub(crate) fn existing(&self, kind: MemoryKind) -> Option<&Allocator> {
        match kind {
            MemoryKind::Device => self.device.get(),
            MemoryKind::Pinned => self.pinned.get(),
            _ => None,
        }
    }

    /// Makes a second backing of a kind of memory.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub(crate) fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        self.check(kind)?;
        if kind == MemoryKind::Pinned {
            return Ok(Box::new(pinned_host::backing(self)));
        }
        Ok(Box::new(device::backing(self)?))
    }

    /// Checks that the device has this kind of memory.
    pub(crate) fn check(&self, kind: MemoryKind) -> Result<()> {
        match kind {
            MemoryKind::Device | MemoryKind::Pinned => Ok(()),
            other => Err(Error::Unsupported(
                format!("{}: no {other:?} memory", self.context.id()).into(),
            )),
        }
    }

    /// Checks that no buffer is held.
    ///
    /// # Errors
    /// `LeasesOutstanding`.
    pub(crate) fn outstanding(&self) -> Result<()> {
        outstanding(&self.device, &self.pinned)
    }
}

/// Makes an allocator for one kind of memory of a device.
fn make(
    memory: &Memory,
    what: &'static str,
    kind: HostKind,
    backing: Box<dyn Backing>,
) -> Result<Allocator> {
    let config = AllocatorConfig {
        name: Text::Owned(format!("{} {what}", memory.context.id())),
        host_kind: kind,
        debug: memory.shared.config.debug,
        trace_events: memory.shared.config.trace_events,
        ..AllocatorConfig::default()
    };
    Allocator::new(backing, config)
}
