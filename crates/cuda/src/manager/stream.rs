//! Streams: a pool that recycles idle streams without a failure.
//!
//! A stream that is dropped with work pending goes to the retire list. The completion thread
//! publishes the end of its work, and then the pool lends the stream again. A failed stream is
//! destroyed.
//!
//! This module must not know what streams run.

use crate::engine::core::Streams;
use crate::engine::stream::CudaStream;
use leasehold_core::sync::Arc;
use leasehold_core::{Lease, Result, StreamHandle};
use leasehold_hal::Partition;
use leasehold_hal::engine::partitions::StreamKey;
use leasehold_hal::engine::stream_pool::StreamPool;
use std::fmt;
use std::ops::Deref;

/// A stream.
pub type StreamState = leasehold_hal::engine::payload::StreamState<CudaStream>;

/// Owns the streams of a context.
#[doc(alias = "CudaStreamManager")]
pub struct StreamManager {
    streams: StreamPool<StreamState>,
    /// The lowest and the highest priority, in the driver's numbers.
    range: (i32, i32),
    #[cfg(feature = "test-hooks")]
    for_test: bool,
}

impl StreamManager {
    pub(crate) fn new(core: &Arc<Streams>, range: (i32, i32)) -> Result<Self> {
        let maker = core.clone();
        let make = move |key: &StreamKey| StreamState::new(&maker, key);
        Ok(Self {
            streams: StreamPool::new(core.shared.config.streams, Box::new(make))?,
            range,
            #[cfg(feature = "test-hooks")]
            for_test: false,
        })
    }

    /// A manager of streams in a device's primary context, over a driver that a test supplies.
    ///
    /// # Errors
    /// A driver error.
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "configureForTest")]
    pub fn configure_for_test(
        ops: Arc<dyn crate::driver::ops::CudaSlowOps>,
        device: leasehold_hal::DeviceId,
    ) -> Result<Self> {
        let memory = crate::allocator::Memory::for_test(ops, device)?;
        let events = super::event::EventManager::new(memory.context.clone())?;
        let range = memory.context.within(|ops| ops.priority_range())?;
        let (context, shared) = (memory.context.clone(), memory.shared.clone());
        let core = crate::engine::core::Core::new(
            context,
            shared,
            memory.properties.clone(),
            events.event_pool().clone(),
        )?;
        Ok(Self { for_test: true, ..Self::new(&core.streams(), range)? })
    }

    /// Whether the manager was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.for_test
    }

    /// Translates a priority to the driver's numbers.
    fn native(&self, priority: i32) -> i32 {
        let (lowest, highest) = self.range;
        // The driver's numbers fall as the priority rises.
        priority.saturating_neg().clamp(highest.min(lowest), lowest.max(highest))
    }

    /// Acquires a stream: an idle one, or a new one. A greater priority is more urgent. The
    /// priority is clamped to the device's range.
    ///
    /// # Errors
    /// `OverBudget` beyond the limit of streams; `OutOfMemory`; a driver error.
    pub fn acquire(&self, priority: i32) -> Result<Lease<StreamState>> {
        self.streams.acquire(StreamKey::new(self.native(priority)))
    }

    /// Acquires a new stream on a partition, which the caller has checked to be of this context.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub(crate) fn acquire_on(
        &self,
        priority: i32,
        partition: Option<Lease<Partition>>,
    ) -> Result<Lease<StreamState>> {
        self.streams.acquire(StreamKey { priority: self.native(priority), partition })
    }

    /// The manager's own stream of this priority. The call makes the stream unless it is alive. The
    /// manager keeps the stream until `release`.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, priority: i32) -> Result<StreamHandle> {
        self.streams.ensure_alive(StreamKey::new(self.native(priority)))
    }

    /// Whether the device has more than one priority.
    #[must_use]
    pub fn has_priorities(&self) -> bool {
        self.range.0 != self.range.1
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
