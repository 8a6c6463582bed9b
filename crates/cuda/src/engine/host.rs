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

use super::program::Program;
use super::staging_copy;
use super::stream::StreamCore;
use crate::driver::ops::CudaSlowOps;
use leasehold_alloc::Buffer;
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicUsize, Ordering};
use leasehold_core::{Lease, Result, TimelineOwner, UniqueLease};
use leasehold_hal::op::KeepAlive;
use leasehold_hal::{GraphExec, TimestampQuery};
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;

/// The destination of a download in host memory.
#[derive(Debug, Clone, Copy)]
pub struct HostAddress(pub *mut u8);

// SAFETY: the submitter promised that the memory stays valid and untouched until the value
// completes. Only the one thread that runs the action writes to the memory.
unsafe impl Send for HostAddress {}
// SAFETY: a shared reference only copies the address.
unsafe impl Sync for HostAddress {}

/// An action before the publication of a value.
pub enum CompletionAction {
    /// Bytes to copy from pinned memory to their destination.
    Land {
        /// The pinned memory with the bytes.
        staging: UniqueLease<Buffer>,
        /// The destination.
        dst: HostAddress,
        /// The number of bytes.
        bytes: u64,
        /// Keeps the destination alive.
        keep: Option<KeepAlive>,
    },
    /// An object that was kept alive.
    KeepAlive(KeepAlive),
    /// A timestamp, which the device has written by now.
    Timestamp(Lease<TimestampQuery>),
    /// A wait for another stream, which proves that the other stream is done up to a value.
    Passed {
        /// The other stream.
        source: Weak<StreamCore>,
        /// The value.
        value: u64,
        /// Whether the other stream is of another context, whose loss does not stop this one.
        abroad: bool,
    },
    /// A segment of a graph that ran.
    Graph {
        /// The graph.
        exec: Lease<dyn GraphExec>,
        /// The segment's number.
        segment: u32,
    },
}

#[derive(Default)]
struct Queue {
    actions: VecDeque<(u64, CompletionAction)>,
    carrying: bool,
    /// The number of due actions at the front.
    due: usize,
    publish: u64,
}

/// The actions of a stream.
#[derive(Default)]
pub struct HostPart {
    queue: Mutex<Queue>,
    /// Items that are queued or running.
    pending: AtomicUsize,
}

impl HostPart {
    /// Queues an action for a value. The caller queues actions in the order of their values.
    pub fn leave(&self, value: u64, action: CompletionAction) {
        let mut queue = self.queue.lock();
        queue.actions.push_back((value, action));
        self.pending.fetch_add(1, Ordering::Release);
    }

    /// Whether no action is queued or running.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Runs the actions that are queued now, up to `target`, and returns the value that the caller
    /// may publish. That value is `publish`, or a larger one that other threads reported meanwhile.
    /// Returns `None` if another thread is running actions. That thread runs these actions too, and
    /// publishes. An action may fail the timeline.
    pub fn carry_out(
        &self,
        owner: &TimelineOwner,
        target: u64,
        publish: u64,
        ops: &dyn CudaSlowOps,
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
            match catch_unwind(AssertUnwindSafe(|| action.carry_out(!timeline.failed(value), ops)))
            {
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
    pub fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.queue.get_mut().actions));
    }
}

impl CompletionAction {
    /// Carries the action out. An error fails the value of the action.
    fn carry_out(self, sound: bool, ops: &dyn CudaSlowOps) -> Result<()> {
        match self {
            CompletionAction::Land { staging, dst, bytes, keep } => {
                if sound {
                    // SAFETY: the device is done with the copy. The submitter vouches for the
                    // destination until the value is over, and the value is published after this.
                    unsafe { land(&staging, dst, bytes, ops) };
                }
                drop(keep);
            }
            CompletionAction::KeepAlive(keep) => drop(keep),
            CompletionAction::Passed { source, value, abroad } => {
                if sound && let Some(source) = source.upgrade() {
                    return source.passed(value, abroad);
                }
            }
            CompletionAction::Timestamp(stamp) => {
                if sound {
                    stamp.set(1);
                }
            }
            CompletionAction::Graph { exec, segment } => {
                if sound {
                    // SAFETY: graphs of a submission belong to this device (the submitter's
                    // promise), so `native` is the address of a program.
                    unsafe { Program::of(&exec) }.landed(segment, ops);
                }
            }
        }
        Ok(())
    }
}

/// Copies bytes from pinned memory to their destination.
///
/// # Safety
/// - `staging` is pinned memory of at least `bytes` bytes, which the device has written and is done
///   with.
/// - `dst` may be written, and no other thread uses it meanwhile.
pub(crate) unsafe fn land(
    staging: &UniqueLease<Buffer>,
    dst: HostAddress,
    bytes: u64,
    ops: &dyn CudaSlowOps,
) {
    ops.host_access(staging.addr(), bytes, false);
    // SAFETY: the caller vouches for both sides, which are `bytes` long.
    unsafe { staging_copy::copy(staging.addr() as *const u8, dst.0, bytes as usize) };
}

impl fmt::Debug for HostPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPart({} items)", self.pending.load(Ordering::Relaxed))
    }
}
