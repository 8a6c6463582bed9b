//! The runtime: the facade of one device.
//!
//! A device of a context has one runtime, which is counted. The drop of the last clone never waits.
//! A runtime ends in this order: graphs (they hold the runtime, so there are none left), kernel
//! bases' caches, extension slots, the events' pool, streams, and then the device's lease.
//!
//! This module must not know any backend.

pub(crate) mod inner;

pub(crate) use inner::{Forget, RuntimeInner, Table, check_writable, pending};

use crate::array::{Array, ArrayView};
use crate::event::{Event, EventFlags, EventRequest};
use crate::host_timeline::HostTimeline;
use crate::stream::Stream;
use crate::trace::{self, Trace};
use crate::view::View;
use bytemuck::{AnyBitPattern, NoUninit, Zeroable};
use leasehold_alloc::{Allocator, Buffer, HostKind, Layout, On};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, EventHandle, Lease, PoolStats, Result, Timepoint};
use leasehold_hal::{Device, DeviceId, DeviceInfo, StreamDesc};
use std::any::{Any, TypeId};
use std::fmt;
use std::time::{Duration, Instant};

/// One device: memory, streams, events, kernels and graphs. Clones are the same runtime;
/// `Send + Sync`.
///
/// Dropping the last clone never waits: work that is pending goes on while the process lives, and
/// is lost when `main` returns first. [`close`](Self::close) waits for it.
///
/// A `Runtime` makes memory, and a [`Stream`] moves and fills it. Memory is for first use on the
/// runtime's own [stream](Self::stream): the device's default stream, or the one that the runtime
/// was [taken from](Stream::runtime). `upload`, `zeros` and `to_vec` are short ways by that stream.
///
/// Made by [`Runtime::open`], and by [`Context::runtime`](crate::Context::runtime) where a program
/// has a context of its own. Construction makes the device the driver's current one for its own
/// calls; it never touches the thread's current context ([`Current`](crate::Current)).
///
/// ```
/// use leasehold::{DeviceId, Runtime};
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
        Self::of_stream(Stream::new(inner.default(), None, inner))
    }

    /// The runtime of a stream, with that as its own.
    pub(crate) fn of_stream(stream: Stream) -> Self {
        Self { inner: stream.runtime.clone(), stream }
    }

    /// The runtime without the recording that it has.
    pub(crate) fn unrecorded(&self) -> Self {
        Self::of_stream(self.stream.unrecorded())
    }

    // ---- device
    // ---------------------------------------------------------------------------------------------

    /// The device's name.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.inner.id
    }

    /// The description of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.inner.device.info()
    }

    /// The device under it, for backends' own extensions.
    pub fn raw_device(&self) -> &Lease<dyn Device> {
        &self.inner.device
    }

    /// Makes the device the driver's current one on this thread, for foreign libraries that look at
    /// it. Returns itself.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    #[doc(alias = "infinirtSetDevice")]
    pub fn activate(&self) -> Result<&Self> {
        self.inner.device.make_current()?;
        Ok(self)
    }

    /// The stream of all calls that name none: the device's default stream, or the one that this
    /// runtime was [taken from](Stream::runtime).
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Gives this runtime a sound default stream in the place of its own, which has failed.
    ///
    /// Clones of the runtime share the new stream if they are made afterwards, and so does whoever
    /// opens the device again. A clone that was there before keeps its stream until this is called
    /// on it too: it then takes the stream that another clone was given. Graphs go by themselves
    /// from a default stream that failed to the new one. The rest of the failed stream's work
    /// is lost. Buffers that it wrote are sound again once they are overwritten as a whole.
    ///
    /// ```
    /// use leasehold::prelude::*;
    /// # fn main() -> Result<()> {
    /// let mut runtime = Runtime::open(DeviceId::cpu(0))?;
    /// runtime.stream().host_call("fails", || Err(Error::other("on purpose")))?;
    /// assert!(runtime.stream().synchronize().is_err());
    /// runtime.replace_default_stream()?;
    /// let x = runtime.upload(&[1u32, 2, 3])?;
    /// assert_eq!(runtime.to_vec(&x)?, [1, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`create_stream`](Self::create_stream); `Recording` for a recording's runtime. The stream
    /// stays then.
    pub fn replace_default_stream(&mut self) -> Result<()> {
        let old = self.stream.live("the default stream cannot be replaced while recording; do it on the runtime that the recording was begun on")?;
        let new = self.inner.replace_default(old)?;
        self.stream = Stream::new(new, None, self.inner.clone());
        Ok(())
    }

    /// Another stream of this device; in a recording, another stream of it. Its operations there
    /// are ordered by what they access, as those of all the recording's streams are.
    ///
    /// # Errors
    /// `OverBudget` beyond the device's limit; the driver's own.
    pub fn create_stream(&self) -> Result<Stream> {
        self.create_stream_with(&StreamDesc::default())
    }

    /// Another stream, with a priority, or on a partition.
    ///
    /// # Errors
    /// As [`create_stream`](Self::create_stream); `InvalidArgument` for a partition of another
    /// device, of another context's runtime, or that was closed.
    pub fn create_stream_with(&self, desc: &StreamDesc) -> Result<Stream> {
        let core = self.inner.create_core(desc)?;
        Ok(Stream::new(core, self.stream.recording().cloned(), self.inner.clone()))
    }

    /// The value of type `T` in the runtime's extension slots, made when first asked for: the
    /// operator library, a cache of somebody else's. Dropped with the runtime, before its streams.
    /// The value may hold buffers and kernels of this runtime, but must not hold the runtime
    /// itself, a [`Stream`] or a [`Graph`](crate::Graph): they hold the runtime, which then would
    /// never end.
    /// `make` gets a runtime that does not record, with the default stream.
    ///
    /// # Errors
    /// The error of `make`; nothing is kept then.
    #[doc(alias("infiniopHandle", "infiniop_handle"))]
    pub fn extension<T: Any + Send + Sync>(
        &self,
        make: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<Arc<T>> {
        let id = TypeId::of::<T>();
        let cast = |any: Arc<dyn Any + Send + Sync>| {
            any.downcast::<T>().map_err(|_| {
                Error::state(
                    "an extension slot holds another type; this is a defect of the runtime",
                )
            })
        };
        if let Some(found) = self.inner.extensions.read().get(&id) {
            return cast(found.clone());
        }
        // Made outside the lock: it may use the runtime. When two threads make one, the first
        // stays.
        let plain = Self::from_inner(self.inner.clone());
        let made: Arc<dyn Any + Send + Sync> = Arc::new(make(&plain)?);
        let mut slots = self.inner.extensions.write();
        let kept = slots.entry(id).or_insert_with(|| made.clone()).clone();
        drop(slots);
        // Not under the lock: the one that is too many may use the runtime as it goes.
        drop(made);
        cast(kept)
    }

    // ---- synchronisation
    // --------------------------------------------------------------------------------------------

    /// Blocks until all work of all streams of the device is over.
    ///
    /// # Errors
    /// The first stream's cause; `Recording` for a recording's runtime.
    #[doc(alias = "syncDevice")]
    pub fn synchronize(&self) -> Result<()> {
        self.stream.live("the device cannot be synchronised while recording; do it on the runtime that the recording was begun on")?;
        let device = &self.inner.device;
        self.inner.traced_wait("synchronize device", None, || device.synchronize(None))
    }

    /// As [`synchronize`](Self::synchronize), for a limited time. Zero polls.
    ///
    /// # Errors
    /// `Timeout` as well.
    pub fn synchronize_timeout(&self, timeout: Duration) -> Result<()> {
        self.stream.live("the device cannot be synchronised while recording; do it on the runtime that the recording was begun on")?;
        let (device, timeout) = (&self.inner.device, Some(timeout));
        self.inner.traced_wait("synchronize device", timeout, || device.synchronize(timeout))
    }

    /// Waits until the device is idle, for an orderly end: what is pending when `main` returns is
    /// lost with the process, so a program calls this last. The runtime itself ends with its last
    /// clone, which does not wait.
    ///
    /// # Errors
    /// `Timeout`; the first stream's cause; `Recording` for a recording's runtime. `Unavailable` if
    /// `LEASEHOLD_TRACE` asks for a trace and its file cannot be written.
    #[doc(alias = "~Runtime")]
    pub fn close(self, timeout: Duration) -> Result<()> {
        self.stream.live("the runtime of a recording cannot be closed; close the one it is of")?;
        let ended = self.inner.device.synchronize(Some(timeout));
        // After a failure too: its cause comes first.
        let saved = trace::save_if_asked(&self.inner);
        ended.and(saved)
    }

    // ---- memory
    // ---------------------------------------------------------------------------------------------

    /// `bytes` of device memory, aligned to 256, for first use on the runtime's
    /// [stream](Self::stream): what another stream does with the memory first waits for its former
    /// uses. Zero bytes give a valid, empty buffer with a null address. In a recording, the buffer
    /// belongs to it and has no address until it stops.
    ///
    /// Blocks on the driver only when the pool must grow. If it cannot, waits for work that still
    /// uses free memory, provided that this memory is enough: for as long as the stream
    /// [waits for room](Stream::set_submit_timeout), 30 seconds at first.
    ///
    /// Memory for another stream is the affair of that stream's runtime:
    ///
    /// ```
    /// # use leasehold::{DeviceId, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// # let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let copies = runtime.create_stream()?.runtime(); // the same runtime, with another stream
    /// let x = copies.alloc(1024)?;
    /// copies.stream().fill(x.view(), 7u8)?; // waits for nothing
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `OutOfMemory` with a report, at once for more bytes than the device has in all;
    /// `OverBudget`.
    #[doc(alias = "allocateMemory")]
    #[inline]
    pub fn alloc(&self, bytes: u64) -> Result<Lease<Buffer>> {
        self.stream.alloc_layout(Layout::new(bytes))
    }

    /// As [`alloc`](Self::alloc), with an alignment.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); `InvalidArgument` for an alignment that is no power of two.
    #[inline]
    pub fn alloc_layout(&self, layout: Layout) -> Result<Lease<Buffer>> {
        self.stream.alloc_layout(layout)
    }

    /// A new array of `len` values. Its contents are not specified.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); `InvalidArgument` for more bytes than there are addresses.
    pub fn alloc_array<T>(&self, len: usize) -> Result<Array<T>> {
        let align = (align_of::<T>() as u64).max(leasehold_alloc::MIN_ALIGN);
        Array::from_buffer(self.alloc_layout(Layout::aligned(Array::<T>::bytes_of(len)?, align))?)
    }

    /// A new array of `len` zeros, which the runtime's stream writes.
    ///
    /// # Errors
    /// As [`alloc_array`](Self::alloc_array) and [`Stream::fill`].
    pub fn zeros<T: Zeroable>(&self, len: usize) -> Result<Array<T>> {
        let array = self.alloc_array(len)?;
        self.stream.fill(array.view(), 0u8)?;
        Ok(array)
    }

    /// A new array with these values, by the runtime's stream. The values are taken during the
    /// call.
    ///
    /// # Errors
    /// As [`alloc_array`](Self::alloc_array) and [`Stream::upload`].
    pub fn upload<T: NoUninit>(&self, values: &[T]) -> Result<Array<T>> {
        let array = self.alloc_array(values.len())?;
        self.stream.upload(array.view(), values)?;
        Ok(array)
    }

    /// The values of an array or of a part of it, or the bytes of a buffer or a view as values, by
    /// the runtime's stream. Blocks until they are there.
    ///
    /// The vector is new, and so are its pages if it is large: the system makes them while the copy
    /// runs, which takes longer than the copy. [`Stream::download_into`] uses a vector again.
    ///
    /// ```
    /// # use leasehold::{DeviceId, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// # let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let x = runtime.upload(&[1u32, 2, 3])?;
    /// assert_eq!(runtime.to_vec(&x)?, [1, 2, 3]);
    /// assert_eq!(runtime.to_vec(x.slice(1..))?, [2, 3]);
    /// let bytes = x.into_buffer();
    /// assert_eq!(runtime.to_vec::<u64>(bytes.part(..8)?)?.len(), 1);
    /// assert!(runtime.to_vec::<u64>(&bytes).is_err()); // 12 bytes are no whole number of values
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Stream::download_into`].
    pub fn to_vec<'a, T: AnyBitPattern>(
        &self,
        from: impl TryInto<ArrayView<'a, T>, Error: Into<Error>>,
    ) -> Result<Vec<T>> {
        let from = from.try_into().map_err(Into::into)?;
        let mut values = Vec::new();
        self.stream.download_into(&mut values, from.view())?;
        Ok(values)
    }

    /// `bytes` of host memory for fast copies. [`Buffer::host_kind`] says what it is: pinned, or
    /// pageable on a backend without pinning, which is warned of once per runtime.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); `Recording` for a recording's runtime.
    #[doc(alias = "allocatePinnedHostMemory")]
    pub fn alloc_pinned(&self, bytes: u64) -> Result<Lease<Buffer>> {
        let core = self.stream.live("host memory cannot be allocated while recording; allocate it before, on the runtime that the recording was begun on")?;
        let pool = self.inner.pinned()?;
        let on = On { timeline: core.timeline, source: core.source() };
        let buffer = self.inner.traced_alloc(pool, Layout::new(bytes), on)?;
        if buffer.host_kind() == HostKind::Pageable
            && !self.inner.warned_pageable.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(device = %self.inner.id, "this device has no pinned memory; pageable memory is used instead");
        }
        Ok(buffer)
    }

    /// The allocator of the device's memory: statistics, budget, trim, imports.
    #[must_use]
    pub fn allocator(&self) -> &Allocator {
        &self.inner.memory
    }

    // ---- events
    // ---------------------------------------------------------------------------------------------

    /// An event with timing.
    ///
    /// # Errors
    /// The driver's own.
    #[doc(alias = "createEvent")]
    pub fn create_event(&self) -> Result<Lease<Event>> {
        self.create_event_with(EventFlags::TIMING)
    }

    /// An event.
    ///
    /// # Errors
    /// `Unsupported` for timing on a device without timestamps; the driver's own.
    #[doc(alias = "createEventWithFlags")]
    pub fn create_event_with(&self, flags: EventFlags) -> Result<Lease<Event>> {
        self.inner.events.acquire(&EventRequest {
            device: &*self.inner.device,
            runtime: &self.inner,
            flags,
        })
    }

    /// The event that a handle names.
    ///
    /// # Errors
    /// `StaleHandle` when it is gone or another runtime's.
    pub fn event(&self, handle: EventHandle) -> Result<Lease<Event>> {
        self.inner.events.lease(handle)
    }

    /// Blocks until timepoints are over: one, or all of several. They may be of any of the
    /// context's streams, and of host timelines. Allocates nothing.
    ///
    /// ```
    /// # use leasehold::{DeviceId, Runtime};
    /// # fn main() -> leasehold::Result<()> {
    /// # let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let (a, b) = (runtime.stream().now(), runtime.create_stream()?.now());
    /// runtime.wait_for(a)?;
    /// runtime.wait_for([a, b])?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The first cause, in the order of the timepoints; `Recording` for a recording's runtime.
    pub fn wait_for(&self, points: impl AsRef<[Timepoint]>) -> Result<()> {
        self.wait_until(points.as_ref(), None)
    }

    /// As [`wait_for`](Self::wait_for), for a limited time. Zero polls.
    ///
    /// # Errors
    /// `Timeout` as well.
    pub fn wait_for_timeout(
        &self,
        points: impl AsRef<[Timepoint]>,
        timeout: Duration,
    ) -> Result<()> {
        self.wait_until(points.as_ref(), Instant::now().checked_add(timeout))
    }

    fn wait_until(&self, points: &[Timepoint], deadline: Option<Instant>) -> Result<()> {
        self.stream.live("a timepoint cannot be waited for while recording; let the stream wait (Stream::wait), or wait on the runtime that the recording was begun on")?;
        points.iter().try_for_each(|&point| {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            self.inner.wait_point(point, left)
        })
    }

    /// Blocks until one of several timepoints is over, and returns its place. Looks at each in
    /// turn, so it may be late by a tenth of a millisecond. `Duration::MAX` waits without a limit.
    ///
    /// # Errors
    /// The cause of the first timepoint that is found to have failed; `Timeout`; `InvalidArgument`
    /// without timepoints, which nobody could wait for; `Recording` for a recording's runtime.
    pub fn wait_for_any(&self, points: &[Timepoint], timeout: Duration) -> Result<usize> {
        self.stream.live("a timepoint cannot be waited for while recording; let the stream wait (Stream::wait), or wait on the runtime that the recording was begun on")?;
        if points.is_empty() {
            return Err(Error::invalid(
                "a wait for one of no points would never end; give one at least",
            ));
        }
        let deadline = Instant::now().checked_add(timeout);
        let mut looks = 0;
        loop {
            for (i, &point) in points.iter().enumerate() {
                match self.inner.wait_point(point, Some(Duration::ZERO)) {
                    Ok(()) => return Ok(i),
                    Err(Error::Timeout(_)) => {}
                    Err(e) => return Err(e),
                }
            }
            let left =
                deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(Error::Timeout(
                    format!("none of {} points was over within {timeout:?}; wait longer, or look at what the streams wait for", points.len()).into(),
                ));
            }
            let i = looks % points.len();
            looks += 1;
            match self.inner.wait_point(points[i], Some(left.min(Duration::from_micros(100)))) {
                Ok(()) => return Ok(i),
                Err(Error::Timeout(_)) => {}
                Err(e) => return Err(e),
            }
        }
    }

    // ---- host timelines
    // ---------------------------------------------------------------------------------------------

    /// A timeline that the host signals, for streams to wait for before the signal: see
    /// [`Stream::wait`], [`HostTimeline::signal`], [`HostTimeline::fail`].
    ///
    /// # Errors
    /// `Unsupported` on a device without host timelines; the driver's own.
    pub fn create_host_timeline(&self) -> Result<HostTimeline> {
        let raw = self.inner.device.host_timeline()?;
        // A pooled host timeline has the name of its former user.
        raw.timeline().set_name(None);
        Ok(HostTimeline { raw, runtime: self.inner.clone() })
    }

    // ---- reports
    // ---------------------------------------------------------------------------------------------

    /// The statistics of the runtime's and the device's pools.
    #[must_use]
    pub fn pools(&self) -> Vec<(&'static str, PoolStats)> {
        let mut pools = vec![("event", self.inner.events.stats())];
        self.inner.device.pools(&mut |name, stats| pools.push((name, stats)));
        pools
    }

    /// Returns whether both are the same runtime.
    #[must_use]
    pub fn same(&self, other: &Runtime) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Stream {
    /// The runtime that the stream belongs to, with this stream as the [one](Runtime::stream) of
    /// all calls that name none: its allocations are for first use here. A recording's, if the
    /// stream is. A thread that allocates often keeps it.
    #[must_use]
    pub fn runtime(&self) -> Runtime {
        Runtime::of_stream(self.clone())
    }

    /// Returns whether the stream is of this runtime, or of one of its recordings.
    #[inline]
    #[must_use]
    pub fn is_of(&self, runtime: &Runtime) -> bool {
        Arc::ptr_eq(&self.runtime, &runtime.inner)
    }
}

impl Trace {
    /// Starts a trace of what a runtime and its streams do, for ui.perfetto.dev: kernels, copies
    /// and graph launches with their times on the device, submissions, allocations, waits, and the
    /// memory. Streams, buffers and [scopes](leasehold_core::Name::scope) bear their names in it.
    ///
    /// A trace puts a timestamp before and after each operation, so work takes longer than without
    /// it. Launches of graphs are traced as wholes, with the names of their operations. Memory that
    /// is given back shows at the next sample; samples are taken at allocations, and at
    /// submissions once a millisecond.
    ///
    /// Blocks for some tenths of a millisecond, to compare the device's clock with the host's, and
    /// while another thread has a session open on one of the streams.
    ///
    /// ```
    /// use leasehold::Trace;
    /// use leasehold::prelude::*;
    /// # fn main() -> Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let trace = Trace::start(&runtime)?;
    /// let x = runtime.upload(&[1.0f32, 2.0, 3.0])?;
    /// assert_eq!(runtime.to_vec(&x)?, [1.0, 2.0, 3.0]);
    /// let file = std::env::temp_dir().join(format!("trace-{}.json", std::process::id()));
    /// trace.stop().save(&file)?;
    /// # std::fs::remove_file(file).unwrap();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidState` while another trace of the runtime is on; `Occupied` when this thread has a
    /// session open on one of its streams; `Recording` for a recording's runtime; the driver's own.
    pub fn start(runtime: &Runtime) -> Result<Self> {
        runtime.stream.live("a trace cannot start while recording; start it on the runtime that the recording was begun on")?;
        Self::begin(&runtime.inner)
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recording = if self.stream.is_recording() { ", recording" } else { "" };
        write!(f, "Runtime({}{recording})", self.inner.id)
    }
}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Runtime>();
    shared::<Stream>();
    shared::<HostTimeline>();
};
