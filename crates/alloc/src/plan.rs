//! Plans: a window of free addresses, the granules to back it with, and how the result is brought
//! back.
//!
//! PyTorch's expandable segments map new memory at the end of a range. A plan takes what lies under
//! free blocks first, and maps it where it is needed. Everything here is the slow path: a driver
//! call follows, so walks over all extents are affordable.
//!
//! # What [`plan`](Heap::plan) decides
//! 1. The window. It is the place that the request would get if all of it were backed, widened to a
//!    whole granule at an edge that nothing backs.
//! 2. The pieces at hand, each used whole: those in hand that are mapped nowhere; those under free
//!    memory that nobody uses any more, large ones and high addresses first; if the backing can
//!    alias, those that the asking timeline alone may still use, the least ahead first. A timeline
//!    without a list gets no alias: its blocks are ready for everybody.
//! 3. Whether to wait. If these pieces do not suffice and waits are allowed, the caller waits for
//!    near memory ([`near_wait`](Heap::near_wait)), and no memory is taken.
//! 4. How much is new. The rest comes from the driver, in multiples of `least` granules: the window
//!    grows upwards over addresses that nothing backs, as far as the extent and the budget reach.
//!
//! # What [`claim`](Heap::claim) does
//! It fills the window's gaps from below with the first piece at hand that fits each, and the rest
//! with new pieces. It takes host memory before it changes anything, and the budget last. If the
//! budget refuses, the pieces that were in hand go back; nothing else was taken. Then it takes the
//! window and the ranges over the other pieces out of circulation. The block is pending until the
//! latest use of the window's own memory and of its aliases.

use crate::budget::Budget;
use crate::extent::{NIL, State};
use crate::heap::{Heap, READY, ahead};
use crate::host;
use crate::layout::UNIT_SHIFT;
use crate::old_mappings::OldMapping;
use crate::residency::{End, PieceState, Plan, Source, Step};
use leasehold_core::{PackedTimepoint, Result, TimelineId};

/// The means that a plan may use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Means {
    /// Take pieces from under free memory.
    pub(crate) reclaim: bool,
    /// Among them those that this timeline alone may still use: the backing can do aliases, and the
    /// block is the timeline's.
    pub(crate) alias: Option<TimelineId>,
    /// Instead of taking new memory, say which point to wait for, if that makes pieces free and is
    /// at most so many values ahead.
    pub(crate) near: Option<u64>,
    /// Place large blocks so that their granules can be moved later.
    pub(crate) aligned: bool,
    /// The size of new pieces in granules, one at least.
    pub(crate) piece: u32,
    /// Newly taken memory is a multiple of so many granules, where addresses and budget allow.
    pub(crate) least: u32,
}

/// The outcome of planning.
#[derive(Debug)]
pub(crate) enum Planned {
    /// A plan to carry out.
    Plan(Plan),
    /// The means suffice once this timepoint is over.
    Wait(PackedTimepoint),
    /// No addresses, or the means do not suffice.
    Nothing,
}

/// Where a block is to lie.
#[derive(Clone, Copy)]
struct Target {
    /// The free extent.
    extent: u32,
    start: u32,
    units: u32,
    /// The window.
    from: u32,
    to: u32,
}

/// A piece under free memory.
struct Reclaimable {
    /// When its last use is over; never for one that may be taken now.
    timepoint: PackedTimepoint,
    /// How many values ahead that is. Other threads complete them meanwhile, so it is read once.
    ahead: u64,
    piece: u32,
    at: u32,
    granules: u32,
    /// The free extent that it lies under.
    extent: u32,
}

impl Plan {
    /// A plan with no block of the heap for its target.
    pub(crate) fn of_pieces(steps: Vec<Step>, new_bytes: u64, mappings_held: usize) -> Self {
        Self {
            target: NIL,
            start: 0,
            units: 0,
            list: READY,
            timepoint: PackedTimepoint::NEVER,
            steps,
            new_bytes,
            extents_held: 0,
            mappings_held,
        }
    }
}

impl Heap {
    /// Plans a block of `units` for `list`.
    pub(crate) fn plan(
        &mut self,
        units: u32,
        align: u32,
        list: u8,
        means: Means,
        budget: &Budget,
    ) -> Result<Planned> {
        let align = if means.aligned { self.align_of(units, align) } else { align };
        let Some(mut target) = self.target(units, align, list) else {
            return Ok(Planned::Nothing);
        };
        let missing = self.res.missing(target.start, target.start + units);
        let cached = self.res.cached_granules();
        let mut reclaimable = if means.reclaim && missing > cached {
            self.reclaimable(target.from, target.to)?
        } else {
            Vec::new()
        };
        let alias = means.alias.filter(|_| list != READY);
        let pending = |l: &Reclaimable| {
            let at_hand = l.timepoint.is_never()
                || l.ahead < u64::MAX && alias == Some(l.timepoint.timeline_id());
            !at_hand
        };
        reclaimable.sort_unstable_by_key(|l| {
            (pending(l), l.ahead, std::cmp::Reverse(l.granules), std::cmp::Reverse(l.at))
        });
        let now = reclaimable.partition_point(|l| !pending(l));
        let at_hand: u32 = reclaimable[..now].iter().map(|l| l.granules).sum();
        let short = missing.saturating_sub(cached + at_hand);
        if short > 0 {
            let wait = means.near.and_then(|n| self.near_wait(short, n, &reclaimable[now..]));
            if let Some(timepoint) = wait {
                return Ok(Planned::Wait(timepoint));
            }
            self.widen(&mut target, short, means.least, budget);
        }
        reclaimable.truncate(now);
        let held = 8 + 4 * self.res.missing(target.from, target.to);
        self.extents.hold(held)?;
        let plan = self.claim(target, list, means.piece, reclaimable, budget);
        let Ok(Some(plan)) = plan else {
            self.extents.unhold(held);
            return plan.map(|_| Planned::Nothing);
        };
        self.lists[usize::from(list)].plans += 1;
        Ok(Planned::Plan(Plan { extents_held: held, ..plan }))
    }

    /// The place of a block, if there are addresses whose granules are mapped one by one.
    fn target(&self, units: u32, align: u32, list: u8) -> Option<Target> {
        let extent = self.choose(units, align, list);
        if extent == NIL || !self.spans[usize::from(self.extents[extent].span)].paged {
            return None;
        }
        let start = self.extents[extent].start.next_multiple_of(align.max(1));
        let granule = 1u32 << self.res.shift;
        let from = if self.is_bare(start) { start & !(granule - 1) } else { start };
        let end = start + units;
        let to = if self.is_bare(end - 1) { end.next_multiple_of(granule) } else { end };
        Some(Target { extent, start, units, from, to })
    }

    /// Whether nothing backs a unit.
    fn is_bare(&self, unit: u32) -> bool {
        self.res.piece_of(unit >> self.res.shift) == NIL
    }

    /// The timepoint to wait for instead of taking `short` granules from the driver, if it is at
    /// most `near` values ahead. `pending`: the pieces that are not at hand, nearest first.
    fn near_wait(&self, short: u32, near: u64, pending: &[Reclaimable]) -> Option<PackedTimepoint> {
        if !self.single() {
            // Blocks that several timelines still use do not merge. Once the uses are over, a block
            // there may fit as it is.
            let (enough, newest) = (self.free_units().1 >> self.res.shift, self.newest_pending());
            let wait = enough >= u64::from(short) && ahead(newest) <= near;
            return (wait && !newest.is_never()).then_some(newest);
        }
        let mut more = 0;
        // The wait is for near granules, as many as are short. Even if they are fewer, the driver
        // need not supply that many.
        let wanted = pending.iter().take_while(|l| {
            let wanted = more < short && l.ahead <= near;
            more += l.granules;
            wanted
        });
        wanted.last().map(|l| l.timepoint)
    }

    /// Widens the window of a block that is `short` of granules, so that the new ones are a
    /// multiple of `least`. Growth in pieces of several granules takes more of the addresses above
    /// than it needs.
    fn widen(&self, target: &mut Target, short: u32, least: u32, budget: &Budget) {
        let (granule, end) = (1u32 << self.res.shift, self.extents[target.extent].end());
        let extra = short.next_multiple_of(least.max(1)) - short;
        let room = u32::try_from(budget.room() / self.res.bytes(1)).unwrap_or(u32::MAX);
        for _ in 0..extra.min(room.saturating_sub(short)) {
            let to = target.to;
            if to & (granule - 1) == 0 && to + granule <= end && self.is_bare(to) {
                target.to += granule;
            }
        }
    }

    /// Takes what backs the window, and everything concerned out of circulation. `None`: the budget
    /// does not allow it.
    fn claim(
        &mut self,
        target: Target,
        list: u8,
        new_piece: u32,
        reclaimable: Vec<Reclaimable>,
        budget: &Budget,
    ) -> Result<Option<Plan>> {
        let shift = self.res.shift;
        let Target { extent, start, units, from: a, to: b } = target;
        self.res.reach(((b - 1) >> shift) + 1)?;
        self.reach(b.saturating_add(1))?;
        let gaps = self.gaps_in(a, b)?;
        let span = self.spans[usize::from(self.extents[extent].span)];
        let place = |g: u32| (g, span.addr(g << shift));
        let Some(mut filled) = self.fill(gaps, place, new_piece, reclaimable, budget)? else {
            return Ok(None);
        };
        let (target, timepoint) = self.isolate(extent, a, b);
        let timepoint = self.take_sources(&mut filled.steps, timepoint);
        Ok(Some(Plan { target, start, units, list, timepoint, ..filled }))
    }

    /// Fills gaps from below, each with the first piece at hand that fits, and the rest with new
    /// pieces. `place`: a gap's granule in the heap, or [`NIL`], and its address. The plan has no
    /// target yet, and holds entries for old mappings. `None`: the budget does not allow it, and
    /// nothing was taken.
    fn fill(
        &mut self,
        mut gaps: Vec<(u32, u32)>,
        place: impl Fn(u32) -> (u32, u64),
        new_piece: u32,
        mut reclaimable: Vec<Reclaimable>,
        budget: &Budget,
    ) -> Result<Option<Plan>> {
        let shift = self.res.shift;
        let mut steps = Vec::new();
        let most = gaps.iter().map(|g| g.1 as usize).sum::<usize>();
        host::room(&mut steps, most)?;
        self.res.room(most)?;
        self.old_mappings.hold(most)?;
        let step = |piece: u32, gap: u32, granules: u32, handle: u64, source: Source| {
            let (at, addr) = place(gap);
            let bytes = u64::from(granules) << (shift + UNIT_SHIFT);
            Step { emptied: NIL, piece, at, addr, bytes, handle, source, end: End::Untouched }
        };
        for gap in &mut gaps {
            while gap.1 > 0 {
                let room = gap.1;
                let fits = |&p: &u32| self.res.pieces[p as usize].granules <= room;
                let granules = if let Some(i) = self.res.cached.iter().position(fits) {
                    let id = self.res.cached.swap_remove(i);
                    let p = &mut self.res.pieces[id as usize];
                    p.state = PieceState::Moving;
                    steps.push(step(id, gap.0, p.granules, p.handle, Source::Cached));
                    p.granules
                } else if let Some(i) = reclaimable.iter().position(|l| l.granules <= room) {
                    let l = reclaimable.remove(i);
                    let handle = self.res.pieces[l.piece as usize].handle;
                    let from_addr =
                        self.spans[usize::from(self.extents[l.extent].span)].addr(l.at << shift);
                    let source = if l.timepoint.is_never() {
                        Source::Reclaimed { from: l.at, from_addr }
                    } else {
                        Source::Aliased { from: l.at, from_addr, until: l.timepoint }
                    };
                    let step = step(l.piece, gap.0, l.granules, handle, source);
                    steps.push(Step { emptied: l.extent, ..step });
                    l.granules
                } else {
                    break;
                };
                (gap.0, gap.1) = (gap.0 + granules, gap.1 - granules);
            }
        }
        // The rest comes from the driver.
        let new_bytes = self.res.bytes(gaps.iter().map(|g| g.1).sum());
        if new_bytes > 0 && !budget.take(new_bytes) {
            for s in steps.iter().filter(|s| s.source == Source::Cached) {
                self.res.put_cached(s.piece);
            }
            self.old_mappings.unhold(most);
            return Ok(None);
        }
        for (mut at, mut left) in gaps {
            while left > 0 {
                let n = left.min(new_piece);
                steps.push(step(self.res.new_piece(n), at, n, 0, Source::New));
                (at, left) = (at + n, left - n);
            }
        }

        // In the order of their addresses neighbours are made accessible by one call.
        steps.sort_unstable_by_key(|s| s.addr);
        Ok(Some(Plan::of_pieces(steps, new_bytes, most)))
    }

    /// Takes the ranges over the pieces that a plan moves out of circulation. Returns the later one
    /// of `timepoint` and the last use of the plan's aliases.
    fn take_sources(
        &mut self,
        steps: &mut [Step],
        mut timepoint: PackedTimepoint,
    ) -> PackedTimepoint {
        let shift = self.res.shift;
        for s in steps {
            let from = match s.source {
                Source::Reclaimed { from, .. } => from,
                Source::Aliased { from, until, .. } => {
                    // The rest of the block's granules belongs to the timeline until then.
                    if timepoint.is_never() || timepoint.value() < until.value() {
                        timepoint = until;
                    }
                    from
                }
                Source::Cached | Source::New | Source::Shared | Source::Unshared { .. } => continue,
            };
            let p = &mut self.res.pieces[s.piece as usize];
            p.state = PieceState::Moving;
            let (at, to) = (from << shift, (from + p.granules) << shift);
            s.emptied = self.isolate(self.covering(s.emptied, at), at, to).0;
        }
        timepoint
    }

    /// Plans `granules` for the end of a growing block, from the address `addr` on, of memory that
    /// nobody uses any more. `None`: the budget does not allow it.
    pub(crate) fn plan_pieces(
        &mut self,
        addr: u64,
        granules: u32,
        (reclaim, new_piece): (bool, u32),
        budget: &Budget,
    ) -> Result<Option<Plan>> {
        let cached = self.res.cached_granules();
        let mut reclaimable =
            if reclaim && granules > cached { self.reclaimable(0, 0)? } else { Vec::new() };
        reclaimable.retain(|l| l.timepoint.is_never());
        reclaimable.sort_unstable_by_key(|l| std::cmp::Reverse((l.granules, l.at)));
        let held = 8 + 4 * granules;
        self.extents.hold(held)?;
        let mut gaps = Vec::new();
        let plan = host::room(&mut gaps, 1).and_then(|()| {
            gaps.push((0, granules));
            let bytes = self.res.bytes(1);
            let place = |g: u32| (NIL, addr + u64::from(g) * bytes);
            self.fill(gaps, place, new_piece, reclaimable, budget)
        });
        let Ok(Some(mut plan)) = plan else {
            self.extents.unhold(held);
            return plan;
        };
        self.take_sources(&mut plan.steps, PackedTimepoint::NEVER);
        Ok(Some(Plan { extents_held: held, ..plan }))
    }

    /// Brings the memory of a plan back, and returns unused bytes to the budget.
    pub(crate) fn finish_pieces(&mut self, plan: &Plan, budget: &Budget) {
        self.extents.unhold(plan.extents_held);
        self.old_mappings.unhold(plan.mappings_held);
        let unused = self.end_steps(&plan.steps);
        budget.undo(unused);
        budget.keep(plan.new_bytes - unused);
    }

    /// The parts of `[a, b)` that are not backed, as (granule, granules).
    fn gaps_in(&self, a: u32, b: u32) -> Result<Vec<(u32, u32)>> {
        let shift = self.res.shift;
        let mut gaps: Vec<(u32, u32)> = Vec::new();
        for g in a >> shift..b.div_ceil(1 << shift) {
            if self.res.piece_of(g) != NIL {
                continue;
            }
            match gaps.last_mut() {
                Some(last) if last.0 + last.1 == g => last.1 += 1,
                _ => {
                    host::room(&mut gaps, 1)?;
                    gaps.push((g, 1));
                }
            }
        }
        Ok(gaps)
    }

    /// The extent that covers a unit, from one on that begins below and may have been cut into
    /// several.
    fn covering(&self, mut at: u32, unit: u32) -> u32 {
        while self.extents[at].end() <= unit {
            at = self.extents[at].next;
        }
        at
    }

    /// Pieces that lie wholly under one free extent, outside `[a, b)`, with the time when they may
    /// be taken.
    fn reclaimable(&self, a: u32, b: u32) -> Result<Vec<Reclaimable>> {
        let shift = self.res.shift;
        let mut reclaimable = Vec::new();
        // In the order in which they lie in the table: from neighbour to neighbour each would be a
        // cache miss.
        for (at, n) in (0..).zip(&self.extents.rows) {
            if n.state != State::Free || !self.spans[usize::from(n.span)].paged {
                continue;
            }
            let end = (n.end() >> shift).min(self.res.granules.len() as u32);
            let mut g = n.start.div_ceil(1 << shift);
            if g >= end {
                continue;
            }
            let last = self.extents.timepoint(at);
            let over = last.has_passed();
            while g < end {
                let id = self.res.piece_of(g);
                if id == NIL {
                    g += 1;
                    continue;
                }
                let p = &self.res.pieces[id as usize];
                let to = p.at + p.granules;
                let apart = to << shift <= a || g << shift >= b;
                if apart && p.at == g && to <= end && p.state == PieceState::Mapped {
                    let timepoint =
                        if over { PackedTimepoint::NEVER } else { self.last_use(g, to, last) };
                    host::room(&mut reclaimable, 1)?;
                    reclaimable.push(Reclaimable {
                        timepoint,
                        ahead: ahead(timepoint),
                        piece: id,
                        at: g,
                        granules: p.granules,
                        extent: at,
                    });
                }
                g = to;
            }
        }
        Ok(reclaimable)
    }

    /// When the last use of granules of a pending free extent is over: what is known of each, or
    /// the extent's own timepoint.
    pub(crate) fn last_use(&self, from: u32, to: u32, extent: PackedTimepoint) -> PackedTimepoint {
        let mut latest = PackedTimepoint::NEVER;
        for g in from..to {
            let Some(last) = self.res.granules[g as usize].last_of(extent.timeline_id()) else {
                return extent;
            };
            if last.value() > latest.value() {
                latest = last;
            }
        }
        latest
    }

    /// Brings a plan back. `done`: it ran to its end; then the block is returned, used, with its
    /// timepoint. Returns unused bytes to the budget; pieces in hand stay in the cache.
    pub(crate) fn finish(&mut self, plan: Plan, done: bool, budget: &Budget) -> Option<u32> {
        self.lists[usize::from(plan.list)].plans -= 1;
        self.finish_pieces(&plan, budget);
        let (list, timepoint) = if plan.timepoint.is_never() {
            (READY, PackedTimepoint::NEVER)
        } else {
            (plan.list, plan.timepoint)
        };
        if !done {
            self.free_by_residency(plan.target, list, timepoint);
            return None;
        }
        self.extents[plan.target].holes = 0;
        let mut block = plan.target;
        let target = self.extents[block];
        if target.start < plan.start {
            block = self.split(block, plan.start - target.start);
            self.free_by_residency(plan.target, list, timepoint);
        }
        if self.extents[block].units > plan.units {
            let upper = self.split(block, plan.units);
            self.extents[block].state = State::Used;
            self.free_by_residency(upper, list, timepoint);
        }
        let n = &mut self.extents[block];
        n.state = State::Used;
        n.holes = 0;
        n.link = [NIL; 2];
        n.list = list;
        self.extents.cold[block as usize].timepoint = timepoint;
        Some(block)
    }

    /// Puts an extent that was out of circulation back; parts that the driver would not take back
    /// stay out for ever.
    pub(crate) fn free_by_residency(&mut self, mut id: u32, list: u8, timepoint: PackedTimepoint) {
        let shift = self.res.shift;
        let lost = |heap: &Heap, g: u32| {
            let id = heap.res.piece_of(g);
            id != NIL && heap.res.pieces[id as usize].state == PieceState::Lost
        };
        loop {
            let n = self.extents[id];
            let first = lost(self, n.start >> shift);
            let mut g = (n.start >> shift) + 1;
            while g << shift < n.end() && lost(self, g) == first {
                g += 1;
            }
            self.extents[id].holes = 0;
            let rest =
                if g << shift < n.end() { self.split(id, (g << shift) - n.start) } else { NIL };
            if first {
                self.extents[id].state = State::Quarantined;
            } else {
                let n = self.extents[id];
                self.extents[id].holes = self.res.missing(n.start, n.end());
                self.free_again(id, list, timepoint);
            }
            if rest == NIL {
                return;
            }
            id = rest;
        }
    }

    /// Takes up to `surplus` bytes of unmapped pieces out of the cache, to be destroyed, and leaves
    /// room for `more` entries.
    pub(crate) fn plan_cached(&mut self, mut surplus: u64, more: usize) -> Result<Vec<Step>> {
        let mut out = Vec::new();
        let cached = self.res.cached.len();
        host::room(&mut out, cached + more)?;
        while surplus > 0 {
            // A piece with an old mapping is still mapped there.
            let mapped = |id: &u32| self.old_mappings.has(*id);
            let Some(at) = self.res.cached.iter().rposition(|id| !mapped(id)) else { break };
            let id = self.res.cached.remove(at);
            let step = self.leaving(id, Source::Cached);
            surplus = surplus.saturating_sub(step.bytes);
            out.push(step);
        }
        Ok(out)
    }

    /// Takes `surplus` bytes of pieces out of the cache and from under ready free memory, as far as
    /// there are any: a plan without a target. The caller unmaps and destroys them, and then calls
    /// [`end_steps`](Self::end_steps).
    pub(crate) fn plan_trim(&mut self, mut surplus: u64) -> Result<Vec<Step>> {
        let shift = self.res.shift;
        let mut reclaimable = if surplus > 0 { self.reclaimable(0, 0)? } else { Vec::new() };
        reclaimable.retain(|l| l.timepoint.is_never() && !self.old_mappings.has(l.piece));
        reclaimable.sort_unstable_by_key(|l| std::cmp::Reverse(l.at));
        let mut out = self.plan_cached(surplus, reclaimable.len())?;
        surplus = surplus.saturating_sub(out.iter().map(|s| s.bytes).sum());
        for l in reclaimable {
            // Without host memory for more, what was found so far goes.
            if surplus == 0 || self.extents.ensure(4).is_err() {
                break;
            }
            let from = self.covering(l.extent, l.at << shift);
            let (extent, _) = self.isolate(from, l.at << shift, (l.at + l.granules) << shift);
            let from_addr = self.spans[usize::from(self.extents[extent].span)].addr(l.at << shift);
            let step = self.leaving(l.piece, Source::Reclaimed { from: l.at, from_addr });
            surplus = surplus.saturating_sub(step.bytes);
            out.push(Step { emptied: extent, ..step });
        }
        Ok(out)
    }

    /// A piece that is to be unmapped, if it is mapped, and destroyed.
    pub(crate) fn leaving(&mut self, piece: u32, source: Source) -> Step {
        self.res.pieces[piece as usize].state = PieceState::Moving;
        self.shared_step(piece, source)
    }

    /// A step of a piece that stays mapped elsewhere.
    pub(crate) fn shared_step(&self, piece: u32, source: Source) -> Step {
        let (handle, bytes) = (self.res.pieces[piece as usize].handle, self.res.bytes_of(piece));
        Step { emptied: NIL, piece, at: NIL, addr: 0, bytes, handle, source, end: End::Untouched }
    }

    /// Brings the range of an old mapping back that is `gone`.
    pub(crate) fn end_old_mapping(&mut self, mapping: OldMapping, gone: bool) {
        self.old_mappings.end(mapping, gone);
        if gone {
            debug_assert_eq!(self.extents[mapping.extent].state, State::Moving);
            self.free_by_residency(mapping.extent, READY, PackedTimepoint::NEVER);
        }
    }

    /// Writes down how steps ended, and frees the extents that they emptied. Returns the bytes that
    /// the allocator does not have.
    pub(crate) fn end_steps(&mut self, steps: &[Step]) -> u64 {
        let bytes = steps.iter().map(|s| self.end_step(s)).sum();
        for s in steps.iter().filter(|s| s.emptied != NIL) {
            match s.source {
                Source::Aliased { from_addr, until, .. } if s.end != End::Untouched => {
                    // The range stays out of circulation.
                    self.old_mappings.push(OldMapping {
                        extent: s.emptied,
                        piece: s.piece,
                        addr: from_addr,
                        bytes: s.bytes,
                        until,
                        taken: false,
                    });
                }
                Source::Aliased { .. } => {
                    let list = self.extents[s.emptied].list;
                    self.free_by_residency(s.emptied, list, self.extents.timepoint(s.emptied));
                }
                _ => self.free_by_residency(s.emptied, READY, PackedTimepoint::NEVER),
            }
        }
        bytes
    }

    /// Writes down where a step left its piece. Returns the step's bytes if the allocator does not
    /// have them: the piece was never made, or is destroyed.
    pub(crate) fn end_step(&mut self, s: &Step) -> u64 {
        let granules = self.res.pieces[s.piece as usize].granules;
        self.res.pieces[s.piece as usize].handle = s.handle;
        if let (Source::Reclaimed { from, .. } | Source::Aliased { from, .. }, true) =
            (s.source, !matches!(s.end, End::Untouched | End::LostAtSource))
        {
            self.res.set_unmapped(from, granules);
        }
        match (s.end, s.source) {
            (_, Source::Shared | Source::Unshared { .. }) => {
                self.res.end_shared(s);
                return 0;
            }
            (End::Untouched, Source::New) | (End::Destroyed, _) => {
                self.res.drop_piece(s.piece);
                return s.bytes;
            }
            (End::Untouched, Source::Reclaimed { .. } | Source::Aliased { .. }) => {
                self.res.pieces[s.piece as usize].state = PieceState::Mapped
            }
            (End::Untouched, Source::Cached) | (End::Loose, _) => self.res.put_cached(s.piece),
            (End::Mapped, _) => self.res.set_mapped(s.piece, s.at, PieceState::Mapped),
            (End::LostAtSource, _) => self.res.pieces[s.piece as usize].state = PieceState::Lost,
            (End::LostAtTarget, _) => self.res.set_mapped(s.piece, s.at, PieceState::Lost),
            (End::Leaked, _) => self.res.drop_piece(s.piece),
        }
        if matches!(s.end, End::LostAtSource | End::LostAtTarget | End::Leaked) {
            self.res.quarantined += s.bytes;
        }
        0
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/plan.rs"]
mod tests;
