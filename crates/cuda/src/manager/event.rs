//! Events: pools of recorded events, of a caller's events, and of timestamps. The engine records
//! marks for its waits. A timestamp is an event with timing.
//!
//! This module must not know when events are recorded.

use crate::driver::ops::{EventFlags, NativeEvent};
use crate::engine::driver_context::DriverContext;
pub use crate::engine::events::EventState;
use crate::engine::events::{EventPool, Events, Timestamps};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, EventHandle, Lease, PoolConfig, PoolManager, PoolStats, Result};
use leasehold_hal::TimestampQuery;
use std::time::Duration;

/// Owns the events of a context.
#[doc(alias = "CudaEventManager")]
#[derive(Debug)]
pub struct EventManager {
    context: Arc<DriverContext>,
    events: PoolManager<Events, EventFlags>,
    /// The source of the engine's recorded events.
    event_pool: Arc<EventPool>,
    timestamps: PoolManager<Timestamps>,
    #[cfg(feature = "test-hooks")]
    for_test: bool,
}

impl EventManager {
    pub(crate) fn new(context: Arc<DriverContext>) -> Result<Self> {
        let events = PoolManager::new();
        events.configure(Events(context.clone()), PoolConfig::default())?;
        let event_pool = EventPool::new(
            Events(context.clone()),
            PoolConfig { block: 64, ..PoolConfig::default() },
        )?;
        let timestamps = PoolManager::new();
        timestamps.configure(Timestamps(context.clone()), PoolConfig::default())?;
        Ok(Self {
            context,
            events,
            event_pool: Arc::new(event_pool),
            timestamps,
            #[cfg(feature = "test-hooks")]
            for_test: false,
        })
    }

    /// A manager of events in a device's primary context, over a driver that a test supplies.
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
        Ok(Self { for_test: true, ..Self::new(memory.context.clone())? })
    }

    /// Whether the manager was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.for_test
    }

    /// The pool of the engine's recorded events.
    pub(crate) fn event_pool(&self) -> &Arc<EventPool> {
        &self.event_pool
    }

    /// Acquires an event with these flags: an idle one, or a new one. If no event is idle, the call
    /// may block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory`, or a driver error.
    pub fn acquire(&self, flags: EventFlags) -> Result<Lease<EventState>> {
        self.sound()?;
        self.events.acquire(&flags)
    }

    /// The manager's own event with these flags. The call makes the event unless it is alive. The
    /// manager keeps the event until its [release](Self::release).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, flags: EventFlags) -> Result<EventHandle> {
        self.sound()?;
        self.events.get_or_create(&flags, &flags).map(|event| event.handle())
    }

    /// A lease on the handle's event.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "getState")]
    pub fn get_state(&self, event: EventHandle) -> Result<Lease<EventState>> {
        self.events.lease(event)
    }

    /// Whether the handle's event is alive: one load.
    pub fn is_alive(&self, event: EventHandle) -> bool {
        self.events.is_alive(event)
    }

    /// Drops the manager's own lease on an event. Other holders keep theirs.
    ///
    /// # Errors
    /// `StaleHandle` for an event that the manager does not keep.
    pub fn release(&self, event: EventHandle) -> Result<()> {
        self.events.release(event)
    }

    /// Acquires a timestamp that was not written. If no timestamp is idle, the call may block on
    /// the driver.
    ///
    /// # Errors
    /// `OutOfMemory`, or a driver error.
    pub fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        self.sound()?;
        self.timestamps.acquire(&())
    }

    fn sound(&self) -> Result<()> {
        self.context.loss().map_or(Ok(()), Err)
    }

    /// The time between two timestamps. The time is zero if `end` was written before `start`.
    ///
    /// # Errors
    /// `InvalidState` for a timestamp that was not written yet, or a driver error.
    ///
    /// # Safety
    /// - Both timestamps are of this manager, and their leases are held.
    pub(crate) unsafe fn elapsed(
        &self,
        start: &TimestampQuery,
        end: &TimestampQuery,
    ) -> Result<Duration> {
        if start.get().is_none() || end.get().is_none() {
            return Err(Error::state("a timestamp that was not written yet"));
        }
        let (start, end) = (NativeEvent(start.native()), NativeEvent(end.native()));
        // SAFETY: both timestamps are of this device and leased (the caller's promise by the
        // trait's contract).
        let nanos = self.context.within(|ops| unsafe { ops.event_elapsed(start, end) })?;
        Ok(Duration::from_nanos(u64::try_from(nanos).unwrap_or(0)))
    }

    /// Gives idle events, marks and timestamps back to the driver until `keep` of each are left.
    /// Returns the number given back.
    pub fn trim(&self, keep: u64) -> u64 {
        self.events.trim(keep) + self.event_pool.trim(keep) + self.timestamps.trim(keep)
    }

    /// The number of events with a holder beside the manager.
    pub(crate) fn in_use(&self) -> u64 {
        self.events.in_use()
    }

    /// The statistics of the pool of events.
    pub fn stats(&self) -> PoolStats {
        self.events.stats()
    }

    /// The statistics of the pool of the engine's recorded events.
    pub fn event_pool_stats(&self) -> PoolStats {
        self.event_pool.stats()
    }

    /// The statistics of the pool of timestamps.
    pub fn timestamp_stats(&self) -> PoolStats {
        self.timestamps.stats()
    }

    /// Shuts the manager down. Recorded events end with the streams that hold them.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        for (resource, strong, stats) in [
            ("event", self.in_use(), self.stats()),
            ("timestamp", self.timestamp_stats().live, self.timestamp_stats()),
        ] {
            if strong != 0 || stats.weak != 0 {
                return Err(Error::LeasesOutstanding { resource, strong, weak: stats.weak });
            }
        }
        self.timestamps.shutdown()?;
        self.events.shutdown()
    }
}
