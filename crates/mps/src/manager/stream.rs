//! Streams: a pool that recycles idle streams without a failure. The streams share the command
//! queues.
//!
//! A stream that is dropped with work pending goes to the retire list. The completion thread
//! publishes the end of its work, and then the pool lends the stream again. A failed stream is
//! destroyed.
//!
//! This module must not know what streams run.

use crate::engine::core::Streams;
use crate::engine::stream::MpsStream;
use leasehold_core::sync::Arc;
use leasehold_core::{Lease, Result, StreamHandle};
use leasehold_hal::engine::partitions::StreamKey;
use leasehold_hal::engine::stream_pool::StreamPool;
use std::fmt;
use std::ops::Deref;

/// A stream.
pub type StreamState = leasehold_hal::engine::payload::StreamState<MpsStream>;

/// Owns the streams of a device.
#[doc(alias = "MpsStreamManager")]
pub struct StreamManager {
    streams: StreamPool<StreamState>,
    #[cfg(feature = "test-hooks")]
    for_test: bool,
}

impl StreamManager {
    pub(crate) fn new(streams: &Arc<Streams>) -> Result<Self> {
        let (maker, limit) = (streams.clone(), streams.config().streams);
        let make = move |key: &StreamKey| StreamState::new(&maker, key);
        Ok(Self {
            streams: StreamPool::new(limit, Box::new(make))?,
            #[cfg(feature = "test-hooks")]
            for_test: false,
        })
    }

    /// A manager of the streams of a device, over a driver that a test supplies.
    ///
    /// # Errors
    /// `NotFound`; a driver error.
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "configureForTest")]
    pub fn configure_for_test(
        ops: Arc<dyn crate::driver::ops::MpsSlowOps>,
        device: leasehold_hal::DeviceId,
    ) -> Result<Self> {
        use crate::engine::core::{Common, Core, Sources};
        let device = super::opened::OpenedDevice::one(ops, device)?;
        let config = device.shared.config.clone();
        let libraries = super::library::LibraryManager::new(&device, &config)?;
        let transfers = Arc::new(crate::transfer::Transfers::new(&device, &libraries)?);
        let sources = Sources {
            queues: Arc::new(super::command_queue::CommandQueueManager::new(&device, &config)?),
            events: Arc::new(super::event::EventManager::new(&device, &config)?),
            fences: Arc::new(super::fence::FenceManager::new(&device, &config)?),
        };
        let core = Core::new(&device, sources, &transfers, Common::new(device.ops.clone()))?;
        Ok(Self { for_test: true, ..Self::new(&core.streams())? })
    }

    /// Whether the manager was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.for_test
    }

    /// Acquires a stream: an idle one, or a new one. New streams take the queues in turn.
    ///
    /// # Errors
    /// `OverBudget` beyond the limit of streams; `OutOfMemory`; a driver error.
    pub fn acquire(&self) -> Result<Lease<StreamState>> {
        self.streams.acquire(StreamKey::default())
    }

    /// The manager's own stream. The call makes the stream unless it is alive. The manager keeps
    /// the stream until `release`.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self) -> Result<StreamHandle> {
        self.streams.ensure_alive(StreamKey::default())
    }
}

impl Deref for StreamManager {
    type Target = StreamPool<StreamState>;

    fn deref(&self) -> &Self::Target {
        &self.streams
    }
}

impl fmt::Debug for StreamManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StreamManager").field(&self.streams).finish()
    }
}
