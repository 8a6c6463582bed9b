//! A device's memory: one allocator for each kind of memory, over placement heaps.
//!
//! | kind | storage | a lease's address | used for |
//! |---|---|---|---|
//! | `Device`, unified memory | shared | the host's | everything: the host maps it |
//! | `Device`, else | private | the device's | what only the device uses |
//! | `Pinned` | shared | the host's | bytes on their way between host and device |
//!
//! [`MpsConfig::storage`](crate::MpsConfig::storage) overrules the first two lines. An allocator's
//! budget is the recommended working set of the device, because Metal itself refuses no memory.
//!
//! This module must not know how blocks are placed.

pub mod heap;

use crate::driver::ops::Storage;
use crate::manager::buffer::BufferManager;
use crate::manager::heap::HeapManager;
use crate::manager::opened::OpenedDevice;
use heap::HeapBacking;
use leasehold_alloc::{Allocator, AllocatorCell, AllocatorConfig, Backing, HostKind};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Result, Text};
use leasehold_hal::MemoryKind;
use leasehold_hal::engine::buffers::outstanding;
use std::fmt;

/// A device's memory.
pub(crate) struct Memory {
    opened: Arc<OpenedDevice>,
    heaps: Arc<HeapManager>,
    buffers: Arc<BufferManager>,
    /// The segments that the allocators hold: one heap and one buffer each.
    segments: Arc<AtomicU64>,
    device: AllocatorCell,
    pinned: AllocatorCell,
}

impl Memory {
    /// Makes the memory without allocators.
    pub(crate) fn new(
        opened: &Arc<OpenedDevice>,
        heaps: &Arc<HeapManager>,
        buffers: &Arc<BufferManager>,
    ) -> Self {
        Self {
            opened: opened.clone(),
            heaps: heaps.clone(),
            buffers: buffers.clone(),
            segments: Arc::default(),
            device: AllocatorCell::default(),
            pinned: AllocatorCell::default(),
        }
    }

    /// The storage of device memory.
    pub(crate) fn storage(&self) -> Storage {
        let natural = match self.opened.properties.unified_memory {
            true => Storage::Shared,
            false => Storage::Private,
        };
        self.opened.shared.config.storage.unwrap_or(natural)
    }

    /// The storage of a kind of memory.
    ///
    /// # Errors
    /// `Unsupported` for a kind that the device does not have.
    fn storage_of(&self, kind: MemoryKind) -> Result<Storage> {
        match kind {
            MemoryKind::Device => Ok(self.storage()),
            MemoryKind::Pinned => Ok(Storage::Shared),
            other => {
                Err(Error::Unsupported(format!("{}: no {other:?} memory", self.opened.id).into()))
            }
        }
    }

    /// The allocator of a kind of memory. The first call makes it.
    ///
    /// # Errors
    /// `Unsupported` for a kind that the device does not have; `OutOfMemory`; a driver error.
    pub(crate) fn of(&self, kind: MemoryKind) -> Result<&Allocator> {
        let storage = self.storage_of(kind)?;
        let (cell, what) = match kind {
            MemoryKind::Pinned => (&self.pinned, "pinned host memory"),
            _ => (&self.device, "device memory"),
        };
        cell.get_or_make(|| {
            let config = &self.opened.shared.config;
            let budget = match self.opened.properties.recommended_working_set {
                0 => u64::MAX,
                bytes => bytes,
            };
            let config = AllocatorConfig {
                name: Text::Owned(format!("{} {what}", self.opened.id)),
                host_kind: match storage {
                    Storage::Shared => HostKind::Pinned,
                    Storage::Private => HostKind::None,
                },
                budget,
                debug: config.debug,
                trace_events: config.trace_events,
                ..AllocatorConfig::default()
            };
            Allocator::new(Box::new(self.source(storage, self.segments.clone())), config)
        })
    }

    /// Makes a second backing of a kind of memory. Its segments count as leases of their holder.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub(crate) fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        Ok(Box::new(self.source(self.storage_of(kind)?, Arc::default())))
    }

    fn source(&self, storage: Storage, segments: Arc<AtomicU64>) -> HeapBacking {
        let (heaps, buffers) = (self.heaps.clone(), self.buffers.clone());
        HeapBacking::new(self.opened.clone(), heaps, buffers, storage, segments)
    }

    /// The number of heaps, and of buffers, that the allocators hold.
    pub(crate) fn segments(&self) -> u64 {
        self.segments.load(Ordering::Acquire)
    }

    /// Checks that no block of memory is held.
    ///
    /// # Errors
    /// `LeasesOutstanding`.
    pub(crate) fn outstanding(&self) -> Result<()> {
        outstanding(&self.device, &self.pinned)
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("device", &self.opened.id)
            .field("segments", &self.segments())
            .finish_non_exhaustive()
    }
}
