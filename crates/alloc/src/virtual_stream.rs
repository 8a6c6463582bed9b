//! Streams without a device, whose work is over when somebody says so: for tests, replays and benchmarks.
//!
//! Must not know allocators. Builds under loom too.

use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Mutex, OnceLock};
use leasehold_core::{Line, LineOwner, Point, Result, Timeline};
use std::collections::BTreeMap;
use std::time::Duration;

/// A stream without a device: its epochs complete `lag` operations of its replay later, or when the host waits.
pub struct VirtualStream {
    owner: LineOwner,
    host_waits: AtomicU64,
}

/// What virtual streams wait for, by line: from which value on, and for which point.
type Waits = Mutex<BTreeMap<u16, Vec<(u64, Point)>>>;
/// Made by the first wait, so that a replay without waits takes no lock. (Not a plain static: loom's locks are made at run time.)
static WAITS: OnceLock<Waits> = OnceLock::new();

/// Lets virtual time pass until a point is over: first whatever its stream was made to wait for before it.
pub fn pass(point: Point) {
    if let Some(waits) = WAITS.get() {
        let mut first = Vec::new();
        if let Some(list) = waits.lock().get_mut(&point.line_id().get()) {
            list.retain(|w| {
                if w.0 <= point.value() {
                    first.push(w.1);
                }
                w.0 > point.value()
            });
        }
        first.into_iter().for_each(pass);
    }
    point.line().complete(point.value());
}

impl VirtualStream {
    /// A stream of its own.
    ///
    /// # Errors
    /// `OutOfMemory` when all lines are in use.
    pub fn new() -> Result<Self> {
        Ok(Self { owner: LineOwner::take()?, host_waits: AtomicU64::new(0) })
    }

    /// Submits nothing, and returns its point.
    ///
    /// # Errors
    /// `InvalidState` when the line's values are used up.
    pub fn submit(&self) -> Result<Point> {
        let line = self.owner.line();
        let value = line.advance()?;
        Ok(line.at(value))
    }

    /// How often the host waited for it.
    pub fn host_waits(&self) -> u64 {
        self.host_waits.load(Ordering::Relaxed)
    }
}

impl Drop for VirtualStream {
    fn drop(&mut self) {
        pass(self.owner.line().now());
    }
}

impl Timeline for VirtualStream {
    fn line(&self) -> &'static Line {
        self.owner.line()
    }
    fn signal(&self) -> Result<u64> {
        Ok(self.owner.line().submitted())
    }
    fn refresh(&self) -> Result<u64> {
        Ok(self.owner.line().completed())
    }
    fn wait(&self, on: Point) -> Result<()> {
        let line = self.owner.line();
        line.learn(on);
        let waits = WAITS.get_or_init(|| Mutex::new(BTreeMap::new()));
        waits.lock().entry(line.id().get()).or_default().push((line.submitted() + 1, on));
        Ok(())
    }
    fn wait_host(&self, value: u64, _: Option<Duration>) -> Result<()> {
        self.host_waits.fetch_add(1, Ordering::Relaxed);
        pass(self.owner.line().at(value));
        Ok(())
    }
}
