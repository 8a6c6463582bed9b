//! The host's part of completion: bytes to copy out, keeps and leases to drop, timestamps to mark
//! as written.
//!
//! # Protocol
//! A stream queues actions in the order of their values, before it tells the driver to signal the
//! value. A thread that learns that the device is done with a value runs the actions up to it. Only
//! then does the thread publish the value. One thread at a time runs actions. A thread that comes
//! meanwhile records the due actions and returns. Actions run without the lock, because destructors
//! may be user code.
//!
//! The due actions are a count: those in the queue when a thread reports a value. A submission with
//! a host call queues actions of one value before and after the call. The actions after the call
//! must not become due with those before it: their work may still run.
//!
//! A wait for another stream is an action that ends with the publication of the other stream's
//! timepoint, or with its failure. Until then the action stays at the front, and holds the later
//! ones back. No thread blocks for it: each later observer of the stream tries it again.
//!
//! The values below an action's own are published before the action runs. A stream only ever waits
//! for values from before its wait. So no two streams hold each other back here, and a destructor
//! may wait for work behind earlier values.
//!
//! This module does not poll for completion.

use crate::driver::DriverStream;
use crate::stream::StreamCore;
use leasehold_core::Timepoint;
use leasehold_core::panics::quietly;
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicUsize, Ordering};
use leasehold_hal::Op;
use leasehold_hal::op::KeepAlive;
use std::collections::VecDeque;
use std::fmt;
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
    /// Actions that are queued or running.
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
    /// An action may fail the stream.
    ///
    /// Returns `None` if another thread is running actions, or if a wait for another stream is not
    /// over. What is due stays due: the other thread or a later call goes on with it.
    pub(crate) fn carry_out(
        &self,
        stream: &StreamCore<N>,
        target: u64,
        publish: u64,
    ) -> Option<u64> {
        if self.is_empty() {
            return Some(publish);
        }
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
            if stream.timeline().completed() < value - 1 {
                stream.owner.complete(value - 1);
            }
            // A dropped object may be the user's. A panic of its destructor must not end this
            // thread.
            let open = quietly(|| action.carry_out(stream, value)).flatten();
            queue = self.queue.lock();
            if let Some(wait) = open {
                queue.actions.push_front((value, wait));
                queue.due += 1;
                queue.carrying = false;
                return None;
            }
            self.pending.fetch_sub(1, Ordering::Release);
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
    /// Carries out an action of a value of `stream`. Returns a wait that is not over.
    fn carry_out(self, stream: &StreamCore<N>, value: u64) -> Option<Self> {
        let sound = !stream.timeline().failed(value);
        match self {
            CompletionAction::KeepAlive(keep) => drop(keep),
            CompletionAction::Driver(action) => N::carry_out(&stream.core.device, action, sound),
            CompletionAction::Passed { source, value: proven, point, abroad } if sound => {
                // A stream that is gone has published its values, or does so as it ends.
                if let Some(source) = source.upgrade() {
                    source.passed(proven, abroad);
                }
                match point.timeline().check(point.value()) {
                    Ok(true) => {}
                    Ok(false) => {
                        let value = proven;
                        return Some(CompletionAction::Passed { source, value, point, abroad });
                    }
                    // The stream's work ran without the results that it waited for.
                    Err(cause) => {
                        let cause = stream.inherited(&Op::Wait(point), value, cause);
                        stream.owner.poison(value, cause);
                    }
                }
            }
            // The stream has failed already.
            CompletionAction::Passed { .. } => {}
        }
        None
    }
}

impl<N: DriverStream> fmt::Debug for HostPart<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPart({} actions)", self.pending.load(Ordering::Relaxed))
    }
}
