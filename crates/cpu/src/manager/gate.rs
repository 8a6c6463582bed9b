//! Gates: timelines that the host signals.
//!
//! A gate begins where its line was left: its first value is [`Line::completed`], usually 0. Values that streams wait for before they are signalled are
//! noted here; a gate that is dropped while a stream waits for it fails, so that nobody hangs and the line is not lent again.
//!
//! This module must not know who waits.

use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Fate, Handle, HostLine, Lease, Line, LineId, Point, PoolConfig, PoolManager, PoolStats, Resource, Result,
    Tagged, tags,
};
use std::fmt;
use std::marker::PhantomPinned;

/// Which values of which lines are waited for although nobody has submitted them yet.
#[derive(Default)]
pub(crate) struct GateWaits(Mutex<Vec<Point>>);

impl GateWaits {
    /// Notes a wait. Nothing to do for a point that is submitted.
    #[inline]
    pub(crate) fn note(&self, point: Point) {
        if point.value() > point.line().submitted() {
            self.note_slow(point);
        }
    }

    #[cold]
    fn note_slow(&self, point: Point) {
        let mut points = self.0.lock();
        points.retain(|p| p.value() > p.line().completed());
        points.push(point);
    }

    /// The largest value of a line that is waited for.
    fn take(&self, line: LineId) -> Option<u64> {
        let mut points = self.0.lock();
        let most = points.iter().filter(|p| p.line_id() == line).map(|p| p.value()).max();
        points.retain(|p| p.line_id() != line);
        most
    }
}

/// A gate.
pub struct GateState {
    signals: HostLine,
    /// Its manager's: nobody swaps it with another one.
    _place: PhantomPinned,
}

impl GateState {
    /// Its line.
    #[inline]
    pub fn line(&self) -> &'static Line {
        self.signals.line()
    }

    /// Raises the value.
    pub(crate) fn raise(&self, value: u64) -> Result<()> {
        self.signals.raise(value)
    }

    /// Fails everything that was not signalled.
    pub(crate) fn fail(&self, cause: Error) {
        self.signals.fail(cause);
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

struct Gates(Arc<GateWaits>);

impl Resource for Gates {
    type Payload = GateState;
    type Request<'a> = ();
    const NAME: &'static str = "gate";

    fn create(&self, _: Handle<tags::Gate>, (): &()) -> Result<GateState> {
        Ok(GateState { signals: HostLine::take()?, _place: PhantomPinned })
    }

    fn recycle(&self, gate: &mut GateState) -> Fate {
        let line = gate.line();
        if self.0.take(line.id()).is_some_and(|value| value > line.completed()) {
            gate.fail(Error::state("the gate was dropped before the value was signalled"));
        }
        Fate::Destroy
    }
}

/// Owns the gates of a device.
#[derive(Debug)]
pub struct GateManager {
    manager: PoolManager<Gates>,
}

impl GateManager {
    pub(crate) fn new(waits: Arc<GateWaits>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Gates(waits), PoolConfig::default())?;
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
