//! The supply of an allocator: its backing, with the budget, the trace and the counts of what is
//! asked of it.
//!
//! Every call of a driver passes here or gets its plan carried out here. No caller holds the
//! allocator's lock.

use crate::backing::{Backing, BackingCaps, Chunk};
use crate::budget::Budget;
use crate::residency::{Plan, Step};
use crate::stream::On;
use crate::trace::{EventKind, Ring};
use leasehold_core::sync::OnceLock;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, PackedTimepoint, Result, Timepoint};
use std::time::{Duration, Instant};

/// A count that only ever rises, or is set by its one writer.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, to: u64) {
        self.0.store(to, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Where an allocator takes memory from.
pub(crate) struct Supply {
    pub(crate) backing: Box<dyn Backing>,
    pub(crate) caps: BackingCaps,
    pub(crate) budget: Budget,
    pub(crate) trace: Ring,
    /// The loss of the device that the backing reported. Calls that need the driver fail with it.
    lost: OnceLock<Error>,
    pub(crate) growths: Counter,
    pub(crate) remaps: Counter,
    pub(crate) host_waits: Counter,
    pub(crate) inserted_waits: Counter,
    pub(crate) failed: Counter,
    /// Bytes of whole ranges that the driver would not take back.
    pub(crate) kept_by_driver: Counter,
}

impl Supply {
    pub(crate) fn new(backing: Box<dyn Backing>, budget: Budget, trace: Ring) -> Self {
        Self {
            caps: backing.caps(),
            backing,
            budget,
            trace,
            lost: OnceLock::new(),
            growths: Counter::default(),
            remaps: Counter::default(),
            host_waits: Counter::default(),
            inserted_waits: Counter::default(),
            failed: Counter::default(),
            kept_by_driver: Counter::default(),
        }
    }

    /// # Errors
    /// The loss of the device, if the backing reported it.
    pub(crate) fn check_lost(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |e| Err(e.clone()))
    }

    /// Counts a request that failed, and remembers the loss of the device.
    pub(crate) fn note_failure(&self, e: &Error) {
        self.failed.add(1);
        if matches!(e, Error::DeviceLost { .. }) {
            self.lost.get_or_init(|| e.clone());
        }
    }

    /// Takes a range of memory from the driver by `make`, within the budget.
    ///
    /// # Errors
    /// `OverBudget`; those of `make`.
    pub(crate) fn take(&self, bytes: u64, make: impl FnOnce() -> Result<Chunk>) -> Result<Chunk> {
        if !self.budget.take(bytes) {
            return Err(self.budget.refusal(bytes));
        }
        let chunk = make().inspect_err(|_| self.budget.undo(bytes))?;
        self.budget.keep(chunk.bytes);
        self.trace.memory(EventKind::SegmentAlloc, chunk.addr, chunk.bytes);
        Ok(chunk)
    }

    /// Takes a segment from the driver.
    ///
    /// # Errors
    /// `OverBudget`; the driver's.
    pub(crate) fn take_segment(&self, bytes: u64) -> Result<Chunk> {
        // SAFETY: at no address in particular.
        self.take(bytes, || unsafe { self.backing.commit(None, bytes) })
    }

    /// Gives a range back by `give`, with its bytes to the budget. `false`: the driver does not
    /// take it, and it stays counted.
    pub(crate) fn give(&self, chunk: Chunk, give: impl FnOnce() -> Result<()>) -> bool {
        let given = give().is_ok();
        if given {
            self.trace.memory(EventKind::SegmentFree, chunk.addr, chunk.bytes);
            self.budget.give_back(chunk.bytes);
        } else {
            self.kept_by_driver.add(chunk.bytes);
        }
        given
    }

    /// Gives a segment back. `false`: the driver does not take it.
    ///
    /// # Safety
    /// - The allocator has the segment no more: no block and no stream uses it.
    pub(crate) unsafe fn give_segment(&self, chunk: Chunk) -> bool {
        // SAFETY: the caller vouches for the segment, which `take_segment` took.
        self.give(chunk, || unsafe { self.backing.decommit(chunk) })
    }

    /// Carries a plan out, and counts and traces it.
    pub(crate) fn run(&self, plan: &mut Plan) -> Result<()> {
        self.remaps.add(plan.reclaims().into());
        self.growths.add((plan.new_bytes > 0).into());
        let result = plan.run(&*self.backing);
        self.trace.steps(&plan.steps);
        result
    }

    /// Unmaps and destroys pieces.
    pub(crate) fn destroy(&self, steps: &mut [Step]) {
        steps.iter_mut().for_each(|s| s.destroy(&*self.backing));
        self.trace.steps(steps);
    }

    /// Unmaps pieces, up to one that the driver keeps.
    pub(crate) fn unmap(&self, steps: &mut [Step]) {
        let _ = steps.iter_mut().try_for_each(|s| s.obtain(&*self.backing));
        self.trace.steps(steps);
    }

    /// Blocks until a timepoint is over, and counts and traces the wait.
    pub(crate) fn wait(
        &self,
        point: Timepoint,
        on: On<'_>,
        timeout: Option<Duration>,
    ) -> Result<()> {
        if PackedTimepoint::from(point).has_passed() {
            return Ok(());
        }
        self.host_waits.add(1);
        let begin = Instant::now();
        let waited = on.wait_host(point, timeout);
        let us = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.trace.wait(EventKind::HostWait, point.timeline_id(), us);
        waited
    }
}
