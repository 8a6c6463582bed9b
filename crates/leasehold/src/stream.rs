//! Streams: ordered queues of work, and the one path on which all work is submitted.
//!
//! # The submit path
//! Every copy, fill, session, event and graph launch passes `Stream::pass`: take the stream's
//! submission lock; lock the operands' records; find the timepoints that they must wait for; one
//! submission to the backend; mark the operands with the new timepoint; unlock. A submission waits
//! only for uses on other timelines that this timeline does not know of. On a single stream the
//! path inserts no wait and calls no driver.
//!
//! A call or a session holds the submission lock (`submit_lock`). Other threads wait for the lock.
//! The thread that holds the lock gets `Occupied`, since it would wait for itself. The holder locks
//! nothing else but records and the backend's own submission lock.
//!
//! The records' locks (`records`) order submissions of several threads to several streams with a
//! common buffer. A submission holds them. A thread that finds one taken gives up its own, and
//! takes all again in the order of their addresses. So no two threads wait for each other.
//!
//! # Room
//! A backend may block a submitter while its queue is full. Nobody may be blocked so while holding
//! the submission lock: a host call on the same stream that submits would wait for the submission
//! lock, and the queue for the host call. So callers pause *before* they take the submission lock,
//! as soon as about 8,192 operations are pending (`StreamCore::submit_guard`); host calls never
//! pause. A pause in which nothing completes ends with an error: the thread that pauses may be the
//! one that the stream waits for.
//!
//! While a thread records, its calls on any stream of that device go to the recorder instead, and
//! the stream is not touched.

mod records;
mod submit_lock;

pub(crate) use records::{Locked, Use, add_wait, need};
use submit_lock::held_by_me;
pub(crate) use submit_lock::{Scratch, SubmitGuard, SubmitLock};

use crate::context::ContextGuard;
use crate::graph::recorder;
use crate::kernel::{Grid, KernelBase, KernelSession, Params, session_ops, session_sync_ops};
use crate::ops::call;
use crate::runtime::{Runtime, RuntimeInner};
use crate::view::Operand;
use leasehold_alloc::{Buffer, Layout, On};
use leasehold_core::defects::{Defect, planted};
use leasehold_core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Lease, Name, Result, StreamHandle, Timeline, TimelineSource, Timepoint,
};
use leasehold_hal::Op;
use std::fmt;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Operations after which submitters see to it that the ones before are over.
const SEGMENT: u32 = 4096;
/// How long a submitter waits for room while nothing completes, unless the stream is told
/// otherwise.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// The part of a stream that the runtime and its handles share.
pub(crate) struct StreamCore {
    pub(crate) raw: Lease<dyn leasehold_hal::Stream>,
    pub(crate) timeline: &'static Timeline,
    submit_lock: SubmitLock,
    /// Operations since `mark`. Written in the submission lock.
    since: AtomicU32,
    /// The submitted value when `since` began. Written in the submission lock.
    mark: AtomicU64,
    /// How long a submitter waits for room while nothing completes, in milliseconds.
    patience: AtomicU64,
    /// Streams of other devices that work for this one, used in its submission lock alone.
    companions: Mutex<Vec<Companion>>,
}

/// A stream of another device that works for one of this device's: what it is given waits for
/// nobody else's.
struct Companion {
    runtime: Weak<RuntimeInner>,
    core: Arc<StreamCore>,
}

impl StreamCore {
    pub(crate) fn new(raw: Lease<dyn leasehold_hal::Stream>) -> Self {
        let timeline = raw.timeline();
        // A pooled stream has the name of its former user.
        timeline.set_name(None);
        let patience = AtomicU64::new(SUBMIT_TIMEOUT.as_millis() as u64);
        Self {
            raw,
            timeline,
            submit_lock: SubmitLock::new(),
            since: AtomicU32::new(0),
            mark: AtomicU64::new(0),
            patience,
            companions: Mutex::default(),
        }
    }

    /// The stream of `other` that works for this one: made when first asked for, and again after it
    /// failed. May block on the driver.
    ///
    /// # Errors
    /// As [`Runtime::create_stream`].
    pub(crate) fn companion(&self, other: &Arc<RuntimeInner>) -> Result<Arc<StreamCore>> {
        let sound = |c: &&Companion| {
            std::ptr::eq(c.runtime.as_ptr(), Arc::as_ptr(other))
                && !c.core.timeline.failed(c.core.timeline.submitted() + 1)
        };
        if let Some(found) = self.companions.lock().iter().find(sound) {
            return Ok(found.core.clone());
        }
        let core = Runtime::from_inner(other.clone()).create_stream()?.core;
        let mut companions = self.companions.lock();
        // Another thread may have made one meanwhile: that one stays.
        let core = companions.iter().find(sound).map_or(core, |c| c.core.clone());
        let is_of_use = |c: &Companion| {
            c.runtime.strong_count() > 0 && !std::ptr::eq(c.runtime.as_ptr(), Arc::as_ptr(other))
        };
        let (stay, go): (Vec<_>, Vec<_>) =
            std::mem::take(&mut *companions).into_iter().partition(is_of_use);
        *companions = stay;
        companions.push(Companion { runtime: Arc::downgrade(other), core: core.clone() });
        drop(companions);
        // Not under the lock: a stream that ends may run what is left of it.
        drop(go);
        Ok(core)
    }

    /// The cold half of the stream's timeline.
    #[inline]
    pub(crate) fn raw_source(&self) -> &dyn TimelineSource {
        &*self.raw
    }

    /// Takes the submission lock, once there is room.
    ///
    /// # Errors
    /// `Occupied` when this thread has a session open on the stream.
    #[inline]
    pub(crate) fn submit_guard(&self) -> Result<SubmitGuard<'_>> {
        self.wait_for_room()?;
        self.submit_lock.submit_guard()
    }

    /// Takes the submission lock for a caller that waited for room before it took a lock.
    ///
    /// # Errors
    /// `Occupied` when this thread has a session open on the stream.
    #[inline]
    pub(crate) fn submit_guard_now(&self) -> Result<SubmitGuard<'_>> {
        self.submit_lock.submit_guard()
    }

    /// Takes the submission lock if it is free, once there is room.
    ///
    /// # Errors
    /// `Occupied` when anybody holds it.
    pub(crate) fn try_submit_guard(&self) -> Result<SubmitGuard<'_>> {
        // Before and after: the wait for room takes turns of its own.
        drop(self.submit_lock.try_submit_guard()?);
        if planted(Defect::TurnRefused) && !self.timeline.is_idle() {
            return Err(held_by_me());
        }
        self.wait_for_room()?;
        self.submit_lock.try_submit_guard()
    }

    /// Waits until there is room for another submission. Called without any lock.
    #[inline]
    pub(crate) fn wait_for_room(&self) -> Result<()> {
        if self.since.load(Ordering::Relaxed) < SEGMENT {
            Ok(())
        } else {
            self.wait_for_room_slow()
        }
    }

    #[cold]
    fn wait_for_room_slow(&self) -> Result<()> {
        if call::inside() {
            return Ok(());
        }
        let mut gave_up = false;
        loop {
            let target = {
                let _turn = self.submit_lock.submit_guard()?;
                let since = self.since.load(Ordering::Relaxed);
                if since < SEGMENT {
                    return Ok(());
                }
                // One segment may be pending while the next one is filled; after a giant submission
                // none.
                let huge = since > 4 * SEGMENT;
                let target = if huge {
                    self.timeline.submitted()
                } else {
                    self.mark.load(Ordering::Relaxed)
                };
                if gave_up || self.timeline.completed() >= target || self.timeline.failed(target) {
                    self.mark.store(self.timeline.submitted(), Ordering::Relaxed);
                    self.since.store(0, Ordering::Relaxed);
                    return Ok(());
                }
                target
            };
            let before = self.timeline.completed();
            let patience = Duration::from_millis(self.patience.load(Ordering::Relaxed));
            match self.raw.wait_host(target, Some(patience)) {
                Err(Error::Timeout(_)) if self.timeline.completed() == before => {
                    return Err(self.stuck(patience));
                }
                Ok(()) | Err(Error::Timeout(_)) => {}
                // A failure is the business of the submission that follows.
                Err(_) => gave_up = true,
            }
        }
    }

    #[cold]
    fn stuck(&self, patience: Duration) -> Error {
        Error::Timeout(
            format!(
                "no room for another operation: {} submissions are pending on {:?} and none completed within {patience:?}. What they \
                 wait for (a host timeline, a host call) must not come from the thread that submits more of them. Nothing was submitted; the \
                 call may be repeated",
                self.timeline.submitted() - self.timeline.completed().min(self.timeline.submitted()),
                self.timeline.id()
            )
            .into(),
        )
    }

    /// Submits one operation after the scratch's waits, and remembers what the stream knows from
    /// then on.
    ///
    /// # Safety
    /// - As [`leasehold_hal::Stream::submit`].
    #[inline]
    pub(crate) unsafe fn submit(&self, scratch: &mut Scratch, op: &Op<'_>) -> Result<u64> {
        let value = if scratch.waits.is_empty() {
            // SAFETY: by the caller's contract.
            unsafe { self.raw.submit(std::slice::from_ref(op)) }?
        } else {
            // SAFETY: as above.
            unsafe { self.submit_after(scratch, op) }?
        };
        self.count(1 + scratch.waits.len());
        Ok(value)
    }

    /// # Safety
    /// - As [`submit`](Self::submit).
    #[cold]
    unsafe fn submit_after(&self, scratch: &mut Scratch, op: &Op<'_>) -> Result<u64> {
        let Scratch { waits, ops, .. } = scratch;
        ops.clear();
        ops.extend(waits.iter().map(|&p| Op::Wait(p)));
        // SAFETY: the list is cleared before the operation's borrows end.
        ops.push(unsafe { std::mem::transmute::<Op<'_>, Op<'static>>(*op) });
        // SAFETY: by the caller's contract.
        let result = unsafe { self.raw.submit(ops) };
        ops.clear();
        result
    }

    /// Counts operations that were submitted. In the submission lock.
    #[inline]
    pub(crate) fn count(&self, ops: usize) {
        // No submission has 2^31 operations, and none is made while a quarter of that is pending.
        self.since
            .store(self.since.load(Ordering::Relaxed).wrapping_add(ops as u32), Ordering::Relaxed);
    }
}

/// An ordered queue of work on a device. Clones are the same stream.
///
/// Within a stream operations behave in order. Any thread may use it: calls and sessions of several
/// threads take turns, and each waits for the one before it. While a thread has a
/// [`KernelSession`] open on the stream, its own other submissions there get
/// `Occupied`, since they would wait for themselves. Dropping a stream with work pending loses
/// nothing: the work completes, unless the process ends first: [`Runtime::close`] before `main`
/// returns waits for it.
///
/// # Room
/// A submission blocks while about 8,192 operations are pending. If none of them completes for 30
/// seconds ([`set_submit_timeout`](Self::set_submit_timeout)), it ends with [`Error::Timeout`] and
/// nothing is submitted: the blocked thread may be the one that is to signal the
/// [`HostTimeline`](crate::HostTimeline) that the stream waits for. A thread that submits more than
/// that behind its own host timeline must signal the host timeline from another thread, or a
/// recorded graph, which is one operation, must hold the work.
///
/// # Failures
///
/// A failed operation poisons its stream: from then on every call returns that cause, and nothing
/// more is run. Take another stream, or for the default one [`Runtime::replace_default_stream`], to
/// go on. Buffers that the failed work wrote hand the failure to whoever reads them, until they are
/// overwritten as a whole. Work that is submitted while the failed work still runs waits for it and
/// fails with it, also work that only overwrites: [`synchronize`](Self::synchronize) the failed
/// stream first.
#[doc(alias("infinirtStream_t", "Stream_t"))]
#[derive(Clone)]
pub struct Stream {
    pub(crate) core: Arc<StreamCore>,
    pub(crate) runtime: Arc<RuntimeInner>,
}

impl Stream {
    /// The stream's handle.
    #[must_use]
    pub fn handle(&self) -> StreamHandle {
        self.core.raw.handle()
    }

    /// Names the stream in reports, error messages, snapshots, traces and `Debug`. The name is of
    /// all clones, and the last one counts. Reports of a simulated device show it from the next
    /// submission on.
    ///
    /// A launch's own place has a name too, if it runs in a [scope](Name::scope):
    ///
    /// ```
    /// use leasehold::{Context, DeviceId, Name, View};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Context::new().runtime(DeviceId::cpu(0))?;
    /// let stream = runtime.create_stream()?;
    /// stream.set_name("decode");
    /// assert!(format!("{stream:?}").contains("\"decode\""));
    /// let weights = runtime.zeros::<f32>(1000)?;
    /// weights.buffer().set_name("weights");
    /// let _scope = Name::here().scope(); // reports say which file and line submitted what follows
    /// stream.fill(weights.buffer().view(), 0u8)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn set_name(&self, name: impl Into<Name>) {
        self.core.timeline.set_name(Some(name.into()));
    }

    /// The stream's name, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<Name> {
        self.core.timeline.name()
    }

    /// The timepoint of everything submitted so far.
    #[must_use]
    pub fn now(&self) -> Timepoint {
        self.core.timeline.now()
    }

    /// Returns whether all that was submitted is complete. Asks the driver; never blocks.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `Recording` on a thread that records on this device.
    pub fn query(&self) -> Result<bool> {
        recorder::refuse(&self.runtime, "a stream cannot be queried while recording")?;
        self.core.raw.refresh()?;
        self.core.timeline.check(self.core.timeline.submitted())
    }

    /// Blocks until all that was submitted is over. After a failure too, but then for a second at
    /// most: once this has returned, what the stream wrote can be overwritten without meeting the
    /// failure again.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `Recording` on a thread that records on this device.
    #[doc(alias = "syncStream")]
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
        recorder::refuse(&self.runtime, "a stream cannot be synchronised while recording")?;
        let value = self.core.timeline.submitted();
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let result = self.core.raw.wait_host(value, timeout);
        // A failure is told as soon as it is known, which may be before what failed is over.
        if result.is_err() && self.core.timeline.failed(value) && !call::inside() {
            self.core.timeline.drain(value, deadline, || self.core.raw.refresh());
        }
        result
    }

    /// Calls `call` once, when all that was submitted so far is over: with `Ok` when it completed,
    /// with the cause when it failed. The building block of futures and of queues of one's own:
    /// whatever happens to the stream, the call comes.
    ///
    /// The call comes exactly once: also when the stream has failed or fails, when the device is
    /// lost, when the stream or the runtime is dropped or closed first, while the calling thread
    /// records (with `Recording`; nothing is recorded), and on a device without host calls (with
    /// `Unsupported`). Only the end of the process comes before it. After a failure it may come
    /// before the failed work is over: [`synchronize`](Self::synchronize) says when that is.
    ///
    /// The call runs on the thread that runs the stream's host calls. After a failure it runs on
    /// whichever thread notices or gives up what failed, possibly in
    /// [`HostTimeline::signal`](crate::HostTimeline::signal),
    /// [`HostTimeline::fail`](crate::HostTimeline::fail) or the drop of a host timeline; where
    /// nothing could be submitted, on the calling thread before this returns. It must not block,
    /// and must not wait for a stream. It may submit work to sound streams and signal host
    /// timelines. A panic poisons the stream, as in [`host_call`](Self::host_call), unless it has
    /// failed already.
    ///
    /// ```
    /// use leasehold::{Context, DeviceId};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Context::new().runtime(DeviceId::cpu(0))?;
    /// let (tell, hear) = std::sync::mpsc::channel();
    /// runtime.stream().on_complete(move |result| tell.send(result.is_ok()).unwrap_or_default());
    /// assert_eq!(hear.recv(), Ok(true));
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias("addCompletedHandler", "cudaStreamAddCallback", "cudaLaunchHostFunc"))]
    pub fn on_complete(&self, call: impl FnOnce(Result<()>) + Send + 'static) {
        crate::ops::on_complete(self, call);
    }

    /// `bytes` of device memory, aligned to 256, for first use on this stream: what another stream
    /// does with the memory first waits for its former uses. Zero bytes give a valid, empty buffer
    /// with a null address. While this thread records, the buffer belongs to the recording and has
    /// no address until it stops. Blocks on the driver only when the pool must grow.
    ///
    /// # Errors
    /// `OutOfMemory` with a report; `OverBudget`; `InvalidArgument` for more bytes than the device
    /// has in all.
    #[inline]
    pub fn alloc(&self, bytes: u64) -> Result<Lease<Buffer>> {
        self.alloc_layout(Layout::new(bytes))
    }

    /// As [`alloc`](Self::alloc), with an alignment.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); `InvalidArgument` for an alignment that is no power of two.
    #[inline]
    pub fn alloc_layout(&self, layout: Layout) -> Result<Lease<Buffer>> {
        let runtime = &*self.runtime;
        if recorder::is_active() || layout.size > runtime.total {
            return self.alloc_otherwise(layout);
        }
        runtime
            .memory
            .alloc(layout, On { timeline: self.core.timeline, source: self.core.raw_source() })
    }

    /// An allocation on a thread that records, or of more than the device has.
    #[cold]
    fn alloc_otherwise(&self, layout: Layout) -> Result<Lease<Buffer>> {
        if let Some(result) = recorder::alloc(&self.runtime, layout) {
            return result;
        }
        // Some devices give more than they have. Where one refuses, the size is the reason.
        let on = On { timeline: self.core.timeline, source: self.core.raw_source() };
        self.runtime
            .memory
            .alloc(layout, on)
            .map_err(|e| self.runtime.too_large(layout.size).unwrap_or(e))
    }

    /// Launches a kernel, as one submission: waits on the device for whoever used the operands
    /// before, binds them in their order, and marks their use. Does not wait for the launch. While
    /// the calling thread records, the launch goes to the recording.
    ///
    /// A [`KernelSession`] is the long way, for several launches in one
    /// submission.
    ///
    /// ```
    /// use leasehold::kernel::{CpuArgs, KernelCheck, KernelDesc, KernelSource};
    /// use leasehold::{Access, Context, DeviceId, KernelBase, View};
    ///
    /// unsafe fn scale(args: &CpuArgs<'_>) {
    ///     // SAFETY: each tile has 4 values of its own: the grid has one dimension.
    ///     let x = unsafe { args.slice_mut::<f32>(0, args.tile()[0] as usize * 4, 4) };
    ///     x.iter_mut().for_each(|x| *x *= args.params::<f32>());
    /// }
    ///
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Context::new().runtime(DeviceId::cpu(0))?;
    /// let (source, check) = (KernelSource::Cpu(scale), KernelCheck::grid_1d());
    /// let desc = KernelDesc::new("scale", source, &[Access::ReadWrite], check);
    /// // SAFETY: it touches its binding alone, within bounds that `slice_mut` checks. Each tile
    /// // writes a part of its own.
    /// let kernel = unsafe { KernelBase::new(desc.params_of::<f32>().aligned(4)) }?;
    /// let x = runtime.upload(&[1.0f32; 8])?;
    /// runtime.stream().launch(&kernel, &[x.read_write()], &3.0f32, 2)?;
    /// assert_eq!(runtime.download::<f32>(&x)?, [3.0; 8]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` for another number of operands, another role, another size of parameters
    /// or a misaligned or overlapping operand than the kernel declares, for a grid beyond the
    /// device's limits, for memory of another device, and for what the kernel's check refuses; what
    /// making the kernel ready says; `Occupied` while this thread has a session open on the stream;
    /// the stream's cause when it is poisoned.
    #[doc(alias("dispatch", "cuLaunchKernel"))]
    #[inline]
    pub fn launch<P: Params + ?Sized>(
        &self,
        kernel: &KernelBase,
        operands: &[Operand<'_>],
        params: &P,
        grid: impl Into<Grid>,
    ) -> Result<()> {
        let Grid { blocks, threads, shared } = grid.into();
        let session = KernelSession::begin(kernel, self)?;
        let session = session_sync_ops::wait(session, operands)?;
        let session = session_ops::bind(session)?;
        let session = session_ops::params_bytes(session, params.bytes())?;
        let session = session_ops::dispatch_3d(session, blocks, threads, shared)?;
        session_sync_ops::update_tokens(session).finish().map(drop)
    }

    /// Makes the stream and its runtime the thread's current context until the guard is dropped:
    /// [`Current::get`](crate::Current::get) returns them then, and the driver has the device
    /// current.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    pub fn enter(&self) -> Result<ContextGuard> {
        ContextGuard::enter(&self.runtime(), self)
    }

    /// Sets how long a submission waits for room while none of the stream's work completes; 30
    /// seconds at first. To the millisecond.
    pub fn set_submit_timeout(&self, timeout: Duration) {
        let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.core.patience.store(millis, Ordering::Relaxed);
    }

    /// Makes sure that everything submitted is on its way to the device. Does not block.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    pub fn flush(&self) -> Result<()> {
        self.core.raw.flush()
    }

    /// The driver's stream, for libraries that take one; 0 where there is none.
    #[must_use]
    pub fn native(&self) -> u64 {
        self.core.raw.native()
    }

    /// The priority that the stream got, after clamping.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.core.raw.priority()
    }

    /// Returns whether both are the same stream.
    #[must_use]
    pub fn same(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }

    /// The failure that poisoned the stream, if one did.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.core.timeline.failure().map(|(_, e)| e)
    }

    /// The stream under it, for backends' own extensions.
    pub fn raw(&self) -> &Lease<dyn leasehold_hal::Stream> {
        &self.core.raw
    }

    /// The runtime that the stream belongs to.
    #[must_use]
    pub fn runtime(&self) -> Runtime {
        Runtime::from_inner(self.runtime.clone())
    }

    /// The submit path of one operation, ordered after everything that its operands wait for.
    ///
    /// # Safety
    /// - As [`leasehold_hal::Stream::submit`], except that `operands` (checked here) cover all
    ///   device memory that `op` touches.
    pub(crate) unsafe fn pass(
        &self,
        op: &Op<'_>,
        operands: &[Operand<'_>],
    ) -> Result<Option<Timepoint>> {
        self.runtime.check_operands(operands)?;
        // SAFETY: by the caller's contract; the operands are this device's.
        unsafe { self.pass_checked(op, operands) }
    }

    /// As [`pass`](Self::pass), for operands that the caller has checked: they may be a peer's.
    ///
    /// The function is inlined, so that a caller with an array of operands has no loops.
    ///
    /// # Safety
    /// - As [`leasehold_hal::Stream::submit`], except that `operands` cover all device memory that
    ///   `op` touches.
    #[inline(always)]
    pub(crate) unsafe fn pass_checked(
        &self,
        op: &Op<'_>,
        operands: &[Operand<'_>],
    ) -> Result<Option<Timepoint>> {
        if recorder::is_active() {
            // SAFETY: by the caller's contract; the recorder runs nothing.
            if let Some(result) = unsafe { recorder::record(&self.runtime, op, operands) } {
                return result.map(|()| None);
            }
        }
        self.runtime.refuse_symbolic(operands)?;
        let core = &*self.core;
        let mut submit_guard = core.submit_guard()?;
        let scratch = submit_guard.scratch();
        scratch.waits.clear();
        let mut locked = Locked::new(core.timeline, operands);
        // SAFETY: the submission lock is held until the end.
        unsafe { locked.gather(&mut scratch.waits) }?;
        // SAFETY: by the caller's contract.
        let point = core.timeline.at(unsafe { core.submit(scratch, op) }?);
        // SAFETY: the submission waited for what was gathered, and the submission lock is still
        // held.
        unsafe { locked.mark(point) };
        Ok(Some(point))
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({}, {:?})", self.runtime.id(), self.core.timeline)
    }
}
