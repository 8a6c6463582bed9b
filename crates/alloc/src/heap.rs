//! The heap: nodes that tile address spans, free ones indexed by who may take them.
//!
//! Free memory lies in *lanes*. Lane 0 is ready for everybody. Every line (stream) that frees memory which it may still be using has a
//! lane of its own: what lies there is free for that line at once, since a stream's operations run in order, and for the others when
//! its stamp has passed; then it is drained into lane 0. Neighbours merge when they lie in one lane. While a single line uses the heap,
//! lane 0 and its lane merge too, so that one stream sees no fragmentation by readiness.
//!
//! Placement and residency are separate: parts of a free node may be backed by nothing. See `residency`.
//!
//! Plain single-threaded state: whoever owns it guards it. Makes no driver call; must not know leases.

use crate::index::Index;
use crate::layout::{UNIT, UNIT_SHIFT};
use crate::map::PageMap;
use crate::node::{Cold, NIL, Node, Nodes, State};
use crate::residency::Residency;
use leasehold_core::{Error, Line, LineId, OutOfMemory, Result, Stamp};

/// Lane 0: ready for everybody.
pub(crate) const READY: u8 = 0;
const NO_LANE: u8 = u8::MAX;
const MAX_LANES: usize = 200;
/// A lane that is empty and was not used for this many operations is given up.
const LANE_IDLE: u64 = 4096;

/// Whether the work of `stamp` is over: complete, or failed and over. A failed stream's memory may be used again; whoever reads
/// results must ask whether the stamp is settled instead.
#[inline]
pub(crate) fn passed(stamp: Stamp) -> bool {
    stamp.point().is_none_or(|p| p.line().completed() >= p.value())
}

/// A range of addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) base: u64,
    /// The first unit in the heap's space of units.
    pub(crate) unit: u32,
    pub(crate) units: u32,
    pub(crate) first: u32,
    pub(crate) native: u64,
    /// Parts of it are backed and unbacked one by one; otherwise all of it is backed for as long as it exists.
    pub(crate) paged: bool,
    pub(crate) live: bool,
}

pub(crate) struct Lane {
    pub(crate) index: Index,
    pub(crate) line: Option<LineId>,
    oldest: u32,
    newest: u32,
    used_at: u64,
    /// Plans in flight that will bring memory back into it.
    pub(crate) plans: u32,
}

impl Lane {
    fn new(line: Option<LineId>) -> Self {
        Self { index: Index::new(), line, oldest: NIL, newest: NIL, used_at: 0, plans: 0 }
    }
}

/// The heap.
pub(crate) struct Heap {
    pub(crate) nodes: Nodes,
    pub(crate) spans: Vec<Span>,
    /// The live spans by address.
    order: Vec<u16>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) res: Residency,
    lane_of_line: Vec<u8>,
    /// Lanes in use besides lane 0.
    lines: u32,
    /// Free nodes whose last users are several lines.
    waiting: Vec<(u32, Box<[Stamp]>)>,
    pub(crate) tick: u64,
    next_drain: usize,
    /// Gaps in the space of units, left by spans that are gone.
    gaps: Vec<(u32, u32)>,
    unit_end: u32,
    /// Nodes start below this unit, apart from those whose spans end above it.
    reached: u32,
    pub(crate) pages: PageMap,
}

impl Heap {
    /// A heap whose granules are `granule` bytes (a power of two, a unit at least).
    pub(crate) fn new(granule: u64) -> Self {
        debug_assert!(granule.is_power_of_two() && granule >= UNIT);
        Self {
            nodes: Nodes::new(),
            spans: Vec::new(),
            order: Vec::new(),
            lanes: vec![Lane::new(None)],
            res: Residency::new(granule.trailing_zeros() - UNIT_SHIFT),
            lane_of_line: Vec::new(),
            lines: 0,
            waiting: Vec::new(),
            tick: 0,
            next_drain: 1,
            gaps: Vec::new(),
            unit_end: 0,
            reached: 0,
            pages: PageMap::new(),
        }
    }

    /// The used node that holds an address.
    pub(crate) fn at(&self, addr: u64) -> Option<u32> {
        let above = self.order.partition_point(|&slot| self.spans[usize::from(slot)].base <= addr);
        let span = &self.spans[usize::from(*self.order.get(above.checked_sub(1)?)?)];
        let unit = u32::try_from((addr - span.base) >> UNIT_SHIFT).ok().filter(|&u| u < span.units)?;
        self.pages.find(&self.nodes.rows, span.unit + unit)
    }

    /// Bytes of host memory that the tables take.
    pub(crate) fn host_bytes(&self) -> u64 {
        let lanes: u64 = self.lanes.iter().map(|l| l.index.host_bytes()).sum();
        self.nodes.host_bytes() + self.res.host_bytes() + self.pages.host_bytes() + lanes
    }

    /// Adds `bytes` of addresses from `base`. A paged span begins as one hole, another as one free ready block.
    pub(crate) fn add_span(&mut self, base: u64, bytes: u64, native: u64, paged: bool) -> Result<usize> {
        let granule = 1u64 << (self.res.shift + UNIT_SHIFT);
        let units = bytes >> UNIT_SHIFT;
        let room = units.next_multiple_of(granule >> UNIT_SHIFT);
        self.nodes.ensure(1)?;
        let full = || -> Error { OutOfMemory::new("the allocator's space of units (2 TiB)", bytes).into() };
        let want = u32::try_from(room).map_err(|_| full())?;
        let unit = match self.gaps.iter().position(|g| g.1 >= want) {
            Some(i) => {
                let at = self.gaps[i].0;
                self.gaps[i].0 += want;
                self.gaps[i].1 -= want;
                if self.gaps[i].1 == 0 {
                    self.gaps.swap_remove(i);
                }
                at
            }
            None => {
                let at = self.unit_end;
                self.unit_end = at.checked_add(want).filter(|&e| e < NIL).ok_or_else(full)?;
                at
            }
        };
        self.reach(if paged { unit + 1 } else { unit + want })?;
        let slot = match self.spans.iter().position(|s| !s.live) {
            Some(i) => i,
            None if self.spans.len() < usize::from(u16::MAX) => {
                self.spans.push(Span { base: 0, unit: 0, units: 0, first: NIL, native: 0, paged: false, live: false });
                self.spans.len() - 1
            }
            None => return Err(full()),
        };
        let at = self.order.partition_point(|&s| self.spans[usize::from(s)].base < base);
        self.order.insert(at, slot as u16);
        let id = self.nodes.take();
        self.nodes[id] =
            Node { start: unit, units: units as u32, span: slot as u16, state: State::Used, ..Node::VACANT };
        self.spans[slot] = Span { base, unit, units: units as u32, first: id, native, paged, live: true };
        if paged {
            self.nodes[id].holes = units as u32 >> self.res.shift;
        }
        self.give(id, READY, Stamp::NEVER);
        Ok(slot)
    }

    /// Makes room in the indexes for free nodes that start below `end`, so that freeing needs no host memory.
    pub(crate) fn reach(&mut self, end: u32) -> Result<()> {
        if end > self.reached {
            let used = |(i, l): &(usize, &mut Lane)| *i == usize::from(READY) || l.line.is_some();
            for (_, lane) in self.lanes.iter_mut().enumerate().filter(used) {
                lane.index.reach(end)?;
            }
            self.pages.reach(end)?;
            self.reached = end;
        }
        Ok(())
    }

    /// Takes back a span that lies free and ready as one block. `None`: it does not.
    pub(crate) fn remove_span(&mut self, slot: usize) -> Option<Span> {
        let span = self.spans[slot];
        let node = self.nodes[span.first];
        let whole = node.units == span.units;
        if !span.live || !whole {
            return None;
        }
        match node.state {
            State::Free if passed(self.nodes.stamp(span.first)) => self.unlink_free(span.first),
            _ => return None,
        }
        self.nodes.put(span.first);
        self.spans[slot].live = false;
        self.order.retain(|&s| usize::from(s) != slot);
        let granule = 1u32 << self.res.shift;
        self.gaps.push((span.unit, span.units.next_multiple_of(granule)));
        Some(span)
    }

    /// The address of a unit of a node.
    #[inline]
    pub(crate) fn addr(&self, node: u32) -> u64 {
        let n = &self.nodes[node];
        let span = &self.spans[usize::from(n.span)];
        span.base + (u64::from(n.start - span.unit) << UNIT_SHIFT)
    }

    /// Metal's spanning buffer of the node's span, else 0.
    #[inline]
    pub(crate) fn native(&self, node: u32) -> u64 {
        self.spans[usize::from(self.nodes[node].span)].native
    }

    /// The lane of a line that allocates. When lanes have run out: lane 0, which is always right.
    #[inline]
    pub(crate) fn lane_for(&mut self, line: &Line) -> u8 {
        let id = usize::from(line.id().get());
        match self.lane_of_line.get(id) {
            Some(&lane) if lane != NO_LANE => {
                self.lanes[usize::from(lane)].used_at = self.tick;
                lane
            }
            _ => self.lane_slow(line.id()),
        }
    }

    #[cold]
    fn lane_slow(&mut self, line: LineId) -> u8 {
        let id = usize::from(line.get());
        if id == 0 {
            return READY;
        }
        if self.lane_of_line.len() <= id {
            if self.lane_of_line.try_reserve(id + 1 - self.lane_of_line.len()).is_err() {
                return READY;
            }
            self.lane_of_line.resize(id + 1, NO_LANE);
        }
        let slot = match (1..self.lanes.len()).find(|&i| self.lanes[i].line.is_none()) {
            Some(i) => i,
            None if self.lanes.len() < MAX_LANES => {
                self.lanes.push(Lane::new(None));
                self.lanes.len() - 1
            }
            None => return READY,
        };
        if self.lanes[slot].index.reach(self.reached).is_err() {
            return READY;
        }
        if self.lines == 1 {
            self.part_lanes();
        }
        self.lanes[slot].line = Some(line);
        self.lanes[slot].used_at = self.tick;
        self.lane_of_line[id] = slot as u8;
        self.lines += 1;
        slot as u8
    }

    /// A second line comes: what the first one's lane has absorbed goes back to lane 0, granule by granule, unless its last use goes on.
    fn part_lanes(&mut self) {
        let shift = self.res.shift;
        let known = self.res.granules.len() as u32;
        for lane in 1..self.lanes.len() {
            let mut left = self.lanes[lane].index.count();
            let mut at = self.lanes[lane].oldest;
            while at != NIL && left > 0 {
                let Node { start, units, span, .. } = self.nodes[at];
                let Cold { stamp, age_next, .. } = self.nodes.cold[at as usize];
                left -= 1;
                let (mut id, end) = (at, start + units);
                at = age_next;
                if passed(stamp) || !self.spans[usize::from(span)].paged {
                    continue;
                }
                let busy = |heap: &Heap, g: u32| {
                    let granule = heap.res.granules[g as usize];
                    granule.piece != NIL && granule.last_of(stamp.line_id()).is_none_or(|last| !passed(last))
                };
                // Whole granules only; the edges stay in the lane.
                let mut g = start.div_ceil(1 << shift);
                while g << shift < end && (g + 1) << shift <= end {
                    let from = g;
                    let part = g >= known || !busy(self, g);
                    g += 1;
                    while (g + 1) << shift <= end && (g >= known || !busy(self, g)) == part {
                        g = if g >= known { end >> shift } else { g + 1 };
                    }
                    if !part || self.nodes.ensure(2).is_err() {
                        continue;
                    }
                    self.unlink_free(id);
                    let mut ready = id;
                    if self.nodes[id].start < from << shift {
                        ready = self.split(id, (from << shift) - self.nodes[id].start);
                        self.link_free(id, lane as u8, stamp);
                    }
                    let rest = if g << shift < end { self.split(ready, (g - from) << shift) } else { NIL };
                    if rest != NIL {
                        self.link_free(rest, lane as u8, stamp);
                    }
                    self.settle(ready, READY, Stamp::NEVER, false);
                    if rest == NIL {
                        break;
                    }
                    id = rest;
                }
            }
        }
    }

    /// Whether nobody uses free memory any more.
    pub(crate) fn is_over(&self) -> bool {
        let mut free = (0..).zip(&self.nodes.rows).filter(|n| n.1.state == State::Free);
        self.waiting.iter().all(|w| w.1.iter().all(|&s| passed(s))) && free.all(|n| passed(self.nodes.stamp(n.0)))
    }

    /// The lane in which a stamp's memory lies while it has not passed, if the line has one.
    #[inline]
    pub(crate) fn lane_of(&self, stamp: Stamp) -> Option<u8> {
        let lane = *self.lane_of_line.get(usize::from(stamp.line_id().get()))?;
        (lane != NO_LANE).then_some(lane)
    }

    /// Whether one line at most uses the heap.
    #[inline]
    pub(crate) fn single(&self) -> bool {
        self.lines <= 1
    }

    #[inline]
    fn unite(&self, a: u8, b: u8) -> bool {
        a == b || (self.lines <= 1 && (a == READY || b == READY))
    }

    /// Takes `units` (aligned to `align` units) that lie free for `lane`. The node's stamp says what its memory still waits for on
    /// that lane. `None`: nothing resident fits.
    #[inline]
    pub(crate) fn take(&mut self, units: u32, align: u32, lane: u8) -> Result<Option<u32>> {
        self.nodes.ensure(2)?;
        self.tick += 1;
        if self.lines > 1 {
            self.drain_some(8);
        }
        let at = self.choose(units, align, lane);
        if at == NIL || self.nodes[at].holes > 0 && self.missing_in(at, units, align) > 0 {
            return Ok(None);
        }
        Ok(Some(self.carve(at, units, align)))
    }

    /// The free node that a request for `lane` is placed in, or `NIL`.
    #[inline]
    pub(crate) fn choose(&self, units: u32, align: u32, lane: u8) -> u32 {
        let mut at = NIL;
        if lane != READY {
            at = self.lanes[usize::from(lane)].index.find(&self.nodes.rows, units, align);
        }
        if at == NIL || self.nodes[at].units != units {
            let ready = self.lanes[0].index.find(&self.nodes.rows, units, align);
            if ready != NIL && (at == NIL || self.nodes[ready].start < self.nodes[at].start) {
                at = ready;
            }
        }
        at
    }

    /// Unbacked granules under the place that a request would get in a free node.
    #[cold]
    pub(crate) fn missing_in(&self, at: u32, units: u32, align: u32) -> u32 {
        let start = self.nodes[at].start.next_multiple_of(align.max(1));
        self.res.missing(start, start + units)
    }

    /// As [`take`](Self::take), but anything that is backed, however badly it fits: in the middle of a free node too. Slow path.
    pub(crate) fn take_resident(&mut self, units: u32, align: u32, lane: u8) -> Result<Option<u32>> {
        self.nodes.ensure(2)?;
        for l in [lane, READY] {
            let index = &self.lanes[usize::from(l)].index;
            let mut start = 0;
            let at = index.find_where(&self.nodes.rows, units, align, |n| match self.backed_at(n, units, align) {
                Some(place) => {
                    start = place;
                    true
                }
                None => false,
            });
            if at != NIL {
                return Ok(Some(self.carve_at(at, start, units)));
            }
        }
        Ok(None)
    }

    /// Where a block would lie in a free node on memory that is there.
    fn backed_at(&self, n: &Node, units: u32, align: u32) -> Option<u32> {
        let align = align.max(1);
        let fits = |from: u32, to: u32| {
            let start = from.checked_next_multiple_of(align)?;
            (start < to && to - start >= units).then_some(start)
        };
        if n.holes == 0 {
            return fits(n.start, n.end());
        }
        let mut found = None;
        self.backed_parts(n, |from, to| found = found.or_else(|| fits(from, to)));
        found
    }

    /// The parts of a node that are backed.
    fn backed_parts(&self, n: &Node, mut each: impl FnMut(u32, u32)) {
        let (mut from, mut at) = (n.start, n.start);
        while at < n.end() {
            let granule = at >> self.res.shift;
            let next = ((granule + 1) << self.res.shift).min(n.end());
            if self.res.piece_of(granule) == NIL {
                if from < at {
                    each(from, at);
                }
                from = next;
                if granule as usize >= self.res.granules.len() {
                    // Nothing was ever backed from here on.
                    return;
                }
            }
            at = next;
        }
        if from < n.end() {
            each(from, n.end());
        }
    }

    /// Takes a block from another line's lane whose stamp `allowed` accepts. Looks at one candidate per lane.
    pub(crate) fn take_foreign(
        &mut self,
        units: u32,
        align: u32,
        lane: u8,
        mut allowed: impl FnMut(Stamp) -> bool,
    ) -> Result<Option<u32>> {
        self.nodes.ensure(2)?;
        for other in 1..self.lanes.len() {
            if other == usize::from(lane) {
                continue;
            }
            let at = self.lanes[other].index.find(&self.nodes.rows, units, align);
            if at != NIL && allowed(self.nodes.stamp(at)) && self.missing_in(at, units, align) == 0 {
                return Ok(Some(self.carve(at, units, align)));
            }
        }
        Ok(None)
    }

    /// The point to wait for on the host so that about `units` more become ready: on the line where the fewest values are ahead of it.
    pub(crate) fn cheapest_wait(&self, units: u32, more: &[(u64, Stamp)]) -> Option<Stamp> {
        let shift = self.res.shift;
        let mut pending: Vec<(u16, u64, u64)> = Vec::new();
        let mut push = |s: Stamp, units: u64| {
            if !s.is_never() && !passed(s) && !s.point().is_some_and(|p| p.line().failed(p.value())) {
                pending.push((s.line_id().get(), s.value(), units));
            }
        };
        for lane in &self.lanes[1..] {
            let mut at = lane.oldest;
            while at != NIL {
                let n = &self.nodes[at];
                let Cold { stamp, age_next, .. } = self.nodes.cold[at as usize];
                // A block merged from many frees is ready granule by granule.
                let (mut g, end) = (n.start.div_ceil(1 << shift), n.end() >> shift);
                while g < end {
                    if let Some(last) = self.res.granules.get(g as usize).and_then(|g| g.last_of(stamp.line_id())) {
                        push(last, 1 << shift);
                    }
                    g += 1;
                }
                push(stamp, u64::from(n.units));
                at = age_next;
            }
        }
        for (units, stamps) in self.waiting() {
            stamps.iter().for_each(|&s| push(s, u64::from(units)));
        }
        more.iter().for_each(|&(bytes, s)| push(s, bytes >> UNIT_SHIFT));
        pending.sort_unstable();
        let mut best: Option<(bool, u64, Stamp)> = None;
        for line in pending.chunk_by(|a, b| a.0 == b.0) {
            let mut sum = 0;
            let enough = line.iter().find(|p| {
                sum += p.2;
                sum >= u64::from(units)
            });
            let last = line[line.len() - 1];
            let at = enough.unwrap_or(&last);
            let stamp = Stamp::from_bits(u64::from(at.0) << 48 | at.1);
            let ahead = stamp.point().map_or(0, |p| p.value().saturating_sub(p.line().completed()));
            let key = (enough.is_none(), if enough.is_none() { u64::MAX - sum } else { ahead });
            if best.is_none_or(|b| key < (b.0, b.1)) {
                best = Some((key.0, key.1, stamp));
            }
        }
        best.map(|b| b.2)
    }

    /// Cuts a used block out of a free node that holds it, and that is backed there. Needs two spare nodes.
    #[inline]
    pub(crate) fn carve(&mut self, at: u32, units: u32, align: u32) -> u32 {
        let start = self.nodes[at].start;
        self.carve_at(at, if align > 1 { start.next_multiple_of(align) } else { start }, units)
    }

    /// As [`carve`](Self::carve), from the unit `from`.
    #[inline]
    fn carve_at(&mut self, at: u32, from: u32, units: u32) -> u32 {
        let Node { start, units: all, lane, prev, holes, span, .. } = self.nodes[at];
        let id = if from != start {
            self.carve_slow(at, from, units)
        } else if all == units {
            self.unlink_free(at);
            at
        } else {
            // The rest keeps its node, and so its place in the order of release.
            let id = self.nodes.take();
            self.nodes[id] = Node { start, units, prev, next: at, span, lane, ..Node::VACANT };
            if lane != READY {
                self.nodes.cold[id as usize].stamp = self.nodes.cold[at as usize].stamp;
            }
            self.nodes[at].prev = id;
            if prev == NIL {
                self.spans[usize::from(span)].first = id;
            } else {
                self.nodes[prev].next = id;
            }
            let index = &mut self.lanes[usize::from(lane)].index;
            index.change(&mut self.nodes.rows, at, start + units, all - units, holes);
            id
        };
        let n = &mut self.nodes[id];
        n.state = State::Used;
        n.link = [NIL; 2];
        self.pages.enter(n, id);
        id
    }

    /// The block does not begin where the free node does.
    #[cold]
    fn carve_slow(&mut self, at: u32, from: u32, units: u32) -> u32 {
        self.unlink_free(at);
        let Node { start, lane, .. } = self.nodes[at];
        let stamp = self.nodes.stamp(at);
        let id = self.split(at, from - start);
        self.nodes[at].state = State::Free;
        self.link_free(at, lane, stamp);
        if self.nodes[id].units > units {
            let rest = self.split(id, units);
            self.nodes[rest].state = State::Free;
            self.link_free(rest, lane, stamp);
        }
        id
    }

    /// Splits a node that is in no index; the new upper part has the same state.
    pub(crate) fn split(&mut self, at: u32, units: u32) -> u32 {
        let upper = self.nodes.take();
        let low = self.nodes[at];
        debug_assert!(units > 0 && units < low.units);
        let (mut below, mut above) = (0, 0);
        if low.holes > 0 {
            // No unbacked granule lies across the cut: those that a part touches are its own.
            if units < low.units / 2 {
                below = self.res.missing(low.start, low.start + units);
                above = low.holes - below;
            } else {
                above = self.res.missing(low.start + units, low.end());
                below = low.holes - above;
            }
        }
        self.nodes[upper] = Node { start: low.start + units, units: low.units - units, prev: at, holes: above, ..low };
        if low.lane != READY {
            self.nodes.cold[upper as usize].stamp = self.nodes.cold[at as usize].stamp;
        }
        self.nodes[at].units = units;
        self.nodes[at].holes = below;
        self.nodes[at].next = upper;
        if low.next != NIL {
            self.nodes[low.next].prev = upper;
        }
        upper
    }

    /// Puts a node into a lane's index, without merging.
    #[inline]
    pub(crate) fn link_free(&mut self, id: u32, lane: u8, stamp: Stamp) {
        self.nodes[id].lane = lane;
        self.lanes[usize::from(lane)].index.insert(&mut self.nodes.rows, id);
        if lane != READY {
            self.link_age(id, lane, stamp);
        }
    }

    /// Takes a free node out of its index; its state is left to the caller.
    #[inline]
    pub(crate) fn unlink_free(&mut self, id: u32) {
        let lane = self.nodes[id].lane;
        self.lanes[usize::from(lane)].index.remove(&mut self.nodes.rows, id);
        if lane != READY {
            self.unlink_age(id, lane);
        }
    }

    #[inline]
    fn link_age(&mut self, id: u32, lane: u8, stamp: Stamp) {
        let l = &mut self.lanes[usize::from(lane)];
        let cold = &mut self.nodes.cold;
        let newest = std::mem::replace(&mut l.newest, id);
        cold[id as usize] = Cold { stamp, age_prev: newest, age_next: NIL };
        match newest {
            NIL => l.oldest = id,
            _ => cold[newest as usize].age_next = id,
        }
    }

    #[inline]
    fn unlink_age(&mut self, id: u32, lane: u8) {
        let l = &mut self.lanes[usize::from(lane)];
        let cold = &mut self.nodes.cold;
        let Cold { age_prev, age_next, .. } = cold[id as usize];
        match age_prev {
            NIL => l.oldest = age_next,
            _ => cold[age_prev as usize].age_next = age_next,
        }
        match age_next {
            NIL => l.newest = age_prev,
            _ => cold[age_next as usize].age_prev = age_prev,
        }
    }

    /// Gives a used node back: free at once for `lane`, for the others when `stamp` has passed. Never fails, never takes host memory.
    #[inline]
    pub(crate) fn give(&mut self, id: u32, lane: u8, stamp: Stamp) {
        self.tick += 1;
        self.pages.leave(&self.nodes.rows, id);
        if lane != READY {
            self.res.note_use(&self.nodes[id], stamp);
        }
        self.settle(id, lane, stamp, true);
    }

    /// Frees a node into a lane, merging with neighbours. `absorb`: while a single line uses the heap, lanes merge too.
    fn settle(&mut self, id: u32, lane: u8, stamp: Stamp, absorb: bool) {
        let Node { prev, next, .. } = self.nodes[id];
        let merges = |heap: &Heap, at: u32| {
            at != NIL && heap.nodes[at].state == State::Free && {
                let other = heap.nodes[at].lane;
                other == lane || absorb && heap.unite(other, lane)
            }
        };
        match (merges(self, prev), merges(self, next)) {
            (false, false) => {
                self.nodes[id].state = State::Free;
                self.link_free(id, lane, stamp);
            }
            (true, above) => self.merge_below(id, above, lane, stamp),
            (false, true) => self.merge_above(id, lane, stamp),
        }
    }

    /// The free neighbour below grows over a node, and over the one above.
    #[inline]
    fn merge_below(&mut self, id: u32, above: bool, mut lane: u8, mut stamp: Stamp) {
        let Node { mut units, mut holes, mut next, prev, .. } = self.nodes[id];
        if above {
            (lane, stamp) = latest((lane, stamp), (self.nodes[next].lane, self.nodes.stamp(next)));
            self.unlink_free(next);
            let n = self.nodes[next];
            self.nodes.put(next);
            (units, holes, next) = (units + n.units, holes + n.holes, n.next);
        }
        self.nodes.put(id);
        let p = self.nodes[prev];
        self.nodes[prev].next = next;
        if next != NIL {
            self.nodes[next].prev = prev;
        }
        self.grow(prev, p.start, p.units + units, p.holes + holes, lane, stamp);
    }

    /// The free neighbour above grows over a node.
    #[inline]
    fn merge_above(&mut self, id: u32, lane: u8, stamp: Stamp) {
        let Node { start, units, holes, prev, next, span, .. } = self.nodes[id];
        self.nodes.put(id);
        let n = self.nodes[next];
        self.nodes[next].prev = prev;
        match prev {
            NIL => self.spans[usize::from(span)].first = next,
            _ => self.nodes[prev].next = next,
        }
        self.grow(next, start, units + n.units, holes + n.holes, lane, stamp);
    }

    /// A free node becomes larger, by memory of `lane` and `stamp`.
    #[inline]
    fn grow(&mut self, id: u32, start: u32, units: u32, holes: u32, lane: u8, stamp: Stamp) {
        let own = self.nodes[id].lane;
        let (to, stamp) = latest((lane, stamp), (own, self.nodes.stamp(id)));
        if to != own {
            self.unlink_free(id);
            let n = &mut self.nodes[id];
            (n.start, n.units, n.holes) = (start, units, holes);
            return self.link_free(id, to, stamp);
        }
        self.lanes[usize::from(own)].index.change(&mut self.nodes.rows, id, start, units, holes);
        if own != READY && self.nodes.cold[id as usize].stamp != stamp {
            self.unlink_age(id, own);
            self.link_age(id, own, stamp);
        }
    }

    /// Frees a node that was out of circulation.
    pub(crate) fn resettle(&mut self, id: u32, lane: u8, stamp: Stamp) {
        if lane != READY {
            self.res.note_use(&self.nodes[id], stamp);
        }
        self.settle(id, lane, stamp, true);
    }

    /// Gives a node back that several lines may still be using.
    pub(crate) fn give_shared(&mut self, id: u32, stamps: &[Stamp]) {
        self.tick += 1;
        self.pages.leave(&self.nodes.rows, id);
        let mut left = stamps.iter().copied().filter(|&s| !passed(s));
        match (left.next(), left.next()) {
            (None, _) => self.settle(id, READY, Stamp::NEVER, true),
            (Some(s), None) if self.lane_of(s).is_some() => {
                let lane = self.lane_of(s).unwrap_or(READY);
                self.res.note_use(&self.nodes[id], s);
                self.settle(id, lane, s, true);
            }
            _ => {
                self.nodes[id].state = State::Waiting;
                let rest: Box<[Stamp]> = stamps.iter().copied().filter(|&s| !passed(s)).collect();
                self.waiting.push((id, rest));
            }
        }
    }

    /// Looks at the blocks that several lines used last.
    pub(crate) fn poll_waiting(&mut self) {
        let mut i = 0;
        while i < self.waiting.len() {
            let open = self.waiting[i].1.iter().filter(|&&s| !passed(s)).count();
            let one = self.waiting[i].1.iter().copied().find(|&s| !passed(s));
            if open == 0 || open == 1 && one.is_some_and(|s| self.lane_of(s).is_some()) {
                let (id, _) = self.waiting.swap_remove(i);
                match one {
                    Some(s) => {
                        let lane = self.lane_of(s).unwrap_or(READY);
                        self.res.note_use(&self.nodes[id], s);
                        self.settle(id, lane, s, true);
                    }
                    None => self.settle(id, READY, Stamp::NEVER, true),
                }
            } else {
                i += 1;
            }
        }
    }

    /// The stamps that blocks used by several lines wait for, with the blocks' units.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (u32, &[Stamp])> {
        self.waiting.iter().map(|(id, s)| (self.nodes[*id].units, &**s))
    }

    /// Moves up to `limit` blocks whose stamps have passed into lane 0, from one lane after the other.
    #[inline]
    pub(crate) fn drain_some(&mut self, limit: usize) {
        if self.next_drain >= self.lanes.len() {
            self.next_drain = 1;
            if !self.waiting.is_empty() {
                self.poll_waiting();
            }
        }
        self.drain(self.next_drain, limit);
        self.next_drain += 1;
    }

    fn drain(&mut self, lane: usize, limit: usize) {
        let Some(l) = self.lanes.get(lane) else { return };
        let Some(line) = l.line else { return };
        let mut at = l.oldest;
        let mut left = limit;
        // The line's progress is read once: all stamps of a lane are on its line.
        let mut done = None;
        while at != NIL && left > 0 {
            let Cold { stamp, age_next, .. } = self.nodes.cold[at as usize];
            let done = *done.get_or_insert_with(|| stamp.point().map_or(u64::MAX, |p| p.line().completed()));
            debug_assert!(stamp.is_never() || stamp.line_id() == line);
            if stamp.value() > done {
                break;
            }
            // The successor may be merged away only with its own lane's blocks, and this one merges with lane 0's.
            self.unlink_free(at);
            self.settle(at, READY, Stamp::NEVER, false);
            at = age_next;
            left -= 1;
        }
    }

    /// Moves everything that has passed into lane 0 and gives up lanes that nobody uses. Slow path only.
    pub(crate) fn drain_all(&mut self) {
        self.poll_waiting();
        let lines = self.lines;
        for lane in 1..self.lanes.len() {
            if self.lines > 1 {
                self.drain(lane, usize::MAX);
            }
            let l = &self.lanes[lane];
            let needed = l.index.count() > 0 || l.plans > 0;
            if l.line.is_some() && !needed && self.tick.saturating_sub(l.used_at) > LANE_IDLE {
                if let Some(line) = self.lanes[lane].line.take() {
                    self.lane_of_line[usize::from(line.get())] = NO_LANE;
                }
                self.lines -= 1;
            }
        }
        if lines > 1 && self.lines == 1 {
            self.unite_lanes();
        }
    }

    /// A single line is left: what lies in its lane beside ready memory merges with it, as it does from now on.
    fn unite_lanes(&mut self) {
        for lane in 1..self.lanes.len() {
            for _ in 0..self.lanes[lane].index.count() {
                // Whatever was merged has gone to the end, or away.
                let id = self.lanes[lane].oldest;
                if id == NIL {
                    break;
                }
                let stamp = self.nodes.stamp(id);
                self.unlink_free(id);
                self.settle(id, lane as u8, stamp, true);
            }
        }
    }

    /// Units that lie free and resident in lane 0, and in the lines' lanes.
    pub(crate) fn free_units(&self) -> (u64, u64) {
        let waiting: u64 = self.waiting.iter().map(|(id, _)| u64::from(self.nodes[*id].units)).sum();
        let resident = |l: &Lane| l.index.units() - (l.index.holes() << self.res.shift);
        (resident(&self.lanes[0]), self.lanes[1..].iter().map(resident).sum::<u64>() + waiting)
    }

    /// Bytes that lie free in each line's lane, with the line.
    pub(crate) fn pending_by_line(&self) -> impl Iterator<Item = (u64, u16)> {
        let shift = self.res.shift;
        let resident = move |l: &Lane| (l.index.units() - (l.index.holes() << shift)) << UNIT_SHIFT;
        self.lanes[1..].iter().filter_map(move |l| Some((resident(l), l.line?.get()))).filter(|l| l.0 > 0)
    }

    /// The newest stamp of a block in a line's lane: of the line that is least far behind.
    pub(crate) fn newest_pending(&self) -> Stamp {
        let newest = self.lanes[1..].iter().filter(|l| l.newest != NIL).map(|l| self.nodes.stamp(l.newest));
        let behind = |s: &Stamp| s.point().map_or(0, |p| p.value().saturating_sub(p.line().completed()));
        newest.filter(|s| !passed(*s)).min_by_key(behind).unwrap_or(Stamp::NEVER)
    }

    /// The largest piece of free memory in units that is backed throughout, whatever its lane. A walk.
    pub(crate) fn largest_free(&self) -> u32 {
        let free = self.nodes.rows.iter().filter(|n| n.state == State::Free);
        free.map(|n| if n.holes == 0 { n.units } else { self.backed_within(n) }).max().unwrap_or(0)
    }

    /// The longest backed part of a node.
    fn backed_within(&self, n: &Node) -> u32 {
        let mut best = 0;
        self.backed_parts(n, |from, to| best = best.max(to - from));
        best
    }

    /// Checks every invariant of spans, nodes, indexes and residency. For tests.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut indexed = vec![false; self.nodes.rows.len()];
        for (i, lane) in self.lanes.iter().enumerate() {
            let mut wrong = None;
            lane.index.check(&self.nodes.rows, |id| {
                indexed[id as usize] = true;
                let n = &self.nodes[id];
                if n.state != State::Free || usize::from(n.lane) != i {
                    wrong = Some(id);
                }
            })?;
            if let Some(id) = wrong {
                return Err(format!("lane {i} indexes node {id}: {:?}", self.nodes[id]));
            }
        }
        for span in self.spans.iter().filter(|s| s.live) {
            let (mut at, mut prev, mut unit) = (span.first, NIL, span.unit);
            while at != NIL {
                let n = &self.nodes[at];
                if n.prev != prev || n.start != unit || n.units == 0 {
                    return Err(format!("node {at} does not tile its span: {n:?}, expected start {unit}, prev {prev}"));
                }
                if (n.state == State::Free) != indexed[at as usize] {
                    return Err(format!("node {at} and the indexes disagree: {n:?}"));
                }
                if prev != NIL {
                    let p = &self.nodes[prev];
                    let both = |s: State| p.state == s && n.state == s;
                    if both(State::Free) && p.lane == n.lane {
                        return Err(format!("nodes {prev} and {at} should have merged: {p:?} {n:?}"));
                    }
                }
                if span.paged {
                    self.res.check_node(n)?;
                }
                unit = n.end();
                prev = at;
                at = n.next;
            }
            if unit != span.unit + span.units {
                return Err(format!("span {span:?} is tiled up to {unit} only"));
            }
        }
        for (id, n) in (0..).zip(&self.nodes.rows) {
            let held = matches!(n.state, State::Used | State::Suspended);
            let found = |unit: u32| self.pages.find(&self.nodes.rows, unit) == Some(id);
            if held && !(found(n.start) && found(n.end() - 1) && found(n.start + n.units / 2)) {
                return Err(format!("the page map has lost node {id}: {n:?}"));
            }
        }
        self.res.check()
    }
}

/// The lane and stamp of two merged blocks.
#[inline]
fn latest(a: (u8, Stamp), b: (u8, Stamp)) -> (u8, Stamp) {
    if a.0 == READY {
        return b;
    }
    if b.0 == READY || a.1.value() >= b.1.value() { a } else { b }
}
