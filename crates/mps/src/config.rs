//! The configuration of the Metal backend.

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
}

impl Default for MpsConfig {
    fn default() -> Self {
        Self { queues: 1, command_buffers: 1024 }
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

    /// Checks the values.
    ///
    /// # Errors
    /// `InvalidArgument`, with the value that is out of range.
    pub fn validate(&self) -> Result<()> {
        let Self { queues, command_buffers } = *self;
        if !(1..=Self::QUEUES_MAX).contains(&queues) {
            return Err(Error::invalid(format!(
                "{queues} command queues: want 1 to {}",
                Self::QUEUES_MAX
            )));
        }
        if !(1..=Self::COMMAND_BUFFERS_MAX).contains(&command_buffers) {
            return Err(Error::invalid(format!(
                "{command_buffers} command buffers of a queue: want 1 to {}",
                Self::COMMAND_BUFFERS_MAX
            )));
        }
        Ok(())
    }
}
