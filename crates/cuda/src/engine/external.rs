//! External streams: streams of another library, whose submissions this backend does not see.
//!
//! An allocator orders reuse by timepoints. The timeline of an external stream counts *epochs*
//! instead of submissions. The last submitted value is the open epoch, and stands for all work that
//! was submitted before the epoch is closed. A use of memory is marked with the open epoch, which
//! needs no driver call. Reuse on the same stream needs none either: a timeline knows its own
//! values.
//!
//! # Protocol
//! - A thread that frees memory has submitted its work. It then reads the open epoch.
//! - A thread closes an epoch under the stream's lock: it opens the next one first, and records an
//!   event on the stream afterwards. So the event comes after the work of each thread that read the
//!   closed epoch.
//! - An epoch is closed only if a thread needs its completion: an allocation that found no memory,
//!   a trim, another stream that takes the memory, a wait of the host.
//! - An epoch is over once its events, or those of a later epoch, are complete. Events are queried
//!   by the threads that ask.
//!
//! # Other streams
//! A program may use memory on a stream that it does not name here. With an allocator that gives
//! memory to another stream only behind a wait for the whole device, nothing is wrong then. So the
//! thread that closes an epoch records an event on each other stream of the context too, after it
//! has opened the next epoch. A stream has none of these in capture, once it is ended, and as
//! another thread's default stream.
//!
//! # Kinds of streams
//! - Legacy default stream (handles 0 and 1): a stream like any other. Its event also comes after
//!   the work of all streams that synchronise with it.
//! - Per-thread default stream (handle 2): the handle means another stream on each thread, so each
//!   thread has a timeline of its own. No other thread can record an event on it. So the thread
//!   closes the epoch at each free, which is one driver call, and when the thread ends.
//! - Stream in capture: an event on it would become a part of the graph. So its epoch stays open,
//!   and the memory stays with the stream until the capture is over. A captured stream does not
//!   wait for other streams either. A capture may begin between the look and the record, and may
//!   end too. So a second look and a question follow, and an event that a capture has is not kept.
//! - Stream that its owner destroys: the owner ends it here first. The last epoch is closed then,
//!   and its event outlives the stream.
//! - The whole context ([`External::whole`]): stands for streams whose handles may be used no more.
//!   No event is behind all of them.
//!
//! # Without an event
//! A wait for the whole context closes the epochs of all its streams, and uses no handle
//! ([`Externals::synchronize`]). It takes the place of an event that cannot be recorded: of a
//! stream that is gone, of another thread's default stream, of the whole context. A thread that
//! waits without a limit waits so. To any other thread such an epoch is an error, so that nobody
//! waits for what never comes. The driver refuses to wait for a context with a stream in capture,
//! and ends the capture without a graph, whichever thread's. So only a caller who asked for that
//! wait gets it while a stream is known to be in capture ([`Externals::synchronize_uncaptured`]).
//!
//! This module must not know managers or how blocks are placed.

use super::core::Core;
use super::events::EventState;
use crate::driver::codes::code;
use crate::driver::ops::{CudaSlowOps, NativeStream, Progress};
use leasehold_core::sync::atomic::{Ordering, fence};
use leasehold_core::sync::thread::{self, ThreadId};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Result, Timeline, TimelineOwner, TimelineSource, Timepoint};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

/// `CU_STREAM_LEGACY`.
const LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`.
pub(crate) const PER_THREAD: u64 = 2;
/// Events that a stream keeps at most. A further one takes the place of the last.
const EVENTS: usize = 32;
/// Queries before a waiting thread sleeps between them.
const SPINS: u32 = 100;

/// The driver's answers for the handle of a stream that is gone, if it answers.
const GONE: [i32; 4] =
    [code::INVALID_VALUE, code::INVALID_CONTEXT, code::INVALID_HANDLE, code::CONTEXT_IS_DESTROYED];

fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Driver { code, .. } if GONE.contains(code))
}

/// The events that close an epoch: first the stream's own, then those of other streams.
type Closing = SmallVec<[Lease<EventState>; 1]>;

/// Events that are not known to be complete.
struct State {
    /// Events by the epoch that they close, in order.
    events: VecDeque<(u64, Closing)>,
    /// The owner ended the stream, or its device is lost: no epoch is open.
    ended: bool,
}

/// An external stream.
pub struct External {
    owner: TimelineOwner,
    core: Arc<Core>,
    /// `None` for the whole context.
    native: Option<NativeStream>,
    /// The thread whose default stream it is, for the handle [`PER_THREAD`].
    thread: Option<ThreadId>,
    /// Held across driver calls that do not block. A leaf.
    state: Mutex<State>,
}

impl External {
    /// Makes the timeline of a stream.
    ///
    /// # Errors
    /// `OutOfMemory` without timelines.
    ///
    /// # Safety
    /// - `native` is a stream of the core's context, and is not destroyed before
    ///   [`end`](Self::end).
    pub(crate) unsafe fn new(core: Arc<Core>, native: u64) -> Result<Arc<Self>> {
        let thread = (native == PER_THREAD).then(|| thread::current().id());
        Self::with(core, Some(NativeStream(if native == 0 { LEGACY } else { native })), thread)
    }

    /// Makes a timeline that stands for all streams of the core's context.
    ///
    /// # Errors
    /// `OutOfMemory` without timelines.
    pub(crate) fn whole(core: Arc<Core>) -> Result<Arc<Self>> {
        Self::with(core, None, None)
    }

    fn with(
        core: Arc<Core>,
        native: Option<NativeStream>,
        thread: Option<ThreadId>,
    ) -> Result<Arc<Self>> {
        let owner = TimelineOwner::take()?;
        owner.set_external();
        owner.advance()?;
        let stream = Arc::new(Self {
            owner,
            native,
            thread,
            state: Mutex::new(State { events: VecDeque::with_capacity(EVENTS), ended: false }),
            core,
        });
        let weak = Arc::downgrade(&stream);
        stream.owner.set_publisher(Some(std::sync::Arc::new(move |value, timeout| {
            weak.upgrade().map_or(Ok(()), |stream| stream.publish(value, timeout))
        })));
        stream.core.shared.externals.add(&stream);
        Ok(stream)
    }

    /// The driver's handle. 0 for the whole context.
    #[must_use]
    pub fn native(&self) -> u64 {
        self.native.map_or(0, |native| native.0)
    }

    /// Blocks until all work of the stream's context is over, also that of streams that were never
    /// seen here. The epochs of all its streams are over then, and memory that any of them freed
    /// before is anybody's, whether or not the stream still exists. Uses no stream's handle.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's, for a context with a stream in capture too. The capture ends
    /// without a graph then.
    pub fn synchronize_context(&self) -> Result<()> {
        self.core.shared.externals.synchronize(&self.core)
    }

    /// Blocks until the work that the context's streams have now is over, for at most `limit`.
    /// Breaks no capture: streams in capture are not waited for, and streams that were never seen
    /// here only if another one can have no event.
    ///
    /// # Errors
    /// `DeviceLost`.
    pub fn wait_context(&self, limit: Duration) -> Result<()> {
        self.core.shared.externals.wait(&self.core, limit)
    }

    /// The stream's timeline.
    #[inline]
    #[must_use]
    pub fn timeline(&self) -> &'static Timeline {
        self.owner.timeline()
    }

    /// The timepoint of all work that was submitted before this call. Makes no driver call, except
    /// for the calling thread's own default stream, whose event is recorded. If that fails, a later
    /// event of the stream stands for this one.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Timepoint {
        // A thread that closes the epoch opens the next one before its event is recorded. So if
        // this load returns the old epoch, the event comes after this thread's submissions.
        fence(Ordering::SeqCst);
        let now = self.timeline().now();
        if self.thread.is_some_and(|thread| thread == thread::current().id())
            && let Err(error) = self.close(false)
        {
            tracing::debug!(%error, "the event of a default stream was not recorded");
        }
        now
    }

    fn calls<R>(&self, calls: impl FnOnce(&dyn CudaSlowOps) -> Result<R>) -> Result<R> {
        self.core.context.relaxed(calls)
    }

    /// Whether the stream is another thread's default stream, which this thread cannot name.
    fn is_elsewhere(&self) -> bool {
        self.thread.is_some_and(|thread| thread != thread::current().id())
    }

    /// The driver's stream, as this thread can name it.
    fn stream(&self) -> Result<NativeStream> {
        match self.native {
            Some(_) if self.is_elsewhere() => {
                Err(Error::state("a per-thread default stream belongs to another thread"))
            }
            Some(native) => Ok(native),
            None => Err(Error::state(
                "no event is behind the work of a whole device; synchronize the device instead",
            )),
        }
    }

    fn check_capture(&self, ops: &dyn CudaSlowOps, stream: NativeStream) -> Result<()> {
        // SAFETY: the stream is not destroyed before its end, which the caller has checked.
        if unsafe { ops.is_capturing(stream) }? { Err(in_capture(stream)) } else { Ok(()) }
    }

    /// Whether the stream is in capture, as far as this thread can tell.
    fn is_captured(&self) -> bool {
        let Ok(stream) = self.stream() else { return false };
        let state = self.state.lock();
        // SAFETY: the stream is not destroyed before its end, which the lock holds off.
        !state.ended && self.calls(|ops| unsafe { ops.is_capturing(stream) }).unwrap_or(false)
    }

    /// Whether no event will ever close the epoch for this thread, after this error.
    fn needs_context(&self, error: &Error) -> bool {
        self.native.is_none() || self.is_elsewhere() || is_gone(error)
    }

    /// The error with its cure.
    fn explained(&self, error: Error) -> Error {
        if !is_gone(&error) {
            return error;
        }
        Error::state(format!(
            "stream {:#x} is gone ({error}): its owner must end a stream before it destroys it \
             (leasehold_stream_end); synchronizing the device frees its memory too",
            self.native()
        ))
    }

    /// Closes the open epoch: records an event behind all work so far, also on the other streams if
    /// asked. Returns the closed value.
    fn close(&self, others_too: bool) -> Result<u64> {
        let stream = self.stream()?;
        let event = self.noted(self.core.event())?;
        let opened = {
            let state = self.state.lock();
            let open = self.timeline().submitted();
            if state.ended {
                return Ok(open);
            }
            self.calls(|ops| self.check_capture(ops, stream)).and_then(|()| {
                self.owner.advance()?;
                fence(Ordering::SeqCst);
                Ok(open)
            })
        };
        let open = self.noted(opened)?;
        let others = if others_too { self.events_of_others() } else { Closing::new() };
        let recorded = {
            let mut state = self.state.lock();
            if state.ended {
                return Ok(open);
            }
            self.record(&mut state, stream, (open, event), others)
        };
        self.noted(recorded).map(|()| open)
    }

    /// Records the events that close an epoch: this stream's own. `others` are recorded already.
    fn record(
        &self,
        state: &mut State,
        stream: NativeStream,
        (epoch, own): (u64, Lease<EventState>),
        others: Closing,
    ) -> Result<()> {
        self.calls(|ops| self.record_event(ops, stream, &own))?;
        // Another thread may have closed a later epoch meanwhile, perhaps without the others.
        if let Some((later, events)) = state.events.back_mut()
            && *later >= epoch
        {
            events.extend(others);
            return Ok(());
        }
        // A later record of the same stream stands for the earlier ones too.
        if state.events.len() == EVENTS {
            state.events.pop_back();
        }
        state.events.push_back((epoch, std::iter::once(own).chain(others).collect()));
        Ok(())
    }

    /// Records an event behind the stream's work so far.
    fn record_event(
        &self,
        ops: &dyn CudaSlowOps,
        stream: NativeStream,
        event: &EventState,
    ) -> Result<()> {
        self.check_capture(ops, stream)?;
        // SAFETY: the event is leased, and the stream is not destroyed before its end.
        unsafe { ops.event_record(event.native, stream) }?;
        // Another thread may have begun a capture since the first look. Its graph has the record
        // then, and a question about the event would break it: the event is not kept.
        self.check_capture(ops, stream)?;
        // The capture may be over again. The driver knows nothing of its event then.
        // SAFETY: the event is leased.
        match unsafe { ops.event_query(event.native) } {
            Err(Error::Driver { code: code::INVALID_VALUE, .. }) => Err(in_capture(stream)),
            other => other.map(drop),
        }
    }

    /// Events behind the work of the context's other streams so far, of those that can have one.
    fn events_of_others(&self) -> Closing {
        let streams = self.core.shared.externals.of(&self.core);
        let others = streams.iter().filter(|other| !std::ptr::eq(&***other, self));
        others.filter_map(|other| other.event_beside()).collect()
    }

    /// An event behind the work so far, which closes no epoch of this stream.
    fn event_beside(&self) -> Option<Lease<EventState>> {
        let (stream, event) = (self.stream().ok()?, self.core.event().ok()?);
        let state = self.state.lock();
        let recorded =
            !state.ended && self.calls(|ops| self.record_event(ops, stream, &event)).is_ok();
        drop(state);
        recorded.then_some(event)
    }

    /// Takes note of a lost device: nothing of the stream runs any more.
    fn noted<R>(&self, result: Result<R>) -> Result<R> {
        if let Err(cause @ Error::DeviceLost { .. }) = &result {
            let mut state = self.state.lock();
            let events = std::mem::take(&mut state.events);
            if !std::mem::replace(&mut state.ended, true) {
                self.owner.poison(self.timeline().completed() + 1, cause.clone());
            }
            drop(state);
            self.owner.complete(self.timeline().submitted());
            drop(events);
        }
        result
    }

    /// Queries the events in order, and publishes the epochs that are over.
    fn look(&self) -> Result<u64> {
        let mut over = Vec::new();
        let looked = {
            let mut state = self.state.lock();
            let mut value = None;
            let mut looked = Ok(());
            while let Some((epoch, events)) = state.events.front() {
                let complete = self.calls(|ops| {
                    events.iter().try_fold(true, |complete, event| {
                        // SAFETY: the event is leased.
                        let is = || unsafe { ops.event_query(event.native) };
                        Ok(complete && is()? == Progress::Complete)
                    })
                });
                match complete {
                    Ok(true) => {
                        value = Some(*epoch);
                        over.extend(state.events.pop_front());
                    }
                    Ok(false) => break,
                    Err(e) => {
                        looked = Err(e);
                        break;
                    }
                }
            }
            if let Some(value) = value {
                self.owner.complete(value);
            }
            looked
        };
        drop(over);
        self.noted(looked)?;
        Ok(self.timeline().completed())
    }

    /// Ensures that an event comes after the work of `value`, unless the work is over. An epoch
    /// that was closed has none if its record failed.
    fn cover(&self, value: u64) -> Result<()> {
        let covered = self.state.lock().events.back().is_some_and(|e| e.0 >= value);
        if covered || self.timeline().completed() >= value {
            return Ok(());
        }
        self.close(true).map(drop)
    }

    /// Publishes the completion of `value`, for a thread that waits for it. Closes its epoch if it
    /// is open. Blocks for at most `timeout`.
    fn publish(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let nap = self.core.context.ops().poll_interval();
        if self.look()? >= value {
            return Ok(());
        }
        if let Err(refused) = self.cover(value) {
            if timeout.is_some() || !self.needs_context(&refused) {
                return Err(self.explained(refused));
            }
            return match self.core.shared.externals.synchronize_uncaptured(&self.core) {
                Ok(()) if self.timeline().completed() < value => Err(refused),
                Err(error @ (Error::Driver { .. } | Error::InvalidState(_))) => {
                    Err(Error::state(format!(
                        "{}; the device cannot be waited for now: {error}",
                        self.explained(refused)
                    )))
                }
                waited => waited,
            };
        }
        let mut looks = 0;
        loop {
            if self.look()? >= value || deadline.is_some_and(|at| Instant::now() >= at) {
                return Ok(());
            }
            looks += 1;
            if looks < SPINS {
                thread::yield_now();
            } else {
                thread::sleep(nap);
            }
        }
    }

    /// The events after all work up to `value`, the stream's own first, and the epoch that they
    /// close. `None` if the work is over.
    ///
    /// # Errors
    /// `Unsupported` if only a thread can wait; `InvalidState` for a stream in capture; the
    /// driver's.
    pub(crate) fn events_for(&self, value: u64) -> Result<Option<(Closing, u64)>> {
        if self.timeline().completed() >= value {
            return Ok(None);
        }
        if let Err(refused) = self.cover(value) {
            return Err(if self.needs_context(&refused) {
                Error::Unsupported(self.explained(refused).to_string().into())
            } else {
                refused
            });
        }
        let state = self.state.lock();
        let found = state.events.iter().find(|e| e.0 >= value);
        let found = found.map(|(epoch, events)| (events.clone(), *epoch));
        drop(state);
        // Another thread may have seen the events complete meanwhile.
        if found.is_none() && self.timeline().completed() < value {
            return Err(Error::state("the stream's event was not recorded"));
        }
        Ok(found)
    }

    /// Ends the stream: its owner may destroy it afterwards. Marks that were made before are over
    /// once the stream's work is. A second call does nothing. Blocks only if the stream is gone
    /// already: then for all work of the context.
    ///
    /// # Errors
    /// `InvalidState` for a stream in capture, and for the per-thread default stream of another
    /// thread; the driver's. Then the stream is as it was.
    pub(crate) fn end(&self) -> Result<()> {
        let stream = self.stream()?;
        let event = self.noted(self.core.event())?;
        let others = self.events_of_others();
        let mut state = self.state.lock();
        if state.ended {
            return Ok(());
        }
        let open = self.timeline().submitted();
        let closed = match self.record(&mut state, stream, (open, event), others) {
            // The handle of a stream that was destroyed: the driver knows no more of its work.
            Err(Error::Driver { .. }) => {
                drop(state);
                let waited = self.core.shared.externals.synchronize_uncaptured(&self.core);
                state = self.state.lock();
                waited.map(|()| self.owner.complete(self.timeline().submitted()))
            }
            other => other,
        };
        if closed.is_ok() {
            state.ended = true;
        }
        drop(state);
        self.noted(closed)
    }

    /// Ends a stream that no mark refers to.
    pub(crate) fn end_unused(&self) {
        self.state.lock().ended = true;
        self.owner.complete(self.timeline().submitted());
    }

    /// Opens the next epoch, for a wait for the whole context. Returns the last value whose work
    /// was submitted before this call.
    fn open_next(&self) -> Result<u64> {
        let state = self.state.lock();
        let open = self.timeline().submitted();
        if !state.ended {
            self.owner.advance()?;
            // As in `now`: a thread that read the former epoch had submitted its work.
            fence(Ordering::SeqCst);
        }
        Ok(open)
    }

    /// Publishes that all work up to `value` is over.
    fn all_over(&self, value: u64) {
        let mut state = self.state.lock();
        let later = state.events.partition_point(|(epoch, _)| *epoch <= value);
        let over: Vec<_> = state.events.drain(..later).collect();
        self.owner.complete(value);
        drop(state);
        drop(over);
    }

    /// Whether the stream was ended and all its work is over.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn is_over(&self) -> Result<bool> {
        if !self.state.lock().ended {
            return Ok(false);
        }
        if !self.timeline().is_idle() {
            self.look()?;
        }
        Ok(self.timeline().is_idle())
    }
}

// SAFETY: a value is published after the event that closes its epoch, or a later one, was reported
// as complete, or after the loss of the context. The stream runs its work in order. A timepoint is
// learned after the driver accepted the wait for an event behind it.
unsafe impl TimelineSource for External {
    fn timeline(&self) -> &'static Timeline {
        self.owner.timeline()
    }

    fn signal(&self) -> Result<u64> {
        self.close(true).map_err(|e| self.explained(e))
    }

    fn refresh(&self) -> Result<u64> {
        self.look()
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        if on.timeline_id() == self.timeline().id() || on.is_settled() {
            return Ok(());
        }
        // A stream without a name here gets no wait.
        let Ok(stream) = self.stream() else { return Err(no_device_wait(on)) };
        let found = match self.core.shared.externals.get(on.timeline_id()) {
            Some(source) => source.events_for(on.value())?,
            None => match self.core.shared.tables.mark(on)? {
                Some(mark) => Some((Closing::from([mark]), on.value())),
                None => return Err(no_device_wait(on)),
            },
        };
        let Some((events, value)) = found else { return Ok(()) };
        let state = self.state.lock();
        let waited = if state.ended {
            Err(Error::state("the external stream was ended"))
        } else {
            self.calls(|ops| {
                self.check_capture(ops, stream)?;
                for event in &events {
                    // SAFETY: the event is leased, and the stream is not destroyed before its end.
                    unsafe { ops.stream_wait_event(stream, event.native) }?;
                }
                // The lock is the submitter's turn.
                self.owner.learn(on.timeline().at(value));
                Ok(())
            })
        };
        drop(state);
        self.noted(waited).map_err(|e| self.explained(e))
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.timeline().wait(value, timeout)
    }
}

impl Drop for External {
    fn drop(&mut self) {
        // No block of a live device refers to an open epoch of a stream that was not ended, unless
        // the whole device goes: then its work must be over before the timeline has another owner.
        if !self.timeline().is_idle() {
            let _ = self.core.context.release(|ops| ops.context_synchronize());
            self.owner.complete(self.timeline().submitted());
        }
    }
}

impl fmt::Debug for External {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "External({:#x}, {:?})", self.native(), self.timeline())
    }
}

/// The refusal of an event on a stream in capture.
fn in_capture(stream: NativeStream) -> Error {
    Error::state(format!(
        "stream {:#x} is being captured; its memory stays with it until the capture is over",
        stream.0
    ))
}

/// The refusal of a wait on the device. Callers wait on the host then.
fn no_device_wait(on: Timepoint) -> Error {
    Error::Unsupported(format!("an external stream cannot wait for {on:?} on the device").into())
}

/// The external streams of all devices, by timeline.
#[derive(Default)]
pub(crate) struct Externals(
    Mutex<std::collections::HashMap<leasehold_core::TimelineId, std::sync::Weak<External>>>,
);

impl Externals {
    fn add(&self, stream: &Arc<External>) {
        let mut all = self.0.lock();
        if all.len() == all.capacity() {
            all.retain(|_, stream| stream.strong_count() > 0);
        }
        all.insert(stream.timeline().id(), Arc::downgrade(stream));
    }

    pub(crate) fn get(&self, timeline: leasehold_core::TimelineId) -> Option<Arc<External>> {
        self.0.lock().get(&timeline)?.upgrade()
    }

    /// As [`External::synchronize_context`].
    fn synchronize(&self, core: &Core) -> Result<()> {
        // An epoch that cannot be closed stays open.
        let streams = self.of(core).into_iter();
        let open: Vec<_> = streams.filter_map(|s| Some((s.open_next().ok()?, s))).collect();
        core.context.relaxed(|ops| ops.context_synchronize())?;
        open.iter().for_each(|(value, stream)| stream.all_over(*value));
        Ok(())
    }

    /// As [`synchronize`](Self::synchronize), unless a stream that is known here is in capture:
    /// then the capture goes on.
    ///
    /// # Errors
    /// `DeviceLost`; `InvalidState` while a stream is in capture; the driver's.
    fn synchronize_uncaptured(&self, core: &Core) -> Result<()> {
        match self.of(core).iter().find(|stream| stream.is_captured()) {
            Some(stream) => Err(Error::state(format!(
                "stream {:#x} is being captured, which a wait for the device would break",
                stream.native()
            ))),
            None => self.synchronize(core),
        }
    }

    /// As [`External::wait_context`]. Events tell when streams are over. The whole context is
    /// waited for if a stream can have no event and none is in capture.
    fn wait(&self, core: &Core, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        let mut without_event = false;
        let mut closed = Vec::new();
        for stream in self.of(core) {
            match stream.close(false) {
                Ok(value) => closed.push((value, stream)),
                Err(lost @ Error::DeviceLost { .. }) => return Err(lost),
                Err(refused) => without_event |= stream.needs_context(&refused),
            }
        }
        for (value, stream) in closed {
            let left = deadline.saturating_duration_since(Instant::now());
            if let Err(lost @ Error::DeviceLost { .. }) = stream.publish(value, Some(left)) {
                return Err(lost);
            }
        }
        match without_event.then(|| self.synchronize_uncaptured(core)) {
            Some(Err(lost @ Error::DeviceLost { .. })) => Err(lost),
            _ => Ok(()),
        }
    }

    /// The streams of a context.
    fn of(&self, core: &Core) -> Vec<Arc<External>> {
        let mut all: Vec<_> = self.0.lock().values().filter_map(std::sync::Weak::upgrade).collect();
        // Without the lock: the last user of another context's stream may wait for that context.
        all.retain(|stream| std::ptr::eq(&*stream.core, core));
        all
    }
}
