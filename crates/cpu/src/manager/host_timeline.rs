//! Host timelines: timelines that the host signals. On this device a host timeline has no object
//! behind it, and nobody is told of a signal: a waiting worker sleeps on the timeline.
//!
//! This module must not know who waits.

use leasehold_core::{Result, Timeline};
use leasehold_hal::engine::host_timeline as shared;

/// This device's part of its host timelines.
#[derive(Debug)]
pub struct Sleepers;

impl shared::HostSignals for Sleepers {
    type Native = ();

    fn create(&self, _: &'static Timeline) -> Result<()> {
        Ok(())
    }

    fn destroy(&self, _: &'static Timeline, (): &()) {}

    /// The timeline wakes who sleeps on it.
    fn resume(&self, _: &'static Timeline, _: u64) {}
}

/// A host timeline.
pub type HostTimelineState = shared::HostTimelineState<Sleepers>;

/// Owns the host timelines of a device.
pub type HostTimelineManager = shared::HostTimelineManager<Sleepers>;
