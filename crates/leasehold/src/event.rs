//! Events: recorded points, with a device time stamp where asked for.
//!
//! An event names a point that was already submitted, so waiting for it never waits before its signal. A wait binds to the last
//! record before it; recording again does not disturb it.
//!
//! Each record of an event with timing has a time stamp of its own, since several records may be pending at once. A graph owns one
//! for each record in it, and its every launch writes that one again.

use leasehold_core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Fate, Handle, Lease, Point, Resource, Result, Stamp, Tagged, tags};
use leasehold_hal::{Device, DeviceId, Timestamp};
use std::marker::PhantomPinned;

/// How an event is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct EventFlags {
    /// Keeps a device time stamp, so that `elapsed` works. On by default.
    pub timing: bool,
    /// A host thread that waits for the event sleeps at once and leaves its processor to others. Without it, the default, a waiting thread
    /// may spin for some tenths of a millisecond first, which notices the event sooner. The same on every backend.
    pub blocking_sync: bool,
}

impl EventFlags {
    /// With a time stamp.
    pub const TIMING: EventFlags = EventFlags { timing: true, blocking_sync: false };
    /// Without one: cheaper to record and to wait for.
    pub const DISABLE_TIMING: EventFlags = EventFlags { timing: false, blocking_sync: false };
    /// With a time stamp, waited for asleep.
    pub const BLOCKING_SYNC: EventFlags = EventFlags { timing: true, blocking_sync: true };
}

impl Default for EventFlags {
    fn default() -> Self {
        Self::TIMING
    }
}

/// A point of a stream that was marked.
#[doc(alias = "infinirtEvent_t")]
#[derive(Debug)]
pub struct Event {
    pub(crate) stamp: AtomicU64,
    /// How often it was recorded.
    pub(crate) serial: AtomicU32,
    timing: bool,
    /// The last record with its time; for events with timing.
    timed: Mutex<Option<Timed>>,
    pub(crate) blocking: bool,
    pub(crate) device: DeviceId,
    /// The runtime that made it: another one may be of the same device, in another context.
    pub(crate) runtime: u64,
    /// A pool's event stays that pool's.
    _place: PhantomPinned,
}

impl Event {
    /// Whether it keeps a time stamp.
    #[must_use]
    pub fn has_timing(&self) -> bool {
        self.timing
    }

    /// Whether a thread that waits for it sleeps at once.
    #[must_use]
    pub fn is_blocking_sync(&self) -> bool {
        self.blocking
    }

    /// How often it was recorded since it was created.
    #[must_use]
    pub fn serial(&self) -> u32 {
        self.serial.load(Ordering::Acquire)
    }

    /// The device whose runtime made it.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// The point of the last record.
    ///
    /// # Errors
    /// `InvalidState` when it was never recorded.
    pub fn point(&self) -> Result<Point> {
        Stamp::from_bits(self.stamp.load(Ordering::Acquire)).point().ok_or_else(never_recorded)
    }

    /// A time stamp for one more record; `None` without timing.
    #[inline]
    pub(crate) fn fresh_time(&self, device: &dyn Device) -> Result<Option<Lease<Timestamp>>> {
        if self.timing { device.timestamp().map(Some) } else { Ok(None) }
    }

    /// Makes a point the last record, and `time`, which its submission writes, that record's. `launch` is given if that is a graph's.
    pub(crate) fn set_timed(&self, point: Point, time: Lease<Timestamp>, launch: Option<Launch>) {
        let mut timed = self.timed.lock();
        let old = timed.replace(Timed { point, time, launch });
        self.set(point);
        drop(timed);
        // Without the lock: the stamp may go back to its pool.
        drop(old);
    }

    /// Makes a point the last record, of an event without timing.
    pub(crate) fn set(&self, point: Point) {
        self.stamp.store(Stamp::from(point).to_bits(), Ordering::Release);
        self.serial.fetch_add(1, Ordering::AcqRel);
    }

    /// The last record with its time.
    ///
    /// # Errors
    /// `InvalidState` for an event without timing, or that was never recorded.
    pub(crate) fn timed(&self) -> Result<Timed> {
        if !self.timing {
            return Err(Error::state("the event was created without timing"));
        }
        self.timed.lock().clone().ok_or_else(never_recorded)
    }

    /// Whether a graph writes the time of this record again, and has not made that the last record yet.
    pub(crate) fn is_overtaken(&self, record: &Timed) -> bool {
        !record.is_kept() && self.stamp.load(Ordering::Acquire) == Stamp::from(record.point).to_bits()
    }
}

#[cold]
fn never_recorded() -> Error {
    Error::state("the event was never recorded")
}

/// A record with its time.
#[derive(Debug, Clone)]
pub(crate) struct Timed {
    pub(crate) point: Point,
    pub(crate) time: Lease<Timestamp>,
    /// The launch that made it, if a graph did.
    launch: Option<Launch>,
}

impl Timed {
    /// Whether nothing has begun to write the time stamp again, so that what was read of it is this record's.
    pub(crate) fn is_kept(&self) -> bool {
        self.launch.as_ref().is_none_or(|l| l.begun.load(Ordering::Acquire) == l.number)
    }
}

/// One launch of a graph.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    /// The number of the graph's last launch. A launch raises it before it is submitted.
    pub(crate) begun: Arc<AtomicU64>,
    pub(crate) number: u64,
}

impl Tagged for Event {
    type Tag = tags::Event;
}

/// Makes events of one device.
pub(crate) struct Events;

/// Whether the event is to have timing.
///
/// # Errors
/// `Unsupported` on a device without time stamps.
fn timing(request: &EventRequest<'_>) -> Result<bool> {
    if request.flags.timing && !request.device.caps().timestamps {
        return Err(Error::Unsupported(format!("{} has no time stamps", request.device.info().id).into()));
    }
    Ok(request.flags.timing)
}

/// What an event is asked to be, and of which device.
pub(crate) struct EventRequest<'a> {
    pub(crate) device: &'a dyn Device,
    pub(crate) runtime: u64,
    pub(crate) flags: EventFlags,
}

impl Resource for Events {
    type Payload = Event;
    type Request<'a> = EventRequest<'a>;
    const NAME: &'static str = "event";

    fn create(&self, _: Handle<tags::Event>, request: &EventRequest<'_>) -> Result<Event> {
        Ok(Event {
            stamp: AtomicU64::new(0),
            serial: AtomicU32::new(0),
            timing: timing(request)?,
            timed: Mutex::new(None),
            blocking: request.flags.blocking_sync,
            device: request.device.info().id,
            runtime: request.runtime,
            _place: PhantomPinned,
        })
    }

    fn fits(&self, idle: &mut Event, request: &EventRequest<'_>) -> bool {
        match timing(request) {
            Ok(timing) => idle.timing = timing,
            Err(_) => return false,
        }
        idle.blocking = request.flags.blocking_sync;
        true
    }

    fn recycle(&self, event: &mut Event) -> Fate {
        // The time stamp goes back to its own pool: an idle event must not pin its device.
        drop(event.timed.get_mut().take());
        event.stamp.store(0, Ordering::Relaxed);
        event.serial.store(0, Ordering::Relaxed);
        Fate::Keep
    }
}
