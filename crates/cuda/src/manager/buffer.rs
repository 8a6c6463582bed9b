//! Buffers: allocation and freeing, through a device's allocator. The allocator's block table is
//! the pool of buffers; no second pool exists.
//!
//! This module must not know how blocks are placed.

use crate::allocator::Memory;
use leasehold_alloc::Allocator;
use leasehold_core::Result;
use leasehold_core::sync::Arc;
use leasehold_hal::MemoryKind;
use leasehold_hal::engine::buffers::Buffers;
use std::fmt;
use std::ops::Deref;

/// One kind of memory of a device.
pub struct KindOfMemory {
    memory: Arc<Memory>,
    kind: MemoryKind,
}

impl leasehold_hal::engine::buffers::Memory for KindOfMemory {
    fn existing(&self) -> Option<&Allocator> {
        self.memory.existing(self.kind)
    }

    fn allocator(&self) -> Result<&Allocator> {
        self.memory.of(self.kind)
    }
}

/// Owns the buffers of one kind of memory of a device: allocation, look-up, life cycle, statistics.
///
/// All contexts of a device share its memory. The first buffer makes the allocator.
#[doc(alias = "CudaBufferManager")]
pub struct BufferManager {
    buffers: Buffers<KindOfMemory>,
    kind: MemoryKind,
    #[cfg(feature = "test-hooks")]
    for_test: bool,
}

impl BufferManager {
    pub(crate) fn new(memory: Arc<Memory>, kind: MemoryKind) -> Self {
        Self {
            buffers: Buffers::new(KindOfMemory { memory, kind }),
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
        let memory = Memory::for_test(ops, device)?;
        memory.check(kind)?;
        Ok(Self { for_test: true, ..Self::new(memory, kind) })
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
}

impl Deref for BufferManager {
    type Target = Buffers<KindOfMemory>;

    fn deref(&self) -> &Self::Target {
        &self.buffers
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
