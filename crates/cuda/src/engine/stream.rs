//! A stream: submission, completion, waiting. What the host holds back is in [`deferred`](super::deferred).
//!
//! # Protocol
//! | number | meaning | written |
//! |---|---|---|
//! | `line.submitted` | values that were taken | in the lock |
//! | `issued` | all up to this value was given to the driver | in the lock |
//! | `signalled` | the driver was told to make completion visible up to this value | in the lock |
//! | the word | the device is done up to this value | by the device |
//! | `line.completed` | and the host has done its part | by whoever looks |
//! | `wanted` | somebody relies on the publication of this value without asking | by anyone, monotone |
//!
//! A submission on a stream that holds nothing back is: the lock, a look at the current context, the driver's calls, the next value. Nothing
//! is allocated. The word is written every [`signal_every`](crate::config::CudaConfig::signal_every) submissions, at a signal, at a flush and
//! when somebody waits.
//!
//! What needs other locks (a mark on another stream, staging memory) is prepared before the lock is taken.
//!
//! # After a failure
//! The line is poisoned from the failed value on, what was held back is dropped, and values are published once the driver says that all it
//! was given is over. A lost context is over at once.
//!
//! This module must not know managers.

use super::core::Core;
use super::deferred::{Job, Turn};
use super::events::EventState;
use super::host::{HostPart, Item};
use super::shared::Origin;
use super::words::Word;
use crate::driver::ops::{NativeStream, Progress};
use crate::encoder::{Encoder, Prepared, Ready};
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, MutexGuard, spin_loop, thread};
use leasehold_core::{Error, Fault, Lease, Line, LineId, LineOwner, Point, Result, Timeline, VALUE_LIMIT};
use leasehold_hal::Op;
use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Marks that a stream remembers.
const MARKS: usize = 4;
/// Without words: events that may be under way before no more are recorded by the way.
const SIGNALS: usize = 16;
/// Of so many submissions the kernel is remembered, for reports.
const RECENT: usize = 64;
/// A waiting thread looks so often before it yields, and then so often before it sleeps.
const SPINS: u32 = 200;
const YIELDS: u32 = 200;
/// How often a thread looks whether another one has published what it knows to be over.
const PASSING: u32 = 1000;
/// The longest sleep between looks.
const NAP_MAX: Duration = Duration::from_millis(1);

thread_local! {
    /// The line whose host call this thread runs, and its value.
    pub(super) static RUNNING: Cell<Option<(LineId, u64)>> = const { Cell::new(None) };
}

/// An event that was recorded when all up to `value` had been given to the driver.
struct Mark {
    value: u64,
    event: Lease<EventState>,
}

/// What the lock guards.
pub(super) struct State {
    pub(super) deferred: VecDeque<Job>,
    pub(super) turn: Turn,
    /// Somebody came to go on while another was at it.
    pub(super) again: bool,
    /// Set by the device when it has come to the host call in front.
    pub(super) fence: Option<Arc<AtomicBool>>,
    /// The first of what is held back waits for a line that nobody of ours advances.
    pub(super) foreign: bool,
    /// The driver was given something since it was last seen to be done with all.
    pub(super) dirty: bool,
    marks: VecDeque<Mark>,
    /// Without words: events by value.
    signals: VecDeque<(u64, Lease<EventState>)>,
}

impl State {
    /// Whether something is held back, so that whatever comes must queue behind it.
    pub(super) fn is_busy(&self) -> bool {
        self.turn != Turn::Free || !self.deferred.is_empty()
    }
}

/// A driver that did not take an operation.
pub(super) struct Refusal {
    pub(super) error: Error,
    /// It had taken something of the same submission.
    accepted: bool,
    /// The operation.
    op: String,
}

/// What a stream is.
pub struct StreamCore {
    pub(super) core: Arc<Core>,
    owner: LineOwner,
    native: NativeStream,
    priority: i32,
    word: Option<Word>,
    pub(super) issued: AtomicU64,
    signalled: AtomicU64,
    /// Without words: what the events said.
    seen: AtomicU64,
    pub(super) wanted: AtomicU64,
    pub(super) watched: AtomicBool,
    pub(super) state: Mutex<State>,
    pub(super) host: HostPart,
    recent: [AtomicU64; RECENT],
    pub(super) me: Weak<StreamCore>,
}

impl StreamCore {
    /// A stream with a line of its own. May block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory` without lines or memory; the driver's.
    pub fn new(core: Arc<Core>, priority: i32) -> Result<Arc<Self>> {
        let owner = LineOwner::take()?;
        let start = owner.line().submitted();
        let word = if core.has_words() { Some(core.words.take(start)?) } else { None };
        let native = core.door.within(|ops| ops.stream_create(priority)).map_err(|e| core.settle(e))?;
        let stream = Arc::new_cyclic(|me: &Weak<StreamCore>| Self {
            owner,
            native,
            priority,
            word,
            issued: AtomicU64::new(start),
            signalled: AtomicU64::new(start),
            seen: AtomicU64::new(start),
            wanted: AtomicU64::new(0),
            watched: AtomicBool::new(false),
            state: Mutex::new(State {
                deferred: VecDeque::new(),
                turn: Turn::Free,
                again: false,
                fence: None,
                foreign: false,
                dirty: false,
                marks: VecDeque::with_capacity(MARKS + 1),
                signals: VecDeque::new(),
            }),
            host: HostPart::default(),
            recent: std::array::from_fn(|_| AtomicU64::new(0)),
            me: me.clone(),
            core,
        });
        let me = stream.me.clone();
        stream.line().set_publisher(Some(Arc::new(move |value, timeout| {
            if let Some(stream) = me.upgrade() {
                stream.publish_for(value, timeout);
            }
        })));
        stream.core.shared.add_origin(stream.line(), Origin::Stream(stream.me.clone()));
        stream.core.add_stream(&stream);
        Ok(stream)
    }

    /// Its line.
    #[inline]
    #[must_use]
    pub fn line(&self) -> &'static Line {
        self.owner.line()
    }

    /// The driver's stream.
    #[must_use]
    pub fn native(&self) -> NativeStream {
        self.native
    }

    /// The priority, in the driver's numbers.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// The context that it belongs to.
    #[must_use]
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Whether it can be lent again.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let line = self.line();
        line.is_idle() && !line.failed(VALUE_LIMIT) && line.submitted() < VALUE_LIMIT / 2 && self.host.is_empty()
    }

    /// How it is called in reports.
    pub(super) fn name(&self) -> String {
        format!("{} {:?}", self.core.door.id(), self.line().id())
    }

    // ---- submission -------------------------------------------------------------------------------------------------

    /// Hands over operations as one submission; see `hal::Stream::submit`.
    ///
    /// # Errors
    /// See there.
    ///
    /// # Safety
    /// - See there.
    pub unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        let mut plain = true;
        for op in ops {
            crate::encoder::check(op, self.core.properties(), self.line())?;
            plain &= self.is_plain(op);
        }
        if !plain {
            return self.submit_slow(ops);
        }
        let state = self.state.lock();
        self.healthy()?;
        if state.is_busy() {
            return self.defer(state, ops);
        }
        self.submit_now(state, ops, &mut Prepared::default(), ops.len())
    }

    /// Whether an operation is given to the driver without preparation.
    #[inline]
    fn is_plain(&self, op: &Op<'_>) -> bool {
        match op {
            Op::Dispatch(_) | Op::Copy(_) | Op::Fill(_) | Op::Upload(_) | Op::Stamp(_) => true,
            Op::Wait(p) => p.line_id() == self.line().id() || p.is_settled(),
            Op::Download(d) => crate::encoder::lands_directly(&self.core, d),
            // SAFETY: graphs of a submission belong to this device (the submitter's promise), whose execs give their own address.
            Op::Graph(exec) => unsafe { super::program::Program::of(exec) }.is_plain(),
            _ => false,
        }
    }

    /// The cause of a poisoned line as an error.
    #[inline]
    pub(super) fn healthy(&self) -> Result<()> {
        self.line().check(VALUE_LIMIT).map(drop)
    }

    fn next_value(&self) -> Result<u64> {
        let value = self.line().submitted() + 1;
        if value >= VALUE_LIMIT {
            return Err(Error::state("a line's 2^48 values are used up; replace the stream"));
        }
        Ok(value)
    }

    /// Submits to a stream that holds nothing back: `ops[..cut]` to the driver, the rest is held back.
    #[inline]
    fn submit_now(
        &self,
        mut state: MutexGuard<'_, State>,
        ops: &[Op<'_>],
        prepared: &mut Prepared,
        cut: usize,
    ) -> Result<u64> {
        let value = self.next_value()?;
        #[cfg(feature = "planted-defects")]
        if let Some(word) = &self.word
            && self.core.shared.config.has(crate::defects::Defect::WordBeforeWork)
        {
            self.core.door.within(|ops| ops.stream_write_word(self.native, word.addr(), value))?;
            self.signalled.store(value, Ordering::Release);
        }
        if let Err(refusal) = self.issue(&mut state, value, ops[..cut].iter().enumerate(), prepared, false) {
            return self.refused(state, value, refusal);
        }
        self.line().advance()?;
        if cut < ops.len() {
            return Ok(self.hold_back(state, value, &ops[cut..]));
        }
        self.issued.store(value, Ordering::Release);
        let due = value - self.signalled.load(Ordering::Relaxed) >= u64::from(self.core.shared.config.signal_every);
        if due && state.signals.len() < SIGNALS {
            let signalled = self.signal_locked(&mut state);
            drop(state);
            self.after(signalled);
            self.poll();
        }
        Ok(value)
    }

    /// The driver refused an operation of a submission that was to have `value`.
    #[cold]
    fn refused(&self, mut state: MutexGuard<'_, State>, value: u64, refusal: Refusal) -> Result<u64> {
        if !refusal.accepted || matches!(refusal.error, Error::DeviceLost { .. }) {
            drop(state);
            return Err(self.core.settle(refusal.error));
        }
        // A part runs: its memory must be guarded by a value, so there is one, and it has failed.
        state.dirty = true;
        self.line().advance()?;
        self.issued.store(value, Ordering::Release);
        drop(state);
        self.fail(value, self.fault(refusal.op, value, &refusal.error));
        Ok(value)
    }

    /// A failure of an operation of ours, with its place.
    pub(super) fn fault(&self, op: String, value: u64, cause: &Error) -> Error {
        match cause {
            Error::DeviceLost { .. } => cause.clone(),
            _ => Fault::new(op, self.name(), value, cause.to_string()).into(),
        }
    }

    #[cold]
    fn submit_slow(&self, ops: &[Op<'_>]) -> Result<u64> {
        {
            let state = self.state.lock();
            self.healthy()?;
            if state.is_busy() {
                return self.defer(state, ops);
            }
        }
        let mut prepared = Prepared::default();
        let mut cut = ops.len();
        for (i, op) in ops.iter().enumerate() {
            match self.prepare(op)? {
                Ready::Plain => {}
                Ready::Blocked => {
                    cut = i;
                    break;
                }
                Ready::Failed(cause) => {
                    let state = self.state.lock();
                    let next = self.line().submitted() + 1;
                    self.line().poison(next, cause.clone());
                    drop(state);
                    self.after_failure();
                    return Err(cause);
                }
                ready => prepared.put(i, ready),
            }
        }
        let state = self.state.lock();
        self.healthy()?;
        if state.is_busy() {
            return self.defer(state, ops);
        }
        let value = self.submit_now(state, ops, &mut prepared, cut)?;
        ops[..cut].iter().for_each(|op| {
            if let Op::Wait(p) = op {
                self.line().learn(*p);
            }
        });
        if cut < ops.len() {
            self.pump();
        }
        Ok(value)
    }

    /// Gives operations to the driver, in the lock. `part`: operations of the same submission were given before.
    pub(super) fn issue<'o, 'r>(
        &self,
        state: &mut State,
        value: u64,
        ops: impl Iterator<Item = (usize, &'r Op<'o>)>,
        prepared: &mut Prepared,
        part: bool,
    ) -> std::result::Result<(), Refusal>
    where
        'o: 'r,
    {
        let mut accepted = part;
        let mut failed = None;
        match self.core.door.enter() {
            Err(error) => return Err(Refusal { error, accepted, op: "submission".to_owned() }),
            Ok(entry) => {
                for (i, op) in ops {
                    let mut encoder = Encoder::new(&self.core, &*entry, self.native, value, &self.host, &mut accepted);
                    if let Err(error) = encoder.encode(op, prepared.take(i)) {
                        failed = Some((error, op.name()));
                        break;
                    }
                    if let Op::Dispatch(d) = op {
                        self.recent[value as usize % RECENT].store(d.pipeline.native, Ordering::Relaxed);
                    }
                }
            }
        }
        state.dirty |= accepted;
        match failed {
            Some((error, op)) => Err(Refusal { error: self.core.door.note(error), accepted, op }),
            None => Ok(()),
        }
    }

    /// What an operation needs before the driver can be given it. Called without a lock.
    pub(super) fn prepare(&self, op: &Op<'_>) -> Result<Ready> {
        match op {
            Op::Wait(p) => self.resolve(*p),
            Op::Download(d) if !crate::encoder::lands_directly(&self.core, d) => {
                let on = leasehold_alloc::On { line: self.line(), timeline: &Own(self) };
                Ok(Ready::Staging(self.core.staging(d.bytes, on)?))
            }
            _ if self.is_plain(op) => Ok(Ready::Plain),
            _ => Ok(Ready::Blocked),
        }
    }

    /// How this stream can wait for a point.
    pub(super) fn resolve(&self, point: Point) -> Result<Ready> {
        if point.line_id() == self.line().id() {
            return Ok(Ready::Plain);
        }
        #[cfg(feature = "planted-defects")]
        if self.core.shared.config.has(crate::defects::Defect::MissingWait) && point.value() <= point.line().submitted()
        {
            return Ok(Ready::Plain);
        }
        match point.line().check(point.value()) {
            Ok(true) => return Ok(Ready::Plain),
            Err(cause) => return Ok(Ready::Failed(cause)),
            Ok(false) => {}
        }
        match self.core.shared.origin(point.line_id()) {
            Some(Origin::Stream(source)) => match source.upgrade() {
                Some(source) => {
                    let mark = source.mark_for(point.value())?;
                    #[cfg(feature = "planted-defects")]
                    if let Some((event, _)) = &mark
                        && self.core.shared.config.has(crate::defects::Defect::EventRecycledEarly)
                    {
                        self.core.door.within(|ops| ops.event_record(event.native, self.native))?;
                    }
                    Ok(mark.map_or(Ready::Blocked, |(event, value)| {
                        Ready::Event(event, Item::Passed { source: source.me.clone(), value })
                    }))
                }
                // It is gone: then all its values are over, or soon will be.
                None => Ok(Ready::Blocked),
            },
            _ => Ok(Ready::Blocked),
        }
    }

    /// An event that was recorded after everything up to `value`, and before as little else as may be, with the value up to which all is over
    /// when it is. `None` while `value` is held back.
    fn mark_for(&self, value: u64) -> Result<Option<(Lease<EventState>, u64)>> {
        let find = |state: &State| {
            #[cfg(feature = "planted-defects")]
            if self.core.shared.config.has(crate::defects::Defect::StaleMark) {
                return state.marks.back().map(|m| (m.event.clone(), value));
            }
            state.marks.iter().find(|m| m.value >= value).map(|m| (m.event.clone(), m.value))
        };
        {
            let state = self.state.lock();
            if self.issued.load(Ordering::Relaxed) < value {
                return Ok(None);
            }
            if let Some(event) = find(&state) {
                return Ok(Some(event));
            }
        }
        let event = self.core.mark().map_err(|e| self.core.settle(e))?;
        let mut state = self.state.lock();
        if let Some(event) = find(&state) {
            return Ok(Some(event));
        }
        let recorded = self.core.door.within(|ops| ops.event_record(event.native, self.native));
        if let Err(e) = recorded {
            drop(state);
            return Err(self.core.settle(e));
        }
        if state.marks.len() == MARKS {
            state.marks.pop_front();
        }
        let issued = self.issued.load(Ordering::Relaxed);
        state.marks.push_back(Mark { value: issued, event: event.clone() });
        Ok(Some((event, issued)))
    }

    // ---- completion -------------------------------------------------------------------------------------------------

    /// Tells the driver to make completion visible up to what it was given. In the lock.
    pub(super) fn signal_locked(&self, state: &mut State) -> Result<()> {
        let issued = self.issued.load(Ordering::Relaxed);
        if self.signalled.load(Ordering::Relaxed) >= issued {
            return Ok(());
        }
        match &self.word {
            Some(word) => {
                self.core.door.within(|ops| ops.stream_write_word(self.native, word.addr(), issued))?;
            }
            None => {
                let event = self.core.mark()?;
                self.core.door.within(|ops| ops.event_record(event.native, self.native))?;
                state.signals.push_back((issued, event));
            }
        }
        state.dirty = true;
        self.signalled.store(issued, Ordering::Release);
        Ok(())
    }

    /// What remains to be done about an error once the lock is released.
    pub(super) fn after(&self, result: Result<()>) {
        if let Err(e) = result {
            let e = self.core.settle(e);
            tracing::debug!(error = %e, stream = %self.name(), "completion could not be signalled");
        }
    }

    /// How far the device is, as far as it told. No driver call with words.
    fn reached(&self) -> u64 {
        #[cfg(feature = "planted-defects")]
        if self.core.shared.config.has(crate::defects::Defect::ReuseBeforeCompletion) {
            return self.issued.load(Ordering::Acquire);
        }
        if let Some(word) = &self.word {
            return word.load();
        }
        let mut state = self.state.lock();
        while let Some((value, event)) = state.signals.front() {
            match self.core.door.within(|ops| ops.event_query(event.native)) {
                Ok(Progress::Complete) => {
                    self.seen.fetch_max(*value, Ordering::AcqRel);
                    state.signals.pop_front();
                }
                _ => break,
            }
        }
        self.seen.load(Ordering::Acquire)
    }

    /// Publishes what the device is done with. Says whether that was news.
    pub(super) fn poll(&self) -> bool {
        let line = self.line();
        let reached = self.reached().min(line.submitted());
        reached > line.completed() && self.publish(reached)
    }

    /// The device is done up to `value`: the host's part, then publication.
    fn publish(&self, value: u64) -> bool {
        let line = self.line();
        let before = line.completed();
        #[cfg(feature = "planted-defects")]
        if self.core.shared.config.has(crate::defects::Defect::EarlyPublication) {
            line.complete(value);
            if let Some(stream) = self.me.upgrade() {
                self.core.watch.attend(&stream);
            }
            thread::yield_now();
        }
        if let Some(publish) = self.host.carry_out(line, value, value, self.core.door.ops()) {
            line.complete(publish);
        }
        line.completed() > before
    }

    /// Somebody who has waited for `value` is done: so is this stream, up to there. Whoever sees that the other one is over sees it here too.
    pub(super) fn passed(&self, value: u64) {
        let line = self.line();
        self.publish(value);
        // Another thread may be at it: not for long, unless something that it gives up waits for us.
        let mut turns = 0;
        while line.completed() < value && turns < PASSING {
            turns += 1;
            thread::yield_now();
        }
    }

    /// Whether the driver is done with all that it was given.
    pub(super) fn query(&self) -> Result<bool> {
        let progress = self.core.door.within(|ops| ops.stream_query(self.native));
        Ok(progress? == Progress::Complete)
    }

    /// Asks the driver; see `hal::Timeline::refresh`.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's.
    pub fn refresh(&self) -> Result<u64> {
        let line = self.line();
        self.take_turn();
        if line.is_idle() {
            return Ok(line.completed());
        }
        self.pump();
        self.poll();
        if line.completed() < self.issued.load(Ordering::Acquire) {
            self.look()?;
        }
        self.finish_failed();
        match self.core.door.loss() {
            Some(loss) if !line.is_idle() => Err(loss),
            _ => Ok(line.completed()),
        }
    }

    /// Makes later submissions start after a point; see `hal::Timeline::wait`.
    ///
    /// # Errors
    /// See there.
    pub fn wait(&self, on: Point) -> Result<()> {
        self.healthy()?;
        if on.is_settled() || on.line_id() == self.line().id() && on.value() <= self.line().submitted() {
            return Ok(());
        }
        // SAFETY: a wait touches no memory.
        unsafe { self.submit(&[Op::Wait(on)]) }.map(drop)
    }

    /// Nobody holds the stream any more: its work goes on by itself. Whether it can be lent again at once.
    pub(crate) fn let_go(&self) -> bool {
        let line = self.line();
        if line.is_idle() {
            // Nobody waits for what was marked, and the events may serve others.
            let marks = std::mem::take(&mut self.state.lock().marks);
            drop(marks);
            return self.is_sound();
        }
        self.pump();
        if let Err(error) = self.want(line.submitted()) {
            tracing::debug!(%error, stream = %self.name(), "the work of a dropped stream could not be signalled");
        }
        self.poll();
        self.finish_failed();
        self.is_sound()
    }

    /// Asks the driver whether all is over, and has a signal under way where there is none.
    pub(super) fn look(&self) -> Result<()> {
        let before = self.issued.load(Ordering::Acquire);
        if self.signalled.load(Ordering::Acquire) < before {
            let result = self.signal_locked(&mut self.state.lock());
            result.map_err(|e| self.core.settle(e))?;
        }
        if self.query().map_err(|e| self.core.settle(e))? {
            self.publish(before);
        }
        Ok(())
    }

    /// Makes completion observable; see `hal::Timeline::signal`.
    ///
    /// # Errors
    /// The stream's cause; `DeviceLost`.
    pub fn signal(&self) -> Result<u64> {
        self.healthy()?;
        let submitted = self.line().submitted();
        self.want(submitted)?;
        Ok(submitted)
    }

    /// See `hal::Stream::flush`.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's.
    pub fn flush(&self) -> Result<()> {
        if self.issued.load(Ordering::Acquire) > self.signalled.load(Ordering::Acquire) {
            let result = self.signal_locked(&mut self.state.lock());
            result.map_err(|e| self.core.settle(e))?;
        }
        match self.core.door.loss() {
            Some(loss) => Err(loss),
            None => Ok(()),
        }
    }

    /// Sees to it that `value` gets published without further calls.
    pub(super) fn want(&self, value: u64) -> Result<()> {
        self.wanted.fetch_max(value, Ordering::AcqRel);
        if self.line().completed() >= value {
            return Ok(());
        }
        if self.signalled.load(Ordering::Acquire) < value.min(self.issued.load(Ordering::Acquire)) {
            let result = self.signal_locked(&mut self.state.lock());
            result.map_err(|e| self.core.settle(e))?;
        }
        self.attend();
        Ok(())
    }

    /// As the line's publisher.
    fn publish_for(&self, value: u64, timeout: Option<Duration>) {
        if self.core.watch.is_inline() {
            // What becomes of it shows in the line.
            let _ = self.wait_host(value, timeout);
        } else if let Err(error) = self.want(value) {
            tracing::debug!(%error, stream = %self.name(), "completion could not be signalled");
        }
    }

    /// Leaves the stream to the watcher, which goes on with it as long as it needs attention.
    pub(super) fn attend(&self) {
        if let Some(stream) = self.me.upgrade() {
            self.core.watch.attend(&stream);
        }
    }

    /// Without threads: sees to everything that a thread would.
    fn take_turn(&self) {
        if self.core.watch.is_inline() {
            self.core.watch.round();
        }
    }

    /// Blocks until a value is over; see `hal::Timeline::wait_host`.
    ///
    /// # Errors
    /// See there; `InvalidState` in a host call of this very stream.
    pub fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        let line = self.line();
        if line.check(value)? {
            return Ok(());
        }
        if let Some((id, running)) = RUNNING.get()
            && id == line.id()
            && value >= running
        {
            return Err(Error::state("a host call waits for the stream that it runs on"));
        }
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let interval = self.core.door.ops().poll_interval();
        let mut nap = interval.max(Duration::from_micros(10));
        let mut looks = 0u32;
        loop {
            self.take_turn();
            self.pump();
            let aim = value.min(self.issued.load(Ordering::Acquire));
            if self.signalled.load(Ordering::Acquire) < aim {
                let result = self.signal_locked(&mut self.state.lock());
                result.map_err(|e| self.core.settle(e))?;
            }
            if line.completed() < aim {
                self.poll();
            }
            if looks % 64 == 63 && line.completed() < aim {
                self.look()?;
            }
            self.finish_failed();
            if line.check(value)? {
                return Ok(());
            }
            if let Some(loss) = self.core.door.loss() {
                self.core.settle_loss();
                line.check(value)?;
                return Err(loss);
            }
            if deadline.is_some_and(|at| Instant::now() >= at) {
                return Err(Error::Timeout(
                    format!("{:?} did not complete in time; completed is {}", line.at(value), line.completed()).into(),
                ));
            }
            looks += 1;
            if looks < SPINS {
                spin_loop();
            } else if looks < SPINS + YIELDS || interval.is_zero() && aim > line.completed() {
                thread::yield_now();
            } else {
                let left = deadline.map_or(nap, |at| at.saturating_duration_since(Instant::now()).min(nap));
                match line.wait_published(value, Some(left)) {
                    Ok(()) => return Ok(()),
                    Err(Error::Timeout(_)) => {}
                    Err(e) => return Err(e),
                }
                // The device is polled at its interval; for the host's part somebody else wakes us.
                if line.completed() >= aim {
                    nap = (nap * 2).min(NAP_MAX);
                }
            }
        }
    }

    // ---- failure ----------------------------------------------------------------------------------------------------

    /// Fails everything from `value` on.
    pub(super) fn fail(&self, value: u64, cause: Error) {
        self.line().poison(value, cause);
        self.after_failure();
    }

    /// Drops what is held back, tells who waits, and completes what is over.
    fn after_failure(&self) {
        let dropped = {
            let mut state = self.state.lock();
            state.fence = None;
            state.foreign = false;
            std::mem::take(&mut state.deferred)
        };
        drop(dropped);
        self.core.shared.wake(self.line().id(), u64::MAX);
        self.finish_failed();
        if !self.line().is_idle() {
            self.attend();
        }
    }

    /// Of a failed stream: publishes all values once the driver is done with what it was given.
    pub(super) fn finish_failed(&self) {
        let line = self.line();
        if line.is_idle() && self.host.is_empty() || !line.failed(VALUE_LIMIT) {
            return;
        }
        if self.state.lock().turn != Turn::Free {
            // Whoever is at it comes here when done.
            return;
        }
        let over = self.core.door.loss().is_some() || self.query().is_ok_and(|over| over);
        if over || self.core.door.loss().is_some() {
            let end = line.submitted();
            // Also of a submission that was lost half way, and so has no value.
            if let Some(publish) = self.host.carry_out(line, VALUE_LIMIT, end, self.core.door.ops()) {
                line.complete(publish);
            }
        }
    }

    /// The context is dead: nothing of it runs any more.
    pub(super) fn lost(&self, loss: &Error) {
        let line = self.line();
        if !line.failed(VALUE_LIMIT) {
            line.poison(line.completed() + 1, loss.clone());
        }
        self.after_failure();
    }

    /// The submissions that are not over, and their kernels; for the report of a loss.
    pub(super) fn pending_text(&self) -> Option<String> {
        let line = self.line();
        let (done, issued) = (line.completed(), line.submitted());
        if done >= issued {
            return None;
        }
        let mut names: Vec<String> = Vec::new();
        for value in (done + 1..=issued).rev().take(RECENT).collect::<Vec<_>>().into_iter().rev() {
            let function = self.recent[value as usize % RECENT].load(Ordering::Relaxed);
            if let Some(name) = self.core.shared.function_name(function)
                && !names.contains(&name)
            {
                names.push(name);
            }
        }
        names.truncate(4);
        let kernels =
            if names.is_empty() { String::new() } else { format!(" (dispatch {})", names.join(", dispatch ")) };
        Some(format!("submissions {} to {issued} of {}{kernels}", done + 1, self.name()))
    }
}

impl Drop for StreamCore {
    fn drop(&mut self) {
        let line = self.line();
        self.core.shared.remove_origin(line);
        if !line.is_idle() {
            // Only when the backend was dropped without a shutdown while a gate held work back.
            let jobs = std::mem::take(&mut self.state.get_mut().deferred);
            line.poison(line.completed() + 1, Error::state("the backend ended while the stream's work was held back"));
            drop(jobs);
            self.core.door.leave_behind(|ops| ops.stream_synchronize(self.native));
            let end = line.submitted();
            let _ = self.host.carry_out(line, end, end, self.core.door.ops());
            line.complete(end);
        }
        if self.core.door.loss().is_none() && self.reached() < self.signalled.load(Ordering::Acquire) {
            // All is over, but the signal of it may still be on its way to the word, which somebody else gets next.
            self.core.door.leave_behind(|ops| ops.stream_synchronize(self.native));
        }
        self.core.door.leave_behind(|ops| ops.stream_destroy(self.native));
    }
}

impl fmt::Debug for StreamCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamCore")
            .field("line", &self.line())
            .field("issued", &self.issued.load(Ordering::Relaxed))
            .field("signalled", &self.signalled.load(Ordering::Relaxed))
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

/// The stream as its own staging memory sees it: it waits for nobody else's.
struct Own<'a>(&'a StreamCore);

impl Timeline for Own<'_> {
    fn line(&self) -> &'static Line {
        self.0.line()
    }

    fn signal(&self) -> Result<u64> {
        self.0.signal()
    }

    fn refresh(&self) -> Result<u64> {
        self.0.refresh()
    }

    fn wait(&self, _: Point) -> Result<()> {
        Err(Error::Unsupported("a wait now would come after the work that needs the memory".into()))
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.0.wait_host(value, timeout)
    }
}
