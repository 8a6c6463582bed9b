//! Reports on the heap's contents. They change nothing.

use super::{FreeList, Heap, ahead};
use crate::extent::{Cold, Extent, NIL, State};
use crate::layout::UNIT_SHIFT;
use leasehold_core::{PackedTimepoint, TimelineId};

impl Heap {
    /// Units that lie free and resident in list 0, and in the timelines' lists.
    pub(crate) fn free_units(&self) -> (u64, u64) {
        let mut waiting = self.deferred;
        self.waiting(|units, _| waiting += u64::from(units));
        let resident = |l: &FreeList| l.index.units() - (l.index.holes() << self.res.shift);
        (resident(&self.lists[0]), self.lists[1..].iter().map(resident).sum::<u64>() + waiting)
    }

    /// Units that lie free and resident and whose last use is over, and those that a timeline may
    /// still use. A walk.
    pub(crate) fn free_units_now(&self) -> (u64, u64) {
        let (ready, pending) = self.free_units();
        let mut waiting = self.deferred;
        self.waiting(|units, s| waiting += if s.has_passed() { 0 } else { u64::from(units) });
        let in_use = self.lists[1..].iter().map(|l| self.units_in_use(l)).sum::<u64>() + waiting;
        (ready + pending - in_use, in_use)
    }

    /// Units of a timeline's list that are resident and whose last use is not over.
    fn units_in_use(&self, list: &FreeList) -> u64 {
        let (mut at, mut units, mut done) = (list.oldest, 0, None);
        while at != NIL {
            let Cold { timepoint, age_next, .. } = self.extents.cold[at as usize];
            let n = &self.extents[at];
            // All timepoints of a list are on its timeline, whose progress is read once.
            let done = *done.get_or_insert_with(|| {
                timepoint.timepoint().map_or(u64::MAX, |p| p.timeline().passed())
            });
            if timepoint.value() > done {
                units += u64::from(n.units) - (u64::from(n.holes) << self.res.shift);
            }
            at = age_next;
        }
        units
    }

    /// Bytes that lie free in each timeline's list and that it may still use, with the timeline.
    pub(crate) fn pending_by_timeline(&self) -> impl Iterator<Item = (u64, TimelineId)> {
        self.lists[1..]
            .iter()
            .filter_map(|l| Some((self.units_in_use(l) << UNIT_SHIFT, l.timeline?)))
            .filter(|l| l.0 > 0)
    }

    /// The newest timepoint of a block in a timeline's list: of the timeline that is least far
    /// behind.
    pub(crate) fn newest_pending(&self) -> PackedTimepoint {
        let newest = self.lists[1..]
            .iter()
            .filter(|l| l.newest != NIL)
            .map(|l| self.extents.timepoint(l.newest));
        let pending = newest.filter(|s| !s.has_passed());
        pending.min_by_key(|&s| ahead(s)).unwrap_or(PackedTimepoint::NEVER)
    }

    /// The largest piece of free memory in units that is backed throughout, whatever its list. A
    /// walk.
    pub(crate) fn largest_free(&self) -> u32 {
        let free = self.extents.rows.iter().filter(|n| n.state == State::Free);
        free.map(|n| if n.holes == 0 { n.units } else { self.backed_within(n) }).max().unwrap_or(0)
    }

    /// The longest backed part of an extent.
    pub(super) fn backed_within(&self, n: &Extent) -> u32 {
        let mut best = 0;
        self.backed_parts(n, |from, to| best = best.max(to - from));
        best
    }
}
