//! Host timelines: timelines that the host signals.
//!
//! A host timeline begins at the value that its timeline had reached: its first value is
//! [`Timeline::completed`], usually 0. This module records the values that streams wait for before
//! they are signalled. If a host timeline is dropped while a stream waits for it, it fails. So no
//! waiter hangs, and the timeline is not lent again.
//!
//! This module must not know who waits.

use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Handle, HostTimelineOwner, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource,
    Result, Tagged, Timeline, TimelineId, Timepoint, tags,
};
use std::fmt;
use std::marker::PhantomPinned;

/// Timepoints that streams wait for before they are submitted.
#[derive(Default)]
pub(crate) struct HostTimelineWaits(Mutex<Vec<Timepoint>>);

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

/// A host timeline.
pub struct HostTimelineState {
    signals: HostTimelineOwner,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl HostTimelineState {
    /// The timeline.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.signals.timeline()
    }

    /// Signals the value.
    pub(crate) fn signal(&self, value: u64) -> Result<()> {
        self.signals.signal(value)
    }

    /// Fails all values that were not signalled.
    pub(crate) fn fail(&self, cause: Error) {
        self.signals.fail(cause);
    }
}

impl Tagged for HostTimelineState {
    type Tag = tags::HostTimeline;
}

impl fmt::Debug for HostTimelineState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTimelineState({:?})", self.timeline())
    }
}

struct HostTimelines(Arc<HostTimelineWaits>);

impl Resource for HostTimelines {
    type Payload = HostTimelineState;
    type Request<'a> = ();
    const NAME: &'static str = "host timeline";

    fn create(&self, _: Handle<tags::HostTimeline>, (): &()) -> Result<HostTimelineState> {
        Ok(HostTimelineState { signals: HostTimelineOwner::take()?, _place: PhantomPinned })
    }

    fn recycle(&self, host_timeline: &mut HostTimelineState) -> Recycle {
        let timeline = host_timeline.timeline();
        if self.0.take(timeline.id()).is_some_and(|value| value > timeline.completed()) {
            host_timeline
                .fail(Error::state("the host timeline was dropped before the value was signalled"));
        }
        Recycle::Destroy
    }
}

/// Owns the host timelines of a device.
#[derive(Debug)]
pub struct HostTimelineManager {
    manager: PoolManager<HostTimelines>,
}

impl HostTimelineManager {
    pub(crate) fn new(waits: Arc<HostTimelineWaits>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(HostTimelines(waits), PoolConfig::default())?;
        Ok(Self { manager })
    }

    /// Makes a host timeline.
    ///
    /// # Errors
    /// `OutOfMemory` without free timelines.
    pub fn acquire(&self) -> Result<Lease<HostTimelineState>> {
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
