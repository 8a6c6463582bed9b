//! Time stamps: events with timing. Events without are marks, which the engine keeps for its waits.
//!
//! This module must not know when stamps are written.

use crate::driver::ops::NativeEvent;
use crate::engine::core::Core;
use crate::engine::door::Door;
use crate::engine::events::Timestamps;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, PoolConfig, PoolManager, PoolStats, Result};
use leasehold_hal::Timestamp;
use std::time::Duration;

/// Owns the time stamps of a context.
#[doc(alias = "CudaEventManager")]
#[derive(Debug)]
pub struct EventManager {
    door: Arc<Door>,
    manager: PoolManager<Timestamps>,
}

impl EventManager {
    pub(crate) fn new(core: &Core) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Timestamps(core.door.clone()), PoolConfig::default())?;
        Ok(Self { door: core.door.clone(), manager })
    }

    /// A time stamp that was not written. May block on the driver when none is idle.
    ///
    /// # Errors
    /// `OutOfMemory`; the driver's.
    pub fn acquire(&self) -> Result<Lease<Timestamp>> {
        if let Some(loss) = self.door.loss() {
            return Err(loss);
        }
        self.manager.acquire(&())
    }

    /// The time between two stamps; zero when they were written in the other order.
    ///
    /// # Errors
    /// `InvalidState` for a stamp that was not written, or not yet; the driver's.
    pub fn elapsed(&self, start: &Timestamp, end: &Timestamp) -> Result<Duration> {
        if start.get().is_none() || end.get().is_none() {
            return Err(Error::state("a time stamp that was not written yet"));
        }
        let (start, end) = (NativeEvent(start.native), NativeEvent(end.native));
        let nanos = self.door.within(|ops| ops.event_elapsed(start, end))?;
        Ok(Duration::from_nanos(u64::try_from(nanos).unwrap_or(0)))
    }

    /// Gives idle time stamps back to the driver until `keep` are left; says how many went.
    pub fn trim(&self, keep: u64) -> u64 {
        self.manager.trim(keep)
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
