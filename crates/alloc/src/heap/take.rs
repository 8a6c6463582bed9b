//! How a request gets a free extent, and how a used one comes back.

use super::{Heap, READY, ahead};
use crate::extent::{Cold, Extent, NIL};
use crate::host;
use crate::layout::UNIT_SHIFT;
use leasehold_core::{PackedTimepoint, Result, Timeline};

impl Heap {
    /// Takes `units` (aligned to `align` units) that lie free for `timeline`. The extent's
    /// timepoint says what its memory still waits for on that timeline. `None`: nothing resident
    /// fits.
    #[inline(always)]
    pub(crate) fn take(
        &mut self,
        units: u32,
        align: u32,
        timeline: &Timeline,
    ) -> Result<Option<u32>> {
        self.extents.ensure(2)?;
        Ok(self.take_extent(units, align, timeline))
    }

    /// As [`take`](Self::take). Needs two spare extents.
    #[inline(always)]
    pub(crate) fn take_extent(
        &mut self,
        units: u32,
        align: u32,
        timeline: &Timeline,
    ) -> Option<u32> {
        let list = self.list_found(timeline);
        let tick = self.tick;
        self.tick += 1;
        if self.timelines > 1 {
            self.drain_some(8);
        }
        let own = &mut self.lists[usize::from(list)];
        own.used_at = tick;
        let extent = if units >= self.aligned_from {
            self.take_aligned(units, align, list)
        } else {
            // Where nothing lies in a list, it need not be asked.
            let list = if own.index.count() > 0 { list } else { READY };
            self.take_lowest(units, align, list)
        };
        (extent != NIL).then_some(extent)
    }

    /// As [`take`](Self::take) for a list; or `NIL`. Needs two spare extents.
    #[inline(never)]
    fn take_lowest(&mut self, units: u32, align: u32, list: u8) -> u32 {
        let at = self.choose(units, align, list);
        if at == NIL || self.extents[at].holes > 0 && !self.is_backed_in(at, units, align) {
            return NIL;
        }
        self.carve(at, units, align)
    }

    /// As [`take_lowest`](Self::take_lowest), for a block that may be aligned.
    #[cold]
    #[inline(never)]
    fn take_aligned(&mut self, units: u32, align: u32, list: u8) -> u32 {
        let wide = self.align_of(units, align);
        let at = if wide > align { self.take_lowest(units, wide, list) } else { NIL };
        if at != NIL { at } else { self.take_lowest(units, align, list) }
    }

    /// The free extent that a request for `list` is placed in, or `NIL`.
    #[inline(always)]
    pub(crate) fn choose(&self, units: u32, align: u32, list: u8) -> u32 {
        if list != READY {
            return self.choose_between(units, align, list);
        }
        self.lists[0].index.find(&self.extents.rows, units, align)
    }

    /// As [`choose`](Self::choose), for a timeline's own list.
    #[inline(never)]
    fn choose_between(&self, units: u32, align: u32, list: u8) -> u32 {
        let mut at = self.lists[usize::from(list)].index.find(&self.extents.rows, units, align);
        if at == NIL || self.extents[at].units != units {
            let ready = self.lists[0].index.find(&self.extents.rows, units, align);
            if ready != NIL && (at == NIL || self.extents[ready].start < self.extents[at].start) {
                at = ready;
            }
        }
        at
    }

    /// Whether the place that a request would get in a free extent is backed.
    #[inline]
    fn is_backed_in(&self, at: u32, units: u32, align: u32) -> bool {
        let start = self.extents[at].start;
        let start = if align > 1 { start.next_multiple_of(align) } else { start };
        self.res.is_backed(start, start + units)
    }

    /// As [`take`](Self::take), but anything that is backed, however badly it fits: in the middle
    /// of a free extent too. Slow path.
    pub(crate) fn take_resident(
        &mut self,
        units: u32,
        align: u32,
        list: u8,
    ) -> Result<Option<u32>> {
        self.extents.ensure(2)?;
        for l in [list, READY] {
            let index = &self.lists[usize::from(l)].index;
            let mut start = 0;
            let at = index.find_where(&self.extents.rows, units, align, |n| {
                match self.backed_at(n, units, align) {
                    Some(place) => {
                        start = place;
                        true
                    }
                    None => false,
                }
            });
            if at != NIL {
                return Ok(Some(self.carve_at(at, start, units)));
            }
        }
        Ok(None)
    }

    /// Where a block would lie in a free extent on memory that is there.
    fn backed_at(&self, n: &Extent, units: u32, align: u32) -> Option<u32> {
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

    /// Takes a block from another timeline's list whose timepoint `allowed` accepts. Looks at one
    /// candidate per list.
    pub(crate) fn take_foreign(
        &mut self,
        units: u32,
        align: u32,
        list: u8,
        mut allowed: impl FnMut(PackedTimepoint) -> bool,
    ) -> Result<Option<u32>> {
        self.extents.ensure(2)?;
        for other in 1..self.lists.len() {
            if other == usize::from(list) {
                continue;
            }
            let at = self.lists[other].index.find(&self.extents.rows, units, align);
            if at != NIL
                && allowed(self.extents.timepoint(at))
                && self.is_backed_in(at, units, align)
            {
                return Ok(Some(self.carve(at, units, align)));
            }
        }
        Ok(None)
    }

    /// The timepoint to wait for on the host so that about `units` more become ready, on the
    /// timeline where the fewest values are ahead of it. `more`: pending memory besides the heap's.
    pub(crate) fn cheapest_wait(
        &self,
        units: u32,
        more: &[(u64, PackedTimepoint)],
    ) -> Option<PackedTimepoint> {
        let shift = self.res.shift;
        let mut pending: Vec<(u16, u64, u64)> = Vec::new();
        let mut push = |s: PackedTimepoint, units: u64| {
            // A failed value passes after the work that it was to wait for.
            let at_work = s.timepoint().and_then(|p| p.timeline().obstacle(p.value()));
            if let Some(p) = at_work.filter(|p| !p.timeline().failed(p.value())) {
                // Without host memory for all of them the choice is a worse one.
                host::push(&mut pending, (p.timeline_id().get(), p.value(), units));
            }
        };
        for list in &self.lists[1..] {
            let mut at = list.oldest;
            while at != NIL {
                let n = &self.extents[at];
                let Cold { timepoint, age_next, .. } = self.extents.cold[at as usize];
                // A block merged from many frees is ready granule by granule.
                let (mut g, end) = (n.start.div_ceil(1 << shift), n.end() >> shift);
                while g < end {
                    if let Some(last) = self
                        .res
                        .granules
                        .get(g as usize)
                        .and_then(|g| g.last_of(timepoint.timeline_id()))
                    {
                        push(last, 1 << shift);
                    }
                    g += 1;
                }
                push(timepoint, u64::from(n.units));
                at = age_next;
            }
        }
        self.waiting(|units, s| push(s, u64::from(units)));
        more.iter().for_each(|&(bytes, s)| push(s, bytes >> UNIT_SHIFT));
        pending.sort_unstable();
        let mut best: Option<(bool, u64, PackedTimepoint)> = None;
        for timeline in pending.chunk_by(|a, b| a.0 == b.0) {
            let mut sum = 0;
            let enough = timeline.iter().find(|p| {
                sum += p.2;
                sum >= u64::from(units)
            });
            let last = timeline[timeline.len() - 1];
            let at = enough.unwrap_or(&last);
            let timepoint = PackedTimepoint::from_bits(u64::from(at.0) << 48 | at.1);
            let order = if enough.is_none() { u64::MAX - sum } else { ahead(timepoint) };
            let key = (enough.is_none(), order);
            if best.is_none_or(|b| key < (b.0, b.1)) {
                best = Some((key.0, key.1, timepoint));
            }
        }
        best.map(|b| b.2)
    }
}
