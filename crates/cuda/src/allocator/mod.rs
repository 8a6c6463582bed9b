//! A device's memory: one allocator for each kind of memory, and its backing.
//!
//! This module must not know managers, or how blocks are placed.

pub mod device;
pub mod pinned_host;
pub(crate) mod shareable;

use crate::driver::ops::DeviceProperties;
use crate::engine::driver_context::DriverContext;
use crate::engine::shared::Shared;
use device::DeviceBacking;
use leasehold_alloc::{Allocator, AllocatorCell, AllocatorConfig, Backing, HostKind};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result, Text};
use leasehold_hal::MemoryKind;
use leasehold_hal::engine::buffers::outstanding;
use pinned_host::PinnedBacking;

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

    /// A device's memory over a driver that a test supplies.
    #[cfg(feature = "test-hooks")]
    pub(crate) fn for_test(
        ops: Arc<dyn crate::driver::ops::CudaSlowOps>,
        device: leasehold_hal::DeviceId,
    ) -> Result<Arc<Self>> {
        let ordinal = device.ordinal_on(leasehold_hal::BackendKind::Cuda)?;
        ops.init()?;
        let properties = ops.device_properties(ordinal)?;
        let shared = Arc::new(Shared::new(ops.clone(), crate::CudaConfig::default().inline(true)));
        let context = Arc::new(DriverContext::primary(ops, ordinal)?);
        Ok(Arc::new(Self::new(context, shared, properties)))
    }

    /// The allocator of a kind of memory. The first call makes it.
    ///
    /// # Errors
    /// `Unsupported` for a kind that the device does not have; `OutOfMemory`; a driver error.
    pub(crate) fn of(&self, kind: MemoryKind) -> Result<&Allocator> {
        self.check(kind)?;
        let (cell, what, host_kind) = match kind {
            MemoryKind::Pinned => (&self.pinned, "pinned host memory", HostKind::Pinned),
            _ => (&self.device, "device memory", HostKind::None),
        };
        cell.get_or_make(|| {
            let config = AllocatorConfig {
                name: Text::Owned(format!("{} {what}", self.context.id())),
                host_kind,
                debug: self.shared.config.debug,
                trace_events: self.shared.config.trace_events,
                ..AllocatorConfig::default()
            };
            Allocator::new(self.backing(kind)?, config)
        })
    }

    /// The allocator of a kind of memory, if it exists.
    pub(crate) fn existing(&self, kind: MemoryKind) -> Option<&Allocator> {
        match kind {
            MemoryKind::Device => self.device.get(),
            MemoryKind::Pinned => self.pinned.get(),
            _ => None,
        }
    }

    /// Makes a backing of a kind of memory.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub(crate) fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        self.check(kind)?;
        let (context, shared) = (self.context.clone(), self.shared.clone());
        Ok(match kind {
            MemoryKind::Pinned => Box::new(PinnedBacking::new(context, shared)),
            _ => Box::new(DeviceBacking::new(context, shared, &self.properties)?),
        })
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
