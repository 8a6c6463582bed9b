//! Staging memory: host memory that the device reaches, for bytes on their way to or from memory
//! that it does not reach.
//!
//! This module must not know which operation needs it.

use leasehold_alloc::{Allocator, Buffer, Layout, On};
use leasehold_core::sync::OnceLock;
use leasehold_core::{
    Error, Result, Timeline, TimelineOwner, TimelineSource, Timepoint, UniqueLease,
};
use std::fmt;
use std::time::Duration;

/// Makes the allocator of staging memory at its first use.
pub type StagingSource = Box<dyn Fn() -> Result<Allocator> + Send + Sync>;

/// An address in host memory that the caller of a submission vouches for.
#[derive(Debug, Clone, Copy)]
pub struct HostAddress(pub *mut u8);

// SAFETY: the submitter promised that the memory stays valid and untouched until the value
// completes. Only the one thread that carries the operation out accesses the memory.
unsafe impl Send for HostAddress {}
// SAFETY: a shared reference only copies the address.
unsafe impl Sync for HostAddress {}

/// The staging memory of a device.
pub struct Staging {
    /// The timeline of an owner that never submits: memory taken for this timeline is ready for
    /// every stream.
    nobody: TimelineOwner,
    source: OnceLock<StagingSource>,
}

impl Staging {
    /// Staging memory without a source.
    ///
    /// # Errors
    /// `OutOfMemory` without free timelines.
    pub fn new() -> Result<Self> {
        Ok(Self { nobody: TimelineOwner::take()?, source: OnceLock::new() })
    }

    /// Sets the source. Only the first call has an effect.
    pub fn set_source(&self, source: StagingSource) {
        let _ = self.source.set(source);
    }

    /// Allocates staging memory. May block on the driver.
    ///
    /// No stream uses the memory, and no other thread can get a lease of it. So neither the
    /// device's accesses nor the host's are marked.
    ///
    /// # Errors
    /// `OutOfMemory`, or a driver error.
    pub fn take(&self, bytes: u64) -> Result<UniqueLease<Buffer>> {
        let source = self.source.get();
        let source = source.ok_or_else(|| Error::state("the device has no staging memory yet"))?;
        let nobody = Nobody(self.nobody.timeline());
        source()?.alloc_unique(Layout::new(bytes), On { timeline: nobody.0, source: &nobody })
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Staging(has a source: {})", self.source.get().is_some())
    }
}

/// A timeline without submissions.
struct Nobody(&'static Timeline);

// SAFETY: nothing is ever submitted to this timeline.
unsafe impl TimelineSource for Nobody {
    fn timeline(&self) -> &'static Timeline {
        self.0
    }

    fn signal(&self) -> Result<u64> {
        Ok(self.0.submitted())
    }

    fn refresh(&self) -> Result<u64> {
        Ok(self.0.completed())
    }

    fn wait(&self, _: Timepoint) -> Result<()> {
        Err(Error::Unsupported("this memory must be ready for everybody".into()))
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.0.wait(value, timeout)
    }
}
