//! Host timelines: timelines that the host signals. A host timeline uses no object of the driver.
//! Streams that wait for one hold their work back, and a signal resumes these streams at once.
//!
//! This module must not know how streams wait.

use crate::engine::shared::{Origin, Shared};
use leasehold_core::{Result, Timeline};
use leasehold_engine::host_timeline as shared;

impl shared::HostSignals for Shared {
    type Native = ();

    fn create(&self, timeline: &'static Timeline) -> Result<()> {
        self.add_origin(timeline, Origin::HostTimeline);
        Ok(())
    }

    fn destroy(&self, timeline: &'static Timeline, (): &()) {
        self.remove_origin(timeline);
    }

    fn is_awaited(&self, timeline: &'static Timeline, (): &()) -> bool {
        self.most_waited(timeline.id()).is_some_and(|value| value > timeline.completed())
    }

    fn resume(&self, timeline: &'static Timeline, value: u64) {
        self.wake(timeline.id(), value);
    }
}

/// A host timeline.
pub type HostTimelineState = shared::HostTimelineState<Shared>;

/// Owns the host timelines of a context.
pub type HostTimelineManager = shared::HostTimelineManager<Shared>;
