//! The stream that asks for memory, and how the host waits on its behalf.

use leasehold_core::{Error, PackedTimepoint, Result, Timeline, TimelineSource, Timepoint};
use std::time::Duration;

/// The stream that asks.
#[derive(Clone, Copy)]
pub struct On<'a> {
    /// The stream's timeline. A hit touches nothing else.
    pub timeline: &'static Timeline,
    /// The stream itself, for the slow path: its signals and waits.
    pub source: &'a dyn TimelineSource,
}

impl<'a> On<'a> {
    /// The stream of a timeline.
    pub fn new(source: &'a dyn TimelineSource) -> Self {
        Self { timeline: source.timeline(), source }
    }

    /// Blocks until a timepoint is over.
    pub(crate) fn wait_host(self, point: Timepoint, timeout: Option<Duration>) -> Result<()> {
        if point.timeline_id() == self.timeline.id() {
            self.source.signal()?;
            return self.source.wait_host(point.value(), timeout);
        }
        match point.timeline().wait(point.value(), timeout) {
            // It may be another device's timeline; the work is over either way, and our own driver
            // will tell.
            Err(Error::DeviceLost { .. }) if PackedTimepoint::from(point).has_passed() => Ok(()),
            // Work that only the driver knows of is waited for by its own wait, without a limit.
            Err(Error::InvalidState(_)) if timeout.is_some() => {
                point.timeline().wait(point.value(), None)
            }
            waited => waited,
        }
    }
}
