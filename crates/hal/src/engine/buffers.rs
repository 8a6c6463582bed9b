//! Buffers: a view over the allocator of one kind of memory. The allocator's block table is the
//! pool of buffers; no second pool exists.
//!
//! This module must not know where memory comes from.

use leasehold_alloc::{AllocStats, Allocator, AllocatorCell, Buffer, Layout, On};
use leasehold_core::{BufferHandle, Error, Lease, Result};
use std::fmt;

/// The allocator of one kind of memory.
pub trait Memory {
    /// The allocator, if it was made.
    fn existing(&self) -> Option<&Allocator>;

    /// The allocator. The first call makes it, and may block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory`; the driver's.
    fn allocator(&self) -> Result<&Allocator>;
}

impl Memory for &Allocator {
    fn existing(&self) -> Option<&Allocator> {
        Some(self)
    }

    fn allocator(&self) -> Result<&Allocator> {
        Ok(self)
    }
}

/// Checks that no buffer of a device is held.
///
/// # Errors
/// `LeasesOutstanding` for the first kind of memory with held buffers.
pub fn outstanding(device: &AllocatorCell, pinned: &AllocatorCell) -> Result<()> {
    for (resource, cell) in [("buffer", device), ("pinned buffer", pinned)] {
        let strong = cell.get().map_or(0, |a| a.stats().live);
        if strong != 0 {
            return Err(Error::LeasesOutstanding { resource, strong, weak: 0 });
        }
    }
    Ok(())
}

/// The buffers of one kind of memory: allocation, look-up, life cycle, statistics.
#[derive(Clone, Copy)]
pub struct Buffers<M> {
    memory: M,
}

impl<M: Memory> Buffers<M> {
    /// The buffers of this memory.
    pub fn new(memory: M) -> Self {
        Self { memory }
    }

    /// The allocator. The first call makes it.
    ///
    /// # Errors
    /// As [`Memory::allocator`].
    pub fn allocator(&self) -> Result<&Allocator> {
        self.memory.allocator()
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
        match self.memory.existing() {
            Some(allocator) => allocator.lease(buffer),
            None => Err(Error::stale("buffer", buffer)),
        }
    }

    /// Whether the handle's buffer is alive: one load.
    #[must_use]
    pub fn is_alive(&self, buffer: BufferHandle) -> bool {
        self.memory.existing().is_some_and(|a| a.is_alive(buffer))
    }

    /// Gives free memory back until at most `keep` bytes are kept. Returns the number of bytes
    /// given back.
    ///
    /// # Errors
    /// The driver's.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        self.memory.existing().map_or(Ok(0), |a| a.trim(keep))
    }

    /// The allocator's statistics.
    #[must_use]
    pub fn stats(&self) -> AllocStats {
        self.memory.existing().map(Allocator::stats).unwrap_or_default()
    }
}

impl<M: Memory> fmt::Debug for Buffers<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffers").field("live", &self.stats().live).finish()
    }
}
