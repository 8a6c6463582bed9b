//! Gates: timelines that the host signals. Nothing of them is the driver's: streams that wait for one hold their work back, and whoever
//! signals goes on with them at once.
//!
//! A gate begins where its line was left: its first value is [`Line::completed`], usually 0. A gate that is dropped while a stream waits for it
//! fails, so that nobody hangs and the line is not lent again.
//!
//! This module must not know how streams wait.

use crate::engine::shared::{Origin, Shared};
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Fate, Handle, HostLine, Lease, Line, PoolConfig, PoolManager, PoolStats, Resource, Result, Tagged, tags,
};
use std::fmt;
use std::marker::PhantomPinned;

/// A gate.
pub struct GateState {
    signals: HostLine,
    shared: Arc<Shared>,
    /// Its manager's: nobody swaps it with another one.
    _place: PhantomPinned,
}

impl GateState {
    /// Its line.
    #[inline]
    pub fn line(&self) -> &'static Line {
        self.signals.line()
    }

    /// Raises the value and goes on with the streams that wait for it.
    pub(crate) fn raise(&self, value: u64) -> Result<()> {
        self.signals.raise(value)?;
        self.shared.wake(self.line().id(), value);
        Ok(())
    }

    /// Fails everything that was not signalled, and the streams that wait for it.
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

/// Owns the gates of a context.
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

    /// A gate.
    ///
    /// # Errors
    /// `OutOfMemory` without lines.
    pub fn acquire(&self) -> Result<Lease<GateState>> {
        self.manager.acquire(&())
    }

    /// What the pool did so far.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Ends the manager.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}
