//! Time stamps: events of the machine with their time.
//!
//! This module must not know when stamps are written.

use crate::machine::{EventId, Machine};
use leasehold_core::{Error, Fate, Handle, Lease, PoolConfig, PoolManager, PoolStats, Resource, Result, tags};
use leasehold_hal::Timestamp;
use std::fmt;
use std::time::Duration;

struct Timestamps {
    machine: Machine,
    device: u32,
}

impl Resource for Timestamps {
    type Payload = Timestamp;
    type Request<'a> = ();
    const NAME: &'static str = "timestamp";

    fn create(&self, _: Handle<tags::Timestamp>, (): &()) -> Result<Timestamp> {
        Ok(Timestamp::new(self.machine.event_create(self.device, true)?.0))
    }

    fn recycle(&self, stamp: &mut Timestamp) -> Fate {
        match self.machine.event_reset(EventId(stamp.native())) {
            Ok(()) => Fate::Keep,
            Err(_) => Fate::Destroy,
        }
    }

    fn destroy(&self, stamp: Timestamp) {
        // The call fails only if the event does not exist, which is the desired state.
        let _ = self.machine.event_destroy(EventId(stamp.native()));
    }
}

/// Owns the time stamps of a device.
pub struct EventManager {
    machine: Machine,
    manager: PoolManager<Timestamps>,
}

impl EventManager {
    pub(crate) fn new(machine: &Machine, device: u32) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Timestamps { machine: machine.clone(), device }, PoolConfig::default())?;
        Ok(Self { machine: machine.clone(), manager })
    }

    /// A time stamp without a time.
    ///
    /// # Errors
    /// `OutOfMemory`; an error of the machine.
    pub fn acquire(&self) -> Result<Lease<Timestamp>> {
        self.manager.acquire(&())
    }

    /// The virtual time between two stamps; zero if `end` was written first.
    ///
    /// # Errors
    /// `InvalidState` for a stamp that was not written.
    pub fn elapsed(&self, start: &Timestamp, end: &Timestamp) -> Result<Duration> {
        let time = |stamp: &Timestamp| {
            let time = self.machine.event_time(EventId(stamp.native()))?;
            time.ok_or_else(|| Error::state("a time stamp that was not written yet"))
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
