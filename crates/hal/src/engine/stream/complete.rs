//! Completion: what the device is done with, the host's part of it, and publication.
//!
//! The values below an action's own are published before the action runs. A stream only ever waits
//! for values from before its wait. So no two streams hold each other back here, and a destructor
//! may wait for work behind earlier values.
//!
//! This module must not know what was submitted.

use crate::Op;
use crate::engine::driver::{CompletionAction, DriverStream, Passed};
use crate::engine::state::StreamCore;
use crate::engine::timelines::Origin;
use leasehold_core::panics::quietly;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Result, VALUE_LIMIT};

impl<N: DriverStream> StreamCore<N> {
    /// Publishes the values that the device is done with. Returns whether a new value was
    /// published.
    pub(crate) fn poll(&self) -> bool {
        let timeline = self.timeline();
        let reached = self.reached().min(timeline.submitted());
        reached > timeline.completed() && self.publish(reached)
    }

    /// The device is done up to `value`: runs the host's part, then publishes.
    pub(crate) fn publish(&self, value: u64) -> bool {
        let timeline = self.timeline();
        let before = timeline.completed();
        let sound = !timeline.failed(VALUE_LIMIT);
        self.note_failure();
        if let Some(publish) = self.run_host_part(value, value) {
            self.owner.complete(publish);
        }
        if sound && timeline.failed(VALUE_LIMIT) {
            self.after_failure();
        }
        timeline.completed() > before
    }

    /// A stream that has waited for `value` is done, so this stream is done up to `value` too. The
    /// call publishes `value`, unless the host's part of this stream is not over. `abroad`: the
    /// other stream is of another context.
    pub(crate) fn passed(&self, value: u64, abroad: bool) {
        if abroad && self.timeline().completed() < value {
            // A driver may release the streams that wait for a lost device. The context of this
            // stream may not know of the loss yet.
            let _ = self.query();
            self.core.settle_loss();
        }
        self.publish(value);
    }

    /// Queries the driver whether all work is over, after it ensures that a signal is pending.
    pub(crate) fn look(&self) -> Result<()> {
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

    /// Runs the host's part up to `target`, and returns the value that the caller may publish; see
    /// [`HostPart::run_due`](crate::engine::host_part::HostPart::run_due). An action may fail the
    /// stream.
    #[inline(never)]
    pub(crate) fn run_host_part(&self, target: u64, publish: u64) -> Option<u64> {
        self.host.run_due(target, publish, |value, action| {
            if self.timeline().completed() < value - 1 {
                self.owner.complete(value - 1);
            }
            // A dropped object may be the user's. A panic of its destructor must not end this
            // thread.
            quietly(|| self.run_action(value, action)).flatten()
        })
    }

    /// Runs an action of a value. Returns a wait that is not over.
    #[inline(always)]
    fn run_action(&self, value: u64, action: CompletionAction<N>) -> Option<CompletionAction<N>> {
        let sound = !self.timeline().failed(value);
        match action {
            CompletionAction::KeepAlive(keep) => drop(keep),
            CompletionAction::Driver(action) => N::run_action(&self.core.device, action, sound),
            CompletionAction::Passed(wait) if sound && !self.end_wait(value, wait) => {
                return Some(CompletionAction::Passed(wait));
            }
            // The wait is over, or the stream has failed already.
            CompletionAction::Passed(_) => {}
        }
        None
    }

    /// Ends a wait for another stream: that stream is done too. Returns `false` if that stream's
    /// host part is not over.
    #[inline(never)]
    fn end_wait(&self, value: u64, wait: Passed) -> bool {
        let Passed { point, value: proven, abroad } = wait;
        // A stream that is gone has published its values, or does so as it ends.
        if point.timeline().completed() < proven
            && let Some(Origin::Stream(source)) = self.core.tables.origin(point.timeline_id())
            && let Some(source) = source.upgrade()
        {
            source.passed(proven, abroad);
        }
        point.timeline().check(point.value()).unwrap_or_else(|cause| {
            // The stream's work ran without the results that it waited for.
            self.owner.poison(value, self.inherited(&Op::Wait(point), value, cause));
            true
        })
    }
}
