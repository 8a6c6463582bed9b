//! Events: pools of marks, of a caller's events, and of time stamps. The engine records marks for
//! its waits. A time stamp is an event with timing.
//!
//! This module must not know when events are recorded.

use crate::driver::ops::{EventFlags, NativeEvent};
use crate::engine::door::Door;
pub use crate::engine::events::EventState;
use crate::engine::events::{Events, Marks, Timestamps};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, EventHandle, Lease, PoolConfig, PoolManager, PoolStats, Result};
use leasehold_hal::Timestamp;
use std::time::Duration;

/// Owns the events of a context.
#[doc(alias = "CudaEventManager")]
#[derive(Debug)]
pub struct EventManager {
    door: Arc<Door>,
    events: PoolManager<Events, EventFlags>,
    /// The source of the engine's marks.
    marks: Arc<Marks>,
    timestamps: PoolManager<Timestamps>,
    #[cfg(feature = "test-hooks")]
    for_test: bool,
}

impl EventManager {
    pub(crate) fn new(door: Arc<Door>) -> Result<Self> {
        let events = PoolManager::new();
        events.configure(Events(door.clone()), PoolConfig::default())?;
        let marks = Marks::new(Events(door.clone()), PoolConfig { block: 64, ..PoolConfig::default() })?;
        let timestamps = PoolManager::new();
        timestamps.configure(Timestamps(door.clone()), PoolConfig::default())?;
        Ok(Self {
            door,
            events,
            marks: Arc::new(marks),
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
        let memory = super::context::memory_for_test(ops, device)?;
        Ok(Self { for_test: true, ..Self::new(memory.door.clone())? })
    }

    /// Whether the manager was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.for_test
    }

    /// The pool of the engine's marks.
    pub(crate) fn marks(&self) -> &Arc<Marks> {
        &self.marks
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

    /// Acquires a time stamp that was not written. If no time stamp is idle, the call may block on
    /// the driver.
    ///
    /// # Errors
    /// `OutOfMemory`, or a driver error.
    pub fn timestamp(&self) -> Result<Lease<Timestamp>> {
        self.sound()?;
        self.timestamps.acquire(&())
    }

    fn sound(&self) -> Result<()> {
        self.door.loss().map_or(Ok(()), Err)
    }

    /// The time between two time stamps. The time is zero if `end` was written before `start`.
    ///
    /// # Errors
    /// `InvalidState` for a time stamp that was not written yet, or a driver error.
    ///
    /// # Safety
    /// - Both time stamps are of this manager, and their leases are held.
    pub(crate) unsafe fn elapsed(&self, start: &Timestamp, end: &Timestamp) -> Result<Duration> {
        if start.get().is_none() || end.get().is_none() {
            return Err(Error::state("a time stamp that was not written yet"));
        }
        let (start, end) = (NativeEvent(start.native()), NativeEvent(end.native()));
        // SAFETY: both time stamps are of this device and leased (the caller's promise by the
        // trait's contract).
        let nanos = self.door.within(|ops| unsafe { ops.event_elapsed(start, end) })?;
        Ok(Duration::from_nanos(u64::try_from(nanos).unwrap_or(0)))
    }

    /// Gives idle events, marks and time stamps back to the driver until `keep` of each are left.
    /// Returns the number given back.
    pub fn trim(&self, keep: u64) -> u64 {
        self.events.trim(keep) + self.marks.trim(keep) + self.timestamps.trim(keep)
    }

    /// The number of events with a holder beside the manager.
    pub(crate) fn in_use(&self) -> u64 {
        self.events.in_use()
    }

    /// The statistics of the pool of events.
    pub fn stats(&self) -> PoolStats {
        self.events.stats()
    }

    /// The statistics of the pool of the engine's marks.
    pub fn mark_stats(&self) -> PoolStats {
        self.marks.stats()
    }

    /// The statistics of the pool of time stamps.
    pub fn timestamp_stats(&self) -> PoolStats {
        self.timestamps.stats()
    }

    /// Shuts the manager down. Marks end with the streams that hold them.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        for (resource, strong, stats) in
            [("event", self.in_use(), self.stats()), ("timestamp", self.timestamp_stats().live, self.timestamp_stats())]
        {
            if strong != 0 || stats.weak != 0 {
                return Err(Error::LeasesOutstanding { resource, strong, weak: stats.weak });
            }
        }
        self.timestamps.shutdown()?;
        self.events.shutdown()
    }
}
