//! Host timelines: semaphores that the host signals.
//!
//! A host timeline begins at the completed value of its timeline. If it is dropped while a stream
//! waits for it, it fails. So no stream waits for ever, and no other owner gets the timeline.
//!
//! This module must not know which streams wait.

use super::device::Common;
use crate::machine::SemaphoreId;
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, HostTimelineOwner, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource,
    Result, Tagged, Timeline, tags,
};
use std::fmt;
use std::marker::PhantomPinned;

/// A host timeline.
pub struct HostTimelineState {
    common: Arc<Common>,
    signals: HostTimelineOwner,
    semaphore: SemaphoreId,
    /// The state must not be moved out of its manager's pool.
    _place: PhantomPinned,
}

impl HostTimelineState {
    /// The timeline.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.signals.timeline()
    }

    pub(crate) fn common(&self) -> &Common {
        &self.common
    }

    /// Signals the value.
    pub(crate) fn signal(&self, value: u64) -> Result<()> {
        self.signals
            .signal_with(value, || self.common.machine.semaphore_signal(self.semaphore, value))?;
        self.common.go_on();
        Ok(())
    }

    /// Fails every value that was not signalled.
    pub(crate) fn fail(&self, cause: Error) {
        if self.signals.fail(cause.clone()) {
            // The semaphore exists as long as this state, and no further signal comes.
            let _ = self.common.machine.semaphore_fail(self.semaphore, cause);
            self.common.go_on();
        }
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

struct HostTimelines(Arc<Common>);

impl Resource for HostTimelines {
    type Payload = HostTimelineState;
    type Request<'a> = ();
    const NAME: &'static str = "host timeline";

    fn create(&self, _: Handle<tags::HostTimeline>, (): &()) -> Result<HostTimelineState> {
        let signals = HostTimelineOwner::take()?;
        let semaphore = self.0.semaphore(signals.timeline())?;
        Ok(HostTimelineState { common: self.0.clone(), signals, semaphore, _place: PhantomPinned })
    }

    fn recycle(&self, host_timeline: &mut HostTimelineState) -> Recycle {
        if self.0.machine.semaphore_is_awaited(host_timeline.semaphore).unwrap_or(false) {
            host_timeline
                .fail(Error::state("the host timeline was dropped before the value was signalled"));
        }
        Recycle::Destroy
    }

    fn destroy(&self, host_timeline: HostTimelineState) {
        self.0.forget(host_timeline.timeline(), host_timeline.semaphore);
    }
}

/// Owns the host timelines of a device.
pub struct HostTimelineManager {
    manager: PoolManager<HostTimelines>,
}

impl HostTimelineManager {
    pub(crate) fn new(common: Arc<Common>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(HostTimelines(common), PoolConfig::default())?;
        Ok(Self { manager })
    }

    /// Takes a host timeline.
    ///
    /// # Errors
    /// `OutOfMemory` without timelines; an error of the machine.
    pub fn acquire(&self) -> Result<Lease<HostTimelineState>> {
        self.manager.acquire(&())
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }
}

impl fmt::Debug for HostTimelineManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GateManager").field(&self.stats()).finish()
    }
}
