//! Host timelines: timelines that the host signals. A host timeline uses no object of the driver.
//! Streams that wait for one hold their work back, and a signal resumes these streams at once.
//!
//! A host timeline begins at the value that its line had reached: its first value is
//! [`Line::completed`], usually 0. If a host timeline is dropped while a stream waits for it, it
//! fails. So no waiter hangs, and the line is not lent again.
//!
//! This module must not know how streams wait.

use crate::engine::shared::{Origin, Shared};
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Fate, Handle, HostLine, Lease, Line, PoolConfig, PoolManager, PoolStats, Resource, Result, Tagged, tags,
};
use std::fmt;
use std::marker::PhantomPinned;

/// A host timeline.
pub struct GateState {
    signals: HostLine,
    shared: Arc<Shared>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl GateState {
    /// The timeline.
    #[inline]
    pub fn line(&self) -> &'static Line {
        self.signals.line()
    }

    /// Signals the value and resumes the streams that wait for it.
    pub(crate) fn raise(&self, value: u64) -> Result<()> {
        self.signals.raise(value)?;
        self.shared.wake(self.line().id(), value);
        Ok(())
    }

    /// Fails all values that were not signalled, and the streams that wait for them.
    pub(crate) fn fail(&self, cause: Error) {
        if self.signals.fail(cause) {
            self.shared.wake(self.line().id(), u64::MAX);
        }
    }
}

impl Drop for GateState {
    fn drop(&mut self) {
        self.shared.remove_origin(self.signals.line());
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

struct Gates(Arc<Shared>);

impl Resource for Gates {
    type Payload = GateState;
    type Request<'a> = ();
    const NAME: &'static str = "gate";

    fn create(&self, _: Handle<tags::Gate>, (): &()) -> Result<GateState> {
        let signals = HostLine::take()?;
        self.0.add_origin(signals.line(), Origin::Gate);
        Ok(GateState { signals, shared: self.0.clone(), _place: PhantomPinned })
    }

    fn recycle(&self, gate: &mut GateState) -> Fate {
        let line = gate.line();
        if self.0.most_waited(line.id()).is_some_and(|value| value > line.completed()) {
            gate.fail(Error::state("the gate was dropped before the value was signalled"));
        }
        Fate::Destroy
    }
}

/// Owns the host timelines of a context.
#[derive(Debug)]
pub struct GateManager {
    manager: PoolManager<Gates>,
}

impl GateManager {
    pub(crate) fn new(shared: Arc<Shared>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Gates(shared), PoolConfig::default())?;
        Ok(Self { manager })
    }

    /// Makes a host timeline.
    ///
    /// # Errors
    /// `OutOfMemory` without free lines.
    pub fn acquire(&self) -> Result<Lease<GateState>> {
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
