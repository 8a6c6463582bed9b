//! The state that a runtime's streams, graphs and handles share: the device, its memory and events,
//! and the waits for timepoints.
//!
//! This module must not know the facade.

use crate::event::Events;
use crate::graph::Executables;
use crate::stream::{StreamInner, in_host_call};
use crate::trace::recorder::{Recorder, What};
use crate::trace::tracks::Tracks;
use crate::view::{Operand, View};
use leasehold_alloc::{Allocator, Buffer, Layout, On, SYMBOLIC};
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, RwLock};
use leasehold_core::{Error, Lease, PoolConfig, Result, SlotPool, Timepoint, TryOnceLock};
use leasehold_hal::{Backend, Device, DeviceId, Limits, MemoryKind, StreamDesc};
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::Weak;
use std::time::Duration;

/// A table that refers to a runtime by its serial, and forgets it as the runtime ends.
pub(crate) trait Forget: Send + Sync {
    /// Gives up what is kept for the runtime.
    ///
    /// # Safety
    /// - The runtime of the serial is gone: nobody borrows what is kept for it.
    unsafe fn forget(&self, serial: u64);
}

/// The backends of a context, and its runtimes.
pub(crate) struct Table {
    pub(crate) backends: Vec<Arc<dyn Backend>>,
    /// By device. Nothing is made, waited for or dropped under the lock.
    pub(crate) runtimes: Mutex<HashMap<DeviceId, Arc<RuntimeSlot>>>,
}

/// Where a device's runtime is.
#[derive(Default)]
pub(crate) struct RuntimeSlot {
    /// Held by who makes it.
    pub(crate) making: Mutex<()>,
    /// Locked for a look.
    pub(crate) open: Mutex<Weak<RuntimeInner>>,
}

impl RuntimeSlot {
    pub(crate) fn open(&self) -> Option<Arc<RuntimeInner>> {
        self.open.lock().upgrade()
    }
}

/// Owns the backends and one runtime per device. Clones are the same context.
///
/// Neither the end of a context nor that of `main` waits for work that is pending:
/// [`Runtime::close`](crate::Runtime::close) and
/// [`Stream::synchronize`](crate::Stream::synchronize) do.
#[doc(alias = "ContextImpl")]
#[derive(Clone)]
pub struct Context(pub(crate) Arc<Table>);

impl Context {
    /// The runtimes that are open.
    pub(crate) fn open_runtimes(&self) -> impl Iterator<Item = Arc<RuntimeInner>> {
        let places: Vec<_> = self.0.runtimes.lock().values().cloned().collect();
        places.into_iter().filter_map(|p| p.open())
    }
}

/// The part of a runtime that its streams, graphs and handles share. The order of the fields is
/// that of their end.
pub(crate) struct RuntimeInner {
    pub(super) serial: u64,
    pub(super) id: DeviceId,
    /// The device's.
    pub(crate) limits: Limits,
    bases: Mutex<Vec<Weak<dyn Forget>>>,
    pub(super) extensions: RwLock<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
    pub(crate) memory: Allocator,
    /// The device's host memory.
    pinned: TryOnceLock<Allocator>,
    /// Bytes of the device's memory; the largest number where that is not known.
    pub(crate) total: u64,
    /// The largest request that goes straight to the allocator: `total`, and 0 while a trace is
    /// on, so that an allocation asks one question for both.
    pub(crate) direct: AtomicU64,
    /// The trace that is on.
    trace: Mutex<Option<Arc<Tracks>>>,
    pub(super) events: SlotPool<Events>,
    /// The default stream of runtimes that are opened from now on.
    default: Mutex<Arc<StreamInner>>,
    /// Streams beside the default one, to find who advances a timeline.
    pub(super) streams: Mutex<Vec<Weak<StreamInner>>>,
    pub(super) warned_pageable: AtomicBool,
    pub(crate) executables: Arc<Executables>,
    /// Devices of the same backend that were asked about, and whether copies between the two are
    /// the driver's.
    peers: Mutex<Vec<(DeviceId, bool)>>,
    pub(crate) device: Lease<dyn Device>,
    /// Keeps the backends alive.
    pub(crate) context: Context,
}

impl RuntimeInner {
    pub(crate) fn open(context: Context, backend: &dyn Backend, id: DeviceId) -> Result<Self> {
        static SERIAL: AtomicU64 = AtomicU64::new(1);
        let device = backend.open(id)?;
        device.make_current()?;
        let memory = device.memory(MemoryKind::Device)?.clone();
        let stream = device.stream(&StreamDesc::default())?;
        let total = match device.info().memory.total {
            0 => u64::MAX,
            total => total,
        };
        Ok(Self {
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            id,
            limits: *device.limits(),
            default: Mutex::new(Arc::new(StreamInner::new(stream))),
            executables: Executables::new(memory.clone()),
            memory,
            pinned: TryOnceLock::default(),
            total,
            direct: AtomicU64::new(total),
            trace: Mutex::default(),
            events: SlotPool::new(
                Events,
                PoolConfig { thread_cells: true, ..PoolConfig::default() },
            )?,
            extensions: RwLock::new(HashMap::new()),
            bases: Mutex::new(Vec::new()),
            streams: Mutex::new(Vec::new()),
            warned_pageable: AtomicBool::new(false),
            peers: Mutex::default(),
            device,
            context,
        })
    }

    /// Tells this runtime from every other that the process ever had; never 0.
    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    pub(crate) fn id(&self) -> DeviceId {
        self.id
    }

    /// The default stream.
    pub(crate) fn default(&self) -> Arc<StreamInner> {
        self.default.lock().clone()
    }

    /// A sound default stream in the place of `old`: a new one, unless somebody has replaced it.
    pub(crate) fn replace_default(&self, old: &Arc<StreamInner>) -> Result<Arc<StreamInner>> {
        let sound = |core: &StreamInner| !core.timeline.failed(core.timeline.submitted() + 1);
        let present = self.default();
        if !Arc::ptr_eq(&present, old) && sound(&present) {
            return Ok(present);
        }
        // Without the lock: it may block on the driver.
        let new = Arc::new(StreamInner::new(self.device.stream(&StreamDesc::default())?));
        let mut default = self.default.lock();
        if !Arc::ptr_eq(&default, &present) && sound(&default) {
            return Ok(default.clone());
        }
        let former = std::mem::replace(&mut *default, new.clone());
        drop(default);
        self.trace_new(&new)?;
        // Others may still hold it, and wait for its timepoints.
        self.note_stream(&former);
        Ok(new)
    }

    /// A stream of this device, which it remembers. May block on the driver.
    ///
    /// # Errors
    /// `OverBudget` beyond the device's limit; the driver's own.
    pub(crate) fn create_core(&self, desc: &StreamDesc) -> Result<Arc<StreamInner>> {
        let core = Arc::new(StreamInner::new(self.device.stream(desc)?));
        self.note_stream(&core);
        self.trace_new(&core)?;
        Ok(core)
    }

    /// Remembers a stream, to find who advances a timeline.
    fn note_stream(&self, core: &Arc<StreamInner>) {
        let mut streams = self.streams.lock();
        if streams.len() == streams.capacity() {
            streams.retain(|s| s.strong_count() > 0);
        }
        streams.push(Arc::downgrade(core));
    }

    /// The trace that is on, if one is.
    pub(crate) fn tracks(&self) -> Option<Arc<Tracks>> {
        if self.direct.load(Ordering::Relaxed) > 0 { None } else { self.trace.lock().clone() }
    }

    /// The recorder of the trace that is on, if one is.
    pub(crate) fn recorder(&self) -> Option<Arc<Recorder>> {
        self.tracks().map(|tracks| tracks.recorder.clone())
    }

    /// Has the trace that is on note what a new stream does. The stream is among the runtime's, so
    /// a trace that begins meanwhile finds it.
    fn trace_new(&self, core: &StreamInner) -> Result<()> {
        self.tracks().map_or(Ok(()), |tracks| core.trace_by(&tracks))
    }

    /// Has a trace note what all streams do from now on.
    ///
    /// # Errors
    /// `InvalidState` while another trace is on; `Occupied` when this thread has a session open on
    /// one of the streams. Nothing is traced then.
    pub(crate) fn begin_trace(&self, tracks: &Arc<Tracks>) -> Result<()> {
        let mut trace = self.trace.lock();
        if trace.is_some() {
            return Err(Error::state(format!(
                "a trace of {} is on already; stop or drop it before another one starts",
                self.id
            )));
        }
        *trace = Some(tracks.clone());
        self.direct.store(0, Ordering::Relaxed);
        drop(trace);
        let result = self.live_streams().iter().try_for_each(|core| core.trace_by(tracks));
        result.inspect_err(|_| self.end_trace(tracks))
    }

    /// Ends a trace, if it is on.
    pub(crate) fn end_trace(&self, tracks: &Arc<Tracks>) {
        let mut trace = self.trace.lock();
        if !trace.as_ref().is_some_and(|on| Arc::ptr_eq(on, tracks)) {
            return;
        }
        tracks.recorder.end();
        *trace = None;
        self.direct.store(self.total, Ordering::Relaxed);
        drop(trace);
        self.live_streams().iter().for_each(|core| core.forget_trace());
    }

    /// The streams, the default one first.
    fn live_streams(&self) -> Vec<Arc<StreamInner>> {
        let mut all = vec![self.default()];
        all.extend(self.streams.lock().iter().filter_map(Weak::upgrade));
        all
    }

    /// Allocates, which a trace notes if one is on.
    pub(crate) fn traced_alloc(
        &self,
        memory: &Allocator,
        layout: Layout,
        on: On<'_>,
    ) -> Result<Lease<Buffer>> {
        match self.recorder() {
            Some(recorder) => recorder.allocation(memory, layout, on),
            None => memory.alloc(layout, on),
        }
    }

    /// Makes a call, which a trace notes if one is on.
    pub(crate) fn traced<R>(&self, what: What, call: impl FnOnce() -> Result<R>) -> Result<R> {
        match self.recorder() {
            Some(recorder) => recorder.call(what, call),
            None => call(),
        }
    }

    /// Waits for the device, which a trace notes if one is on. A poll is no wait.
    pub(crate) fn traced_wait<R>(
        &self,
        name: &'static str,
        timeout: Option<Duration>,
        wait: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        if timeout.is_some_and(|t| t.is_zero()) {
            wait()
        } else {
            self.traced(What::Wait(name), wait)
        }
    }

    /// Remembers a kernel base whose cache points into this device.
    pub(crate) fn adopt(&self, base: Weak<dyn Forget>) {
        let mut bases = self.bases.lock();
        if bases.len() == bases.capacity() {
            bases.retain(|b| b.strong_count() > 0);
        }
        bases.push(base);
    }

    /// Blocks until a timepoint is over, or known to have failed.
    pub(crate) fn wait_point(&self, point: Timepoint, timeout: Option<Duration>) -> Result<()> {
        if point.timeline().check(point.value())? {
            return Ok(());
        }
        self.traced_wait("wait for a timepoint", timeout, || self.wait_unseen(point, timeout))
    }

    /// As [`wait_point`](Self::wait_point), and no trace notes it.
    pub(crate) fn wait_unseen(&self, point: Timepoint, timeout: Option<Duration>) -> Result<()> {
        if let Some(stream) = self.stream_of(point) {
            return stream.raw.wait_host(point.value(), timeout);
        }
        point.timeline().wait(point.value(), timeout)
    }

    /// As [`wait_point`](Self::wait_point), without a moment of spinning: the thread sleeps on the
    /// timeline, which whoever completes it wakes.
    pub(crate) fn wait_asleep(&self, point: Timepoint, timeout: Option<Duration>) -> Result<()> {
        // Sees to it that the work is on its way, and that nobody waits for itself.
        match self.wait_point(point, Some(Duration::ZERO)) {
            Err(Error::Timeout(_)) => point.timeline().wait(point.value(), timeout),
            over => over,
        }
    }

    /// Blocks until a timepoint has passed, whatever became of it.
    ///
    /// # Errors
    /// Why it cannot be waited for: `DeviceLost`, or in a host call of the timepoint's own stream.
    pub(crate) fn wait_over(&self, point: Timepoint) -> Result<()> {
        let mut nap = Duration::from_micros(1);
        loop {
            let result = self.wait_point(point, None);
            if point.has_passed() {
                return Ok(());
            }
            // A failure is known before its value is over; anything else will not get better.
            if let Err(e) = result
                && (!point.timeline().failed(point.value())
                    || in_host_call()
                    || matches!(e, Error::DeviceLost { .. }))
            {
                return Err(e);
            }
            if let Some(stream) = self.stream_of(point) {
                stream.raw.refresh()?;
            }
            point.timeline().ask(point.value());
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(1));
        }
    }

    /// Waits until a timepoint is over, or known to have failed, as long as something completes on
    /// its timeline.
    ///
    /// # Errors
    /// `Timeout` if nothing does for this long.
    pub(crate) fn wait_moving(&self, point: Timepoint, timeout: Duration) -> Result<()> {
        let timeline = point.timeline();
        loop {
            let before = timeline.completed();
            match self.wait_point(point, Some(timeout)) {
                Err(e @ Error::Timeout(_)) if timeline.completed() == before => return Err(e),
                Err(Error::Timeout(_)) => {}
                _ => return Ok(()),
            }
        }
    }

    /// Waits as [`wait_over`](Self::wait_over), or for a moment where nothing is known to wait for.
    pub(crate) fn wait_over_or_moment(&self, point: Option<Timepoint>) -> Result<()> {
        match point {
            Some(point) => self.wait_over(point),
            None => {
                std::thread::sleep(Duration::from_micros(20));
                Ok(())
            }
        }
    }

    /// The stream of this runtime that advances the timepoint's timeline. A stream that was dropped
    /// advances no more: its manager drains it.
    pub(crate) fn stream_of(&self, point: Timepoint) -> Option<Arc<StreamInner>> {
        let default = self.default();
        if point.timeline_id() == default.timeline.id() {
            return Some(default);
        }
        self.streams
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .find(|s| s.timeline.id() == point.timeline_id())
    }

    /// Refuses memory of another device, and writing what is read-only.
    #[inline]
    pub(crate) fn check_operands(&self, operands: &[Operand<'_>]) -> Result<()> {
        for operand in operands {
            self.check_owned(operand)?;
            check_writable(operand)?;
        }
        Ok(())
    }

    /// Refuses memory of another device. Most operands are device memory.
    #[inline]
    fn check_owned(&self, operand: &Operand<'_>) -> Result<()> {
        if self.memory.owns(operand.view.lease) { Ok(()) } else { self.check_owned_slow(operand) }
    }

    #[cold]
    fn check_owned_slow(&self, operand: &Operand<'_>) -> Result<()> {
        self.check_host(operand)
    }

    /// Refuses what is not this device's host memory.
    #[inline]
    pub(crate) fn check_host(&self, operand: &Operand<'_>) -> Result<()> {
        if self.owns_pinned(operand.view.lease) { Ok(()) } else { Err(self.strange(operand)) }
    }

    #[cold]
    fn strange(&self, operand: &Operand<'_>) -> Error {
        let (len, id) = (operand.view.lease.len(), self.id);
        let text =
            |on| format!("a buffer of {len} bytes is on {on}, not {id}; copy it there first");
        match self.owner_of(operand.view.lease) {
            Ok(owner) => Error::invalid(text(owner.id)),
            Err(strange) => strange,
        }
    }

    /// The device's host memory.
    ///
    /// # Errors
    /// As [`Device::memory`].
    #[inline]
    pub(crate) fn pinned(&self) -> Result<&Allocator> {
        self.pinned.get_or_make(|| self.device.memory(MemoryKind::Pinned).cloned())
    }

    /// Returns whether the buffer is of this device's memory, or of its host memory.
    #[inline]
    pub(crate) fn owns(&self, buffer: &Lease<Buffer>) -> bool {
        self.memory.owns(buffer) || self.owns_pinned(buffer)
    }

    #[inline]
    fn owns_pinned(&self, buffer: &Lease<Buffer>) -> bool {
        self.pinned().is_ok_and(|m| m.owns(buffer))
    }

    /// Refuses a buffer that cannot be in the place of another one in a graph of this device.
    ///
    /// # Errors
    /// `InvalidArgument` unless both are of this device, or both of one peer; `Unsupported` for
    /// memory of another backend, which the graph's host calls copy from or to.
    pub(crate) fn check_stand_in(&self, old: &Lease<Buffer>, new: &Lease<Buffer>) -> Result<()> {
        if self.owns(old) {
            return self.check_operands(&[new.read()]);
        }
        let other = self.owner_of(old)?;
        if !(other.id.backend == self.id.backend && self.is_peer(&other)?) {
            return Err(Error::Unsupported(
                format!(
                    "the graph copies between {} and {}; record it anew with another buffer",
                    self.id, other.id
                )
                .into(),
            ));
        }
        if self.owns(new) { Ok(()) } else { other.check_operands(&[new.read()]) }
    }

    /// The owner of a buffer: a runtime of the same context.
    ///
    /// # Errors
    /// `InvalidArgument` for a buffer of another context, or of a runtime that ended.
    pub(crate) fn owner_of(&self, buffer: &Lease<Buffer>) -> Result<Arc<RuntimeInner>> {
        self.context.open_runtimes().find(|r| r.owns(buffer)).ok_or_else(|| {
            Error::invalid(format!(
                "a buffer of {} bytes was allocated on no runtime that is open in the context of {}: it is of another context, or its runtime has ended. Open both devices in one context (Runtime::open does), or copy through the host",
                buffer.len(),
                self.id
            ))
        })
    }

    /// Returns whether one operation copies between this device and another one of its backend.
    /// Asks for peer access the first time; a driver without it still has a way.
    ///
    /// # Errors
    /// The driver's own.
    pub(crate) fn is_peer(&self, other: &RuntimeInner) -> Result<bool> {
        let known =
            |peers: &[(DeviceId, bool)]| peers.iter().find(|p| p.0 == other.id).map(|p| p.1);
        if let Some(known) = known(&self.peers.lock()) {
            return Ok(known);
        }
        // Without the lock: it may block on the driver.
        let direct = match self.device.peer_access(other.id) {
            Ok(_) => true,
            Err(Error::NotFound(_) | Error::Unsupported(_)) => false,
            Err(e) => return Err(e),
        };
        self.peers.lock().push((other.id, direct));
        Ok(direct)
    }

    /// Refuses memory that has no address yet.
    #[inline]
    pub(crate) fn refuse_symbolic(&self, operands: &[Operand<'_>]) -> Result<()> {
        if operands.iter().any(|o| o.view.lease.is_symbolic()) {
            return Err(no_address());
        }
        Ok(())
    }

    /// As [`check_operands`](Self::check_operands); refuses memory that has no address yet, too.
    #[inline]
    pub(crate) fn check_eager(&self, operands: &[Operand<'_>]) -> Result<()> {
        let mut addresses = 0;
        for operand in operands {
            self.check_owned(operand)?;
            check_writable(operand)?;
            addresses |= operand.view.lease.addr();
        }
        if addresses & SYMBOLIC == 0 { Ok(()) } else { Err(no_address()) }
    }
}

/// Refuses to write what was imported to be read only.
///
/// # Errors
/// `InvalidArgument`.
#[inline]
pub(crate) fn check_writable(operand: &Operand<'_>) -> Result<()> {
    if operand.access.writes() && operand.view.lease.is_read_only() {
        Err(read_only(operand))
    } else {
        Ok(())
    }
}

#[cold]
fn read_only(operand: &Operand<'_>) -> Error {
    Error::invalid(format!(
        "a buffer of {} bytes was imported read-only and cannot be written; copy it to a buffer of your own first",
        operand.view.lease.len()
    ))
}

#[cold]
fn no_address() -> Error {
    Error::recording(
        "a buffer of a recording gets its address when the recording stops, and until then is used by the recording's own runtime and \
         streams alone; if that recording was given up or failed, it never has one",
    )
}

impl Drop for RuntimeInner {
    fn drop(&mut self) {
        for base in self.bases.get_mut().drain(..) {
            if let Some(base) = base.upgrade() {
                // SAFETY: sessions borrow a stream, which holds the runtime; the last one is gone,
                // so nobody borrows from the cells.
                unsafe { base.forget(self.serial) };
            }
        }
        self.extensions.get_mut().clear();
    }
}

/// The recorded uses of a buffer that may still go on.
pub(crate) fn pending(buffer: &Buffer) -> Vec<Timepoint> {
    let mut uses = vec![buffer.write_timepoint()];
    buffer.for_each_read(|read| uses.push(read));
    uses.into_iter().filter(|used| !used.has_passed()).filter_map(|used| used.timepoint()).collect()
}
