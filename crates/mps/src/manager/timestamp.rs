//! Timestamps of the device, by counter samples.
//!
//! This module must not know when timestamps are written.

use super::pool::PoolOf;
use crate::engine::core::Streams;
use leasehold_core::sync::Arc;
use leasehold_core::{Handle, Lease, PoolConfig, Recycle, Resource, Result, tags};
use leasehold_hal::TimestampQuery;

/// The timestamps of a device, as their pool makes them.
pub struct Timestamps(Arc<Streams>);

impl Resource for Timestamps {
    type Payload = TimestampQuery;
    type Request<'a> = ();
    const NAME: &'static str = "timestamp";

    fn create(&self, _: Handle<tags::TimestampQuery>, (): &()) -> Result<TimestampQuery> {
        self.0.samples.take().map(TimestampQuery::new)
    }

    fn recycle(&self, timestamp: &mut TimestampQuery) -> Recycle {
        timestamp.clear();
        Recycle::Keep
    }

    fn destroy(&self, timestamp: TimestampQuery) {
        self.0.samples.give_back(timestamp.native());
    }
}

/// Owns the timestamps of a device.
#[doc(alias = "MpsTimestampManager")]
pub type TimestampManager = PoolOf<Timestamps>;

impl TimestampManager {
    pub(crate) fn of(streams: &Arc<Streams>) -> Result<Self> {
        Self::over(Timestamps(streams.clone()), PoolConfig::default())
    }

    /// Acquires a timestamp that was not written. If no timestamp is idle, the call may block on
    /// the driver.
    ///
    /// # Errors
    /// `Unsupported` on a device that samples no timestamps at the boundaries of a pass; a driver
    /// error.
    pub fn acquire(&self) -> Result<Lease<TimestampQuery>> {
        self.manager.acquire(&())
    }
}
