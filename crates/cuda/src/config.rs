//! The configuration of the backend.
//!
//! This module must not know how any of it is used.

use leasehold_alloc::DebugOptions;
use leasehold_core::{Error, Result};

/// The source of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum MemorySource {
    /// The best source of the device: virtual memory management, else the driver's pools, else
    /// plain allocations.
    #[default]
    Auto,
    /// Virtual memory management: address ranges and physical memory are allocated separately.
    Vmm,
    /// Segments from the driver's stream-ordered pool.
    Pool,
    /// Segments from `cuMemAlloc`.
    Plain,
}

/// The means by which the host learns of completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum CompletionSource {
    /// Words in pinned memory if streams can write them, else events.
    #[default]
    Auto,
    /// Events.
    Events,
}

/// The settings of the backend. Every setting has a default.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaConfig {
    /// The most streams of a device at a time; 256 by default.
    pub streams: u32,
    /// The source of device memory.
    /// Default: [`MemorySource::Auto`].
    pub memory: MemorySource,
    /// The means by which the host learns of completion.
    /// Default: [`CompletionSource::Auto`].
    pub completion: CompletionSource,
    /// The most submissions before the host can see their completion without a signal; 64 by
    /// default.
    pub signal_every: u32,
    /// No threads of the backend's own, for deterministic tests; false by default. The thread that
    /// waits, queries or synchronises then handles deferred work, host calls and completion. A host
    /// call runs on the thread that waits.
    pub inline: bool,
    /// Debug checks that detect wrong uses of memory. All are off by default. The host cannot write
    /// device memory, so checks that write have no effect on it.
    pub debug: DebugOptions,
    /// The entries of each memory's trace ring. 0, the default, disables the ring.
    pub trace_events: usize,
}

impl Default for CudaConfig {
    fn default() -> Self {
        Self {
            streams: 256,
            memory: MemorySource::default(),
            completion: CompletionSource::default(),
            signal_every: 64,
            inline: false,
            debug: DebugOptions::default(),
            trace_events: 0,
        }
    }
}

impl CudaConfig {
    leasehold_hal::config_setters!(streams inline debug trace_events);

    /// Sets the source of device memory.
    #[must_use]
    pub fn memory(mut self, memory: MemorySource) -> Self {
        self.memory = memory;
        self
    }

    /// Sets the means by which the host learns of completion.
    #[must_use]
    pub fn completion(mut self, completion: CompletionSource) -> Self {
        self.completion = completion;
        self
    }

    /// Checks the values.
    ///
    /// # Errors
    /// `InvalidArgument` for 0 streams, and for a signal interval outside 1 to 1,024 submissions.
    pub fn validate(&self) -> Result<()> {
        if self.streams == 0 {
            return Err(Error::invalid("a device without streams can do nothing"));
        }
        if !(1..=1024).contains(&self.signal_every) {
            return Err(Error::invalid(format!(
                "a signal every {} submissions: want 1 to 1,024",
                self.signal_every
            )));
        }
        Ok(())
    }
}
