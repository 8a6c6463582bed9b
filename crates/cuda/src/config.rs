//! What can be chosen about the backend.
//!
//! This module must not know how any of it is used.

use leasehold_alloc::DebugAids;
use leasehold_core::{Error, Result};

/// Where device memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum MemorySource {
    /// The best that the device has: virtual memory management, else the driver's pools, else plain allocations.
    #[default]
    Auto,
    /// Virtual memory management: addresses and memory apart.
    Vmm,
    /// Segments from the driver's stream-ordered pool.
    Pool,
    /// Segments from `cuMemAlloc`.
    Plain,
}

/// How the host learns what is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum CompletionSource {
    /// Words in pinned memory where streams can write them, else events.
    #[default]
    Auto,
    /// Events.
    Events,
}

/// The settings of the backend. All have defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaConfig {
    /// Streams of a device at a time.
    pub streams: u32,
    /// Where device memory comes from.
    pub memory: MemorySource,
    /// How the host learns what is complete.
    pub completion: CompletionSource,
    /// After so many submissions at the latest their completion is made visible to the host.
    pub signal_every: u32,
    /// No threads of the backend's own: deferred work, host calls and completion are seen to by whoever waits, asks or synchronises. For
    /// tests that must be the same every time; a host call then runs on the thread that waits.
    pub inline: bool,
    /// What looks for wrong uses of memory. All off. The host cannot write device memory, so of the aids for it those that write do nothing.
    pub debug: DebugAids,
    /// Entries of each memory's trace ring; 0 switches it off.
    pub trace_events: usize,
    /// A mistake that tests must find.
    #[cfg(feature = "planted-defects")]
    pub defect: Option<crate::defects::Defect>,
}

impl Default for CudaConfig {
    fn default() -> Self {
        Self {
            streams: 256,
            memory: MemorySource::default(),
            completion: CompletionSource::default(),
            signal_every: 64,
            inline: false,
            debug: DebugAids::default(),
            trace_events: 0,
            #[cfg(feature = "planted-defects")]
            defect: None,
        }
    }
}

impl CudaConfig {
    /// As before, with this many streams at most.
    #[must_use]
    pub fn streams(mut self, streams: u32) -> Self {
        self.streams = streams;
        self
    }

    /// As before, with this source of device memory.
    #[must_use]
    pub fn memory(mut self, memory: MemorySource) -> Self {
        self.memory = memory;
        self
    }

    /// As before, with this way to learn of completion.
    #[must_use]
    pub fn completion(mut self, completion: CompletionSource) -> Self {
        self.completion = completion;
        self
    }

    /// As before, with or without threads of the backend's own.
    #[must_use]
    pub fn inline(mut self, inline: bool) -> Self {
        self.inline = inline;
        self
    }

    /// As before, with these debug aids for memory.
    #[must_use]
    pub fn debug(mut self, aids: DebugAids) -> Self {
        self.debug = aids;
        self
    }

    /// As before, with a trace ring of this many events for each kind of memory.
    #[must_use]
    pub fn trace_events(mut self, events: usize) -> Self {
        self.trace_events = events;
        self
    }

    /// As before, with a mistake that tests must find.
    #[cfg(feature = "planted-defects")]
    #[must_use]
    pub fn defect(mut self, defect: crate::defects::Defect) -> Self {
        self.defect = Some(defect);
        self
    }

    /// Checks the values.
    ///
    /// # Errors
    /// `InvalidArgument` for no streams, and for a signal after no or more than 1,024 submissions.
    pub fn validate(&self) -> Result<()> {
        if self.streams == 0 {
            return Err(Error::invalid("a device without streams can do nothing"));
        }
        if !(1..=1024).contains(&self.signal_every) {
            return Err(Error::invalid(format!("a signal every {} submissions: want 1 to 1,024", self.signal_every)));
        }
        Ok(())
    }

    /// Whether a mistake was planted.
    #[cfg(feature = "planted-defects")]
    #[inline]
    pub(crate) fn has(&self, defect: crate::defects::Defect) -> bool {
        self.defect == Some(defect)
    }
}
