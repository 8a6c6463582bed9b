//! The out-of-memory fallback: the attempts of an allocation that no free block fits, each bounded
//! and counted, up to an error that says where the memory is.
//!
//! 1 coalesce what is over · 2 memory that this stream is known to run after · 3 (if so
//! configured) memory that the stream can be made to wait for · 4 [grow](crate::growth), moving
//! free granules first as the policy says, then with idle memory of growing blocks · 5 let the
//! stream wait for other streams' memory · 6 flush all thread caches · 7 move free granules
//! whatever the policy · 8 reclaimers · 9 wait on the host for the least that suffices, if there
//! is enough, for a [limited time](leasehold_core::TimelineSource::timeout) · 10 `OutOfMemory`
//! with what was tried.
//!
//! PyTorch's caching allocator has such an order too: callbacks, then new memory, then its caches
//! are released and it tries again. This one asks for waits before it gives up, and knows what each
//! would free.

use crate::checks::SweepScope;
use crate::config::CrossStream;
use crate::core::ask_external;
use crate::extent::Block;
use crate::host;
use crate::layout::Layout;
use crate::oom::AttemptLog;
use crate::state::Inner;
use crate::store::{Found, Need};
use crate::stream::On;
use crate::supply::Supply;
use crate::trace::EventKind;
use crate::trim::{give_back_idle, trim_idle};
use leasehold_core::thread_number::thread_number;
use leasehold_core::{PackedTimepoint, Result, Timeline};
use std::ops::ControlFlow;
use std::time::Instant;

/// With fewer granules than this in hand, alignment saves memory: large blocks are placed so that
/// all of theirs can be moved. With more, the rule leaves more memory empty than it saves.
const FEW_GRANULES: u64 = 256;
/// Host waits of one allocation.
const MOST_WAITS: usize = 256;

/// Ends the attempts with a block or an error.
fn or_go_on(found: Found) -> ControlFlow<Found> {
    if matches!(found, Ok(None)) { ControlFlow::Continue(()) } else { ControlFlow::Break(found) }
}

/// The end of attempts.
fn found(end: ControlFlow<Found>) -> Found {
    end.break_value().unwrap_or(Ok(None))
}

impl Inner {
    /// The slow path of an allocation.
    pub(crate) fn alloc_slow(&self, need: Need, layout: Layout, on: On<'_>) -> Result<Block> {
        self.sweep_retired();
        trim_idle(&self.core, &self.supply);
        crate::destroy::sweep();
        let mut log = AttemptLog::default();
        let supply = &self.supply;
        let block = supply.check_lost().and_then(|()| {
            if layout.size > supply.budget.limit() {
                return Err(supply.budget.refusal(layout.size));
            }
            if supply.caps.vmm && layout.size > supply.caps.physical {
                // Such a driver gives no more than it has.
                return Ok(None);
            }
            found(self.attempts(need, layout, on, &mut log))
        });
        block
            .and_then(|block| block.ok_or_else(|| self.report(layout, log)))
            .inspect_err(|e| supply.note_failure(e))
    }

    /// The attempts, in order, up to one that finds a block or fails.
    fn attempts(
        &self,
        need: Need,
        layout: Layout,
        on: On<'_>,
        log: &mut AttemptLog,
    ) -> ControlFlow<Found> {
        // 1, 2
        or_go_on(self.take_known(need, on))?;
        // Nobody but this call makes external timelines progress.
        if Timeline::any_external() {
            ask_external(&self.core, &self.table);
            or_go_on(self.take_known(need, on))?;
        }
        // 3
        if self.config.cross_stream == CrossStream::InsertWait {
            or_go_on(self.insert_wait(need, on, log))?;
        }
        // 4
        or_go_on(self.grow(need, on, false, log))?;
        if give_back_idle(&self.core, &self.supply, layout.size) > 0 {
            or_go_on(self.grow(need, on, false, log))?;
        }
        // 5
        if self.config.cross_stream == CrossStream::IfReady {
            or_go_on(self.insert_wait(need, on, log))?;
        }
        // 6, 7
        self.flush();
        self.attempt_forced(need, layout, on, log)?;
        // 8
        or_go_on(self.reclaim(need, layout, on, log))?;
        // 9
        let (mut waits, deadline) = (0, Instant::now().checked_add(on.source.timeout()));
        while waits < MOST_WAITS
            && self.may_fit(layout.size)
            && self.wait_for_memory(need, on, deadline, log)
        {
            waits += 1;
            self.sweep_retired();
            give_back_idle(&self.core, &self.supply, layout.size);
            self.attempt_forced(need, layout, on, log)?;
        }
        if waits > 0 {
            log.note(format_args!("waited {waits} times for streams to be done with free memory"));
        }
        ControlFlow::Continue(())
    }

    /// Memory that is free for this stream by now, once this thread's cache is empty and all that
    /// is over has coalesced.
    fn take_known(&self, need: Need, on: On<'_>) -> Found {
        let evicted = self.caches.flush_own(thread_number());
        let mut core = self.core.lock();
        self.return_evicted_in(&mut core, evicted);
        core.settle(&self.table);
        let moves = self.may_move(&core);
        let Supply { budget, caps, .. } = &self.supply;
        let few = budget.committed() < FEW_GRANULES * caps.granule;
        let align = moves && few && self.reservation.is_some();
        core.store.heap.align_large(align);
        let mut block = core.store.take(need, on.timeline)?;
        if block.is_none() && !moves {
            block = core.store.take_resident(need, on.timeline)?;
        }
        if block.is_none() {
            block = core.store.take_foreign(need, on.timeline, |s| on.timeline.knows(s))?;
        }
        Ok(block)
    }

    /// Everything that needs no wait, with moving granules allowed; at last a block without
    /// rounding.
    fn attempt_forced(
        &self,
        need: Need,
        layout: Layout,
        on: On<'_>,
        log: &mut AttemptLog,
    ) -> ControlFlow<Found> {
        or_go_on(self.take_coalesced(need, on))?;
        or_go_on(self.grow(need, on, true, log))?;
        // The lowest place that fits may lack memory that is not to be had, while a higher one has
        // it.
        let exact = Need::exact(layout.size, layout.align).filter(|&e| e != need);
        for need in [Some(need), exact].into_iter().flatten() {
            or_go_on(self.core.lock().store.take_resident(need, on.timeline))?;
        }
        or_go_on(exact.map_or(Ok(None), |exact| self.grow(exact, on, true, log)))
    }

    /// Takes memory that another stream may still be using and lets this one wait for it on the
    /// device.
    fn insert_wait(&self, need: Need, on: On<'_>, log: &mut AttemptLog) -> Found {
        let block = {
            let mut core = self.core.lock();
            let fine =
                |s: PackedTimepoint| s.timepoint().is_some_and(|p| !p.timeline().failed(p.value()));
            core.store.take_foreign(need, on.timeline, fine)?
        };
        let Some(block) = block else { return Ok(None) };
        if let Some(point) = block.timepoint.timepoint() {
            if let Err(e) = on.source.wait(point) {
                self.core.lock().store.free(block.placement, block.timepoint);
                log.note(format_args!("the stream cannot wait for {point:?}: {e}"));
                return Ok(None);
            }
            self.supply.inserted_waits.add(1);
            self.supply.trace.wait(EventKind::StreamWait, point.timeline_id(), 0);
        }
        Ok(Some(block))
    }

    fn reclaim(&self, need: Need, layout: Layout, on: On<'_>, log: &mut AttemptLog) -> Found {
        self.reclaimers.each(layout.size, |panicked| {
            if panicked {
                log.note(format_args!("a reclaimer panicked and is not called again"));
            }
            self.checks.sweep(&self.core, &self.supply, SweepScope::All);
            found(self.attempt_forced(need, layout, on, log))
        })
    }

    /// Whether so many bytes would fit if all work were over: no lease holds them, and budget and
    /// device have as many.
    fn may_fit(&self, bytes: u64) -> bool {
        let Supply { budget, caps, .. } = &self.supply;
        let taken = budget.committed();
        let room = budget.room().min(caps.physical.saturating_sub(taken));
        // Memory that growing blocks share is counted with each of them.
        let shared = self.core.lock().store.heap.res.shared;
        bytes <= (taken + room).saturating_sub(self.live.bytes(&self.caches).saturating_sub(shared))
    }

    /// Waits on the host for the least that may make `need` fit. `false`: there is nothing to wait
    /// for, or it does not come in time.
    fn wait_for_memory(
        &self,
        need: Need,
        on: On<'_>,
        deadline: Option<Instant>,
        log: &mut AttemptLog,
    ) -> bool {
        let timepoint = {
            let core = self.core.lock();
            let mut more = Vec::new();
            // Without host memory for all of them the choice is a worse one.
            core.each_pending(&self.table, |bytes, s| _ = host::push(&mut more, (bytes, s)));
            core.store.heap.cheapest_wait(core.store.units(need), &more)
        };
        let Some(point) = timepoint.and_then(PackedTimepoint::timepoint) else { return false };
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        if let Err(e) = self.supply.wait(point, on, left) {
            // A failed stream's memory is usable once its work is over. The loss may be another
            // device's: the backing reports the loss of this one.
            log.note(format_args!("waiting for {point:?}: {e}"));
        }
        PackedTimepoint::from(point).has_passed()
    }
}
