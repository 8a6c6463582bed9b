//! Events: the pool of timestamps. On this device an event is a timepoint, which needs no owner,
//! and a timestamp, which this pool owns.
//!
//! This module must not know when timepoints are written.

use leasehold_core::{
    Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result, tags,
};
use leasehold_hal::TimestampQuery;

struct Timestamps;

impl Resource for Timestamps {
    type Payload = TimestampQuery;
    type Request<'a> = ();
    const NAME: &'static str = "timestamp";

    fn create(&self, _: Handle<tags::TimestampQuery>, (): &()) -> Result<TimestampQuery> {
        Ok(TimestampQuery::new(0))
    }

    fn recycle(&self, timestamp: &mut TimestampQuery) -> Recycle {
        timestamp.clear();
        Recycle::Keep
    }
}

/// Owns the timestamps of a device.
#[derive(Debug)]
pub struct EventManager {
    manager: PoolManager<Timestamps>,
}

impl EventManager {
    pub(crate) fn new() -> Result<Self> {
        let manager = PoolManager::new();
        manager
            .configure(Timestamps, PoolConfig { thread_cells: true, ..PoolConfig::default() })?;
        Ok(Self { manager })
    }

    /// Acquires a timestamp that was not written.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn acquire(&self) -> Result<Lease<TimestampQuery>> {
        self.manager.acquire(&())
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
