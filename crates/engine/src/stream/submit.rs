//! Submission: operations that go to the driver at once, operations to prepare first, and
//! operations to hold back.
//!
//! Resources that need other locks (a recorded mark on another stream, staging memory) are
//! prepared before the stream's own lock is taken.
//!
//! The compiler inlines the way of a submission without preparations: a call returns a `Result` of
//! five words through memory.
//!
//! This module must not know how completion becomes known.

use super::{RECENT, RECORDED_MARKS, RecordedMark, Refusal, State, StreamCore};
use crate::driver::{DriverDevice, DriverStream, GraphSteps, NativeWait, Sink};
use crate::prepared::{Preparation, Prepared, Ready};
use crate::tables::Origin;
use crate::waits;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::sync::{Arc, MutexGuard};
use leasehold_core::{Error, Fault, Result, Timepoint, VALUE_LIMIT};
use leasehold_hal::Op;
use std::time::Duration;

impl<N: DriverStream> StreamCore<N> {
    /// Submits operations as one submission; see `hal::Stream::submit`.
    ///
    /// # Errors
    /// See `hal::Stream::submit`.
    ///
    /// # Safety
    /// - See `hal::Stream::submit`.
    pub unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        let mut plain = true;
        for op in ops {
            self.native.check(op, self.timeline())?;
            plain &= self.is_plain(op);
        }
        if !plain {
            // SAFETY: the caller vouches for the operations.
            return unsafe { self.submit_slow(ops) };
        }
        let mut state = self.lock_with_room()?;
        if state.is_busy() {
            return self.defer(state, ops, Vec::new());
        }
        let value = self.begin().inspect_err(|_| self.give_room_back())?;
        let plain = ops.iter().map(|op| (op, None));
        // SAFETY: the caller vouches for the operations, which need nothing prepared.
        if let Err(refusal) = unsafe { self.issue(&mut state, value, plain, false) } {
            return self.refused(state, value, refusal);
        }
        self.owner.advance()?;
        Ok(self.end(state, value))
    }

    /// Takes the lock of a sound stream. Unless the stream holds work back, the driver has room for
    /// a submission. Waits for the room without the lock.
    #[inline]
    fn lock_with_room(&self) -> Result<MutexGuard<'_, State<N>>> {
        loop {
            let state = self.state.lock();
            self.healthy()?;
            if state.is_busy() || self.native.reserve() {
                return Ok(state);
            }
            drop(state);
            self.native.wait_room().map_err(|e| self.core.settle(e))?;
        }
    }

    /// Whether an operation can go to the driver without preparation.
    #[inline(always)]
    pub(crate) fn is_plain(&self, op: &Op<'_>) -> bool {
        match op {
            Op::Wait(p) => self.is_own(*p) || p.is_settled(),
            // SAFETY: graphs of a submission belong to this device (the submitter's promise).
            Op::Graph(exec) => unsafe { N::graph(exec) }.steps().is_plain(),
            Op::Host(_) | Op::Foreign(_) => false,
            other => self.native.is_plain(other),
        }
    }

    /// Returns the cause of a poisoned timeline as an error.
    #[inline]
    pub(crate) fn healthy(&self) -> Result<()> {
        waits::healthy(self.timeline())
    }

    pub(crate) fn next_value(&self) -> Result<u64> {
        let value = self.timeline().submitted() + 1;
        if value >= VALUE_LIMIT {
            return Err(Error::state("a timeline's 2^48 values are used up; replace the stream"));
        }
        Ok(value)
    }

    /// Begins a submission in the lock, and returns its value.
    #[inline(always)]
    fn begin(&self) -> Result<u64> {
        let value = self.next_value()?;
        #[cfg(feature = "planted-defects")]
        if self.core.config.has(crate::defects::Defect::WordBeforeWork) {
            self.native.signal(value)?;
            self.signalled.store(value, Ordering::Release);
        }
        Ok(value)
    }

    /// Gives back the room of a submission that did not begin, in the lock.
    #[cold]
    fn give_room_back(&self) {
        if let Ok(entry) = self.native.enter() {
            // Nothing was given, so an error loses nothing.
            let _ = self.native.leave(entry);
        }
    }

    /// Ends a submission of which the driver has everything.
    #[inline(always)]
    fn end(&self, mut state: MutexGuard<'_, State<N>>, value: u64) -> u64 {
        self.issued.store(value, Ordering::Release);
        let due = value - self.signalled.load(Ordering::Relaxed)
            >= u64::from(self.core.config.signal_every);
        if due && self.native.may_signal() {
            let signalled = self.signal_locked(&mut state);
            drop(state);
            self.after(signalled);
            self.poll();
        }
        value
    }

    /// Handles a refusal by the driver in a submission that was to have `value`.
    #[cold]
    pub(crate) fn refused(
        &self,
        mut state: MutexGuard<'_, State<N>>,
        value: u64,
        refusal: Refusal,
    ) -> Result<u64> {
        if !refusal.accepted || matches!(refusal.error, Error::DeviceLost { .. }) {
            drop(state);
            return Err(self.core.settle(refusal.error));
        }
        // A part of the submission runs, and a value must guard its memory. So the submission takes
        // a value, and that value has failed.
        state.dirty = true;
        let cause = self.fault(refusal.op, value, &refusal.error);
        self.owner.poison(value, cause.clone());
        self.owner.advance()?;
        self.issued.store(value, Ordering::Release);
        drop(state);
        self.fail(value, cause, ());
        Ok(value)
    }

    /// The failure of an operation, with its stream and value. The loss of this device has neither.
    pub(crate) fn fault(&self, op: String, value: u64, cause: &Error) -> Error {
        match (cause, self.core.device.loss()) {
            (Error::DeviceLost { .. }, Some(loss)) => loss,
            _ => Fault::new(op, self.name(), value, cause.to_string()).into(),
        }
    }

    /// The cause of a failure that an operation waited for. The loss of another device does not
    /// lose this one.
    pub(crate) fn inherited(&self, op: &Op<'_>, value: u64, cause: Error) -> Error {
        match cause {
            Error::DeviceLost { .. } => self.fault(op.name(), value, &cause),
            other => other,
        }
    }

    /// Submits operations of which some need preparation.
    ///
    /// # Safety
    /// - As [`submit`](Self::submit): the memory of the operations may be used until the submission
    ///   is over.
    #[cold]
    pub(crate) unsafe fn submit_slow(&self, ops: &[Op<'_>]) -> Result<u64> {
        self.healthy()?;
        // Also for operations that are held back: the thread that resumes them must not wait for
        // memory, nor fail for want of it.
        let mut prepared = Prepared::default();
        for (i, op) in ops.iter().enumerate() {
            if let Op::Wait(p) = op
                && p.timeline().is_external()
            {
                self.check_outside(*p)?;
            }
            if !matches!(op, Op::Wait(_) | Op::Graph(_) | Op::Host(_) | Op::Foreign(_))
                && !self.is_plain(op)
                && let Some(preparation) = self.native.prepare(op)?
            {
                prepared.put(i, Preparation::Driver(preparation));
            }
        }
        {
            let state = self.state.lock();
            self.healthy()?;
            if state.is_busy() {
                return self.defer(state, ops, prepared.rest_from(0));
            }
        }
        let mut cut = ops.len();
        for (i, op) in ops.iter().enumerate() {
            match self.prepare(op)? {
                Ready::Now(wait) => wait.into_iter().for_each(|wait| prepared.put(i, wait)),
                Ready::Blocked => {
                    cut = i;
                    break;
                }
                Ready::Failed(cause) => {
                    let state = self.state.lock();
                    let next = self.timeline().submitted() + 1;
                    let cause = self.inherited(op, next, cause);
                    self.owner.poison(next, cause.clone());
                    drop(state);
                    self.after_failure();
                    return Err(cause);
                }
            }
        }
        let mut state = self.lock_with_room()?;
        if state.is_busy() {
            return self.defer(state, ops, prepared.rest_from(0));
        }
        let value = self.begin().inspect_err(|_| self.give_room_back())?;
        let (now, later) = ops.split_at(cut);
        let plain = prepared.is_empty();
        let given = now.iter().enumerate().map(|(i, op)| (op, prepared.take(i)));
        // SAFETY: the caller vouches for the operations.
        if let Err(refusal) = unsafe { self.issue(&mut state, value, given, false) } {
            return self.refused(state, value, refusal);
        }
        self.owner.advance()?;
        if !plain {
            now.iter().for_each(|op| {
                if let Op::Wait(p) = op {
                    self.owner.learn(*p);
                }
            });
        }
        if later.is_empty() {
            return Ok(self.end(state, value));
        }
        self.hold_back(state, value, later, prepared.rest_from(cut));
        self.pump();
        Ok(value)
    }

    /// Refuses the wait for another library's stream that nothing would end. Afterwards an event is
    /// behind the timepoint, so that the wait may also be held back.
    fn check_outside(&self, point: Timepoint) -> Result<()> {
        if let Ready::Blocked = self.resolve(point)? {
            match point.timeline().wait(point.value(), Some(Duration::ZERO)) {
                Ok(()) | Err(Error::Timeout(_)) => {}
                Err(refused) => return Err(refused),
            }
        }
        Ok(())
    }

    /// Gives operations to the driver with their preparations, in the lock. `part`: the driver was
    /// given operations of the same submission before.
    ///
    /// # Safety
    /// - As [`submit`](Self::submit): the memory of the operations may be used until the submission
    ///   is over.
    #[inline(always)]
    pub(crate) unsafe fn issue<'o: 'r, 'r>(
        &self,
        state: &mut State<N>,
        value: u64,
        ops: impl Iterator<Item = (&'r Op<'o>, Option<Preparation<N>>)>,
        part: bool,
    ) -> std::result::Result<(), Refusal> {
        let mut sink = Sink { value, host: &self.host, accepted: part };
        let mut failed = None;
        match self.native.enter() {
            Err(error) => {
                return Err(Refusal { error, accepted: part, op: "submission".to_owned() });
            }
            Ok(mut entry) => {
                for (op, preparation) in ops {
                    // SAFETY: the caller vouches for the operation.
                    let given = unsafe { self.give(&mut entry, op, preparation, &mut sink) };
                    if let Err(error) = given {
                        failed = Some((error, op.name()));
                        break;
                    }
                    if let Op::Dispatch(d) = op {
                        self.recent[value as usize % RECENT]
                            .store(d.pipeline.native, Ordering::Relaxed);
                    }
                }
                if let Err(error) = self.native.leave(entry)
                    && failed.is_none()
                {
                    failed = Some((error, "submission".to_owned()));
                }
            }
        }
        let accepted = sink.accepted;
        state.dirty |= accepted;
        match failed {
            Some((error, op)) => Err(Refusal { error: self.core.device.note(error), accepted, op }),
            None => Ok(()),
        }
    }

    /// Gives one operation to the driver.
    ///
    /// # Safety
    /// - As [`submit`](Self::submit).
    #[inline(always)]
    unsafe fn give(
        &self,
        entry: &mut N::Entry<'_>,
        op: &Op<'_>,
        preparation: Option<Preparation<N>>,
        sink: &mut Sink<'_, N>,
    ) -> Result<()> {
        let own = match preparation {
            None => None,
            Some(Preparation::Driver(own)) => Some(own),
            Some(Preparation::Wait(wait)) => {
                let given = self.native.encode_wait(entry, &wait.mark);
                sink.took(given)?;
                if let Some(passed) = wait.passed() {
                    self.host.leave(sink.value, passed);
                }
                return Ok(());
            }
        };
        match op {
            Op::Wait(_) => Ok(()),
            Op::Host(_) | Op::Foreign(_) => {
                Err(Error::state(format!("a {} is not given to the driver", op.kind())))
            }
            // SAFETY: the caller vouches for the operation.
            op => unsafe { self.native.encode(entry, op, own, sink) },
        }
    }

    /// Prepares an operation for the driver. The caller holds no lock.
    pub(crate) fn prepare(&self, op: &Op<'_>) -> Result<Ready<N>> {
        match op {
            Op::Wait(p) => self.resolve(*p),
            _ if self.is_plain(op) => Ok(Ready::Now(None)),
            Op::Graph(_) | Op::Host(_) | Op::Foreign(_) => Ok(Ready::Blocked),
            // The driver's own preparation was made as the operation was submitted.
            _ => Ok(Ready::Now(None)),
        }
    }

    /// Whether a timepoint is this stream's own. A failure that a former owner of the timeline left
    /// behind does not count as the stream's own.
    #[inline]
    fn is_own(&self, point: Timepoint) -> bool {
        point.timeline_id() == self.timeline().id() && self.timeline().knows(point.into())
    }

    /// How this stream can wait for a timepoint.
    pub(crate) fn resolve(&self, point: Timepoint) -> Result<Ready<N>> {
        if self.is_own(point) {
            return Ok(Ready::Now(None));
        }
        #[cfg(feature = "planted-defects")]
        if self.core.config.has(crate::defects::Defect::MissingWait)
            && point.value() <= point.timeline().submitted()
        {
            return Ok(Ready::Now(None));
        }
        match point.timeline().check(point.value()) {
            Ok(true) => return Ok(Ready::Now(None)),
            Err(cause) => return Ok(Ready::Failed(cause)),
            Ok(false) => {}
        }
        match self.core.tables.origin(point.timeline_id()) {
            Some(Origin::Stream(source)) => match source.upgrade() {
                Some(source) => {
                    let recorded = source.mark_for(point.value())?;
                    #[cfg(feature = "planted-defects")]
                    if let Some((mark, value)) = &recorded
                        && self.core.config.has(crate::defects::Defect::EventRecycledEarly)
                    {
                        self.native.record(&mut mark.clone(), *value)?;
                    }
                    Ok(recorded.map_or(Ready::Blocked, |(mark, value)| {
                        let abroad = !Arc::ptr_eq(&source.core.device, &self.core.device);
                        let source = Some(source.me.clone());
                        Ready::Now(Some(Preparation::Wait(NativeWait {
                            mark,
                            point,
                            source,
                            value,
                            abroad,
                        })))
                    }))
                }
                // The stream is gone, so all its values are over or soon will be.
                None => Ok(Ready::Blocked),
            },
            Some(Origin::HostTimeline) => Ok(Ready::Blocked),
            None => Ok(self.native.mark_outside(point)?.map_or(Ready::Blocked, |(mark, value)| {
                let (source, abroad) = (None, true);
                Ready::Now(Some(Preparation::Wait(NativeWait {
                    mark,
                    point,
                    source,
                    value,
                    abroad,
                })))
            })),
        }
    }

    /// Returns a recorded mark that covers `value` and as little later work as possible. The
    /// returned value is the last one that the mark covers. `None` while `value` is held back.
    pub(crate) fn mark_for(&self, value: u64) -> Result<Option<(N::Mark, u64)>> {
        let find = |state: &State<N>| {
            #[cfg(feature = "planted-defects")]
            if self.core.config.has(crate::defects::Defect::StaleMark) {
                return state.recorded.back().map(|m| (m.mark.clone(), value));
            }
            state.recorded.iter().find(|m| m.value >= value).map(|m| (m.mark.clone(), m.value))
        };
        {
            let state = self.state.lock();
            if self.issued.load(Ordering::Relaxed) < value {
                return Ok(None);
            }
            if let Some(mark) = find(&state) {
                return Ok(Some(mark));
            }
        }
        let mut mark = self.native.mark().map_err(|e| self.core.settle(e))?;
        let mut state = self.state.lock();
        if let Some(mark) = find(&state) {
            return Ok(Some(mark));
        }
        let issued = self.issued.load(Ordering::Relaxed);
        if let Err(e) = self.native.record(&mut mark, issued) {
            drop(state);
            return Err(self.core.settle(e));
        }
        if state.recorded.len() == RECORDED_MARKS {
            state.recorded.pop_front();
        }
        state.recorded.push_back(RecordedMark { value: issued, mark: mark.clone() });
        Ok(Some((mark, issued)))
    }
}
