//! Host timelines: timelines that the host signals.
//!
//! A host timeline begins at the value that its timeline had reached: its first value is
//! [`Timeline::completed`], usually 0. A host timeline that is dropped fails the values that
//! somebody [may wait for](Timeline::expect), now or later. So no waiter hangs, and no other host
//! timeline's signal stands for them.
//!
//! This module must not know how streams wait.

use crate::HostTimeline;
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, HostTimelineOwner, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource,
    Result, Tagged, Timeline, TimelineSource, Timepoint, tags,
};
use std::fmt;
use std::marker::PhantomPinned;
use std::time::Duration;

/// A backend's part of its host timelines: an object of the driver behind each, if there is one,
/// and the streams that wait.
pub trait HostSignals: Send + Sync + 'static {
    /// The driver's object behind a host timeline; `()` without one.
    type Native: Send + Sync + 'static;

    /// Makes the driver's object for a new host timeline. May block on the driver.
    ///
    /// # Errors
    /// The driver's.
    fn create(&self, timeline: &'static Timeline) -> Result<Self::Native>;

    /// Destroys the driver's object, and removes the records of the host timeline. Must not block.
    fn destroy(&self, timeline: &'static Timeline, native: &Self::Native);

    /// Tells the driver's object the signalled value, before the waiting threads wake. One call at
    /// a time for each host timeline. Must not block.
    ///
    /// # Errors
    /// The driver's. The value is then used up and not complete.
    fn signal(&self, native: &Self::Native, value: u64) -> Result<()> {
        let _ = (native, value);
        Ok(())
    }

    /// Tells the driver's object that no further signal comes. Must not block.
    fn fail(&self, native: &Self::Native, cause: &Error) {
        let _ = (native, cause);
    }

    /// Resumes the streams that wait for a value up to this one. The value is `u64::MAX` after a
    /// failure. The caller holds no lock.
    fn resume(&self, timeline: &'static Timeline, value: u64);

    /// Blocks until a value is over, or fails. The caller checks the timeline afterwards.
    ///
    /// # Errors
    /// As [`TimelineSource::wait_host`].
    fn wait_host(
        &self,
        timeline: &'static Timeline,
        value: u64,
        timeout: Option<Duration>,
    ) -> Result<()> {
        timeline.wait(value, timeout)
    }
}

/// A host timeline.
pub struct HostTimelineState<S: HostSignals> {
    signals: HostTimelineOwner,
    native: S::Native,
    backend: Arc<S>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl<S: HostSignals> HostTimelineState<S> {
    /// The timeline.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.signals.timeline()
    }

    /// Tells the backend of the first failure.
    fn tell(&self, cause: &Error) {
        self.backend.fail(&self.native, cause);
        self.backend.resume(self.timeline(), u64::MAX);
    }
}

impl<S: HostSignals> Drop for HostTimelineState<S> {
    fn drop(&mut self) {
        self.backend.destroy(self.signals.timeline(), &self.native);
    }
}

impl<S: HostSignals> Tagged for HostTimelineState<S> {
    type Tag = tags::HostTimeline;
}

impl<S: HostSignals> fmt::Debug for HostTimelineState<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTimelineState({:?})", self.timeline())
    }
}

// SAFETY: nothing is submitted to a host timeline, and a value is complete once the host signalled
// it. A wait returns `Ok` for such a value only.
unsafe impl<S: HostSignals> TimelineSource for HostTimelineState<S> {
    fn timeline(&self) -> &'static Timeline {
        Self::timeline(self)
    }

    fn signal(&self) -> Result<u64> {
        Ok(Self::timeline(self).submitted())
    }

    fn refresh(&self) -> Result<u64> {
        Ok(Self::timeline(self).completed())
    }

    /// # Errors
    /// `Unsupported`: only the host advances a host timeline.
    fn wait(&self, _: Timepoint) -> Result<()> {
        Err(Error::Unsupported(
            "a host timeline is signalled by the host; it waits for nothing".into(),
        ))
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        let timeline = Self::timeline(self);
        self.backend.wait_host(timeline, value, timeout)?;
        match timeline.check(value)? {
            true => Ok(()),
            false => Err(Error::state("a wait that ended before its value was over")),
        }
    }
}

impl<S: HostSignals> HostTimeline for HostTimelineState<S> {
    fn signal_host(&self, value: u64) -> Result<()> {
        self.signals.signal_with(value, || self.backend.signal(&self.native, value))?;
        self.backend.resume(Self::timeline(self), value);
        Ok(())
    }

    fn fail(&self, cause: Error) {
        if self.signals.fail(cause.clone()) {
            self.tell(&cause);
        }
    }
}

struct HostTimelines<S>(Arc<S>);

impl<S: HostSignals> Resource for HostTimelines<S> {
    type Payload = HostTimelineState<S>;
    type Request<'a> = ();
    const NAME: &'static str = "host timeline";

    fn create(&self, _: Handle<tags::HostTimeline>, (): &()) -> Result<HostTimelineState<S>> {
        let signals = HostTimelineOwner::take()?;
        let native = self.0.create(signals.timeline())?;
        Ok(HostTimelineState { signals, native, backend: self.0.clone(), _place: PhantomPinned })
    }

    fn recycle(&self, host_timeline: &mut HostTimelineState<S>) -> Recycle {
        let cause = Error::state("the host timeline was dropped before the value was signalled");
        if host_timeline.signals.end(cause.clone()) {
            host_timeline.tell(&cause);
        }
        Recycle::Destroy
    }
}

/// Owns the host timelines of a device or context.
pub struct HostTimelineManager<S: HostSignals> {
    manager: PoolManager<HostTimelines<S>>,
}

impl<S: HostSignals> HostTimelineManager<S> {
    /// A manager without host timelines.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(backend: Arc<S>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(HostTimelines(backend), PoolConfig::default())?;
        Ok(Self { manager })
    }

    /// Makes a host timeline. May block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory` without free timelines; the driver's.
    pub fn acquire(&self) -> Result<Lease<HostTimelineState<S>>> {
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

impl<S: HostSignals> fmt::Debug for HostTimelineManager<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostTimelineManager").field(&self.manager.stats()).finish()
    }
}
