//! Submission: operations that go to the driver at once, operations to prepare first, and
//! operations to hold back.
//!
//! Resources that need other locks (a recorded mark on another stream, staging memory) are
//! prepared before the stream's own lock is taken.
//!
//! This module must not know how completion becomes known.

use super::issue::Refusal;
use crate::engine::deferred::resume_waiting;
use crate::engine::driver::DriverStream;
use crate::engine::prepared::{Preparation, Prepared, Ready};
use crate::engine::state::{PumpState, State, StreamCore};
use crate::{ForeignCall, Op};
use leasehold_core::sync::MutexGuard;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, Result, Timepoint, VALUE_LIMIT};
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
        if let [op @ Op::Foreign(call)] = ops {
            return self.submit_foreign(op, call);
        }
        if !plain {
            // SAFETY: the caller vouches for the operations.
            return unsafe { self.submit_slow(ops) };
        }
        let mut state = self.lock_with_room()?;
        if state.is_busy() {
            return self.defer(state, ops, Vec::new());
        }
        let value = self.next_value().inspect_err(|_| self.give_room_back())?;
        let plain = ops.iter().map(|op| (op, None));
        // SAFETY: the caller vouches for the operations, which need nothing prepared.
        if let Err(refusal) = unsafe { self.issue(&mut state, value, plain, false) } {
            return self.refused(state, value, refusal);
        }
        self.owner.advance()?;
        Ok(self.end(state, value))
    }

    /// Submits a library's call. A stream that holds nothing back makes the call at once.
    fn submit_foreign(&self, op: &Op<'_>, call: &ForeignCall) -> Result<u64> {
        let state = self.state.lock();
        self.healthy()?;
        if state.is_busy() {
            return self.defer(state, std::slice::from_ref(op), Vec::new());
        }
        let value = self.owner.advance()?;
        Ok(self.call_at_once(state, value, op, call))
    }

    /// Makes a library's call, the last operation of a submission whose value was taken. The driver
    /// has everything before it. Work that comes during the call is held back, since the call has
    /// no lock.
    fn call_at_once(
        &self,
        mut state: MutexGuard<'_, State<N>>,
        value: u64,
        op: &Op<'_>,
        call: &ForeignCall,
    ) -> u64 {
        state.pump = PumpState::Pumping;
        state.dirty = true;
        drop(state);
        let made = self.native.run_foreign(call, value);
        let failed = made.err().map(|error| self.failure(op, value, error));
        if let Some(cause) = &failed {
            // The poison comes before the turn is free: the thread that takes the turn next must
            // not run later jobs.
            self.owner.poison(value, cause.clone());
        }
        let mut state = self.state.lock();
        state.pump = PumpState::Idle;
        if let Some(cause) = failed {
            drop(state);
            self.fail(value, cause);
            return value;
        }
        let held = !state.deferred.is_empty();
        self.end(state, value);
        // The value could be waited for before the driver had all of it.
        resume_waiting(&self.core.tables, self.timeline().id(), value);
        if self.wanted.load(Ordering::Acquire) >= value {
            let signalled = self.signal_locked(&mut self.state.lock());
            self.note_unsignalled(signalled);
            self.enlist();
        }
        if held {
            self.pump();
        }
        if self.timeline().failed(VALUE_LIMIT) {
            self.finish_failed();
        }
        value
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
            self.note_unsignalled(signalled);
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
        self.fail(value, cause);
        Ok(value)
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
        let value = self.next_value().inspect_err(|_| self.give_room_back())?;
        let (now, later) = ops.split_at(cut);
        let plain = prepared.is_empty();
        let given = now.iter().enumerate().map(|(i, op)| (op, prepared.take(i)));
        // SAFETY: the caller vouches for the operations.
        if let Err(refusal) = unsafe { self.issue(&mut state, value, given, false) } {
            return self.refused(state, value, refusal);
        }
        self.owner.advance()?;
        let mut failed = None;
        if !plain {
            now.iter().for_each(|op| {
                if let Op::Wait(p) = op {
                    self.owner.learn(*p);
                    failed = failed.take().or_else(|| Some((op, self.failed_meanwhile(*p)?)));
                }
            });
        }
        if let Some((op, cause)) = failed {
            self.issued.store(value, Ordering::Release);
            let cause = self.inherited(op, value, cause);
            drop(state);
            self.fail(value, cause);
            return Ok(value);
        }
        if later.is_empty() {
            return Ok(self.end(state, value));
        }
        if let [op @ Op::Foreign(call)] = later {
            return Ok(self.call_at_once(state, value, op, call));
        }
        self.defer_rest(state, value, later, prepared.rest_from(cut));
        self.pump();
        Ok(value)
    }

    /// The failure of a timepoint since its wait was prepared. Who fails it looks for waits
    /// afterwards, and finds those that were noted before.
    #[inline]
    fn failed_meanwhile(&self, point: Timepoint) -> Option<Error> {
        match self.is_own(point) {
            true => None,
            false => point.timeline().check(point.value()).err(),
        }
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
}
