//! Buffers: allocated and freed here, out of a device's allocator. The allocator's block table is
//! the pool; there is no second one.
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
/// All contexts of a device share its memory. The allocator is made with the first buffer.
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

    /// A manager of a device's buffers over a driver of the test's, with all that is below it.
    ///
    /// # Errors
    /// `Unsupported` for a kind of memory that there is not; the driver's.
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

    /// Whether it was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.for_test
    }

    /// Which memory.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// The allocator; the first call makes it.
    ///
    /// # Errors
    /// `OutOfMemory`; the driver's.
    pub fn allocator(&self) -> Result<&Allocator> {
        self.memory.of(self.kind)
    }

    /// A buffer that is ready for `on`'s stream. Makes no driver call if there is free memory; may
    /// block on the driver otherwise.
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    pub fn allocate(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        self.allocator()?.alloc(layout, on)
    }

    /// Gives up a lease on a buffer: what dropping it does. With the last one the memory is free
    /// for others, once the work that was marked on the buffer is over. Never blocks and makes no
    /// driver call.
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

    /// Gives free memory back to the driver until at most `keep` bytes are kept; says how much
    /// went.
    ///
    /// # Errors
    /// The driver's.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        self.memory.existing(self.kind).map_or(Ok(0), |a| a.trim(keep))
    }

    /// The state in numbers.
    #[must_use]
    pub fn stats(&self) -> AllocStats {
        self.memory.existing(self.kind).map(Allocator::stats).unwrap_or_default()
    }
}

impl fmt::Debug for BufferManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferManager").field("kind", &self.kind).field("live", &self.stats().live).finish()
    }
}
