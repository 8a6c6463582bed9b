//! The runtime: the facade of one device.
//!
//! There is one per device and context, counted; dropping the last one never waits. It ends in this order: graphs (they hold the
//! runtime, so there are none left), kernel bases' caches, extension slots, the events' pool, streams, and then the device's lease.
//!
//! This module must not know any backend.

mod inner;

pub(crate) use inner::{RuntimeInner, check_writable};

use crate::context::Context;
use crate::event::{Event, EventFlags, EventRequest};
use crate::gate::Gate;
use crate::graph::{Graph, GraphOperator, recorder};
use crate::ops;
use crate::stream::{Stream, StreamCore};
use crate::view::{Slice, View};
use bytemuck::{AnyBitPattern, NoUninit, Pod};
use leasehold_alloc::{AllocStats, Allocator, Buffer, HostKind, Layout, On};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{DeviceHandle, Error, EventHandle, Lease, Point, PoolStats, Result};
use leasehold_hal::{Device, DeviceId, DeviceInfo, MemoryKind, StreamDesc};
use std::any::{Any, TypeId};
use std::fmt;
use std::time::{Duration, Instant};

/// How often an event's time may be overwritten before it was read.
const OVERTAKEN: u32 = 16;

/// One device: memory, streams, events, kernels and graphs. Clones are the same runtime; `Send + Sync`.
///
/// Dropping the last clone never waits: work that is pending goes on while the process lives, and is lost when `main` returns first.
/// [`close`](Self::close) waits for it.
///
/// Made by [`Context::runtime`]. Construction makes the device the driver's current one for its own calls; it never touches the
/// thread's current [`Context`].
///
/// ```
/// use leasehold::{Context, DeviceId, Runtime};
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// assert!(std::ptr::eq(runtime.activate()?, &runtime));
/// assert_eq!(runtime.device().to_string(), "cpu:0");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Runtime {
    pub(crate) inner: Arc<RuntimeInner>,
    stream: Stream,
}

impl Runtime {
    pub(crate) fn from_inner(inner: Arc<RuntimeInner>) -> Self {
        let stream = Stream { core: inner.default.clone(), runtime: inner.clone() };
        Self { inner, stream }
    }

    /// The runtime of a device in the context that the process shares.
    ///
    /// # Errors
    /// As [`Context::runtime`].
    pub fn open(device: DeviceId) -> Result<Self> {
        Context::global().runtime(device)
    }

    // ---- device -----------------------------------------------------------------------------------------------------

    /// The device's name.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.inner.id
    }

    /// The context that it was opened in.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The device's handle.
    #[must_use]
    pub fn device_handle(&self) -> DeviceHandle {
        self.inner.device.handle()
    }

    /// What the device is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.inner.device.info()
    }

    /// The device under it, for backends' own extensions.
    #[must_use]
    pub fn raw_device(&self) -> &dyn Device {
        &*self.inner.device
    }

    /// Makes the device the driver's current one on this thread, for foreign libraries that look at it. Returns itself.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    #[doc(alias = "infinirtSetDevice")]
    pub fn activate(&self) -> Result<&Self> {
        self.inner.device.make_current()?;
        Ok(self)
    }

    /// The default stream. Wherever a stream may be left out (`None`), it is this one.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Another stream of this device.
    ///
    /// # Errors
    /// `OverBudget` beyond the device's limit; the driver's own.
    pub fn create_stream(&self) -> Result<Stream> {
        self.create_stream_with(&StreamDesc::default())
    }

    /// Another stream, with a priority.
    ///
    /// # Errors
    /// As [`create_stream`](Self::create_stream).
    pub fn create_stream_with(&self, desc: &StreamDesc) -> Result<Stream> {
        let raw = self.inner.device.stream(desc)?;
        let core = Arc::new(StreamCore::new(raw));
        let mut streams = self.inner.streams.lock();
        if streams.len() == streams.capacity() {
            streams.retain(|s| s.strong_count() > 0);
        }
        streams.push(Arc::downgrade(&core));
        drop(streams);
        Ok(Stream { core, runtime: self.inner.clone() })
    }

    /// The stream that `None` means, or the one given; one of another device is refused.
    pub(crate) fn or_default<'a>(&'a self, stream: Option<&'a Stream>) -> Result<&'a Stream> {
        match stream {
            None => Ok(&self.stream),
            Some(s) if Arc::ptr_eq(&s.runtime, &self.inner) => Ok(s),
            Some(s) => Err(Error::invalid(format!("{s:?} is not a stream of {}", self.inner.id))),
        }
    }

    /// The value of type `T` in the runtime's extension slots, made when first asked for: the operator library, a cache of
    /// somebody else's. Dropped with the runtime, before its streams. It may hold buffers and kernels of this runtime, but must not hold the
    /// runtime itself, a [`Stream`] or a [`Graph`]: they hold the runtime, which then would never end.
    ///
    /// # Errors
    /// What `make` says; nothing is kept then.
    #[doc(alias("infiniopHandle", "infiniop_handle"))]
    pub fn extension<T: Any + Send + Sync>(&self, make: impl FnOnce(&Self) -> Result<T>) -> Result<Arc<T>> {
        let id = TypeId::of::<T>();
        let cast = |any: Arc<dyn Any + Send + Sync>| {
            any.downcast::<T>().map_err(|_| Error::state("an extension slot holds another type"))
        };
        if let Some(found) = self.inner.extensions.read().get(&id) {
            return cast(found.clone());
        }
        // Made outside the lock: it may use the runtime. When two threads make one, the first stays.
        let made: Arc<dyn Any + Send + Sync> = Arc::new(make(self)?);
        let mut slots = self.inner.extensions.write();
        let kept = slots.entry(id).or_insert_with(|| made.clone()).clone();
        drop(slots);
        // Not under the lock: the one that is too many may use the runtime as it goes.
        drop(made);
        cast(kept)
    }

    // ---- synchronisation --------------------------------------------------------------------------------------------

    /// Blocks until all work of the default stream is over.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `Recording` on a thread that records on this device.
    #[doc(alias = "syncStream")]
    pub fn sync_stream(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Blocks until all work of all streams of the device is over.
    ///
    /// # Errors
    /// The first stream's cause; `Recording` on a thread that records on this device.
    #[doc(alias = "syncDevice")]
    pub fn sync_device(&self) -> Result<()> {
        recorder::refuse(&self.inner, "the device cannot be synchronised while recording")?;
        self.inner.device.synchronize(None)
    }

    /// Waits until the device is idle, for an orderly end: what is pending when `main` returns is lost with the process, so a program calls
    /// this last. The runtime itself ends with its last clone, which does not wait.
    ///
    /// # Errors
    /// `Timeout`; the first stream's cause; `Recording` on a thread that records on this device.
    #[doc(alias = "~Runtime")]
    pub fn close(self, timeout: Duration) -> Result<()> {
        recorder::refuse(
            &self.inner,
            "a runtime cannot be closed while recording; stop or abandon the recording first",
        )?;
        self.inner.device.synchronize(Some(timeout))
    }

    // ---- memory -----------------------------------------------------------------------------------------------------

    /// `bytes` of device memory, aligned to 256. Zero bytes give a valid, empty buffer with a null address. While this thread
    /// records, the buffer belongs to the recording and has no address until it stops. Blocks on the driver only when the pool must grow.
    ///
    /// # Errors
    /// `OutOfMemory` with a report; `OverBudget`; `InvalidArgument` for more bytes than the device has in all.
    #[doc(alias = "allocateMemory")]
    #[inline]
    pub fn alloc(&self, bytes: u64) -> Result<Lease<Buffer>> {
        self.stream.alloc(bytes)
    }

    /// `bytes` of host memory for fast copies. [`Buffer::host_kind`] says what it is: pinned, or pageable on a backend without
    /// pinning, which is warned of once per runtime.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); `Recording` while recording.
    #[doc(alias = "allocatePinnedHostMemory")]
    pub fn alloc_pinned(&self, bytes: u64) -> Result<Lease<Buffer>> {
        recorder::refuse(&self.inner, "host memory cannot be allocated while recording")?;
        let pool = self.inner.device.memory(MemoryKind::Pinned)?;
        let core = &self.stream.core;
        let buffer = pool.alloc(Layout::new(bytes), On { line: core.line, timeline: core.raw_timeline() })?;
        if buffer.host_kind() == HostKind::Pageable && !self.inner.warned_pageable.swap(true, Ordering::Relaxed) {
            tracing::warn!(device = %self.inner.id, "this device has no pinned memory; pageable memory is used instead");
        }
        Ok(buffer)
    }

    /// The allocator of the device's memory: statistics, budget, trim, imports.
    #[must_use]
    pub fn allocator(&self) -> &Allocator {
        &self.inner.memory
    }

    /// The state of the device's memory in numbers.
    #[must_use]
    pub fn memory_stats(&self) -> AllocStats {
        self.inner.memory.stats()
    }

    /// A new buffer with these values. The values are taken during the call.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc) and [`memcpy_h2d`](Self::memcpy_h2d).
    pub fn upload<T: NoUninit>(&self, values: &[T]) -> Result<Lease<Buffer>> {
        let buffer = self.alloc(size_of_val(values) as u64)?;
        self.memcpy_h2d(buffer.view(), values, true)?;
        Ok(buffer)
    }

    /// The values of a buffer or a part of it. Blocks until they are there.
    ///
    /// The vector is new, and so are its pages if it is large: the system makes them while the copy runs, which takes longer than the
    /// copy. [`download_into`](Self::download_into) uses a vector again.
    ///
    /// # Errors
    /// `InvalidArgument` when the length is no multiple of the type's size; `OutOfMemory` on the host; as
    /// [`memcpy_d2h`](Self::memcpy_d2h).
    pub fn download<T: AnyBitPattern>(&self, from: &impl View) -> Result<Vec<T>> {
        let mut values = Vec::new();
        self.download_into(&mut values, from)?;
        Ok(values)
    }

    /// As [`download`](Self::download), into a vector whose room is used again. What it held is gone,
    /// also after an error, which leaves it empty.
    ///
    /// ```
    /// # use leasehold::{Context, DeviceId};
    /// # fn main() -> leasehold::Result<()> {
    /// # let runtime = Context::new().runtime(DeviceId::cpu(0))?;
    /// let (first, second) = (runtime.upload(&[1u32, 2, 3])?, runtime.upload(&[4u32, 5])?);
    /// let mut values: Vec<u32> = Vec::new();
    /// runtime.download_into(&mut values, &first)?;
    /// let room = values.as_ptr();
    /// runtime.download_into(&mut values, &second)?;
    /// assert_eq!((&values[..], values.as_ptr()), (&[4, 5][..], room));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub fn download_into<T: AnyBitPattern>(&self, into: &mut Vec<T>, from: &impl View) -> Result<()> {
        let from = from.view();
        into.clear();
        let size = size_of::<T>() as u64;
        // Of values without a size no number has these bytes.
        if !from.len().is_multiple_of(size) {
            return Err(Error::invalid(format!("{} bytes are no whole number of values", from.len())));
        }
        let no_room = || Error::from(leasehold_core::OutOfMemory::new("the host", from.len()));
        let count = usize::try_from(from.len().checked_div(size).unwrap_or(0)).map_err(|_| no_room())?;
        into.try_reserve_exact(count).map_err(|_| no_room())?;
        // SAFETY: there is room for as many bytes, which nobody else sees. Once they are written, which
        // the call's success says, they are values: every pattern of bytes is one of an `AnyBitPattern`.
        unsafe {
            ops::download_to(&self.stream, into.as_mut_ptr().cast(), from)?;
            into.set_len(count);
        }
        Ok(())
    }

    /// Copies host values to the device, on the default stream. The bytes are taken during the call, so that they may change or go
    /// right after it. With `asynchronous` they are staged, however many they are, and the call does not wait for the stream; without it
    /// the call waits for the copy. [`ops::upload_owned`] and [`ops::copy_pinned`] neither stage nor wait.
    ///
    /// # Errors
    /// As [`ops::upload`].
    #[doc(alias = "memcpyH2D")]
    pub fn memcpy_h2d<T: NoUninit>(&self, dst: Slice<'_>, src: &[T], asynchronous: bool) -> Result<()> {
        ops::upload(&self.stream, dst, src, asynchronous)
    }

    /// Copies device bytes to host values, on the default stream, and waits for them.
    ///
    /// # Errors
    /// As [`ops::download`].
    #[doc(alias = "memcpyD2H")]
    pub fn memcpy_d2h<T: Pod>(&self, dst: &mut [T], src: Slice<'_>) -> Result<()> {
        ops::download(&self.stream, dst, src)
    }

    /// Copies on the device, or between it and another one of its context, on the default stream; waits for it when `asynchronous` is false.
    ///
    /// # Errors
    /// As [`ops::copy`]; with `asynchronous` false also `Recording` while
    /// recording, and `InvalidState` in a host call of the stream.
    #[doc(alias = "memcpyD2D")]
    pub fn memcpy_d2d(&self, dst: Slice<'_>, src: Slice<'_>, asynchronous: bool) -> Result<()> {
        if !asynchronous {
            recorder::refuse(&self.inner, "a copy cannot be waited for while recording; make it asynchronous")?;
            ops::may_wait(&self.stream)?;
        }
        ops::copy(&self.stream, dst, src)?;
        if asynchronous { Ok(()) } else { self.stream.synchronize() }
    }

    // ---- events -----------------------------------------------------------------------------------------------------

    /// An event with timing.
    ///
    /// # Errors
    /// The driver's own.
    #[doc(alias = "createEvent")]
    pub fn create_event(&self) -> Result<Lease<Event>> {
        self.create_event_with_flags(EventFlags::TIMING)
    }

    /// An event.
    ///
    /// # Errors
    /// `Unsupported` for timing on a device without time stamps; the driver's own.
    #[doc(alias = "createEventWithFlags")]
    pub fn create_event_with_flags(&self, flags: EventFlags) -> Result<Lease<Event>> {
        self.inner.events.acquire(&EventRequest { device: &*self.inner.device, runtime: self.inner.serial, flags })
    }

    /// The event that a handle names.
    ///
    /// # Errors
    /// `StaleHandle` when it is gone or another runtime's.
    pub fn event(&self, handle: EventHandle) -> Result<Lease<Event>> {
        self.inner.events.lease(handle)
    }

    /// Marks a stream's present end (the default stream's for `None`): the event then means everything submitted before.
    ///
    /// # Errors
    /// The stream's cause; `InvalidArgument` for a stream or an event of another device.
    #[doc(alias = "recordEvent")]
    pub fn record_event(&self, event: &Lease<Event>, stream: Option<&Stream>) -> Result<()> {
        ops::signal(self.or_default(stream)?, event)
    }

    /// Whether the event's point is complete. Asks the driver; never blocks.
    ///
    /// # Errors
    /// `InvalidState` for an event that was never recorded; the cause of a failure before the point; `Recording` while recording.
    #[doc(alias = "queryEvent")]
    pub fn query_event(&self, event: &Event) -> Result<bool> {
        recorder::refuse(&self.inner, "an event cannot be queried while recording")?;
        let point = event.point()?;
        if !point.is_settled()
            && let Some(stream) = self.inner.stream_of(point)
        {
            stream.raw.refresh()?;
        }
        point.line().check(point.value())
    }

    /// Blocks until the event's point is over.
    ///
    /// # Errors
    /// As [`query_event`](Self::query_event).
    #[doc(alias = "synchronizeEvent")]
    pub fn synchronize_event(&self, event: &Event) -> Result<()> {
        self.synchronize_event_timeout(event, None)
    }

    /// As [`synchronize_event`](Self::synchronize_event), with a deadline. Zero polls.
    ///
    /// # Errors
    /// `Timeout` as well.
    pub fn synchronize_event_timeout(&self, event: &Event, timeout: Option<Duration>) -> Result<()> {
        recorder::refuse(&self.inner, "an event cannot be waited for while recording")?;
        self.wait_for_record(event, event.point()?, timeout)
    }

    fn wait_for_record(&self, event: &Event, point: Point, timeout: Option<Duration>) -> Result<()> {
        if event.blocking { self.inner.wait_asleep(point, timeout) } else { self.inner.wait_point(point, timeout) }
    }

    /// Ends an event. Dropping the lease does the same; this says so where a handle outlives it.
    ///
    /// Other holders of the event are untouched.
    #[doc(alias = "destroyEvent")]
    pub fn destroy_event(&self, event: Lease<Event>) {
        drop(event);
    }

    /// Milliseconds of device time from `start` to `end`, as [`elapsed`](Self::elapsed). Blocks until both are complete.
    ///
    /// # Errors
    /// `InvalidState` for an event without timing or never recorded; `InvalidArgument` for events of different devices.
    #[doc(alias = "elapsedTime")]
    pub fn elapsed_time(&self, start: &Event, end: &Event) -> Result<f32> {
        Ok(self.elapsed(start, end)?.as_secs_f64() as f32 * 1e3)
    }

    /// Device time between the last records of `start` and `end`. Blocks until both are complete.
    ///
    /// Recording an event again while this waits changes nothing. A graph keeps the times of its last launch alone: if another thread
    /// launches one that recorded one of the events meanwhile, the answer is that of the new launch. Where launches follow each
    /// other without a pause, there may be none.
    ///
    /// # Errors
    /// As [`elapsed_time`](Self::elapsed_time); `InvalidState` when a graph was launched again 16 times, each time before the times
    /// of the launch before could be read.
    pub fn elapsed(&self, start: &Event, end: &Event) -> Result<Duration> {
        recorder::refuse(&self.inner, "elapsed time cannot be asked for while recording")?;
        for event in [start, end] {
            if event.runtime != self.inner.serial {
                return Err(Error::invalid(format!(
                    "an event of another runtime (of {}) cannot be timed on {}",
                    event.device, self.inner.id
                )));
            }
        }
        for _ in 0..OVERTAKEN {
            let (from, to) = (start.timed()?, end.timed()?);
            self.wait_for_record(start, from.point, None)?;
            self.wait_for_record(end, to.point, None)?;
            // SAFETY: both events bear this runtime's serial, so its device gave their stamps.
            let time = unsafe { self.inner.device.elapsed(&from.time, &to.time) };
            if from.is_kept() && to.is_kept() {
                return time;
            }
            // Another thread launches a graph that recorded one of the events: the new launch is the last record soon.
            while start.is_overtaken(&from) || end.is_overtaken(&to) {
                std::thread::yield_now();
            }
        }
        Err(Error::state("a graph that records the event is launched again before its time can be read"))
    }

    /// Makes later work of a stream (the default stream for `None`) start after the event. Does not block the host.
    ///
    /// # Errors
    /// `InvalidState` for an event that was never recorded; the stream's cause.
    #[doc(alias = "streamWaitEvent")]
    pub fn stream_wait_event(&self, stream: Option<&Stream>, event: &Lease<Event>) -> Result<()> {
        ops::wait_event(self.or_default(stream)?, event)
    }

    /// Blocks until a point is over: of any of the device's streams (then it allocates nothing), of another of the context's runtimes, or of a
    /// gate.
    ///
    /// # Errors
    /// The cause of a failure before the point; `Recording` while recording.
    pub fn wait_for(&self, point: Point) -> Result<()> {
        recorder::refuse(&self.inner, "a point cannot be waited for while recording")?;
        self.inner.wait_point(point, None)
    }

    /// Blocks until all of several points are over, within one deadline. Nothing to wait for is over.
    ///
    /// # Errors
    /// The first cause, in the order of the points; `Timeout`; `Recording` while recording.
    pub fn wait_for_all(&self, points: &[Point], timeout: Option<Duration>) -> Result<()> {
        recorder::refuse(&self.inner, "a point cannot be waited for while recording")?;
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        for &point in points {
            self.inner.wait_point(point, deadline.map(|d| d.saturating_duration_since(Instant::now())))?;
        }
        Ok(())
    }

    /// Blocks until one of several points is over, and returns its place. Looks at each in turn, so it may be late by a tenth of a
    /// millisecond.
    ///
    /// # Errors
    /// The cause of the first point that is found to have failed; `Timeout`; `InvalidArgument` without points, which nobody could wait for;
    /// `Recording` while recording.
    pub fn wait_for_any(&self, points: &[Point], timeout: Option<Duration>) -> Result<usize> {
        recorder::refuse(&self.inner, "a point cannot be waited for while recording")?;
        if points.is_empty() {
            return Err(Error::invalid("waiting for one of no points would never end"));
        }
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut turn = 0;
        loop {
            for (i, &point) in points.iter().enumerate() {
                match self.inner.wait_point(point, Some(Duration::ZERO)) {
                    Ok(()) => return Ok(i),
                    Err(Error::Timeout(_)) => {}
                    Err(e) => return Err(e),
                }
            }
            let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(Error::Timeout(format!("none of {} points was over in time", points.len()).into()));
            }
            let i = turn % points.len();
            turn += 1;
            match self.inner.wait_point(points[i], Some(left.min(Duration::from_micros(100)))) {
                Ok(()) => return Ok(i),
                Err(Error::Timeout(_)) => {}
                Err(e) => return Err(e),
            }
        }
    }

    // ---- gates ------------------------------------------------------------------------------------------------------

    /// A timeline that the host signals, for streams to wait for before the signal: see [`ops::wait`], [`ops::raise`], [`ops::fail`].
    ///
    /// # Errors
    /// `Unsupported` on a device without gates; the driver's own.
    pub fn create_gate(&self) -> Result<Gate> {
        Ok(Gate { raw: self.inner.device.gate()?, runtime: self.inner.clone() })
    }

    // ---- graphs -----------------------------------------------------------------------------------------------------

    /// Whether the calling thread records on this device.
    #[doc(alias = "isGraphRecording")]
    #[must_use]
    pub fn is_graph_recording(&self) -> bool {
        recorder::is_recording(&self.inner)
    }

    /// Begins a recording on the calling thread: from now on its calls on this device are noted, not run.
    ///
    /// # Errors
    /// `Recording` while the thread records already; `Unsupported`.
    #[doc(alias = "startGraphRecording")]
    pub fn start_graph_recording(&self) -> Result<()> {
        recorder::start(self)
    }

    /// Encodes an operator into the recording, or runs it at once when the thread does not record.
    ///
    /// # Errors
    /// What the operator says. In a recording its half-encoded work is rolled back, and the recording goes on.
    #[doc(alias = "addGraphOperator")]
    pub fn add_graph_operator(&self, operator: &dyn GraphOperator) -> Result<()> {
        recorder::add_operator(self, operator)
    }

    /// Ends the recording and makes a graph of it.
    ///
    /// # Errors
    /// `Recording` when the thread does not record; `OutOfMemory` for the temporaries. The recording is over either way.
    #[doc(alias = "stopGraphRecording")]
    pub fn stop_graph_recording(&self) -> Result<Graph> {
        recorder::stop(self)
    }

    /// Gives the recording up. Without one it does nothing.
    pub fn abandon_graph_recording(&self) {
        recorder::abandon(&self.inner);
    }

    /// Records what `record` does, with this thread on this device, and makes a graph of it. If it fails or panics the recording is
    /// given up.
    ///
    /// # Errors
    /// What `record` says; as [`stop_graph_recording`](Self::stop_graph_recording).
    pub fn record_graph(&self, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        struct Abandon<'a>(&'a Runtime);
        impl Drop for Abandon<'_> {
            fn drop(&mut self) {
                self.0.abandon_graph_recording();
            }
        }
        self.start_graph_recording()?;
        // Also when it cannot be stopped; once it is, there is nothing to abandon.
        let _abandon = Abandon(self);
        record(self)?;
        self.stop_graph_recording()
    }

    // ---- reports ----------------------------------------------------------------------------------------------------

    /// The statistics of the runtime's and the device's pools.
    #[must_use]
    pub fn pools(&self) -> Vec<(&'static str, PoolStats)> {
        let mut pools = vec![("event", self.inner.events.stats())];
        self.inner.device.pools(&mut |name, stats| pools.push((name, stats)));
        pools
    }

    /// Whether both are the same runtime.
    #[must_use]
    pub fn same(&self, other: &Runtime) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Runtime({})", self.inner.id)
    }
}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Runtime>();
    shared::<Stream>();
    shared::<Graph>();
    shared::<Gate>();
};
