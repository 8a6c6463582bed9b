//! The host's part of completion, as a queue of actions: bytes to copy on, keeps and leases to
//! drop, timestamps to mark as written.
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
//! This module does not know what an action is, and does not poll for completion.

use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::fmt;

struct Queue<A> {
    actions: VecDeque<(u64, A)>,
    /// A thread runs actions.
    running: bool,
    /// The number of due actions at the front.
    due: usize,
    publish: u64,
}

/// The actions of a stream.
pub(crate) struct HostPart<A> {
    queue: Mutex<Queue<A>>,
    /// Actions that are queued or running.
    pending: AtomicUsize,
}

impl<A> Default for HostPart<A> {
    fn default() -> Self {
        let queue = Queue { actions: VecDeque::new(), running: false, due: 0, publish: 0 };
        Self { queue: Mutex::new(queue), pending: AtomicUsize::new(0) }
    }
}

impl<A> HostPart<A> {
    /// Queues an action for a value. The caller queues actions in the order of their values.
    pub(crate) fn leave(&self, value: u64, action: A) {
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
    ///
    /// `run` gets an action and its value, and returns a wait that is not over. It must not unwind.
    ///
    /// Returns `None` if another thread is running actions, or if a wait for another stream is not
    /// over. What is due stays due: the other thread or a later call goes on with it.
    #[inline(always)] // it has one caller
    pub(crate) fn run_due(
        &self,
        target: u64,
        publish: u64,
        run: impl Fn(u64, A) -> Option<A>,
    ) -> Option<u64> {
        if self.is_empty() {
            return Some(publish);
        }
        let mut queue = self.queue.lock();
        queue.due = queue.due.max(queue.actions.partition_point(|(value, _)| *value <= target));
        queue.publish = queue.publish.max(publish);
        if queue.running {
            return None;
        }
        queue.running = true;
        while queue.due > 0 {
            let Some((value, action)) = queue.actions.pop_front() else { break };
            queue.due -= 1;
            drop(queue);
            let open = run(value, action);
            queue = self.queue.lock();
            if let Some(wait) = open {
                queue.actions.push_front((value, wait));
                queue.due += 1;
                queue.running = false;
                return None;
            }
            self.pending.fetch_sub(1, Ordering::Release);
        }
        queue.running = false;
        Some(queue.publish)
    }

    /// Leaks the queued actions, because the device may use their memory at any time.
    pub(crate) fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.queue.get_mut().actions));
    }
}

impl<A> fmt::Debug for HostPart<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPart({} actions)", self.pending.load(Ordering::Relaxed))
    }
}
