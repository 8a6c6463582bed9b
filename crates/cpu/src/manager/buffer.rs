//! Buffers: a view over an allocator's block table. No second pool exists.
//!
//! This module must not know where memory comes from.

use leasehold_alloc::{AllocStats, Allocator, Buffer, Layout, On};
use leasehold_core::{BufferHandle, Lease, Result};

/// The buffers of one kind of memory: allocation, look-up, life cycle, statistics.
#[derive(Clone, Copy)]
pub struct BufferManager<'a> {
    allocator: &'a Allocator,
}

impl<'a> BufferManager<'a> {
    pub(crate) fn new(allocator: &'a Allocator) -> Self {
        Self { allocator }
    }

    /// Allocates a buffer that is ready for the stream of `on`. May ask the system for memory.
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    pub fn allocate(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        self.allocator.alloc(layout, on)
    }

    /// Drops a lease on a buffer. Never blocks.
    pub fn free(&self, buffer: Lease<Buffer>) {
        drop(buffer);
    }

    /// A lease on the handle's buffer.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    pub fn lease(&self, buffer: BufferHandle) -> Result<Lease<Buffer>> {
        self.allocator.lease(buffer)
    }

    /// Whether the handle's buffer is alive: one load.
    #[must_use]
    pub fn is_alive(&self, buffer: BufferHandle) -> bool {
        self.allocator.is_alive(buffer)
    }

    /// Gives free memory back to the system until at most `keep` bytes are kept. Returns the number
    /// of bytes given back.
    ///
    /// # Errors
    /// An error of the system.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        self.allocator.trim(keep)
    }

    /// The allocator's statistics.
    #[must_use]
    pub fn stats(&self) -> AllocStats {
        self.allocator.stats()
    }
}

impl std::fmt::Debug for BufferManager<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BufferManager").field("live", &self.allocator.stats().live).finish()
    }
}
