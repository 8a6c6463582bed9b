//! The configuration of the Metal backend.

use crate::driver::types::Storage;
use leasehold_alloc::DebugOptions;
use leasehold_core::{Error, Result};

/// The configuration of the Metal backend.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MpsConfig {
    /// Command queues of a device, 1 to [`QUEUES_MAX`](Self::QUEUES_MAX); 1 by default. Streams
    /// share them, because a process with hundreds of queues fails.
    pub queues: u32,
    /// Uncompleted command buffers of a queue, 1 to 4,096; 1,024 by default. At the limit the
    /// driver blocks.
    pub command_buffers: u32,
    /// The most streams of a device at a time; 256 by default.
    pub streams: u32,
    /// A stream commits its command buffer after this number of dispatches, at least 1; 40 by
    /// default. MLX commits after 20 on phones, 40 on most computers and 50 on the largest; candle
    /// after 50.
    pub dispatches_per_buffer: u32,
    /// A stream commits its command buffer once its dispatches have touched this number of bytes;
    /// 40 MiB by default, as MLX does on most computers.
    pub bytes_per_buffer: u64,
    /// The most submissions of a stream before it commits, at least 1; 256 by default.
    pub signal_every: u32,
    /// The storage of device memory. By default `None`: shared storage on a device with unified
    /// memory, otherwise private storage.
    pub storage: Option<Storage>,
    /// No threads of the backend's own, for deterministic tests; false by default. The thread that
    /// waits, queries or synchronises then does their work.
    pub inline: bool,
    /// Debug checks that detect wrong uses of memory. All are off by default. Checks that write
    /// have an effect on shared storage only.
    pub debug: DebugOptions,
    /// The entries of each memory's trace ring. 0, the default, disables the ring.
    pub trace_events: usize,
}

impl Default for MpsConfig {
    fn default() -> Self {
        Self {
            queues: 1,
            command_buffers: 1024,
            streams: 256,
            dispatches_per_buffer: 40,
            bytes_per_buffer: 40 << 20,
            signal_every: 256,
            storage: None,
            inline: false,
            debug: DebugOptions::default(),
            trace_events: 0,
        }
    }
}

impl MpsConfig {
    /// The most queues of a device.
    pub const QUEUES_MAX: u32 = 8;
    /// The most uncompleted command buffers of a queue.
    const COMMAND_BUFFERS_MAX: u32 = 4096;

    /// Sets the number of queues of a device.
    #[must_use]
    pub fn queues(mut self, queues: u32) -> Self {
        self.queues = queues;
        self
    }

    /// Sets the number of uncompleted command buffers of a queue.
    #[must_use]
    pub fn command_buffers(mut self, command_buffers: u32) -> Self {
        self.command_buffers = command_buffers;
        self
    }

    leasehold_hal::config_setters!(streams inline debug trace_events);

    /// Sets the dispatches and the bytes after which a stream commits its command buffer. One
    /// dispatch means a commit after each submission.
    #[must_use]
    pub fn batch(mut self, dispatches: u32, bytes: u64) -> Self {
        (self.dispatches_per_buffer, self.bytes_per_buffer) = (dispatches, bytes);
        self
    }

    /// Sets the most submissions of a stream before it commits.
    #[must_use]
    pub fn signal_every(mut self, submissions: u32) -> Self {
        self.signal_every = submissions;
        self
    }

    /// Sets the storage of device memory.
    #[must_use]
    pub fn storage(mut self, storage: Storage) -> Self {
        self.storage = Some(storage);
        self
    }

    /// Checks the values.
    ///
    /// # Errors
    /// `InvalidArgument`, with the value that is out of range.
    pub fn validate(&self) -> Result<()> {
        if !(1..=Self::QUEUES_MAX).contains(&self.queues) {
            return Err(Error::invalid(format!(
                "{} command queues: want 1 to {}",
                self.queues,
                Self::QUEUES_MAX
            )));
        }
        if !(1..=Self::COMMAND_BUFFERS_MAX).contains(&self.command_buffers) {
            return Err(Error::invalid(format!(
                "{} command buffers of a queue: want 1 to {}",
                self.command_buffers,
                Self::COMMAND_BUFFERS_MAX
            )));
        }
        if self.dispatches_per_buffer == 0 || self.signal_every == 0 {
            return Err(Error::invalid("a command buffer takes at least one dispatch"));
        }
        if self.streams == 0 {
            return Err(Error::invalid("a device without streams can do nothing"));
        }
        Ok(())
    }
}
