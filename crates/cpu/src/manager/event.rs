//! Events: on this device an event is a point of a line, which nobody has to own, and a time stamp, which is owned here.
//!
//! This module must not know when stamps are written.

use leasehold_core::{Error, Fate, Handle, Lease, PoolConfig, PoolManager, PoolStats, Resource, Result, tags};
use leasehold_hal::Timestamp;
use std::time::Duration;

struct Timestamps;

impl Resource for Timestamps {
    type Payload = Timestamp;
    type Request<'a> = ();
    const NAME: &'static str = "timestamp";

    fn create(&self, _: Handle<tags::Timestamp>, (): &()) -> Result<Timestamp> {
        Ok(Timestamp::new(0))
    }

    fn recycle(&self, stamp: &mut Timestamp) -> Fate {
        stamp.clear();
        Fate::Keep
    }
}

/// Owns the time stamps of a device.
#[derive(Debug)]
pub struct EventManager {
    manager: PoolManager<Timestamps>,
}

impl EventManager {
    pub(crate) fn new() -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Timestamps, PoolConfig { thread_cells: true, ..PoolConfig::default() })?;
        Ok(Self { manager })
    }

    /// A time stamp that was not written.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn acquire(&self) -> Result<Lease<Timestamp>> {
        self.manager.acquire(&())
    }

    /// The time between two stamps; zero when they were written in the other order.
    ///
    /// # Errors
    /// `InvalidState` for a stamp that was not written.
    pub fn elapsed(&self, start: &Timestamp, end: &Timestamp) -> Result<Duration> {
        match (start.get(), end.get()) {
            (Some(from), Some(to)) => Ok(Duration::from_nanos(to.saturating_sub(from))),
            _ => Err(Error::state("a time stamp that was not written yet")),
        }
    }

    /// What the pool did so far.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Ends the manager.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}
