//! Host timelines: timelines that the host signals. On this device a host timeline has no object
//! behind it. This module records the values that streams wait for before they are signalled.
//!
//! This module must not know who waits.

use leasehold_core::sync::Mutex;
use leasehold_core::{Result, Timeline, TimelineId, Timepoint};
use leasehold_engine::host_timeline as shared;

/// Timepoints that streams wait for before they are submitted.
#[derive(Default)]
pub struct HostTimelineWaits(Mutex<Vec<Timepoint>>);

impl HostTimelineWaits {
    /// Records a wait. A timepoint that is submitted needs no record.
    #[inline]
    pub(crate) fn note(&self, point: Timepoint) {
        if point.value() > point.timeline().submitted() {
            self.note_slow(point);
        }
    }

    #[cold]
    fn note_slow(&self, point: Timepoint) {
        let mut points = self.0.lock();
        points.retain(|p| p.value() > p.timeline().completed());
        points.push(point);
    }

    /// Removes a timeline's records, and returns the largest value that a stream waits for.
    fn take(&self, timeline: TimelineId) -> Option<u64> {
        let mut points = self.0.lock();
        let most = points.iter().filter(|p| p.timeline_id() == timeline).map(|p| p.value()).max();
        points.retain(|p| p.timeline_id() != timeline);
        most
    }
}

impl shared::HostSignals for HostTimelineWaits {
    type Native = ();

    fn create(&self, _: &'static Timeline) -> Result<()> {
        Ok(())
    }

    fn destroy(&self, _: &'static Timeline, (): &()) {}

    fn is_awaited(&self, timeline: &'static Timeline, (): &()) -> bool {
        self.take(timeline.id()).is_some_and(|value| value > timeline.completed())
    }

    /// A waiting worker sleeps on the timeline, which wakes it.
    fn resume(&self, _: &'static Timeline, _: u64) {}
}

/// A host timeline.
pub type HostTimelineState = shared::HostTimelineState<HostTimelineWaits>;

/// Owns the host timelines of a device.
pub type HostTimelineManager = shared::HostTimelineManager<HostTimelineWaits>;
