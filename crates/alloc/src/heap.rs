//! The heap: blocks (*extents*) that tile address ranges, and free lists of them, one for each
//! stream and one for all.
//!
//! It is first fit by address with immediate coalescing (Knuth's boundary tags; here the tags lie
//! in a table, so that no device memory is touched). The free lists go by stream, as in CUDA's
//! stream-ordered pools and PyTorch's caching allocator. It departs from them in this: a block that
//! is freed while its stream may still use it is free for that stream at once, and moves to the
//! list of all once that use is over.
//!
//! List 0 is ready for everybody. Neighbours coalesce when they lie in one list. While a single
//! stream uses the heap, list 0 and its list coalesce too, so that one stream sees no fragmentation
//! by readiness.
//!
//! Addresses and physical memory are separate: parts of a free extent may be backed by nothing. See
//! `residency`. A block lies at the lowest address that fits. While granules are few and are moved,
//! a large block that fills whole granules begins at a granule, if there is memory
//! ([`align_of`](Heap::align_of)).
//!
//! Plain single-threaded state: whoever owns it guards it. Makes no driver call; must not know
//! leases.

mod lists;
mod report;
mod take;

use crate::extent::{Cold, Extent, Extents, NIL, State, or_dummy};
use crate::host::{self, fetch_entry};
use crate::index::Index;
use crate::layout::{UNIT, UNIT_SHIFT};
use crate::old_mappings::OldMappings;
use crate::residency::Residency;
use leasehold_core::{Error, OutOfMemory, PackedTimepoint, Result, TimelineId};

/// FreeList 0: ready for everybody.
pub(crate) const READY: u8 = 0;
const NO_LIST: u8 = u8::MAX;
const MAX_LISTS: usize = 200;
/// Alignments up to this many bytes, or a granule, hold in every span, wherever it begins.
pub(crate) const STRIDE: u64 = 2 << 20;
/// Granules from which on a block may be aligned: of fewer there is little to be moved.
const ALIGNED_FROM: u32 = 4;
/// It may leave one part in so many of its last granule empty.
const SLACK: u32 = 8;
/// A list that is empty and was not used for this many operations is given up.
const LIST_IDLE: u64 = 4096;

/// A range of addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) base: u64,
    /// The first unit in the heap's space of units. It lies in the space as the base lies among the
    /// addresses, modulo [`Heap::stride`], so that what is aligned here is aligned there.
    pub(crate) unit: u32,
    /// The span's share of the space of units: its start and its length.
    room: (u32, u32),
    pub(crate) units: u32,
    pub(crate) first: u32,
    pub(crate) native: u64,
    /// Parts of it are backed and unbacked one by one; otherwise all of it is backed for as long as
    /// it exists.
    pub(crate) paged: bool,
    pub(crate) live: bool,
}

impl Span {
    /// The address of a unit.
    #[inline]
    pub(crate) fn addr(&self, unit: u32) -> u64 {
        self.base + (u64::from(unit - self.unit) << UNIT_SHIFT)
    }
}

pub(crate) struct FreeList {
    pub(crate) index: Index,
    pub(crate) timeline: Option<TimelineId>,
    oldest: u32,
    newest: u32,
    used_at: u64,
    /// Plans in flight that will bring memory back into it.
    pub(crate) plans: u32,
}

impl FreeList {
    fn new(timeline: Option<TimelineId>) -> Self {
        Self { index: Index::default(), timeline, oldest: NIL, newest: NIL, used_at: 0, plans: 0 }
    }
}

/// The heap.
pub(crate) struct Heap {
    pub(crate) extents: Extents,
    pub(crate) spans: Vec<Span>,
    pub(crate) lists: Vec<FreeList>,
    pub(crate) res: Residency,
    pub(crate) old_mappings: OldMappings,
    list_of_timeline: Vec<u8>,
    /// Lists in use besides list 0.
    timelines: u32,
    /// Free extents whose last user is a timeline without a list: the first of a list through their
    /// cold parts.
    waiting: u32,
    /// Units of extents whose last users are several timelines; the rows of the block table know
    /// which.
    deferred: u64,
    pub(crate) tick: u64,
    next_drain: usize,
    /// Gaps in the space of units, left by spans that are gone.
    gaps: Vec<(u32, u32)>,
    unit_end: u32,
    /// Spans take multiples of this from the space of units. It is a granule at least.
    stride: u32,
    /// Extents start below this unit, apart from those whose spans end above it.
    reached: u32,
    /// Blocks of so many units and more get the alignment [`align_of`](Self::align_of), where they
    /// can have it.
    aligned_from: u32,
}

impl Heap {
    /// A heap whose granules are `granule` bytes (a power of two, a unit at least).
    pub(crate) fn new(granule: u64) -> Self {
        debug_assert!(granule.is_power_of_two() && granule >= UNIT);
        Self {
            extents: Extents::new(),
            spans: Vec::new(),
            lists: vec![FreeList::new(None)],
            res: Residency::new(granule.trailing_zeros() - UNIT_SHIFT),
            old_mappings: OldMappings::default(),
            list_of_timeline: Vec::new(),
            timelines: 0,
            waiting: NIL,
            deferred: 0,
            tick: 0,
            next_drain: 1,
            gaps: Vec::new(),
            unit_end: 0,
            stride: (granule.max(STRIDE) >> UNIT_SHIFT) as u32,
            reached: 0,
            aligned_from: u32::MAX,
        }
    }

    /// Bytes of host memory that the tables take.
    pub(crate) fn host_bytes(&self) -> u64 {
        let lists: u64 = self.lists.iter().map(|l| l.index.host_bytes()).sum();
        self.extents.host_bytes() + self.res.host_bytes() + lists
    }

    /// Adds `bytes` of addresses from `base`. A paged span begins as one hole, another as one free
    /// ready block.
    pub(crate) fn add_span(
        &mut self,
        base: u64,
        bytes: u64,
        native: u64,
        paged: bool,
    ) -> Result<usize> {
        if !base.is_multiple_of(UNIT) {
            let text = format!("the backing's memory lies at {base:#x}: want a multiple of {UNIT}");
            return Err(Error::invalid(text));
        }
        let units = bytes >> UNIT_SHIFT;
        let skew = (base >> UNIT_SHIFT) as u32 & (self.stride - 1);
        let room = (u64::from(skew) + units).next_multiple_of(u64::from(self.stride));
        // Everything that may fail comes first.
        self.extents.ensure(1)?;
        host::room(&mut self.spans, 1)?;
        let spans = self.spans.len() + 1;
        host::room(&mut self.gaps, spans)?;
        let full = || -> Error {
            OutOfMemory::new("the allocator's space of units (2 TiB)", bytes).into()
        };
        let want = u32::try_from(room).map_err(|_| full())?;
        let gap = self.gaps.iter().position(|g| g.1 >= want);
        let from = gap.map_or(self.unit_end, |i| self.gaps[i].0);
        let unit = from + skew;
        let unit_end = match gap {
            Some(_) => self.unit_end,
            None => from.checked_add(want).filter(|&e| e < NIL).ok_or_else(full)?,
        };
        self.reach(if paged { unit + 1 } else { from + want })?;
        let slot = self.spans.iter().position(|s| !s.live).unwrap_or(self.spans.len());
        if slot >= usize::from(u16::MAX) {
            return Err(full());
        }
        self.unit_end = unit_end;
        if let Some(i) = gap {
            self.gaps[i].0 += want;
            self.gaps[i].1 -= want;
            if self.gaps[i].1 == 0 {
                self.gaps.swap_remove(i);
            }
        }
        let id = self.extents.take();
        self.extents[id] = Extent {
            start: unit,
            units: units as u32,
            span: slot as u16,
            state: State::Used,
            ..Extent::VACANT
        };
        let (units, room) = (units as u32, (from, want));
        let span = Span { base, unit, room, units, first: id, native, paged, live: true };
        match self.spans.get_mut(slot) {
            Some(vacant) => *vacant = span,
            None => self.spans.push(span),
        }
        if paged {
            self.extents[id].holes = units >> self.res.shift;
        }
        self.free(id, READY, PackedTimepoint::NEVER);
        Ok(slot)
    }

    /// Makes room in the indexes for free extents that start below `end`, so that freeing needs no
    /// host memory.
    pub(crate) fn reach(&mut self, end: u32) -> Result<()> {
        if end > self.reached {
            let used =
                |(i, l): &(usize, &mut FreeList)| *i == usize::from(READY) || l.timeline.is_some();
            for (_, list) in self.lists.iter_mut().enumerate().filter(used) {
                list.index.reach(&mut self.extents.rows, end)?;
            }
            self.reached = end;
        }
        Ok(())
    }

    /// Takes back a span that lies free and ready as one block. `false`: it does not.
    pub(crate) fn remove_span(&mut self, slot: usize) -> bool {
        let span = self.spans[slot];
        let first = &self.extents[span.first];
        let whole = first.units == span.units && first.state == State::Free;
        let fine = span.live && whole && self.extents.timepoint(span.first).has_passed();
        if fine {
            self.unlink_free(span.first);
            self.extents.put(span.first);
            self.spans[slot].live = false;
            self.gaps.push(span.room);
        }
        fine
    }

    /// The address of an extent, and the native object of its span, else 0.
    #[inline]
    pub(crate) fn place(&self, extent: u32) -> (u64, u64) {
        let n = &self.extents[extent];
        let span = &self.spans[usize::from(n.span)];
        (span.addr(n.start), span.native)
    }

    /// From now on large blocks begin at granules, or no longer: see [`align_of`](Self::align_of).
    pub(crate) fn align_large(&mut self, on: bool) {
        self.aligned_from = if on { ALIGNED_FROM << self.res.shift } else { u32::MAX };
    }

    /// The alignment of a block: a granule's, if it is large and fills whole granules but for a
    /// little. When it is freed, all its granules can be moved. An unaligned block would pin one
    /// more. Only where that gains something: while one timeline uses the heap.
    pub(crate) fn align_of(&self, units: u32, align: u32) -> u32 {
        let granule = 1u32 << self.res.shift;
        let rest = units.wrapping_neg() & (granule - 1);
        if units >= self.aligned_from && self.single() && rest <= granule / SLACK {
            align.max(granule)
        } else {
            align
        }
    }

    /// The parts of an extent that are backed.
    fn backed_parts(&self, n: &Extent, mut each: impl FnMut(u32, u32)) {
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

    /// Cuts a used block out of a free extent that holds it, and that is backed there. Needs two
    /// spare extents.
    #[inline(always)]
    pub(crate) fn carve(&mut self, at: u32, units: u32, align: u32) -> u32 {
        let start = self.extents[at].start;
        self.carve_at(at, if align > 1 { start.next_multiple_of(align) } else { start }, units)
    }

    /// As [`carve`](Self::carve), from the unit `from`.
    #[inline(always)]
    fn carve_at(&mut self, at: u32, from: u32, units: u32) -> u32 {
        let Extent { start, units: all, list, prev, span, .. } = self.extents[at];
        let mut id = at;
        if from != start {
            id = self.carve_slow(at, from, units);
        } else if all == units {
            self.unlink_free(at);
        } else {
            // The rest keeps its extent, and so its place in the order of release.
            id = self.extents.take();
            if list != READY {
                self.extents.cold[id as usize].timepoint = self.extents.cold[at as usize].timepoint;
            }
            let rows = &mut self.extents.rows[..];
            rows[id as usize] = Extent {
                start,
                units,
                prev,
                next: at,
                span,
                list,
                state: State::Used,
                ..Extent::VACANT
            };
            rows[at as usize].prev = id;
            match rows.get_mut(prev as usize) {
                Some(prev) => prev.next = id,
                None => self.spans[usize::from(span)].first = id,
            }
            self.lists[usize::from(list)].index.cut(rows, at, units);
            return id;
        }
        let n = &mut self.extents.rows[id as usize];
        n.state = State::Used;
        n.link = [NIL; 2];
        id
    }

    /// The block does not begin where the free extent does.
    #[cold]
    fn carve_slow(&mut self, at: u32, from: u32, units: u32) -> u32 {
        self.unlink_free(at);
        let Extent { start, list, .. } = self.extents[at];
        let timepoint = self.extents.timepoint(at);
        let id = self.split(at, from - start);
        self.extents[at].state = State::Free;
        self.link_free(at, list, timepoint);
        if self.extents[id].units > units {
            let rest = self.split(id, units);
            self.extents[rest].state = State::Free;
            self.link_free(rest, list, timepoint);
        }
        id
    }

    /// Splits an extent that is in no index; the new upper part has the same state.
    pub(crate) fn split(&mut self, at: u32, units: u32) -> u32 {
        let upper = self.extents.take();
        let low = self.extents[at];
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
        self.extents[upper] = Extent {
            start: low.start + units,
            units: low.units - units,
            prev: at,
            holes: above,
            ..low
        };
        if low.list != READY {
            self.extents.cold[upper as usize].timepoint = self.extents.cold[at as usize].timepoint;
        }
        self.extents[at].units = units;
        self.extents[at].holes = below;
        self.extents[at].next = upper;
        if low.next != NIL {
            self.extents[low.next].prev = upper;
        }
        upper
    }

    /// Puts an extent into a list's index, without merging.
    #[inline]
    pub(crate) fn link_free(&mut self, id: u32, list: u8, timepoint: PackedTimepoint) {
        self.extents[id].list = list;
        self.lists[usize::from(list)].index.insert(&mut self.extents.rows, id);
        if list != READY {
            self.link_age(id, list, timepoint);
        }
    }

    /// Takes a free extent out of its index; its state is left to the caller.
    #[inline]
    pub(crate) fn unlink_free(&mut self, id: u32) {
        let list = self.extents[id].list;
        self.lists[usize::from(list)].index.remove(&mut self.extents.rows, id);
        if list != READY {
            self.unlink_age(id, list);
        }
    }

    #[inline]
    fn link_age(&mut self, id: u32, list: u8, timepoint: PackedTimepoint) {
        let l = &mut self.lists[usize::from(list)];
        let cold = &mut self.extents.cold;
        let newest = std::mem::replace(&mut l.newest, id);
        cold[id as usize] = Cold { timepoint, age_prev: newest, age_next: NIL };
        match newest {
            NIL => l.oldest = id,
            _ => cold[newest as usize].age_next = id,
        }
    }

    #[inline]
    fn unlink_age(&mut self, id: u32, list: u8) {
        let l = &mut self.lists[usize::from(list)];
        let cold = &mut self.extents.cold;
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

    /// Gives a used extent back: free at once for `list`, for the others when `timepoint` has
    /// passed. Never fails, never takes host memory.
    pub(crate) fn free(&mut self, id: u32, list: u8, timepoint: PackedTimepoint) {
        self.announce(id, list);
        self.free_again(id, list, timepoint);
    }

    /// As [`free`](Self::free), free for everybody at once.
    #[inline(never)]
    pub(crate) fn free_ready(&mut self, id: u32) {
        self.announce(id, READY);
        self.coalesce(id, READY, PackedTimepoint::NEVER, true);
    }

    /// A used extent is about to come back.
    #[inline(always)]
    fn announce(&mut self, id: u32, list: u8) {
        self.tick += 1;
        // The rest of the operation looks at all of these entries; they are fetched at once.
        let Extent { start, units, prev, next, .. } = self.extents[id];
        fetch_entry(&self.extents.rows, prev as usize);
        fetch_entry(&self.extents.rows, next as usize);
        self.lists[usize::from(list)].index.expect(start + units);
    }

    /// Frees an extent into a list, merging with neighbours. `absorb`: while a single timeline uses
    /// the heap, lists merge too.
    #[inline(never)]
    fn coalesce(&mut self, id: u32, list: u8, timepoint: PackedTimepoint, absorb: bool) {
        let unite = absorb && self.timelines <= 1;
        let rows = &mut self.extents.rows[..];
        let Extent { prev, next, .. } = rows[id as usize];
        let merges = |at: u32| {
            rows.get(at as usize).is_some_and(|n| {
                n.state == State::Free
                    && (n.list == list || unite && (n.list == READY || list == READY))
            })
        };
        match (merges(prev), merges(next)) {
            (false, false) => {
                rows[id as usize].state = State::Free;
                self.link_free(id, list, timepoint);
            }
            (true, false) => self.merge_below(id, list, timepoint),
            (false, true) => self.merge_above(id, list, timepoint),
            (true, true) => self.merge_between(id, list, timepoint),
        }
    }

    /// The extent `below` ends where `above` begins. Without one, `above` is the span's first.
    #[inline(always)]
    fn join(&mut self, below: u32, above: u32, span: u16) {
        let rows = &mut self.extents.rows[..];
        rows[above as usize].prev = below;
        match rows.get_mut(below as usize) {
            Some(below) => below.next = above,
            None => self.spans[usize::from(span)].first = above,
        }
    }

    /// The free neighbour below grows over an extent.
    #[inline(always)]
    fn merge_below(&mut self, id: u32, list: u8, timepoint: PackedTimepoint) {
        let Extent { units, holes, next, prev, .. } = self.extents[id];
        self.extents.put(id);
        let rows = &mut self.extents.rows[..];
        rows[or_dummy(next) as usize].prev = prev;
        let below = &mut rows[prev as usize];
        below.next = next;
        self.grow(prev, 0, units, holes, list, timepoint);
    }

    /// The free neighbour above grows over an extent and over the one below. It keeps its place in
    /// the index, which goes by where extents end.
    #[inline(always)]
    fn merge_between(&mut self, id: u32, list: u8, timepoint: PackedTimepoint) {
        let Extent { units, holes, prev, next, .. } = self.extents[id];
        let below = self.extents[prev];
        let (list, timepoint) =
            latest((list, timepoint), (below.list, self.extents.cold[prev as usize].timepoint));
        self.extents.put(id);
        self.unlink_free(prev);
        self.extents.put(prev);
        self.join(below.prev, next, below.span);
        self.grow(next, units + below.units, 0, holes + below.holes, list, timepoint);
    }

    /// The free neighbour above grows over an extent.
    #[inline(always)]
    fn merge_above(&mut self, id: u32, list: u8, timepoint: PackedTimepoint) {
        let Extent { units, holes, prev, next, span, .. } = self.extents[id];
        self.extents.put(id);
        self.join(prev, next, span);
        self.grow(next, units, 0, holes, list, timepoint);
    }

    /// A free extent becomes larger, by memory of `list` and `timepoint`: `below` units at its
    /// beginning or `above` at its end.
    #[inline(always)]
    fn grow(
        &mut self,
        id: u32,
        below: u32,
        above: u32,
        holes: u32,
        list: u8,
        timepoint: PackedTimepoint,
    ) {
        if list != READY || self.extents[id].list != READY {
            return self.grow_pending(id, below, above, holes, list, timepoint);
        }
        self.extend(READY, id, below, above, holes);
    }

    /// A free extent becomes larger in its index.
    #[inline(always)]
    fn extend(&mut self, list: u8, id: u32, below: u32, above: u32, holes: u32) {
        let index = &mut self.lists[usize::from(list)].index;
        if below > 0 {
            index.extend_down(&mut self.extents.rows, id, below, holes);
        } else {
            index.extend_up(&mut self.extents.rows, id, above, holes);
        }
    }

    /// As [`grow`](Self::grow), where a timepoint has a say.
    #[inline(never)]
    fn grow_pending(
        &mut self,
        id: u32,
        below: u32,
        above: u32,
        holes: u32,
        list: u8,
        timepoint: PackedTimepoint,
    ) {
        let own = self.extents[id].list;
        let last = self.extents.cold[id as usize].timepoint;
        let (to, timepoint) = latest((list, timepoint), (own, last));
        if to != own {
            self.unlink_free(id);
            let n = &mut self.extents[id];
            n.start -= below;
            n.units += below + above;
            n.holes += holes;
            return self.link_free(id, to, timepoint);
        }
        self.extend(own, id, below, above, holes);
        if own != READY && last != timepoint {
            self.unlink_age(id, own);
            self.link_age(id, own, timepoint);
        }
    }

    /// Takes `[a, b)`, which lies in a free extent, out of circulation as one extent. Returns it
    /// with the timepoint of the extent, if it lay in a timeline's list.
    pub(crate) fn isolate(&mut self, at: u32, a: u32, b: u32) -> (u32, PackedTimepoint) {
        self.unlink_free(at);
        let (n, timepoint) = (self.extents[at], self.extents.timepoint(at));
        let mut mid = at;
        if n.start < a {
            mid = self.split(at, a - n.start);
            self.link_free(at, n.list, timepoint);
        }
        if n.end() > b {
            let upper = self.split(mid, b - a);
            self.link_free(upper, n.list, timepoint);
        }
        self.extents[mid].state = State::Moving;
        (mid, timepoint)
    }

    /// The list in which a timepoint's memory lies while it has not passed, if the timeline has
    /// one.
    #[inline]
    pub(crate) fn list_of(&self, timepoint: PackedTimepoint) -> Option<u8> {
        let list = *self.list_of_timeline.get(usize::from(timepoint.timeline_id().get()))?;
        (list != NO_LIST).then_some(list)
    }

    /// Whether one timeline at most uses the heap.
    #[inline]
    pub(crate) fn single(&self) -> bool {
        self.timelines <= 1
    }

    /// The timepoints that blocks of timelines without a list wait for, with the blocks' units.
    pub(crate) fn waiting(&self, mut f: impl FnMut(u32, PackedTimepoint)) {
        let mut at = self.waiting;
        while at != NIL {
            let Cold { timepoint, age_next, .. } = self.extents.cold[at as usize];
            f(self.extents[at].units, timepoint);
            at = age_next;
        }
    }

    /// Frees an extent that was out of circulation.
    pub(crate) fn free_again(&mut self, id: u32, list: u8, timepoint: PackedTimepoint) {
        if list != READY {
            self.res.note_use(&self.extents[id], timepoint);
        }
        self.coalesce(id, list, timepoint, true);
    }
}

/// The list and timepoint of two merged blocks.
#[inline]
fn latest(a: (u8, PackedTimepoint), b: (u8, PackedTimepoint)) -> (u8, PackedTimepoint) {
    if a.0 == READY {
        return b;
    }
    if b.0 == READY || a.1.value() >= b.1.value() { a } else { b }
}

/// How many values lie before a timepoint is over; more than any number, if it failed.
pub(crate) fn ahead(timepoint: PackedTimepoint) -> u64 {
    match timepoint.timepoint() {
        None => 0,
        Some(p) if p.timeline().failed(p.value()) => u64::MAX,
        Some(p) => p.value().saturating_sub(p.timeline().completed()),
    }
}
