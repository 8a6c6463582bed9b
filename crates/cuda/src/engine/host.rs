//! The host's part of completion: bytes that land, keeps and leases that are given up, time stamps that count as written.
//!
//! # Protocol
//! Items are left here, in the order of their values, before the driver is told to signal the value. Whoever learns that the device is done
//! with a value carries out the items up to it and only then publishes the value. One thread at a time carries out; another that comes
//! meanwhile notes what is due and goes. Items run without the lock: destructors may be anybody's.
//!
//! What is due is a number of items, those that lie here when somebody says so. A submission with a host call leaves items before it and
//! after it, of one value: that the first are due says nothing of the others, whose work may still run.
//!
//! Before an item waits for another stream's publication, the values below the item's own are published.
//! A stream only ever waits for values from before its wait. So no two streams, and no thread that comes
//! back to the stream it carries out, wait for each other here.
//!
//! This module must not know how completion is learned of.

use super::landing;
use super::program::Program;
use super::stream::StreamCore;
use crate::driver::ops::CudaSlowOps;
use leasehold_alloc::Buffer;
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicUsize, Ordering};
use leasehold_core::{Lease, LineOwner};
use leasehold_hal::op::Keep;
use leasehold_hal::{GraphExec, Timestamp};
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;

/// Host memory that bytes go to.
#[derive(Debug, Clone, Copy)]
pub struct HostAddress(pub *mut u8);

// SAFETY: who submitted promised that the memory stays valid and untouched until the value completes; only the one thread that carries
// out the item writes to it.
unsafe impl Send for HostAddress {}
// SAFETY: a shared reference to it only copies the address.
unsafe impl Sync for HostAddress {}

/// Something to be done or given up before a value is published.
pub enum Item {
    /// Bytes lie in pinned memory and go to their destination.
    Land {
        /// Where they lie.
        staging: Lease<Buffer>,
        /// Where they go.
        dst: HostAddress,
        /// How many.
        bytes: u64,
        /// What keeps the destination alive.
        keep: Option<Keep>,
    },
    /// Something that was kept alive.
    Keep(Keep),
    /// A time stamp, written by now.
    Stamp(Lease<Timestamp>),
    /// Another stream is done up to a value too: this one has waited for it.
    Passed {
        /// The other stream.
        source: Weak<StreamCore>,
        /// The value.
        value: u64,
    },
    /// A segment of a graph that ran.
    Graph {
        /// The graph.
        exec: Lease<dyn GraphExec>,
        /// Which of its segments.
        segment: u32,
    },
}

#[derive(Default)]
struct Queue {
    items: VecDeque<(u64, Item)>,
    carrying: bool,
    /// So many items from the front are due.
    due: usize,
    publish: u64,
}

/// The items of a stream.
#[derive(Default)]
pub struct HostPart {
    queue: Mutex<Queue>,
    /// Items that were left and are not carried out.
    pending: AtomicUsize,
}

impl HostPart {
    /// Leaves an item for a value. In the order of values.
    pub fn leave(&self, value: u64, item: Item) {
        let mut queue = self.queue.lock();
        queue.items.push_back((value, item));
        self.pending.fetch_add(1, Ordering::Release);
    }

    /// Whether nothing is left.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Carries out what was left up to `target` by now, and says up to which value the line may be published: `publish`, or what others who came
    /// meanwhile know. `None` when another thread is at it: it goes as far, and publishes.
    pub fn carry_out(&self, owner: &LineOwner, target: u64, publish: u64, ops: &dyn CudaSlowOps) -> Option<u64> {
        if self.is_empty() {
            return Some(publish);
        }
        let line = owner.line();
        let mut queue = self.queue.lock();
        queue.due = queue.due.max(queue.items.partition_point(|(value, _)| *value <= target));
        queue.publish = queue.publish.max(publish);
        if queue.carrying {
            return None;
        }
        queue.carrying = true;
        while queue.due > 0 {
            let Some((value, item)) = queue.items.pop_front() else { break };
            queue.due -= 1;
            drop(queue);
            if matches!(item, Item::Passed { .. }) && line.completed() < value - 1 {
                owner.complete(value - 1);
            }
            // What is given up may be anybody's; its destructor must not end this thread.
            if catch_unwind(AssertUnwindSafe(|| item.carry_out(!line.failed(value), ops))).is_err() {
                tracing::error!(?line, value, "something that was kept alive panicked as it was given up");
            }
            self.pending.fetch_sub(1, Ordering::Release);
            queue = self.queue.lock();
        }
        queue.carrying = false;
        Some(queue.publish)
    }

    /// Keeps for ever what was left: the device may use it at any time.
    pub fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.queue.get_mut().items));
    }
}

impl Item {
    fn carry_out(self, sound: bool, ops: &dyn CudaSlowOps) {
        match self {
            Item::Land { staging, dst, bytes, keep } => {
                if sound {
                    // SAFETY: the device is done with the copy; the submitter vouches for the destination until the value,
                    // which is published after this, is over.
                    unsafe { land(&staging, dst, bytes, ops) };
                }
                drop(keep);
            }
            Item::Keep(keep) => drop(keep),
            Item::Passed { source, value } => {
                if sound && let Some(source) = source.upgrade() {
                    source.passed(value);
                }
            }
            Item::Stamp(stamp) => {
                if sound {
                    stamp.set(1);
                }
            }
            Item::Graph { exec, segment } => {
                if sound {
                    // SAFETY: graphs of a submission belong to this device (the submitter's promise), whose execs give their own address.
                    unsafe { Program::of(&exec) }.landed(segment, ops);
                }
            }
        }
    }
}

/// Copies bytes from pinned memory to where they go.
///
/// # Safety
/// - `staging` is pinned memory of at least so many bytes, which the device has written and is done with.
/// - `dst` may be written, and nobody else uses it meanwhile.
pub(crate) unsafe fn land(staging: &Lease<Buffer>, dst: HostAddress, bytes: u64, ops: &dyn CudaSlowOps) {
    ops.host_access(staging.addr(), bytes, false);
    // SAFETY: the caller vouches for both sides, which are `bytes` long.
    unsafe { landing::copy(staging.addr() as *const u8, dst.0, bytes as usize) };
}

impl fmt::Debug for HostPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPart({} items)", self.pending.load(Ordering::Relaxed))
    }
}
