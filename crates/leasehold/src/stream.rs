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
//! Callers pause for room before they take the submission lock (`core`).
//!
//! # Recordings
//! A stream of a recording looks like the stream that it was begun on, and never touches it: its
//! operations are noted in the recording. What cannot be noted asks for `Stream::live`.

mod callback_depth;
mod core;
mod records;
mod submit_lock;
mod suspended;

pub(crate) use self::core::StreamInner;
pub(crate) use callback_depth::{InCallback, in_host_call};
pub(crate) use records::{
    Locked, Use, add_wait, check_end, check_own, in_submission, need, push_waits,
};
pub(crate) use submit_lock::{Scratch, Staged, StagedLaunch, SubmitGuard, SubmitLock, this_thread};
pub(crate) use suspended::{
    PoolTurn, check as check_present, check_all as check_all_present, is_suspended,
};

use crate::graph::Recording;
use crate::runtime::RuntimeInner;
use crate::view::Operand;
use leasehold_alloc::{Buffer, Layout, On};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, Lease, Name, OutOfMemory, Result, StreamHandle, Timepoint};
use leasehold_hal::Op;
use std::fmt;
use std::time::{Duration, Instant};

/// An ordered queue of work on a device. Clones are the same stream.
///
/// Within a stream operations behave in order. Any thread may use it: calls and sessions of several
/// threads take turns, and each waits for the one before it. While a thread has a
/// [`KernelSession`](crate::KernelSession) open on the stream, its own other submissions there get
/// `Occupied`, since they would wait for themselves. Dropping a stream with work pending loses
/// nothing: the work completes, unless the process ends first:
/// [`Runtime::close`](crate::Runtime::close) before `main` returns waits for it.
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
/// more is run. Take another stream, or for the default one
/// [`Runtime::replace_default_stream`](crate::Runtime::replace_default_stream), to go on. Buffers
/// that the failed work wrote hand the failure to whoever reads them, until they are overwritten as
/// a whole.
///
/// Work on another stream that needs what failed is refused with the cause if the failure is known
/// as it is submitted: nothing is submitted, and that stream goes on. If the failure becomes known
/// later, it poisons that stream too. So does an explicit [`wait`](Self::wait) for what failed.
/// While the failed work still runs, this holds for work that only overwrites, too:
/// [`synchronize`](Self::synchronize) the failed stream first.
#[doc(alias("infinirtStream_t", "Stream_t"))]
#[derive(Clone)]
pub struct Stream {
    /// The stream itself; of a recording's stream, the one that it stands for.
    live: Arc<StreamInner>,
    recording: Option<Arc<Recording>>,
    pub(crate) runtime: Arc<RuntimeInner>,
}

impl Stream {
    /// A stream of a runtime, or of a recording on it.
    pub(crate) fn new(
        live: Arc<StreamInner>,
        recording: Option<Arc<Recording>>,
        runtime: Arc<RuntimeInner>,
    ) -> Self {
        Self { live, recording, runtime }
    }

    /// The stream itself, for what has no meaning in a recording.
    ///
    /// # Errors
    /// `Recording` with this rule for a stream of a recording.
    #[inline]
    pub(crate) fn live(&self, rule: &'static str) -> Result<&Arc<StreamInner>> {
        if self.recording.is_some() { Err(Error::recording(rule)) } else { Ok(&self.live) }
    }

    /// The stream itself, or the one that a recording's stream stands for: for what changes
    /// nothing, and where it is known that the stream does not record.
    #[inline]
    pub(crate) fn under(&self) -> &Arc<StreamInner> {
        &self.live
    }

    /// The recording that notes the stream's operations, if one does.
    #[inline]
    pub(crate) fn recording(&self) -> Option<&Arc<Recording>> {
        self.recording.as_ref()
    }

    /// The stream with a recording that notes its operations.
    pub(crate) fn recorded_by(&self, recording: Arc<Recording>) -> Self {
        Self::new(self.live.clone(), Some(recording), self.runtime.clone())
    }

    /// The stream without the recording that it has.
    pub(crate) fn unrecorded(&self) -> Self {
        Self::new(self.live.clone(), None, self.runtime.clone())
    }

    /// Returns whether the stream's operations are noted in a recording and not run: it is of the
    /// runtime that [`Runtime::record_graph`](crate::Runtime::record_graph) lends. Also when that
    /// recording is over, which then refuses them.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        self.recording.is_some()
    }

    /// The stream's handle.
    #[must_use]
    pub fn handle(&self) -> StreamHandle {
        self.live.raw.handle()
    }

    /// Names the stream in reports, error messages, snapshots, traces and `Debug`. The name is of
    /// all clones, and the last one counts. Reports of a simulated device show it from the next
    /// submission on.
    ///
    /// A launch's own place has a name too, if it runs in a [scope](Name::scope):
    ///
    /// ```
    /// use leasehold::{DeviceId, Name, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
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
        self.live.timeline.set_name(Some(name.into()));
    }

    /// The stream's name, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<Name> {
        self.live.timeline.name()
    }

    /// The timepoint of everything submitted so far.
    #[must_use]
    pub fn now(&self) -> Timepoint {
        self.live.timeline.now()
    }

    /// Returns whether all that was submitted is complete. Asks the driver; never blocks.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `Recording` for a recording's stream.
    pub fn query(&self) -> Result<bool> {
        let core = self.live(
            "a stream cannot be queried while recording; ask a stream that does not record",
        )?;
        core.raw.refresh()?;
        core.timeline.check(core.timeline.submitted())
    }

    /// Blocks until all that was submitted is over. After a failure too, but then for a second at
    /// most: once this has returned, what the stream wrote can be overwritten without meeting the
    /// failure again.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `Recording` for a recording's stream.
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
        let core = self.live("a stream cannot be synchronised while recording; launch the graph, and synchronise a stream that does not record")?;
        let value = core.timeline.submitted();
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let wait = || core.raw.wait_host(value, timeout);
        let result = self.runtime.traced_wait("synchronize stream", timeout, wait);
        // A failure is told as soon as it is known, which may be before what failed is over.
        if result.is_err() && core.timeline.failed(value) && !in_host_call() {
            core.timeline.drain(value, deadline, || core.raw.refresh());
        }
        result
    }

    /// Device memory for first use on this stream.
    ///
    /// # Errors
    /// As [`Runtime::alloc`](crate::Runtime::alloc).
    #[inline]
    pub(crate) fn alloc_layout(&self, layout: Layout) -> Result<Lease<Buffer>> {
        let runtime = &*self.runtime;
        if self.recording.is_some() || layout.size > runtime.direct.load(Ordering::Relaxed) {
            return self.alloc_otherwise(layout);
        }
        runtime
            .memory
            .alloc(layout, On { timeline: self.live.timeline, source: self.live.source() })
    }

    /// An allocation in a recording, of more than the device has, or under a trace.
    #[cold]
    fn alloc_otherwise(&self, layout: Layout) -> Result<Lease<Buffer>> {
        if let Some(recording) = &self.recording {
            // Here already: when the recording stops, nobody knows any more who asked for it.
            let Some(note) = self.runtime.device.info().too_large(layout.size) else {
                return recording.alloc(layout);
            };
            let site = format!("{} memory", self.runtime.id());
            return Err(OutOfMemory::new(site, layout.size).note(note).into());
        }
        let on = On { timeline: self.live.timeline, source: self.live.source() };
        let result = self.runtime.traced_alloc(&self.runtime.memory, layout, on);
        // Some devices give more than they have. Where one refuses, the size is the reason.
        result.map_err(|e| self.runtime.device.info().advised(e, layout.size))
    }

    /// Sets how long a submission waits for room while none of the stream's work completes; 30
    /// seconds at first. To the millisecond. A launch of a graph waits as long for room in the
    /// [graph budget](crate::graph::GraphBudget) while the graphs that have it do not go on, and an
    /// [allocation](crate::Runtime::alloc) for work that still uses free memory.
    pub fn set_submit_timeout(&self, timeout: Duration) {
        self.live.set_timeout(timeout);
    }

    /// Makes sure that everything submitted is on its way to the device. Does not block.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    pub fn flush(&self) -> Result<()> {
        self.live.raw.flush()
    }

    /// The driver's stream, for libraries that take one; 0 where there is none.
    #[must_use]
    pub fn native(&self) -> u64 {
        self.live.raw.native()
    }

    /// The priority that the stream got, after clamping.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.live.raw.priority()
    }

    /// Returns whether both are the same stream: both live, or both of one recording.
    #[must_use]
    pub fn same(&self, other: &Stream) -> bool {
        let recordings = (&self.recording, &other.recording);
        Arc::ptr_eq(&self.live, &other.live)
            && match recordings {
                (Some(one), Some(other)) => Arc::ptr_eq(one, other),
                (one, other) => one.is_none() && other.is_none(),
            }
    }

    /// The failure that poisoned the stream, if one did.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.live.timeline.failure().map(|(_, e)| e)
    }

    /// The stream's cause, if it is poisoned.
    pub(crate) fn healthy(&self) -> Result<()> {
        let timeline = self.live.timeline;
        if timeline.failed(timeline.submitted() + 1) {
            self.failure().map_or(Ok(()), Err)
        } else {
            Ok(())
        }
    }

    /// The stream under it, for backends' own extensions.
    pub fn raw(&self) -> &Lease<dyn leasehold_hal::Stream> {
        &self.live.raw
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
        if let Some(recording) = &self.recording {
            // SAFETY: by the caller's contract.
            return unsafe { recording.record(op, operands, self.live.raw.partition()) }
                .map(|()| None);
        }
        // SAFETY: by the caller's contract. The submission waits for what the scratch has.
        let point = unsafe {
            self.submit_ordered(operands, |core, scratch| core.submit(scratch, op, operands))?
        };
        Ok(Some(point))
    }

    /// Makes one submission by `submit`, with the operands' records locked. The scratch has what
    /// the submission must wait for. The stream does not record.
    ///
    /// # Safety
    /// - `submit` waits for what the scratch has, and returns its submission's value.
    /// - The operands cover all device memory that the submission touches.
    #[inline(always)]
    pub(crate) unsafe fn submit_ordered(
        &self,
        operands: &[Operand<'_>],
        submit: impl FnOnce(&StreamInner, &mut Scratch) -> Result<u64>,
    ) -> Result<Timepoint> {
        self.runtime.refuse_symbolic(operands)?;
        let core = &*self.live;
        let mut submit_guard = core.submit_guard()?;
        let scratch = submit_guard.scratch();
        scratch.waits.clear();
        let mut locked = Locked::new(core.timeline, operands);
        // SAFETY: the submission lock is held until the end.
        unsafe { locked.gather(&mut scratch.waits) }?;
        let point = core.timeline.at(submit(core, scratch)?);
        // SAFETY: the submission waited for what was gathered, and the submission lock is still
        // held.
        unsafe { locked.mark(point) };
        Ok(point)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recording = if self.is_recording() { ", recording" } else { "" };
        write!(f, "Stream({}, {:?}{recording})", self.runtime.id(), self.live.timeline)
    }
}
