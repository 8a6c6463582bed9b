//! Streams: a pool that recycles idle streams without a failure.
//!
//! A stream that is dropped with work pending goes to the retire list. The watcher publishes the
//! end of its work, and then the pool lends the stream again. A failed stream is destroyed.
//!
//! This module must not know what streams run.

use crate::engine::core::Core;
use crate::engine::stream::StreamCore;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result,
    RetireList, StreamHandle, Tagged, Timeline, tags,
};
use std::fmt;
use std::marker::PhantomPinned;

/// A stream.
pub struct StreamState {
    pub(crate) core: Arc<StreamCore>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl StreamState {
    /// The stream's timeline.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.core.timeline()
    }
}

impl Tagged for StreamState {
    type Tag = tags::Stream;
}

impl fmt::Debug for StreamState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.fmt(f)
    }
}

struct Common {
    retired: RetireList<StreamState>,
    /// The number of streams that exist, including the retired ones.
    count: Mutex<u32>,
}

impl Common {
    fn forget(&self, stream: StreamState) {
        *self.count.lock() -= 1;
        drop(stream);
    }
}

struct Streams {
    core: Arc<Core>,
    common: Arc<Common>,
    limit: u32,
}

impl Resource for Streams {
    type Payload = StreamState;
    /// The priority, in the driver's numbers.
    type Request<'a> = i32;
    const NAME: &'static str = "stream";

    fn create(&self, _: Handle<tags::Stream>, priority: &i32) -> Result<StreamState> {
        let mut again = None;
        self.common.retired.drain(
            |s| s.timeline().is_idle(),
            |s| {
                if again.is_none() && s.core.is_sound() && s.core.priority() == *priority {
                    again = Some(s);
                } else {
                    self.common.forget(s);
                }
            },
        );
        if let Some(stream) = again {
            stream.core.take_up();
            return Ok(stream);
        }
        {
            let mut count = self.common.count.lock();
            if *count >= self.limit {
                let used = u64::from(*count);
                return Err(Error::OverBudget {
                    unit: leasehold_core::Budgeted::Streams,
                    requested: 1,
                    used,
                    limit: u64::from(self.limit),
                });
            }
            *count += 1;
        }
        StreamCore::new(self.core.clone(), *priority)
            .map(|core| StreamState { core, _place: PhantomPinned })
            .inspect_err(|_| {
                *self.common.count.lock() -= 1;
            })
    }

    fn fits(&self, idle: &mut StreamState, priority: &i32) -> bool {
        let fits = idle.core.priority() == *priority;
        if fits {
            idle.core.take_up();
        }
        fits
    }

    fn recycle(&self, stream: &mut StreamState) -> Recycle {
        if stream.core.let_go() { Recycle::Keep } else { Recycle::Destroy }
    }

    fn destroy(&self, stream: StreamState) {
        // The stream may have work pending.
        self.common.retired.push(stream);
    }
}

/// Owns the streams of a context.
#[doc(alias = "CudaStreamManager")]
pub struct StreamManager {
    manager: PoolManager<Streams, i32>,
    common: Arc<Common>,
    core: Arc<Core>,
    /// The lowest and the highest priority, in the driver's numbers.
    range: (i32, i32),
    #[cfg(feature = "test-hooks")]
    for_test: bool,
}

impl StreamManager {
    pub(crate) fn new(core: &Arc<Core>, range: (i32, i32)) -> Result<Self> {
        let common = Arc::new(Common { retired: RetireList::new(), count: Mutex::new(0) });
        let manager = PoolManager::new();
        let limit = core.shared.config.streams;
        manager.configure(
            Streams { core: core.clone(), common: common.clone(), limit },
            PoolConfig { block: 16, ..PoolConfig::default() },
        )?;
        Ok(Self {
            manager,
            common,
            core: core.clone(),
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
        let memory = super::context::memory_for_test(ops, device)?;
        let events = super::event::EventManager::new(memory.context.clone())?;
        let range = memory.context.within(|ops| ops.priority_range())?;
        let (context, shared) = (memory.context.clone(), memory.shared.clone());
        let core =
            Core::new(context, shared, memory.properties.clone(), events.event_pool().clone())?;
        Ok(Self { for_test: true, ..Self::new(&core, range)? })
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
        self.collect();
        self.manager.acquire(&self.native(priority))
    }

    /// The manager's own stream of this priority. The call makes the stream unless it is alive. The
    /// manager keeps the stream until its [release](Self::release).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, priority: i32) -> Result<StreamHandle> {
        self.collect();
        let priority = self.native(priority);
        self.manager.get_or_create(&priority, &priority).map(|stream| stream.handle())
    }

    /// Drops the manager's own lease on a stream. Other holders keep theirs. Never blocks: pending
    /// work continues.
    ///
    /// # Errors
    /// `StaleHandle` for a stream that the manager does not keep.
    pub fn release(&self, stream: StreamHandle) -> Result<()> {
        self.manager.release(stream)
    }

    /// Whether the device has more than one priority.
    #[must_use]
    pub fn has_priorities(&self) -> bool {
        self.range.0 != self.range.1
    }

    /// Destroys retired streams that are idle and cannot be lent again. If none is retired, the
    /// call is one load.
    pub fn collect(&self) {
        self.common
            .retired
            .drain(|s| s.timeline().is_idle() && !s.core.is_sound(), |s| self.common.forget(s));
    }

    /// A lease on the handle's stream.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "getState")]
    pub fn get_state(&self, stream: StreamHandle) -> Result<Lease<StreamState>> {
        self.manager.lease(stream)
    }

    /// Whether the handle's stream is alive: one load.
    pub fn is_alive(&self, stream: StreamHandle) -> bool {
        self.manager.is_alive(stream)
    }

    /// Destroys idle streams until at most `keep` are left. Returns the number of destroyed
    /// streams.
    pub fn trim(&self, keep: u64) -> u64 {
        let ended = self.manager.trim(keep);
        self.common.retired.drain(|s| s.timeline().is_idle(), |s| self.common.forget(s));
        ended
    }

    /// The number of streams that were dropped with pending work or after a failure, and still
    /// exist.
    pub fn retired(&self) -> usize {
        self.common.retired.len()
    }

    /// Publishes the values that the streams have reached. Queries the driver, and does not block.
    pub(crate) fn settle(&self) {
        for stream in self.core.streams() {
            // The outcome of the stream's work does not matter here.
            let _ = stream.refresh();
            if stream.timeline().is_idle() {
                // Dropping the marks lets their context end.
                stream.let_go();
            }
        }
    }

    /// The number of streams with a holder beside the manager.
    pub(crate) fn in_use(&self) -> u64 {
        self.manager.in_use()
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the manager down. Work of dropped streams that the host still holds back fails.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()?;
        self.common.retired.take_all().into_iter().for_each(|s| self.common.forget(s));
        Ok(())
    }
}

impl fmt::Debug for StreamManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamManager")
            .field("streams", &self.manager)
            .field("retired", &self.common.retired)
            .finish()
    }
}
