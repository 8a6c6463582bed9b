//! Failure: of a submission, of a stream, and of a device with all its streams.
//!
//! A failed stream drops what it held back, and resumes the streams that wait for it. Their work
//! fails in turn. It publishes its values once the driver is done with all work that it was given.
//! In a lost context the values are published at once.
//!
//! This module must not know what failed.

use crate::Op;
use crate::engine::deferred::resume_waiting;
use crate::engine::driver::{DriverDevice, DriverStream};
use crate::engine::state::{BlockedOn, Engine, PumpState, StreamCore};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, Result, Timepoint, VALUE_LIMIT};

impl<N: DriverStream> StreamCore<N> {
    /// Fails everything from `value` on.
    pub(crate) fn fail(&self, value: u64, cause: Error) {
        self.owner.poison(value, cause);
        self.after_failure();
    }

    /// Wakes the waiting streams, drops the submissions that are held back, and completes the
    /// values that are over.
    pub(super) fn after_failure(&self) {
        let mut state = self.state.lock();
        state.fence = None;
        state.blocked_on = BlockedOn::Backend;
        drop(state);
        resume_waiting(&self.core.tables, self.timeline().id(), u64::MAX);
        self.finish_failed();
        if !self.timeline().is_idle() {
            self.enlist();
        }
    }

    /// Drops the failed submissions that are held back. Returns whether none is left, nor a thread
    /// that has the turn: such a thread calls [`finish_failed`](Self::finish_failed) when it is
    /// done.
    fn drop_failed(&self) -> bool {
        let mut state = self.state.lock();
        while state.pump == PumpState::Idle && !state.deferred.is_empty() {
            let sound = state.deferred.partition_point(|job| !self.timeline().failed(job.value));
            let failed = state.deferred.split_off(sound);
            let Some(first) = failed.front().map(|job| job.value) else { return false };
            state.pump = PumpState::Pumping;
            state.again = false;
            drop(state);
            self.release(first, failed);
            state = self.state.lock();
            state.pump = PumpState::Idle;
            if state.again {
                drop(state);
                self.pump();
                state = self.state.lock();
            }
        }
        state.pump == PumpState::Idle
    }

    /// Publishes all values of a failed stream once the driver is done with its work.
    pub(crate) fn finish_failed(&self) {
        let timeline = self.timeline();
        if timeline.is_idle() && self.host.is_empty() || !timeline.failed(VALUE_LIMIT) {
            return;
        }
        if !self.drop_failed() {
            return;
        }
        let over = self.core.device.loss().is_some() || self.query().is_ok_and(|over| over);
        // The query may have found a loss.
        let loss = self.core.device.loss();
        if let Some(loss) = &loss {
            self.fail_pending(loss);
            if !self.drop_failed() {
                return;
            }
        }
        if over || loss.is_some() {
            self.note_failure();
            let end = timeline.submitted();
            // `VALUE_LIMIT` includes the actions of a submission that was lost half way, and so has
            // no value.
            if let Some(publish) = self.run_host_part(VALUE_LIMIT, end) {
                self.owner.complete(publish);
            }
        }
    }

    /// Fails the stream of a lost context, where no work runs any more.
    pub(crate) fn fail_lost(&self, loss: &Error) {
        self.fail_pending(loss);
        self.after_failure();
    }

    /// Handles an error after the lock is released.
    pub(crate) fn note_unsignalled(&self, result: Result<()>) {
        if let Err(e) = result {
            let e = self.core.settle(e);
            tracing::debug!(error = %e, stream = %self.name(), "completion could not be signalled");
        }
    }

    /// The failure of an operation, as the cause for the timeline.
    pub(crate) fn failure(&self, op: &Op<'_>, value: u64, error: Error) -> Error {
        let error = self.core.settle(error);
        self.fault(op.name(), value, &error)
    }
}

impl<N: DriverStream> Engine<N> {
    /// Fails a value that the driver works on, the later ones of its stream, and the values of the
    /// backend's streams that are ordered after it, also of those on other devices. Returns whether
    /// the value has failed by this call. The caller holds no lock.
    ///
    /// A value that the driver has not got fails by itself: when its turn comes, the host finds
    /// the failure that it waits for.
    pub fn fail(&self, point: Timepoint, cause: &Error) -> bool {
        let streams = self.tables.streams();
        let mut failed: Vec<Timepoint> = Vec::new();
        let mut found = vec![point];
        while let Some(at) = found.pop() {
            let own = |s: &&Arc<StreamCore<N>>| s.timeline().id() == at.timeline_id();
            let Some(stream) = streams.iter().find(own) else { continue };
            let timeline = stream.timeline();
            // It may be over without anybody having asked. An error is found there too.
            let _ = stream.refresh();
            // The first value that the driver has not got may be there in part.
            let given = stream.issued.load(Ordering::Acquire) + 1 >= at.value();
            if !given || timeline.completed() >= at.value() || timeline.failed(at.value()) {
                continue;
            }
            stream.fail(at.value(), cause.clone());
            failed.push(at);
            for other in streams.iter().filter(|s| !Arc::ptr_eq(s, stream)) {
                // A thread that submits a wait there notes the wait, then looks for a failure.
                drop(other.state.lock());
                found.extend(other.timeline().first_after(at).map(|v| other.timeline().at(v)));
            }
        }
        failed.contains(&point)
    }

    /// After a loss, fails every stream and completes its submissions. The caller holds no lock.
    pub(crate) fn settle_loss(&self) {
        let Some(loss) = self.device.loss() else { return };
        for stream in self.streams() {
            stream.fail_lost(&loss);
        }
    }

    /// Settles the loss of this device, if an error reports it. The loss of another device is an
    /// error like others. The caller holds no lock.
    pub fn settle(&self, error: Error) -> Error {
        match (self.device.loss(), &error) {
            (Some(loss), Error::DeviceLost { .. }) => {
                self.settle_loss();
                loss
            }
            _ => error,
        }
    }
}
