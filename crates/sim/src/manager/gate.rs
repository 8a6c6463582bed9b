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
    Error, Fate, Handle, HostLine, Lease, Line, PoolConfig, PoolManager, PoolStats, Resource, Result, Tagged, tags,
};
use std::fmt;
use std::marker::PhantomPinned;

/// A host timeline.
pub struct GateState {
    common: Arc<Common>,
    signals: HostLine,
    semaphore: SemaphoreId,
    /// The state must not be moved out of its manager's pool.
    _place: PhantomPinned,
}

impl GateState {
    /// The timeline.
    #[inline]
    pub fn line(&self) -> &'static Line {
        self.signals.line()
    }

    pub(crate) fn common(&self) -> &Common {
        &self.common
    }

    /// Signals the value.
    pub(crate) fn raise(&self, value: u64) -> Result<()> {
        self.signals.raise_with(value, || self.common.machine.semaphore_signal(self.semaphore, value))?;
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

impl Tagged for GateState {
    type Tag = tags::Gate;
}

impl fmt::Debug for GateState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GateState({:?})", self.line())
    }
}

struct Gates(Arc<Common>);

impl Resource for Gates {
    type Payload = GateState;
    type Request<'a> = ();
    const NAME: &'static str = "gate";

    fn create(&self, _: Handle<tags::Gate>, (): &()) -> Result<GateState> {
        let signals = HostLine::take()?;
        let semaphore = self.0.semaphore(signals.line())?;
        Ok(GateState { common: self.0.clone(), signals, semaphore, _place: PhantomPinned })
    }

    fn recycle(&self, gate: &mut GateState) -> Fate {
        if self.0.machine.semaphore_is_awaited(gate.semaphore).unwrap_or(false) {
            gate.fail(Error::state("the gate was dropped before the value was signalled"));
        }
        Fate::Destroy
    }

    fn destroy(&self, gate: GateState) {
        self.0.forget(gate.line(), gate.semaphore);
    }
}

/// Owns the host timelines of a device.
pub struct GateManager {
    manager: PoolManager<Gates>,
}

impl GateManager {
    pub(crate) fn new(common: Arc<Common>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Gates(common), PoolConfig::default())?;
        Ok(Self { manager })
    }

    /// Takes a host timeline.
    ///
    /// # Errors
    /// `OutOfMemory` without timelines; an error of the machine.
    pub fn acquire(&self) -> Result<Lease<GateState>> {
        self.manager.acquire(&())
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }
}

impl fmt::Debug for GateManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GateManager").field(&self.stats()).finish()
    }
}
