//! Streams without a device, whose work is over when somebody says so: for tests, replays and
//! benchmarks.
//!
//! Must not know allocators.

use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Mutex, OnceLock};
use leasehold_core::{Publisher, Result, Timeline, TimelineOwner, TimelineSource, Timepoint};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A stream without a device: its epochs complete `lag` operations of its replay later, or when the
/// host waits.
pub struct VirtualStream {
    owner: Arc<TimelineOwner>,
    host_waits: AtomicU64,
}

/// The waits of virtual streams, by timeline: from which value on, and for which timepoint.
type Waits = Mutex<BTreeMap<u16, Vec<(u64, Timepoint)>>>;
/// Made by the first wait, so that a replay without waits takes no lock.
static WAITS: OnceLock<Waits> = OnceLock::new();

/// The virtual streams that live, by timeline.
type Owners = Mutex<BTreeMap<u16, Weak<TimelineOwner>>>;
static OWNERS: Owners = Mutex::new(BTreeMap::new());

/// Lets virtual time pass until a timepoint is over: first whatever its stream was made to wait for
/// before it. Blocks for a timepoint of a stream that is not virtual.
pub fn pass(point: Timepoint) {
    let owner = OWNERS.lock().get(&point.timeline_id().get()).and_then(Weak::upgrade);
    let Some(owner) = owner else {
        let _ = point.timeline().wait(point.value(), None);
        return;
    };
    if let Some(waits) = WAITS.get() {
        let mut first = Vec::new();
        if let Some(list) = waits.lock().get_mut(&point.timeline_id().get()) {
            list.retain(|w| {
                if w.0 <= point.value() {
                    first.push(w.1);
                }
                w.0 > point.value()
            });
        }
        first.into_iter().for_each(pass);
    }
    owner.complete(point.value());
}

impl VirtualStream {
    /// A stream of its own.
    ///
    /// # Errors
    /// `OutOfMemory` when all timelines are in use.
    pub fn new() -> Result<Self> {
        let owner = Arc::new(TimelineOwner::take()?);
        let timeline = owner.timeline();
        owner.set_publisher(Some(Arc::new(move |value, _| {
            pass(timeline.at(value));
            Ok(())
        })));
        OWNERS.lock().insert(owner.timeline().id().get(), Arc::downgrade(&owner));
        Ok(Self { owner, host_waits: AtomicU64::new(0) })
    }

    /// From now on a wait for it asks `publisher` first. `None`: nothing is over before somebody
    /// says so.
    pub fn on_wait(&self, publisher: Option<Publisher>) {
        self.owner.set_publisher(publisher);
    }

    /// Submits nothing, and returns its timepoint.
    ///
    /// # Errors
    /// `InvalidState` when the timeline's values are used up.
    pub fn submit(&self) -> Result<Timepoint> {
        let value = self.owner.advance()?;
        Ok(self.owner.timeline().at(value))
    }

    /// Says that everything up to `value` is over, whatever the stream was made to wait for.
    pub fn complete(&self, value: u64) {
        self.owner.complete(value);
    }

    /// How often the host waited for it.
    pub fn host_waits(&self) -> u64 {
        self.host_waits.load(Ordering::Relaxed)
    }
}

impl Drop for VirtualStream {
    fn drop(&mut self) {
        pass(self.owner.timeline().now());
        OWNERS.lock().remove(&self.owner.timeline().id().get());
    }
}

// SAFETY: nothing that is submitted touches memory, so every value is over at all times.
unsafe impl TimelineSource for VirtualStream {
    fn timeline(&self) -> &'static Timeline {
        self.owner.timeline()
    }
    fn signal(&self) -> Result<u64> {
        Ok(self.owner.timeline().submitted())
    }
    fn refresh(&self) -> Result<u64> {
        Ok(self.owner.timeline().completed())
    }
    fn wait(&self, on: Timepoint) -> Result<()> {
        let timeline = self.owner.timeline();
        self.owner.learn(on);
        let waits = WAITS.get_or_init(|| Mutex::new(BTreeMap::new()));
        waits.lock().entry(timeline.id().get()).or_default().push((timeline.submitted() + 1, on));
        Ok(())
    }
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.host_waits.fetch_add(1, Ordering::Relaxed);
        self.owner.timeline().wait(value, timeout)
    }
}
