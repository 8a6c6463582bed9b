//! Buffers: allocation and freeing, through a device's allocator. The allocator's block table is
//! the pool of buffers; no second pool exists.
//!
//! This module must not know how blocks are placed.

use crate::allocator::Memory;
use leasehold_alloc::{AllocStats, Allocator, Buffer, Layout, On};
use leasehold_core::sync::Arc;
use leasehold_core::{BufferHandle, Lease, Result};
use leasehold_hal::MemoryKind;
use std::fmt;

/// Owns the buffers of one kind of memory of a device: allocation, look-up, life cycle, statistics.
///
/// All contexts of a device share its memory. The first buffer makes the allocator.
#[doc(alias = "CudaBufferManager")]
pub struct BufferManager {
    memory: Arc<Memory>,
    kind: MemoryKind,
    #[cfg(feature = "test-hooks")]
    for_test: bool,
}

impl BufferManager {
    pub(crate) fn new(memory: Arc<Memory>, kind: MemoryKind) -> Self {
        Self {
            memory,
            kind,
            #[cfg(feature = "test-hooks")]
            for_test: false,
        }
    }

    /// A manager of a device's buffers over a driver that a test supplies, with all lower layers.
    ///
    /// # Errors
    /// `Unsupported` for a kind of memory that the device does not have, or a driver error.
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "configureForTest")]
    pub fn configure_for_test(
        ops: Arc<dyn crate::driver::ops::CudaSlowOps>,
        device: leasehold_hal::DeviceId,
        kind: MemoryKind,
    ) -> Result<Self> {
        let memory = super::context::memory_for_test(ops, device)?;
        memory.check(kind)?;
        Ok(Self { memory, kind, for_test: true })
    }

    /// Whether the manager was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.for_test
    }

    /// The kind of memory.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// The allocator. The first call makes it.
    ///
    /// # Errors
    /// `OutOfMemory`, or a driver error.
    pub fn allocator(&self) -> Result<&Allocator> {
        self.memory.of(self.kind)
    }

    /// Allocates a buffer that is ready for the stream of `on`. If free memory exists, the call
    /// makes no driver call. Otherwise it may block on the driver.
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    pub fn allocate(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        self.allocator()?.alloc(layout, on)
    }

    /// Drops a lease on a buffer. The last lease frees the memory once the work that was marked on
    /// the buffer is over. Never blocks and makes no driver call.
    pub fn free(&self, buffer: Lease<Buffer>) {
        drop(buffer);
    }

    /// A lease on the handle's buffer.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "get_state")]
    pub fn lease(&self, buffer: BufferHandle) -> Result<Lease<Buffer>> {
        match self.memory.existing(self.kind) {
            Some(allocator) => allocator.lease(buffer),
            None => Err(leasehold_core::Error::stale("buffer", buffer)),
        }
    }

    /// Whether the handle's buffer is alive: one load.
    #[must_use]
    pub fn is_alive(&self, buffer: BufferHandle) -> bool {
        self.memory.existing(self.kind).is_some_and(|a| a.is_alive(buffer))
    }

    /// Gives free memory back to the driver until at most `keep` bytes are kept. Returns the number
    /// of bytes given back.
    ///
    /// # Errors
    /// A driver error.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        self.memory.existing(self.kind).map_or(Ok(0), |a| a.trim(keep))
    }

    /// The allocator's statistics.
    #[must_use]
    pub fn stats(&self) -> AllocStats {
        self.memory.existing(self.kind).map(Allocator::stats).unwrap_or_default()
    }
}

impl fmt::Debug for BufferManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferManager")
            .field("kind", &self.kind)
            .field("live", &self.stats().live)
            .finish()
    }
}
