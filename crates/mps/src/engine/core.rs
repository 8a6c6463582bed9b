//! The state that all streams of a device share.
//!
//! This module must not know operations.

use super::outcome::Skipped;
use super::room::Room;
use super::samples::Samples;
use super::stream::MpsStream;
use crate::config::MpsConfig;
use crate::driver::ops::MpsSlowOps;
use crate::manager::command_queue::{CommandQueueManager, CommandQueueState};
use crate::manager::event::EventManager;
use crate::manager::fence::FenceManager;
use crate::manager::opened::{Holdings, OpenedDevice};
use crate::transfer::Transfers;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::sync::{Arc, OnceLock};
use leasehold_core::{Error, Index, Lease, Result};
use leasehold_hal::DeviceId;
use leasehold_hal::engine::driver::DriverDevice;
use leasehold_hal::engine::staging::Staging;
use leasehold_hal::engine::tables::Tables;
use leasehold_hal::engine::{Engine, EngineConfig};
use std::fmt;
use std::time::Duration;

/// The streams of a device. Dereferences to [`Core`].
pub type Streams = Engine<MpsStream>;

/// The managers whose resources streams lease.
#[derive(Debug, Clone)]
pub(crate) struct Sources {
    pub(crate) queues: Arc<CommandQueueManager>,
    pub(crate) events: Arc<EventManager>,
    pub(crate) fences: Arc<FenceManager>,
}

/// The state that the streams of all devices share.
#[derive(Debug, Clone)]
pub(crate) struct Common {
    /// The timelines of all streams and host timelines.
    pub(crate) tables: Arc<Tables<MpsStream>>,
    /// The signals that the host makes up for.
    pub(crate) skipped: Arc<Skipped>,
}

impl Common {
    pub(crate) fn new(ops: Arc<dyn MpsSlowOps>) -> Self {
        Self { tables: Arc::default(), skipped: Skipped::new(ops) }
    }
}

/// The state that all streams of a device share.
pub struct Core {
    pub(crate) common: Common,
    pub(crate) device: Arc<OpenedDevice>,
    pub(crate) sources: Sources,
    /// The room of each queue.
    rooms: Box<[Arc<Room>]>,
    /// The number of streams so far, which take the queues in turn.
    streams: AtomicU32,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) samples: Samples,
    /// The lists that exist, each with an event. A stream's list may outlive the stream.
    pub(crate) in_flight: Holdings,
    /// The streams that exist, each with a fence and a queue.
    pub(crate) live: Holdings,
    /// Memory of the host for bytes on their way to or from other host memory.
    pub(crate) staging: Staging,
    loss: OnceLock<Error>,
}

impl Core {
    /// Makes the shared state of a device.
    ///
    /// # Errors
    /// `OutOfMemory` without free timelines.
    pub(crate) fn new(
        device: &Arc<OpenedDevice>,
        sources: Sources,
        transfers: &Arc<Transfers>,
        common: Common,
    ) -> Result<Arc<Self>> {
        let config = &device.shared.config;
        Ok(Arc::new(Self {
            common,
            rooms: (0..config.queues).map(|_| Room::new(config.command_buffers)).collect(),
            streams: AtomicU32::new(0),
            transfers: transfers.clone(),
            samples: Samples::new(device),
            in_flight: Holdings::default(),
            live: Holdings::default(),
            staging: Staging::new()?,
            loss: OnceLock::new(),
            device: device.clone(),
            sources,
        }))
    }

    /// The streams of the device, which do not exist yet, and their threads.
    pub(crate) fn streams(self: &Arc<Self>) -> Arc<Streams> {
        let own = self.config();
        let config = EngineConfig::new(own.inline, own.signal_every);
        Engine::new(self.clone(), self.common.tables.clone(), config)
    }

    pub(crate) fn config(&self) -> &MpsConfig {
        &self.device.shared.config
    }

    /// The queue of the next stream, and the queue's room. Does not wait for the device.
    ///
    /// # Errors
    /// A driver error.
    pub(crate) fn queue(&self) -> Result<(Lease<CommandQueueState>, Arc<Room>)> {
        let turn = self.streams.fetch_add(1, Ordering::Relaxed);
        let index = turn % self.sources.queues.count();
        Ok((self.sources.queues.acquire(Index::new(index))?, self.rooms[index as usize].clone()))
    }
}

impl DriverDevice for Core {
    fn id(&self) -> DeviceId {
        self.device.id
    }

    #[inline]
    fn loss(&self) -> Option<Error> {
        self.loss.get().cloned()
    }

    fn note(&self, error: Error) -> Error {
        match error {
            Error::DeviceLost { .. } => self.loss.get_or_init(|| error).clone(),
            other => other,
        }
    }

    fn poll_interval(&self) -> Duration {
        self.device.ops.poll_interval()
    }

    fn kernel_name(&self, native: u64) -> Option<String> {
        self.device.shared.function_name(native)
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("device", &self.device)
            .field("rooms", &self.rooms)
            .finish_non_exhaustive()
    }
}
