//! Host timelines: timelines that the host signals.
//!
//! A host timeline begins at the value that its line had reached: its first value is
//! [`Line::completed`], usually 0. This module records the values that streams wait for before they
//! are signalled. If a host timeline is dropped while a stream waits for it, it fails. So no waiter
//! hangs, and the line is not lent again.
//!
//! This module must not know who waits.

use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Fate, Handle, HostLine, Lease, Line, LineId, Point, PoolConfig, PoolManager, PoolStats, Resource, Result,
    Tagged, tags,
};
use std::fmt;
use std::marker::PhantomPinned;

/// Timepoints that streams wait for before they are submitted.
#[derive(Default)]
pub(crate) struct GateWaits(Mutex<Vec<Point>>);

impl GateWaits {
    /// Records a wait. A timepoint that is submitted needs no record.
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

    /// Removes a line's records, and returns the largest value that a stream waits for.
    fn take(&self, line: LineId) -> Option<u64> {
        let mut points = self.0.lock();
        let most = points.iter().filter(|p| p.line_id() == line).map(|p| p.value()).max();
        points.retain(|p| p.line_id() != line);
        most
    }
}

/// A host timeline.
pub struct GateState {
    signals: HostLine,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl GateState {
    /// The timeline.
    #[inline]
    pub fn line(&self) -> &'static Line {
        self.signals.line()
    }

    /// Signals the value.
    pub(crate) fn raise(&self, value: u64) -> Result<()> {
        self.signals.raise(value)
    }

    /// Fails all values that were not signalled.
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

/// Owns the host timelines of a device.
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
