//! Timestamps: events of the machine with their time.
//!
//! This module must not know when timepoints are written.

use crate::machine::{EventId, Machine};
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result, tags,
};
use leasehold_hal::TimestampQuery;
use std::fmt;
use std::time::Duration;

struct Timestamps {
    machine: Machine,
    device: u32,
}

impl Resource for Timestamps {
    type Payload = TimestampQuery;
    type Request<'a> = ();
    const NAME: &'static str = "timestamp";

    fn create(&self, _: Handle<tags::TimestampQuery>, (): &()) -> Result<TimestampQuery> {
        Ok(TimestampQuery::new(self.machine.event_create(self.device, true)?.0))
    }

    fn recycle(&self, timestamp: &mut TimestampQuery) -> Recycle {
        match self.machine.event_reset(EventId(timestamp.native())) {
            Ok(()) => Recycle::Keep,
            Err(_) => Recycle::Destroy,
        }
    }

    fn destroy(&self, timestamp: TimestampQuery) {
        // The call fails only if the event does not exist, which is the desired state.
        let _ = self.machine.event_destroy(EventId(timestamp.native()));
    }
}

/// Owns the timestamps of a device.
pub struct EventManager {
    machine: Machine,
    manager: PoolManager<Timestamps>,
}

impl EventManager {
    pub(crate) fn new(machine: &Machine, device: u32) -> Result<Self> {
        let manager = PoolManager::new();
        manager
            .configure(Timestamps { machine: machine.clone(), device }, PoolConfig::default())?;
        Ok(Self { machine: machine.clone(), manager })
    }

    /// A timestamp without a time.
    ///
    /// # Errors
    /// `OutOfMemory`; an error of the machine.
    pub fn acquire(&self) -> Result<Lease<TimestampQuery>> {
        self.manager.acquire(&())
    }

    /// The virtual time between two timepoints; zero if `end` was written first.
    ///
    /// # Errors
    /// `InvalidState` for a timepoint that was not written.
    pub fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration> {
        let time = |timestamp: &TimestampQuery| {
            let time = self.machine.event_time(EventId(timestamp.native()))?;
            time.ok_or_else(|| Error::state("a timestamp that was not written yet"))
        };
        let (from, to) = (time(start)?, time(end)?);
        Ok(Duration::from_nanos(to.saturating_sub(from)))
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }
}

impl fmt::Debug for EventManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EventManager").field(&self.stats()).finish()
    }
}
