//! The timelines that all devices of a backend share, as its host timelines and its foreign streams
//! see them.
//!
//! This module must not know what a stream runs.

use crate::engine::deferred::resume_waiting;
use crate::engine::driver::DriverStream;
use crate::engine::host_timeline::HostSignals;
use crate::engine::state::StreamCore;
use crate::engine::timelines::{Origin, Timelines};
use leasehold_core::{Result, Timeline, Timepoint};

/// The timelines of a backend: their signallers, and the streams that wait for them.
pub type Tables<N> = Timelines<StreamCore<N>>;

impl<N: DriverStream> Tables<N> {
    /// A mark behind all work of a timepoint, for a wait by a stream that the engine does not know.
    /// `None` for a timeline of another backend, and for work that the host holds back.
    ///
    /// # Errors
    /// Those of recording the mark.
    pub fn mark(&self, point: Timepoint) -> Result<Option<N::Mark>> {
        let Some(Origin::Stream(source)) = self.origin(point.timeline_id()) else {
            return Ok(None);
        };
        let Some(source) = source.upgrade() else { return Ok(None) };
        Ok(source.mark_for(point.value())?.map(|(mark, _)| mark))
    }
}

impl<N: DriverStream> HostSignals for Tables<N> {
    /// A host timeline uses no object of the driver: streams that wait for one hold their work
    /// back, and a signal resumes them at once.
    type Native = ();

    fn create(&self, timeline: &'static Timeline) -> Result<()> {
        self.add_origin(timeline, Origin::HostTimeline);
        Ok(())
    }

    fn destroy(&self, timeline: &'static Timeline, (): &()) {
        self.remove_origin(timeline);
    }

    fn resume(&self, timeline: &'static Timeline, value: u64) {
        resume_waiting(self, timeline.id(), value);
    }
}
