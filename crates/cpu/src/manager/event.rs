//! Events: the pool of time stamps. On this device an event is a timepoint, which needs no owner,
//! and a time stamp, which this pool owns.
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

    /// Acquires a time stamp that was not written.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn acquire(&self) -> Result<Lease<Timestamp>> {
        self.manager.acquire(&())
    }

    /// The time between two time stamps. The time is zero if `end` was written before `start`.
    ///
    /// # Errors
    /// `InvalidState` for a time stamp that was not written.
    pub fn elapsed(&self, start: &Timestamp, end: &Timestamp) -> Result<Duration> {
        match (start.get(), end.get()) {
            (Some(from), Some(to)) => Ok(Duration::from_nanos(to.saturating_sub(from))),
            _ => Err(Error::state("a time stamp that was not written yet")),
        }
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the manager down.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}
