//! Events: recorded timepoints, with a device timestamp where asked for.
//!
//! An event names a timepoint that was already submitted, so waiting for it never waits before its
//! signal. A wait binds to the last record before it; recording again does not disturb it.
//!
//! Each record of an event with timing has a timestamp of its own, since several records may be
//! pending at once. A graph owns one for each record in it, and its every launch writes that one
//! again.

use crate::runtime::RuntimeInner;
use leasehold_core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Handle, Lease, PackedTimepoint, Recycle, Resource, Result, Tagged, Timepoint, tags,
};
use leasehold_hal::{Device, DeviceId, TimestampQuery};
use std::marker::PhantomPinned;
use std::sync::Weak;
use std::time::Duration;

/// How often an event's time may be overwritten before it was read.
const OVERTAKEN: u32 = 16;

/// How an event is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct EventFlags {
    /// Keeps a device timestamp, so that `elapsed` works. On by default.
    pub timing: bool,
    /// A host thread that waits for the event sleeps at once and leaves its processor to others.
    /// Without it, the default, a waiting thread may spin for some tenths of a millisecond first,
    /// which notices the event sooner. The same on every backend.
    pub blocking_sync: bool,
}

impl EventFlags {
    /// With a timestamp.
    pub const TIMING: EventFlags = EventFlags { timing: true, blocking_sync: false };
    /// Without one: cheaper to record and to wait for.
    pub const DISABLE_TIMING: EventFlags = EventFlags { timing: false, blocking_sync: false };
    /// With a timestamp, waited for asleep.
    pub const BLOCKING_SYNC: EventFlags = EventFlags { timing: true, blocking_sync: true };
}

impl Default for EventFlags {
    fn default() -> Self {
        Self::TIMING
    }
}

/// A timepoint of a stream that was marked. Made by
/// [`Runtime::create_event`](crate::Runtime::create_event), held by leases, and free for reuse with
/// the last one.
///
/// ```
/// use leasehold::{DeviceId, Runtime, View};
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let (start, end) = (runtime.create_event()?, runtime.create_event()?);
/// let (stream, x) = (runtime.stream(), runtime.alloc(1 << 20)?);
/// stream.record(&start)?;
/// stream.fill(x.view(), 7u8)?;
/// stream.record(&end)?;
/// let time = end.elapsed_since(&start)?; // waits for both
/// assert!(end.query()? && time > std::time::Duration::ZERO);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "infinirtEvent_t")]
#[derive(Debug)]
pub struct Event {
    pub(crate) timepoint: AtomicU64,
    /// How often it was recorded.
    pub(crate) serial: AtomicU32,
    timing: bool,
    /// The last record with its time; for events with timing.
    timed: Mutex<Option<Timed>>,
    pub(crate) blocking: bool,
    pub(crate) device: DeviceId,
    /// The runtime that made it: another one may be of the same device, in another context.
    pub(crate) runtime: u64,
    /// The same, to ask its streams.
    pub(crate) owner: Weak<RuntimeInner>,
    /// A pool's event stays that pool's.
    _place: PhantomPinned,
}

impl Event {
    /// Returns whether it keeps a timestamp.
    #[must_use]
    pub fn has_timing(&self) -> bool {
        self.timing
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

    /// The timepoint of the last record.
    ///
    /// # Errors
    /// `InvalidState` when it was never recorded.
    pub fn timepoint(&self) -> Result<Timepoint> {
        self.last().ok_or_else(never_recorded)
    }

    /// The timepoint of the last record, if there is one.
    #[inline]
    pub(crate) fn last(&self) -> Option<Timepoint> {
        PackedTimepoint::from_bits(self.timepoint.load(Ordering::Acquire)).timepoint()
    }

    /// Returns whether the last record is complete; an event that was never recorded is. Asks the
    /// driver; never blocks.
    ///
    /// # Errors
    /// The cause of a failure before the record.
    #[doc(alias = "queryEvent")]
    pub fn query(&self) -> Result<bool> {
        let owner = self.owner.upgrade();
        let Some(point) = self.last() else { return Ok(true) };
        if !point.is_settled()
            && let Some(stream) = owner.and_then(|owner| owner.stream_of(point))
        {
            stream.raw.refresh()?;
        }
        point.timeline().check(point.value())
    }

    /// Blocks until the last record is over. An event that was never recorded is not waited for.
    ///
    /// # Errors
    /// As [`query`](Self::query).
    #[doc(alias = "synchronizeEvent")]
    pub fn synchronize(&self) -> Result<()> {
        self.synchronize_within(None)
    }

    /// As [`synchronize`](Self::synchronize), for a limited time. Zero polls.
    ///
    /// # Errors
    /// `Timeout` as well.
    pub fn synchronize_timeout(&self, timeout: Duration) -> Result<()> {
        self.synchronize_within(Some(timeout))
    }

    fn synchronize_within(&self, timeout: Option<Duration>) -> Result<()> {
        let owner = self.owner.upgrade();
        self.last().map_or(Ok(()), |point| self.wait_for_record(owner.as_ref(), point, timeout))
    }

    /// Device time from the last record of `start` to that of this event. Blocks until both are
    /// complete.
    ///
    /// Recording an event again while this waits changes nothing. A graph keeps the times of its
    /// last launch alone: if another thread launches one that recorded one of the events meanwhile,
    /// the answer is that of the new launch. Where launches follow each other without a pause,
    /// there may be none.
    ///
    /// # Errors
    /// `InvalidState` for an event without timing or never recorded, and when a graph was launched
    /// again 16 times, each time before the times of the launch before could be read;
    /// `InvalidArgument` for events of different runtimes; the cause of a failure.
    #[doc(alias("elapsedTime", "cudaEventElapsedTime"))]
    pub fn elapsed_since(&self, start: &Event) -> Result<Duration> {
        let owner = self.owner.upgrade();
        if start.runtime != self.runtime {
            return Err(Error::invalid(format!(
                "an event of one runtime (of {}) cannot be timed with one of another (of {}); create and record both on one runtime",
                start.device, self.device
            )));
        }
        let Some(owner) = owner else {
            return Err(Error::state(
                "the event's runtime has ended; hold the runtime while its events are used",
            ));
        };
        for _ in 0..OVERTAKEN {
            let (from, to) = (start.timed()?, self.timed()?);
            start.wait_for_record(Some(&owner), from.point, None)?;
            self.wait_for_record(Some(&owner), to.point, None)?;
            // SAFETY: both events bear this runtime's serial, so its device gave their timepoints.
            let time = unsafe { owner.device.elapsed(&from.time, &to.time) };
            if from.is_kept() && to.is_kept() {
                return time;
            }
            // Another thread launches a graph that recorded one of the events: the new launch is
            // the last record soon.
            while start.is_overtaken(&from) || self.is_overtaken(&to) {
                std::thread::yield_now();
            }
        }
        Err(Error::state(
            "a graph that records the event is launched again before its time can be read; read it between two launches",
        ))
    }

    fn wait_for_record(
        &self,
        owner: Option<&Arc<RuntimeInner>>,
        point: Timepoint,
        timeout: Option<Duration>,
    ) -> Result<()> {
        match owner {
            Some(owner) if self.blocking => owner.wait_asleep(point, timeout),
            Some(owner) => owner.wait_point(point, timeout),
            None => point.timeline().wait(point.value(), timeout),
        }
    }

    /// A timestamp for one more record; `None` without timing.
    #[inline]
    pub(crate) fn fresh_time(&self, device: &dyn Device) -> Result<Option<Lease<TimestampQuery>>> {
        if self.timing { device.timestamp().map(Some) } else { Ok(None) }
    }

    /// Makes a timepoint the last record, and `time`, which its submission writes, that record's.
    /// `launch` is given if that is a graph's.
    pub(crate) fn set_timed(
        &self,
        point: Timepoint,
        time: Lease<TimestampQuery>,
        launch: Option<GraphLaunch>,
    ) {
        let mut timed = self.timed.lock();
        let old = timed.replace(Timed { point, time, launch });
        self.set(point);
        drop(timed);
        // Without the lock: the timepoint may go back to its pool.
        drop(old);
    }

    /// Makes a timepoint the last record, of an event without timing.
    pub(crate) fn set(&self, point: Timepoint) {
        self.timepoint.store(PackedTimepoint::from(point).to_bits(), Ordering::Release);
        self.serial.fetch_add(1, Ordering::AcqRel);
    }

    /// The last record with its time.
    ///
    /// # Errors
    /// `InvalidState` for an event without timing, or that was never recorded.
    pub(crate) fn timed(&self) -> Result<Timed> {
        if !self.timing {
            return Err(Error::state(
                "the event was created without timing; create it by Runtime::create_event",
            ));
        }
        self.timed.lock().clone().ok_or_else(never_recorded)
    }

    /// Returns whether a graph writes the time of this record again, and has not made that the last
    /// record yet.
    pub(crate) fn is_overtaken(&self, record: &Timed) -> bool {
        !record.is_kept()
            && self.timepoint.load(Ordering::Acquire)
                == PackedTimepoint::from(record.point).to_bits()
    }
}

#[cold]
fn never_recorded() -> Error {
    Error::state("the event was never recorded; record it first (Stream::record)")
}

/// A record with its time.
#[derive(Debug, Clone)]
pub(crate) struct Timed {
    pub(crate) point: Timepoint,
    pub(crate) time: Lease<TimestampQuery>,
    /// The launch that made it, if a graph did.
    launch: Option<GraphLaunch>,
}

impl Timed {
    /// Returns whether nothing has begun to write the timestamp again, so that what was read of it
    /// is this record's.
    pub(crate) fn is_kept(&self) -> bool {
        self.launch.as_ref().is_none_or(|l| l.begun.load(Ordering::Acquire) == l.number)
    }
}

/// One launch of a graph.
#[derive(Debug, Clone)]
pub(crate) struct GraphLaunch {
    /// The number of the graph's last launch. A launch raises it before it is submitted.
    pub(crate) begun: Arc<AtomicU64>,
    pub(crate) number: u64,
}

impl Tagged for Event {
    type Tag = tags::Event;
}

/// Makes events of one device.
pub(crate) struct Events;

/// Returns whether the event is to have timing.
///
/// # Errors
/// `Unsupported` on a device without timestamps.
fn timing(request: &EventRequest<'_>) -> Result<bool> {
    if request.flags.timing && !request.device.caps().timestamps {
        return Err(Error::Unsupported(
            format!(
                "{} has no timestamps; create the event without timing",
                request.device.info().id
            )
            .into(),
        ));
    }
    Ok(request.flags.timing)
}

/// A request for an event: its device, runtime and flags.
pub(crate) struct EventRequest<'a> {
    pub(crate) device: &'a dyn Device,
    pub(crate) runtime: &'a Arc<RuntimeInner>,
    pub(crate) flags: EventFlags,
}

impl Resource for Events {
    type Payload = Event;
    type Request<'a> = EventRequest<'a>;
    const NAME: &'static str = "event";

    fn create(&self, _: Handle<tags::Event>, request: &EventRequest<'_>) -> Result<Event> {
        Ok(Event {
            timepoint: AtomicU64::new(0),
            serial: AtomicU32::new(0),
            timing: timing(request)?,
            timed: Mutex::new(None),
            blocking: request.flags.blocking_sync,
            device: request.device.info().id,
            runtime: request.runtime.serial(),
            owner: Arc::downgrade(request.runtime),
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

    fn recycle(&self, event: &mut Event) -> Recycle {
        // The timestamp goes back to its own pool: an idle event must not pin its device.
        drop(event.timed.get_mut().take());
        event.timepoint.store(0, Ordering::Relaxed);
        event.serial.store(0, Ordering::Relaxed);
        Recycle::Keep
    }
}
