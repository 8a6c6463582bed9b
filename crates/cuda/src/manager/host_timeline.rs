//! Host timelines: timelines that the host signals. A host timeline uses no object of the driver.
//! Streams that wait for one hold their work back, and a signal resumes these streams at once.
//!
//! A host timeline begins at the value that its timeline had reached: its first value is
//! [`Timeline::completed`], usually 0. If a host timeline is dropped while a stream waits for it,
//! it fails. So no waiter hangs, and the timeline is not lent again.
//!
//! This module must not know how streams wait.

use crate::engine::shared::{Origin, Shared};
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, HostTimelineOwner, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource,
    Result, Tagged, Timeline, tags,
};
use std::fmt;
use std::marker::PhantomPinned;

/// A host timeline.
pub struct HostTimelineState {
    signals: HostTimelineOwner,
    shared: Arc<Shared>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl HostTimelineState {
    /// The timeline.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.signals.timeline()
    }

    /// Signals the value and resumes the streams that wait for it.
    pub(crate) fn signal(&self, value: u64) -> Result<()> {
        self.signals.signal(value)?;
        self.shared.wake(self.timeline().id(), value);
        Ok(())
    }

    /// Fails all values that were not signalled, and the streams that wait for them.
    pub(crate) fn fail(&self, cause: Error) {
        if self.signals.fail(cause) {
            self.shared.wake(self.timeline().id(), u64::MAX);
        }
    }
}

impl Drop for HostTimelineState {
    fn drop(&mut self) {
        self.shared.remove_origin(self.signals.timeline());
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

struct HostTimelines(Arc<Shared>);

impl Resource for HostTimelines {
    type Payload = HostTimelineState;
    type Request<'a> = ();
    const NAME: &'static str = "host timeline";

    fn create(&self, _: Handle<tags::HostTimeline>, (): &()) -> Result<HostTimelineState> {
        let signals = HostTimelineOwner::take()?;
        self.0.add_origin(signals.timeline(), Origin::HostTimeline);
        Ok(HostTimelineState { signals, shared: self.0.clone(), _place: PhantomPinned })
    }

    fn recycle(&self, host_timeline: &mut HostTimelineState) -> Recycle {
        let timeline = host_timeline.timeline();
        if self.0.most_waited(timeline.id()).is_some_and(|value| value > timeline.completed()) {
            host_timeline
                .fail(Error::state("the host timeline was dropped before the value was signalled"));
        }
        Recycle::Destroy
    }
}

/// Owns the host timelines of a context.
#[derive(Debug)]
pub struct HostTimelineManager {
    manager: PoolManager<HostTimelines>,
}

impl HostTimelineManager {
    pub(crate) fn new(shared: Arc<Shared>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(HostTimelines(shared), PoolConfig::default())?;
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
