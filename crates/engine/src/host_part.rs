//! The host's part of completion: bytes to land, keeps and leases to drop, timestamps to mark as
//! written.
//!
//! # Protocol
//! A stream queues actions in the order of their values, before it tells the driver to signal the
//! value. A thread that learns that the device is done with a value runs the actions up to it. Only
//! then does the thread publish the value. One thread at a time runs actions. A thread that comes
//! meanwhile records the due actions and returns. Items run without the lock, because destructors
//! may be user code.
//!
//! The due actions are a count: those in the queue when a thread reports a value. A submission with
//! a host call queues actions of one value before and after the call. The actions after the call
//! must not become due with those before it: their work may still run.
//!
//! Before an action waits for another stream's publication, the values below the action's own are
//! published. A stream only ever waits for values from before its wait. So no two streams wait for
//! each other here, and no thread waits for the actions that it runs itself.
//!
//! This module must not know how completion is learned of.

use crate::driver::DriverStream;
use crate::stream::StreamCore;
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicUsize, Ordering};
use leasehold_core::{Error, Result, TimelineOwner, Timepoint};
use leasehold_hal::op::KeepAlive;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;

/// An action before the publication of a value.
pub(crate) enum CompletionAction<N: DriverStream> {
    /// An object that was kept alive.
    KeepAlive(KeepAlive),
    /// A wait for another stream, which proves that the other stream is done up to a value.
    Passed {
        /// The other stream.
        source: Weak<StreamCore<N>>,
        /// The value.
        value: u64,
        /// The timepoint that was waited for, at or before the value.
        point: Timepoint,
        /// Whether the other stream is of another device, whose loss does not stop this one.
        abroad: bool,
    },
    /// The driver's.
    Driver(N::Action),
}

struct Queue<N: DriverStream> {
    actions: VecDeque<(u64, CompletionAction<N>)>,
    carrying: bool,
    /// The number of due actions at the front.
    due: usize,
    publish: u64,
}

/// The actions of a stream.
pub(crate) struct HostPart<N: DriverStream> {
    queue: Mutex<Queue<N>>,
    /// Items that are queued or running.
    pending: AtomicUsize,
}

impl<N: DriverStream> Default for HostPart<N> {
    fn default() -> Self {
        let queue = Queue { actions: VecDeque::new(), carrying: false, due: 0, publish: 0 };
        Self { queue: Mutex::new(queue), pending: AtomicUsize::new(0) }
    }
}

impl<N: DriverStream> HostPart<N> {
    /// Queues an action for a value. The caller queues actions in the order of their values.
    pub(crate) fn leave(&self, value: u64, action: CompletionAction<N>) {
        let mut queue = self.queue.lock();
        queue.actions.push_back((value, action));
        self.pending.fetch_add(1, Ordering::Release);
    }

    /// Whether no action is queued or running.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Runs the actions that are queued now, up to `target`, and returns the value that the caller
    /// may publish. That value is `publish`, or a larger one that other threads reported meanwhile.
    /// Returns `None` if another thread is running actions. That thread runs these actions too, and
    /// publishes. An action may fail the timeline.
    pub(crate) fn carry_out(
        &self,
        owner: &TimelineOwner,
        target: u64,
        publish: u64,
        device: &N::Device,
    ) -> Option<u64> {
        if self.is_empty() {
            return Some(publish);
        }
        let timeline = owner.timeline();
        let mut queue = self.queue.lock();
        queue.due = queue.due.max(queue.actions.partition_point(|(value, _)| *value <= target));
        queue.publish = queue.publish.max(publish);
        if queue.carrying {
            return None;
        }
        queue.carrying = true;
        while queue.due > 0 {
            let Some((value, action)) = queue.actions.pop_front() else { break };
            queue.due -= 1;
            drop(queue);
            if matches!(action, CompletionAction::Passed { .. }) && timeline.completed() < value - 1
            {
                owner.complete(value - 1);
            }
            // A dropped object may be the user's. A panic of its destructor must not end this
            // thread.
            match catch_unwind(AssertUnwindSafe(|| {
                action.carry_out(!timeline.failed(value), device)
            })) {
                Ok(Ok(())) => {}
                Ok(Err(cause)) => owner.poison(value, cause),
                Err(_) => tracing::error!(
                    ?timeline,
                    value,
                    "something that was kept alive panicked as it was given up"
                ),
            }
            self.pending.fetch_sub(1, Ordering::Release);
            queue = self.queue.lock();
        }
        queue.carrying = false;
        Some(queue.publish)
    }

    /// Leaks the queued actions, because the device may use their memory at any time.
    pub(crate) fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.queue.get_mut().actions));
    }
}

impl<N: DriverStream> CompletionAction<N> {
    /// Carries the action out. An error fails the value of the action.
    fn carry_out(self, sound: bool, device: &N::Device) -> Result<()> {
        match self {
            CompletionAction::KeepAlive(keep) => drop(keep),
            CompletionAction::Passed { source, value, point, abroad } => {
                if sound {
                    return match source.upgrade() {
                        Some(source) => source.passed(value, point, abroad),
                        // The other stream was given up when all its work was over.
                        None => inherited(point),
                    };
                }
            }
            CompletionAction::Driver(action) => N::carry_out(device, action, sound),
        }
        Ok(())
    }
}

/// The failure of a timepoint that a stream has waited for: the stream's work ran without its
/// results. The loss of another device does not fail the stream.
///
/// # Errors
/// The failure.
pub(crate) fn inherited(point: Timepoint) -> Result<()> {
    match point.timeline().check(point.value()) {
        Err(Error::DeviceLost { .. }) | Ok(_) => Ok(()),
        Err(cause) => Err(cause),
    }
}

impl<N: DriverStream> fmt::Debug for HostPart<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPart({} items)", self.pending.load(Ordering::Relaxed))
    }
}
