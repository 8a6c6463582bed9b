//! Submission: operations that go to the driver at once, operations to prepare first, and
//! operations to hold back.
//!
//! Resources that need other locks (a recorded event on another stream, staging memory) are
//! prepared before the stream's own lock is taken.
//!
//! This module must not know how completion becomes known.

use super::{RECENT, RECORDED_EVENTS, RecordedEvent, Refusal, SIGNALS, State, StreamCore};
use crate::encoder::{Encoder, Prepared, Ready};
use crate::engine::events::EventState;
use crate::engine::host::CompletionAction;
use crate::engine::shared::Origin;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::sync::{Arc, MutexGuard};
use leasehold_core::{Error, Fault, Lease, Result, Timepoint, VALUE_LIMIT};
use leasehold_engine::waits;
use leasehold_hal::Op;

impl StreamCore {
    /// Submits operations as one submission; see `hal::Stream::submit`.
    ///
    /// # Errors
    /// See `hal::Stream::submit`.
    ///
    /// # Safety
    /// - See `hal::Stream::submit`.
    pub unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        let mut plain = true;
        let device = self.core.properties();
        let most_shared = device.shared_optin.max(device.shared);
        for op in ops {
            op.check(self.timeline(), most_shared)?;
            plain &= self.is_plain(op);
        }
        if !plain {
            // SAFETY: the caller vouches for the operations.
            return unsafe { self.submit_slow(ops) };
        }
        let state = self.state.lock();
        self.healthy()?;
        if state.is_busy() {
            return self.defer(state, ops);
        }
        // SAFETY: the caller vouches for the operations, which need nothing prepared.
        unsafe { self.submit_now(state, ops, &mut Prepared::default(), ops.len()) }
    }

    /// Whether an operation can go to the driver without preparation.
    #[inline]
    pub(super) fn is_plain(&self, op: &Op<'_>) -> bool {
        match op {
            Op::Dispatch(_) | Op::Copy(_) | Op::Fill(_) | Op::Upload(_) | Op::WriteTimestamp(_) => {
                true
            }
            Op::Wait(p) => self.is_own(*p) || p.is_settled(),
            Op::Download(d) => crate::encoder::lands_directly(&self.core, d),
            // SAFETY: graphs of a submission belong to this device (the submitter's promise), so
            // `native` is the address of a program.
            Op::Graph(exec) => unsafe { crate::engine::program::Program::of(exec) }.is_plain(),
            _ => false,
        }
    }

    /// Returns the cause of a poisoned timeline as an error.
    #[inline]
    pub(in crate::engine) fn healthy(&self) -> Result<()> {
        waits::healthy(self.timeline())
    }

    pub(super) fn next_value(&self) -> Result<u64> {
        let value = self.timeline().submitted() + 1;
        if value >= VALUE_LIMIT {
            return Err(Error::state("a timeline's 2^48 values are used up; replace the stream"));
        }
        Ok(value)
    }

    /// Submits to a stream that holds nothing back: `ops[..cut]` go to the driver, the rest is held
    /// back.
    ///
    /// # Safety
    /// - As [`submit`](Self::submit): the memory of the operations may be used until the submission
    ///   is over.
    #[inline]
    pub(super) unsafe fn submit_now(
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
            self.core
                .context
                // SAFETY: the stream and its word are this one's own; the drop waits for the last
                // write.
                .within(|ops| unsafe { ops.stream_write_word(self.native, word.addr(), value) })?;
            self.signalled.store(value, Ordering::Release);
        }
        let plain = prepared.is_empty();
        // SAFETY: the caller vouches for the operations.
        let given = unsafe {
            self.issue(&mut state, value, ops[..cut].iter().enumerate(), prepared, false)
        };
        if let Err(refusal) = given {
            return self.refused(state, value, refusal);
        }
        self.owner.advance()?;
        if !plain {
            ops[..cut].iter().for_each(|op| {
                if let Op::Wait(p) = op {
                    self.owner.learn(*p);
                }
            });
        }
        if cut < ops.len() {
            return Ok(self.hold_back(state, value, &ops[cut..]));
        }
        self.issued.store(value, Ordering::Release);
        let due = value - self.signalled.load(Ordering::Relaxed)
            >= u64::from(self.core.shared.config.signal_every);
        if due && state.signals.len() < SIGNALS {
            let signalled = self.signal_locked(&mut state);
            drop(state);
            self.after(signalled);
            self.poll();
        }
        Ok(value)
    }

    /// Handles a refusal by the driver in a submission that was to have `value`.
    #[cold]
    pub(super) fn refused(
        &self,
        mut state: MutexGuard<'_, State>,
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
    pub(in crate::engine) fn fault(&self, op: String, value: u64, cause: &Error) -> Error {
        match (cause, self.core.context.loss()) {
            (Error::DeviceLost { .. }, Some(loss)) => loss,
            _ => Fault::new(op, self.name(), value, cause.to_string()).into(),
        }
    }

    /// The cause of a failure that an operation waited for. The loss of another device does not
    /// lose this one.
    pub(in crate::engine) fn inherited(&self, op: &Op<'_>, value: u64, cause: Error) -> Error {
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
    pub(super) unsafe fn submit_slow(&self, ops: &[Op<'_>]) -> Result<u64> {
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
                    let next = self.timeline().submitted() + 1;
                    let cause = self.inherited(op, next, cause);
                    self.owner.poison(next, cause.clone());
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
        // SAFETY: the caller vouches for the operations.
        let value = unsafe { self.submit_now(state, ops, &mut prepared, cut) }?;
        if cut < ops.len() {
            self.pump();
        }
        Ok(value)
    }

    /// Gives operations to the driver, in the lock. `part`: the driver was given operations of the
    /// same submission before.
    ///
    /// # Safety
    /// - As [`submit`](Self::submit): the memory of the operations may be used until the submission
    ///   is over.
    pub(in crate::engine) unsafe fn issue<'o, 'r>(
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
        match self.core.context.enter() {
            Err(error) => return Err(Refusal { error, accepted, op: "submission".to_owned() }),
            Ok(entry) => {
                for (i, op) in ops {
                    let mut encoder = Encoder::new(
                        &self.core,
                        &*entry,
                        self.native,
                        value,
                        &self.host,
                        &mut accepted,
                    );
                    // SAFETY: the caller vouches for the operation.
                    if let Err(error) = unsafe { encoder.encode(op, prepared.take(i)) } {
                        failed = Some((error, op.name()));
                        break;
                    }
                    if let Op::Dispatch(d) = op {
                        self.recent[value as usize % RECENT]
                            .store(d.pipeline.native, Ordering::Relaxed);
                    }
                }
            }
        }
        state.dirty |= accepted;
        match failed {
            Some((error, op)) => {
                Err(Refusal { error: self.core.context.note(error), accepted, op })
            }
            None => Ok(()),
        }
    }

    /// Prepares an operation for the driver. The caller holds no lock.
    pub(in crate::engine) fn prepare(&self, op: &Op<'_>) -> Result<Ready> {
        match op {
            Op::Wait(p) => self.resolve(*p),
            Op::Download(d) if !crate::encoder::lands_directly(&self.core, d) => {
                Ok(Ready::Staging(self.core.staging(d.bytes)?))
            }
            _ if self.is_plain(op) => Ok(Ready::Plain),
            _ => Ok(Ready::Blocked),
        }
    }

    /// Whether a timepoint is this stream's own. A failure that a former owner of the timeline left
    /// behind does not count as the stream's own.
    #[inline]
    fn is_own(&self, point: Timepoint) -> bool {
        point.timeline_id() == self.timeline().id() && self.timeline().knows(point.into())
    }

    /// How this stream can wait for a timepoint.
    pub(in crate::engine) fn resolve(&self, point: Timepoint) -> Result<Ready> {
        if self.is_own(point) {
            return Ok(Ready::Plain);
        }
        #[cfg(feature = "planted-defects")]
        if self.core.shared.config.has(crate::defects::Defect::MissingWait)
            && point.value() <= point.timeline().submitted()
        {
            return Ok(Ready::Plain);
        }
        match point.timeline().check(point.value()) {
            Ok(true) => return Ok(Ready::Plain),
            Err(cause) => return Ok(Ready::Failed(cause)),
            Ok(false) => {}
        }
        match self.core.shared.origin(point.timeline_id()) {
            Some(Origin::Stream(source)) => match source.upgrade() {
                Some(source) => {
                    let recorded = source.recorded_event_for(point.value())?;
                    #[cfg(feature = "planted-defects")]
                    if let Some((event, _)) = &recorded
                        && self.core.shared.config.has(crate::defects::Defect::EventRecycledEarly)
                    {
                        self.core
                            .context
                            // SAFETY: the event is leased, and the stream is this one's own.
                            .within(|ops| unsafe { ops.event_record(event.native, self.native) })?;
                    }
                    Ok(recorded.map_or(Ready::Blocked, |(event, value)| {
                        let abroad = !Arc::ptr_eq(&source.core.context, &self.core.context);
                        Ready::Event(
                            event,
                            CompletionAction::Passed { source: source.me.clone(), value, abroad },
                        )
                    }))
                }
                // The stream is gone, so all its values are over or soon will be.
                None => Ok(Ready::Blocked),
            },
            _ => Ok(Ready::Blocked),
        }
    }

    /// Returns a recorded event that covers `value` and as little later work as possible. The
    /// returned value is the last one that the event covers. `None` while `value` is held back.
    pub(super) fn recorded_event_for(
        &self,
        value: u64,
    ) -> Result<Option<(Lease<EventState>, u64)>> {
        let find = |state: &State| {
            #[cfg(feature = "planted-defects")]
            if self.core.shared.config.has(crate::defects::Defect::StaleMark) {
                return state.recorded.back().map(|m| (m.event.clone(), value));
            }
            state.recorded.iter().find(|m| m.value >= value).map(|m| (m.event.clone(), m.value))
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
        let event = self.core.event().map_err(|e| self.core.settle(e))?;
        let mut state = self.state.lock();
        if let Some(event) = find(&state) {
            return Ok(Some(event));
        }
        // SAFETY: the event is leased, and the stream is this one's own.
        let recorded =
            self.core.context.within(|ops| unsafe { ops.event_record(event.native, self.native) });
        if let Err(e) = recorded {
            drop(state);
            return Err(self.core.settle(e));
        }
        if state.recorded.len() == RECORDED_EVENTS {
            state.recorded.pop_front();
        }
        let issued = self.issued.load(Ordering::Relaxed);
        state.recorded.push_back(RecordedEvent { value: issued, event: event.clone() });
        Ok(Some((event, issued)))
    }
}
