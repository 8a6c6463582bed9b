//! What happens when no free block fits: the ladder, each step bounded and counted, up to an error that says where the memory is.
//!
//! 1 drain what is over · 2 memory that this stream is known to run after · 3 (if so configured) memory that the stream can be made to
//! wait for · 4 grow, moving free granules first as the policy says · 5 let the stream wait for other streams' memory · 6 magazines ·
//! 7 move free granules whatever the policy · 8 reclaimers · 9 wait on the host for the least that suffices · 10 wait for another thread's free · 11 `OutOfMemory` with the trail.
//!
//! No step holds the lock across a call of the backing, a timeline or a reclaimer.

use crate::allocator::{Core, Inner, On};
use crate::backing::Chunk;
use crate::buffer::{Buffer, NO_SLOT};
use crate::config::{CREDIT, CrossStream, GRANULES_PER_EPISODE, Growth, Moves, OPERATIONS_PER_EPISODE};
use crate::host;
use crate::layout::{Layout, SIZE_LIMIT, UNIT_SHIFT};
use crate::place::{Means, Planned, Trim};
use crate::ring::EventKind;
use crate::store::Need;
use crate::watch::Reach;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::thread_number::thread_number;
use leasehold_core::{Error, Lease, OutOfMemory, Point, Result, Stamp, Text};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

/// Below this many granules in hand one of them counts: large blocks are placed so that all of theirs can be moved. Above it that rule
/// leaves more memory empty than it saves.
const FEW_GRANULES: u64 = 256;
/// Waits for nearly free memory, of one allocation, instead of growing.
const MOST_NEAR_WAITS: u32 = 8;
/// The longest of them. Longer ones cost more than the memory that they save, and might never end.
const NEAR_WAIT: Duration = Duration::from_millis(1);
/// The largest share of a segment, where memory comes in whole segments.
const MOST_SEGMENT: u64 = 256 << 20;
/// Host waits of one allocation.
const MOST_WAITS: usize = 256;

/// What was tried.
#[derive(Default)]
struct Trail {
    notes: Vec<Text>,
    refused: bool,
}

impl Trail {
    fn note(&mut self, what: fmt::Arguments<'_>) {
        if self.notes.len() < 16
            && let Some(text) = host::text(what)
            && !self.notes.contains(&text)
        {
            host::push(&mut self.notes, text);
        }
    }
}

type Lent = Result<Option<Lease<Buffer>>>;

impl Inner {
    /// An allocation that can never succeed.
    #[cold]
    pub(crate) fn refuse(&self, layout: Layout) -> Error {
        self.counters.failed.fetch_add(1, Ordering::Relaxed);
        if layout.size <= SIZE_LIMIT && Need::of(layout.size, 1).is_some() {
            let what = host::text(format_args!("an alignment of {} in {}", layout.align, self.config.name));
            return Error::Unsupported(what.unwrap_or(Text::Borrowed("an alignment as large as this")));
        }
        let mut report = OutOfMemory::new(self.site(), layout.size);
        host::note(&mut report.notes, format_args!("larger than any device's memory"));
        report.into()
    }

    /// The slow path of an allocation.
    #[cold]
    pub(crate) fn alloc_slow(&self, need: Need, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        self.sweep_retired();
        crate::grave::sweep();
        let mut trail = Trail::default();
        let limit = self.budget.limit();
        let lent = if let Some(e) = self.lost.get() {
            Err(e.clone())
        } else if layout.size > limit {
            Err(Error::OverBudget {
                unit: leasehold_core::Budgeted::Bytes,
                requested: layout.size,
                used: self.budget.committed(),
                limit,
            })
        } else {
            self.climb(need, layout, on, &mut trail)
        };
        match lent {
            Ok(Some(lease)) => Ok(lease),
            Ok(None) => {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
                Err(self.report(layout, trail.notes, trail.refused))
            }
            Err(e) => {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
                if matches!(e, Error::DeviceLost { .. }) {
                    self.lost.get_or_init(|| e.clone());
                }
                Err(e)
            }
        }
    }

    fn climb(&self, need: Need, layout: Layout, on: On<'_>, trail: &mut Trail) -> Lent {
        let size = layout.size;
        // 1 to 4
        if let Some(lease) = self.rise(need, layout, on, trail)? {
            return Ok(Some(lease));
        }
        // 5
        if self.config.cross_stream == CrossStream::IfReady
            && let Some(lease) = self.insert_wait(need, size, on, trail)?
        {
            return Ok(Some(lease));
        }
        // 6, 7
        self.flush();
        if let Some(lease) = self.scrape(need, layout, on, trail)? {
            return Ok(Some(lease));
        }
        // 8
        if let Some(lease) = self.reclaim(need, layout, on, trail)? {
            return Ok(Some(lease));
        }
        // 9
        let mut waits = 0;
        while waits < MOST_WAITS && self.wait_for_memory(need, on, trail)? {
            waits += 1;
            if let Some(lease) = self.scrape(need, layout, on, trail)? {
                return Ok(Some(lease));
            }
        }
        if waits > 0 {
            trail.note(format_args!("waited {waits} times for streams to be done with free memory"));
        }
        // 10
        let Some(patience) = self.config.patience else { return Ok(None) };
        let begin = Instant::now();
        while begin.elapsed() < patience {
            std::thread::sleep(Duration::from_millis(1).min(patience));
            if let Some(lease) = self.scrape(need, layout, on, trail)? {
                return Ok(Some(lease));
            }
        }
        trail.note(format_args!("waited {patience:?} for another thread's free"));
        Ok(None)
    }

    /// The first steps of the ladder.
    fn rise(&self, need: Need, layout: Layout, on: On<'_>, trail: &mut Trail) -> Lent {
        let size = layout.size;
        // 1, 2
        // What lies in this thread's cache may fit, or leave something whole that does.
        let back = self.caches.flush_own(thread_number());
        {
            let mut core = self.core.lock();
            self.take_back(&mut core, back);
            self.settle(&mut core);
            let moves = self.may_move(&core);
            let evenly = moves && self.few() && self.reservation.is_some();
            core.store.heap.place_evenly(evenly);
            let mut block = core.store.take(need, on.line)?;
            if block.is_none() && !moves {
                block = core.store.take_resident(need, on.line)?;
            }
            if block.is_none() {
                block = core.store.take_foreign(need, on.line, |s| on.line.knows(s))?;
            }
            if let Some(block) = block {
                return self.issue(&mut core, block, size, on.line).map(Some);
            }
        }
        // 3
        if self.config.cross_stream == CrossStream::InsertWait
            && let Some(lease) = self.insert_wait(need, size, on, trail)?
        {
            return Ok(Some(lease));
        }
        // 4
        self.grow(need, size, on, false, trail)
    }

    /// Everything that needs no wait, with moving granules allowed; at last a block without rounding.
    fn scrape(&self, need: Need, layout: Layout, on: On<'_>, trail: &mut Trail) -> Lent {
        if let Some(lease) = self.take_settled(need, layout.size, on)? {
            return Ok(Some(lease));
        }
        if let Some(lease) = self.grow(need, layout.size, on, true, trail)? {
            return Ok(Some(lease));
        }
        // The lowest place that fits may lack memory that is not to be had, while a higher one has it.
        let exact = Need::exact(layout.size, layout.align).filter(|&e| e != need);
        for need in [Some(need), exact].into_iter().flatten() {
            let mut core = self.core.lock();
            if let Some(block) = core.store.take_resident(need, on.line)? {
                return self.issue(&mut core, block, layout.size, on.line).map(Some);
            }
        }
        match exact {
            Some(exact) => self.grow(exact, layout.size, on, true, trail),
            None => Ok(None),
        }
    }

    /// What lies free by now, once everything that is over was brought to where it can be taken.
    fn take_settled(&self, need: Need, size: u64, on: On<'_>) -> Lent {
        let mut core = self.core.lock();
        self.settle(&mut core);
        match core.store.take(need, on.line)? {
            Some(block) => self.issue(&mut core, block, size, on.line).map(Some),
            None => Ok(None),
        }
    }

    /// Takes memory that another stream may still be using and lets this one wait for it on the device.
    fn insert_wait(&self, need: Need, size: u64, on: On<'_>, trail: &mut Trail) -> Lent {
        let block = {
            let mut core = self.core.lock();
            let fine = |s: Stamp| s.point().is_some_and(|p| !p.line().failed(p.value()));
            core.store.take_foreign(need, on.line, fine)?
        };
        let Some(block) = block else { return Ok(None) };
        if let Some(point) = block.stamp.point() {
            if let Err(e) = on.timeline.wait(point) {
                self.core.lock().store.give(block.spot, block.stamp);
                if matches!(e, Error::DeviceLost { .. }) {
                    return Err(e);
                }
                trail.note(format_args!("the stream cannot wait for {point:?}: {e}"));
                return Ok(None);
            }
            self.counters.inserted_waits.fetch_add(1, Ordering::Relaxed);
        }
        let mut core = self.core.lock();
        self.issue(&mut core, block, size, on.line).map(Some)
    }

    /// Allocations and frees so far, whoever served them.
    fn operations(&self, core: &Core) -> u64 {
        2 * (core.allocations + self.caches.stats().2)
    }

    /// How memory is taken from the driver now.
    fn growth(&self) -> Growth {
        self.config.policy.growth(self.budget.limit() != u64::MAX)
    }

    /// Whether free granules are moved rather than new memory taken.
    fn may_move(&self, core: &Core) -> bool {
        match self.growth().moves {
            Moves::Never => false,
            Moves::Always => true,
            Moves::Credit => {
                let granules = self.budget.committed() / self.caps.granule;
                core.episodes
                    < CREDIT + granules / GRANULES_PER_EPISODE + self.operations(core) / OPERATIONS_PER_EPISODE
            }
        }
    }

    /// Whether granules are so few that one of them counts.
    fn few(&self) -> bool {
        self.budget.committed() < FEW_GRANULES * self.caps.granule
    }

    /// Grows. `pressed`: move free granules whatever the policy and the credit say, and take no more than needed.
    fn grow(&self, need: Need, size: u64, on: On<'_>, pressed: bool, trail: &mut Trail) -> Lent {
        let paged = {
            let core = self.core.lock();
            core.store.heap.spans.iter().any(|s| s.live && s.paged)
        };
        if paged && let Some(lease) = self.grow_paged(need, size, on, pressed, trail)? {
            return Ok(Some(lease));
        }
        if paged { Ok(None) } else { self.grow_segment(need, size, on, pressed, trail) }
    }

    fn grow_paged(&self, need: Need, size: u64, on: On<'_>, pressed: bool, trail: &mut Trail) -> Lent {
        let growth = self.growth();
        let granules = |bytes: u64| u32::try_from(bytes / self.caps.granule).unwrap_or(u32::MAX).max(1);
        let mut piece = if pressed { 1 } else { granules(growth.piece(self.budget.committed())) };
        let mut waits = 0;
        loop {
            let planned = {
                let mut core = self.core.lock();
                let steal = pressed || self.may_move(&core);
                let near = growth.near.filter(|_| !pressed && waits < MOST_NEAR_WAITS);
                let least = if pressed { 1 } else { granules(growth.least(self.budget.committed())).max(piece) };
                let means = Means { steal, near, even: !pressed, piece, least };
                let lane = core.store.heap.lane_for(on.line);
                let units = core.store.units(need);
                let planned = core.store.heap.plan(units, need.align, lane, means, &self.budget)?;
                match &planned {
                    Planned::Plan(plan) if plan.steals() => core.episodes += 1,
                    _ => {}
                }
                planned
            };
            let mut plan = match planned {
                Planned::Plan(plan) => plan,
                Planned::Wait(stamp) => {
                    // Moving memory that is nearly free costs less than holding more for ever.
                    waits += 1;
                    let Some(p) = stamp.point() else { continue };
                    // Bounded: the caller itself may be the one who lets that stream go on.
                    if let Err(e) = self.wait_point(p, on, Some(NEAR_WAIT)) {
                        if matches!(e, Error::DeviceLost { .. }) {
                            return Err(e);
                        }
                        trail.note(format_args!("waiting for {p:?}: {e}"));
                        waits = MOST_NEAR_WAITS;
                    }
                    if let Some(lease) = self.take_settled(need, size, on)? {
                        return Ok(Some(lease));
                    }
                    continue;
                }
                Planned::Nothing if piece > 1 => {
                    piece = 1;
                    continue;
                }
                Planned::Nothing => {
                    trail.refused |= self.budget.room() < self.caps.granule;
                    return Ok(None);
                }
            };
            if plan.steals() {
                self.counters.remaps.fetch_add(1, Ordering::Relaxed);
            }
            if plan.ticket > 0 {
                self.counters.growths.fetch_add(1, Ordering::Relaxed);
            }
            let result = plan.run(&*self.backing);
            self.trace_steps(plan.steps.iter());
            let mut core = self.core.lock();
            let node = core.store.heap.finish(plan, result.is_ok(), &self.budget);
            if let Some(node) = node {
                let Some(block) = core.store.adopt(node, need)? else { return Ok(None) };
                return self.issue(&mut core, block, size, on.line).map(Some);
            }
            drop(core);
            self.destroy_loose();
            match result {
                Err(e @ Error::DeviceLost { .. }) => return Err(e),
                Err(e) => trail.note(format_args!("the driver: {e}")),
                Ok(()) => {}
            }
            if piece == 1 {
                return Ok(None);
            }
            piece = 1;
        }
    }

    /// Gives pieces that a failed plan left over back to the driver.
    fn destroy_loose(&self) {
        let mut core = self.core.lock();
        let steps = core.store.heap.plan_cached(u64::MAX, 0);
        drop(core);
        // Without host memory for the list they stay in hand, for the next growth or trim.
        if let Ok(steps) = steps {
            self.carry_out_trim(steps);
        }
    }

    fn grow_segment(&self, need: Need, size: u64, on: On<'_>, pressed: bool, trail: &mut Trail) -> Lent {
        let granule = self.caps.granule;
        let units = self.core.lock().store.units(need);
        let least = (u64::from(units) + u64::from(need.align.max(1)) - 1) << UNIT_SHIFT;
        let least = least.next_multiple_of(granule);
        let part = (self.budget.committed() / 8).next_multiple_of(granule).clamp(self.caps.segment, MOST_SEGMENT);
        let mut wants = [least.max(part.next_multiple_of(granule)), least.max(self.caps.segment), least];
        if pressed {
            wants = [least; 3];
        }
        let lent = self.new_segment(need, size, on, wants, trail)?;
        // Segments that lie free are too small one by one; the driver may make a larger one of them.
        if lent.is_none() && pressed && self.trim_core(0).is_ok_and(|freed| freed > 0) {
            trail.note(format_args!("gave free segments back to the driver"));
            return self.new_segment(need, size, on, wants, trail);
        }
        Ok(lent)
    }

    fn new_segment(&self, need: Need, size: u64, on: On<'_>, wants: [u64; 3], trail: &mut Trail) -> Lent {
        for (i, &bytes) in wants.iter().enumerate() {
            if i > 0 && wants[i - 1] == bytes {
                continue;
            }
            if !self.budget.take(bytes) {
                trail.refused = true;
                continue;
            }
            // SAFETY: at no address in particular.
            match unsafe { self.backing.commit(None, bytes) } {
                Ok(chunk) => {
                    self.budget.keep(chunk.bytes);
                    self.trace(EventKind::SegmentAlloc, chunk.addr, chunk.bytes);
                    self.counters.growths.fetch_add(1, Ordering::Relaxed);
                    let mut core = self.core.lock();
                    if let Err(e) = core.store.heap.add_span(chunk.addr, chunk.bytes, chunk.native, false) {
                        drop(core);
                        self.decommit(chunk, true);
                        return Err(e);
                    }
                    if let Some(block) = core.store.take(need, on.line)? {
                        return self.issue(&mut core, block, size, on.line).map(Some);
                    }
                    // Another thread was faster; its request is served, ours climbs on.
                    return Ok(None);
                }
                Err(e) => {
                    self.budget.undo(bytes);
                    if matches!(e, Error::DeviceLost { .. }) {
                        return Err(e);
                    }
                    trail.note(format_args!("the driver: {e}"));
                }
            }
        }
        Ok(None)
    }

    /// Gives a segment back; one that the driver does not take stays counted.
    pub(crate) fn decommit(&self, chunk: Chunk, undo: bool) -> bool {
        // SAFETY: callers hand in a commitment that they took out of the heap, or never put in: no block and no stream uses it.
        match unsafe { self.backing.decommit(chunk) } {
            Ok(()) => {
                self.trace(EventKind::SegmentFree, chunk.addr, chunk.bytes);
                if undo {
                    self.budget.give_back(chunk.bytes);
                }
                true
            }
            Err(_) => {
                self.core.lock().store.heap.res.quarantined += chunk.bytes;
                false
            }
        }
    }

    fn reclaim(&self, need: Need, layout: Layout, on: On<'_>, trail: &mut Trail) -> Lent {
        let mut next = 0;
        loop {
            let Some(reclaimer) = self.reclaimers.lock().get(next).map(|r| r.1.clone()) else { return Ok(None) };
            next += 1;
            for _ in 0..64 {
                let freed = std::panic::catch_unwind(AssertUnwindSafe(|| reclaimer(layout.size)));
                let Ok(freed) = freed else {
                    trail.note(format_args!("a reclaimer panicked and is not called again"));
                    self.reclaimers.lock().retain(|r| !leasehold_core::sync::Arc::ptr_eq(&r.1, &reclaimer));
                    next -= 1;
                    break;
                };
                if let Some(watch) = &self.watch {
                    self.sweep_held(watch, Reach::All);
                }
                if let Some(lease) = self.scrape(need, layout, on, trail)? {
                    return Ok(Some(lease));
                }
                if freed == 0 {
                    break;
                }
            }
        }
    }

    /// Waits on the host for the least that may make `need` fit. `false`: there is nothing to wait for.
    fn wait_for_memory(&self, need: Need, on: On<'_>, trail: &mut Trail) -> Result<bool> {
        let stamp = {
            let core = self.core.lock();
            let mut more = Vec::new();
            // Without host memory for all of them the choice is a worse one.
            self.parked(&core, |bytes, s| _ = host::push(&mut more, (bytes, s)));
            core.store.slabs.pending(|bytes, s| _ = host::push(&mut more, (bytes, s)));
            core.store.heap.cheapest_wait(core.store.units(need), &more)
        };
        let Some(point) = stamp.and_then(Stamp::point) else { return Ok(false) };
        match self.wait_point(point, on, None) {
            Ok(()) => Ok(Stamp::from(point).has_passed()),
            Err(e @ Error::DeviceLost { .. }) => Err(e),
            Err(e) => {
                trail.note(format_args!("waiting for {point:?}: {e}"));
                // A failed stream's memory is usable once its work is over.
                Ok(Stamp::from(point).has_passed())
            }
        }
    }

    /// Blocks until a point is over.
    pub(crate) fn wait_point(&self, point: Point, on: On<'_>, timeout: Option<Duration>) -> Result<()> {
        if Stamp::from(point).has_passed() {
            return Ok(());
        }
        self.counters.host_waits.fetch_add(1, Ordering::Relaxed);
        if point.line_id() == on.line.id() {
            on.timeline.signal()?;
            return on.timeline.wait_host(point.value(), timeout);
        }
        match point.line().wait(point.value(), timeout) {
            // It may be another device's line; the work is over either way, and our own driver will tell.
            Err(Error::DeviceLost { .. }) if Stamp::from(point).has_passed() => Ok(()),
            waited => waited,
        }
    }

    /// Gives the memory under a block back to the driver and keeps its addresses. Returns the bytes that went.
    ///
    /// # Errors
    /// `OutOfMemory` for host memory; then the block is as it was.
    pub(crate) fn suspend_block(&self, block: &Lease<Buffer>) -> Result<u64> {
        let Some(row) = self.table.get(block.header().index()) else { return Ok(0) };
        if row.buffer.slot.load(Ordering::Relaxed) != NO_SLOT {
            return Ok(0);
        }
        let steps = self.core.lock().store.heap.plan_suspend(row.buffer.place.load(Ordering::Relaxed))?;
        if let Some(watch) = &self.watch {
            watch.darken(row);
        }
        Ok(self.carry_out_trim(steps))
    }

    /// Takes memory again for a block whose memory was given back.
    ///
    /// # Errors
    /// `OverBudget`, the driver's; then the block is as it was.
    pub(crate) fn resume_block(&self, block: &Lease<Buffer>) -> Result<()> {
        let Some(row) = self.table.get(block.header().index()) else { return Ok(()) };
        if row.buffer.slot.load(Ordering::Relaxed) != NO_SLOT {
            return Ok(());
        }
        let node = row.buffer.place.load(Ordering::Relaxed);
        let plan = loop {
            let mut core = self.core.lock();
            if !core.store.heap.in_motion(node) {
                break core.store.heap.plan_resume(node, &self.budget)?;
            }
            // A neighbour is being suspended, and a piece lies across the border: until its driver calls are over.
            drop(core);
            leasehold_core::sync::thread::yield_now();
        };
        let Some(mut plan) = plan else {
            let (used, limit) = (self.budget.committed(), self.budget.limit());
            return Err(Error::OverBudget {
                unit: leasehold_core::Budgeted::Bytes,
                requested: block.len(),
                used,
                limit,
            });
        };
        let result = plan.run(&*self.backing);
        self.trace_steps(plan.steps.iter());
        self.core.lock().store.heap.finish_resume(plan, &self.budget);
        self.destroy_loose();
        result
    }

    /// Gives free memory back to the driver until at most `keep` bytes lie free.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        if let Some(e) = self.lost.get() {
            return Err(e.clone());
        }
        self.flush();
        self.sweep_retired();
        if let Some(watch) = &self.watch {
            self.sweep_held(watch, Reach::All);
        }
        crate::grave::sweep();
        self.trim_core(keep)
    }

    fn trim_core(&self, keep: u64) -> Result<u64> {
        let (steps, segments) = {
            let mut core = self.core.lock();
            self.settle(&mut core);
            let heap = &mut core.store.heap;
            let cached: u64 =
                heap.res.cached.iter().map(|&p| heap.res.bytes(heap.res.pieces[p as usize].granules)).sum();
            let free = (heap.free_units().0 + if heap.single() { heap.free_units().1 } else { 0 }) << UNIT_SHIFT;
            let mut surplus = (free + cached).saturating_sub(keep);
            let mut segments = Vec::new();
            host::room(&mut segments, heap.spans.len())?;
            for slot in 0..heap.spans.len() {
                let span = heap.spans[slot];
                let bytes = u64::from(span.units) << UNIT_SHIFT;
                if span.live && !span.paged && bytes <= surplus && heap.remove_span(slot).is_some() {
                    surplus -= bytes;
                    segments.push(Chunk { addr: span.base, bytes, native: span.native });
                }
            }
            (heap.plan_trim(surplus), segments)
        };
        let mut freed = 0;
        for chunk in segments {
            if self.decommit(chunk, true) {
                freed += chunk.bytes;
            }
        }
        Ok(freed + self.carry_out_trim(steps?))
    }

    fn carry_out_trim(&self, mut steps: Vec<Trim>) -> u64 {
        for s in &mut steps {
            s.step.destroy(&*self.backing);
        }
        self.trace_steps(steps.iter().map(|t| &t.step));
        self.core.lock().store.heap.finish_trim(steps, &self.budget)
    }

    /// Alone with the core.
    pub(crate) fn core_mut(&mut self) -> &mut Core {
        self.core.get_mut()
    }
}

/// Gives everything back to the driver. Nobody holds a block.
pub(crate) fn tear_down(inner: &mut Inner) {
    let keeps = std::mem::take(&mut inner.core_mut().keeps);
    drop(keeps);
    if let Some(watch) = &inner.watch {
        inner.sweep_held(watch, Reach::All);
    }
    // A trim that fails has given back what it could; the rest is the driver's own fault and leaks.
    // (The magazines were closed when the keeper went.)
    let _ = inner.trim_core(0);
    if let Some((base, bytes)) = inner.reservation.take() {
        let heap = &inner.core_mut().store.heap;
        // One span, whole again unless the driver kept a part.
        let whole = heap.spans.iter().filter(|s| s.live && s.paged).all(|s| heap.nodes[s.first].units == s.units);
        if whole {
            // SAFETY: the reservation is taken out of the allocator; its one span is whole again, so nothing is mapped in it.
            unsafe { inner.backing.release(base, bytes) };
        }
    }
}
