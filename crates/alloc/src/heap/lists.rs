//! Lists: whose free memory is whose, how timelines get one and lose it, and how memory whose uses
//! have passed comes to list 0.

use super::{FreeList, Heap, LIST_IDLE, MAX_LISTS, NO_LIST, READY};
use crate::extent::{Cold, NIL, State};
use leasehold_core::{PackedTimepoint, Timeline, TimelineId};

impl Heap {
    /// The list of a timeline that allocates. When lists have run out: list 0, which is always
    /// right.
    #[inline]
    pub(crate) fn list_for(&mut self, timeline: &Timeline) -> u8 {
        let list = self.list_found(timeline);
        self.lists[usize::from(list)].used_at = self.tick;
        list
    }

    /// As [`list_for`](Self::list_for); that it is used is for the caller to note.
    #[inline]
    pub(super) fn list_found(&mut self, timeline: &Timeline) -> u8 {
        match self.list_of_timeline.get(usize::from(timeline.id().get())) {
            Some(&list) if list != NO_LIST => list,
            _ => self.list_slow(timeline.id()),
        }
    }

    #[cold]
    pub(super) fn list_slow(&mut self, timeline: TimelineId) -> u8 {
        let id = usize::from(timeline.get());
        if id == 0 {
            return READY;
        }
        if self.list_of_timeline.len() <= id {
            if self.list_of_timeline.try_reserve(id + 1 - self.list_of_timeline.len()).is_err() {
                return READY;
            }
            self.list_of_timeline.resize(id + 1, NO_LIST);
        }
        let slot = match (1..self.lists.len()).find(|&i| self.lists[i].timeline.is_none()) {
            Some(i) => i,
            None if self.lists.len() < MAX_LISTS && self.lists.try_reserve(1).is_ok() => {
                self.lists.push(FreeList::new(None));
                self.lists.len() - 1
            }
            // No more lists, or no host memory for one.
            None => return READY,
        };
        if self.lists[slot].index.reach(&mut self.extents.rows, self.reached).is_err() {
            return READY;
        }
        if self.timelines == 1 {
            self.part_lists();
        }
        self.lists[slot].timeline = Some(timeline);
        self.lists[slot].used_at = self.tick;
        self.list_of_timeline[id] = slot as u8;
        self.timelines += 1;
        slot as u8
    }

    /// A second stream appears: idle granules go from the first stream's list to the one of all.
    fn part_lists(&mut self) {
        let shift = self.res.shift;
        for list in 1..self.lists.len() {
            let (mut at, mut left) = (self.lists[list].oldest, self.lists[list].index.count());
            while at != NIL && left > 0 {
                let (n, Cold { timepoint, age_next, .. }) =
                    (self.extents[at], self.extents.cold[at as usize]);
                let first = n.start.div_ceil(1 << shift);
                let (mut g, paged) = (n.end() >> shift, self.spans[usize::from(n.span)].paged);
                // Downwards: what lies below a part that was cut out keeps its extent.
                while paged && !timepoint.has_passed() && g > first {
                    let to = g;
                    while g > first && self.res.is_idle(g - 1, timepoint.timeline_id()) {
                        g -= 1;
                    }
                    if g < to && self.extents.ensure(2).is_ok() {
                        let (idle, _) = self.isolate(at, g << shift, to << shift);
                        self.coalesce(idle, READY, PackedTimepoint::NEVER, false);
                    }
                    g = g.saturating_sub(1);
                }
                (at, left) = (age_next, left - 1);
            }
        }
    }

    /// Whether nobody uses free memory any more.
    pub(crate) fn is_over(&self) -> bool {
        let mut free = (0..).zip(&self.extents.rows).filter(|n| n.1.state == State::Free);
        let mut over = true;
        self.waiting(|_, s| over &= s.has_passed());
        over &= self.old_mappings.timepoints().all(PackedTimepoint::has_passed);
        over && free.all(|n| self.extents.timepoint(n.0).has_passed())
    }

    /// Keeps an extent that a timeline without a list may still be using. Takes no host memory.
    fn wait(&mut self, id: u32, timepoint: PackedTimepoint) {
        self.extents[id].state = State::Waiting;
        self.extents.cold[id as usize] = Cold { timepoint, age_prev: NIL, age_next: self.waiting };
        self.waiting = id;
    }

    /// Takes an extent that several timelines may still be using out of circulation.
    pub(crate) fn defer(&mut self, id: u32) {
        self.extents[id].state = State::Waiting;
        self.deferred += u64::from(self.extents[id].units);
    }

    /// Gives a deferred extent back, which one timeline at most may still be using.
    pub(crate) fn free_deferred(&mut self, id: u32, timepoint: PackedTimepoint) {
        self.deferred -= u64::from(self.extents[id].units);
        self.release(id, timepoint);
    }

    /// Gives a used extent back whose last use is over at `timepoint`. Never fails, never takes
    /// host memory.
    #[inline(always)]
    pub(crate) fn release(&mut self, extent: u32, timepoint: PackedTimepoint) {
        if timepoint.is_never() || timepoint.has_passed() {
            self.free_ready(extent);
        } else {
            match self.list_of(timepoint) {
                Some(list) => self.free(extent, list, timepoint),
                None => self.wait(extent, timepoint),
            }
        }
    }

    /// Looks at the blocks of timelines without a list.
    pub(crate) fn poll_waiting(&mut self) {
        let mut at = std::mem::replace(&mut self.waiting, NIL);
        while at != NIL {
            let Cold { timepoint, age_next, .. } = self.extents.cold[at as usize];
            self.release(at, timepoint);
            at = age_next;
        }
    }

    /// Moves up to `limit` blocks whose timepoints have passed into list 0, from one list after the
    /// other.
    #[inline]
    pub(crate) fn drain_some(&mut self, limit: usize) {
        if self.next_drain >= self.lists.len() {
            self.next_drain = 1;
            if self.waiting != NIL {
                self.poll_waiting();
            }
        }
        self.drain(self.next_drain, limit);
        self.next_drain += 1;
    }

    pub(super) fn drain(&mut self, list: usize, limit: usize) {
        let Some(l) = self.lists.get(list) else { return };
        let Some(timeline) = l.timeline else { return };
        let mut at = l.oldest;
        let mut left = limit;
        // The timeline's progress is read once: all timepoints of a list are on its timeline.
        let mut done = None;
        while at != NIL && left > 0 {
            let Cold { timepoint, age_next, .. } = self.extents.cold[at as usize];
            let done = *done.get_or_insert_with(|| {
                timepoint.timepoint().map_or(u64::MAX, |p| p.timeline().passed())
            });
            debug_assert!(timepoint.is_never() || timepoint.timeline_id() == timeline);
            if timepoint.value() > done {
                break;
            }
            // The successor may be merged away only with its own list's blocks, and this one merges
            // with list 0's.
            self.unlink_free(at);
            self.coalesce(at, READY, PackedTimepoint::NEVER, false);
            at = age_next;
            left -= 1;
        }
    }

    /// Moves everything that has passed into list 0 and gives up lists that nobody uses. Slow path
    /// only.
    pub(crate) fn drain_all(&mut self) {
        self.poll_waiting();
        let timelines = self.timelines;
        for list in 1..self.lists.len() {
            if self.timelines > 1 {
                self.drain(list, usize::MAX);
            }
            let l = &self.lists[list];
            let needed = l.index.count() > 0 || l.plans > 0;
            if l.timeline.is_some() && !needed && self.tick.saturating_sub(l.used_at) > LIST_IDLE {
                if let Some(timeline) = self.lists[list].timeline.take() {
                    self.list_of_timeline[usize::from(timeline.get())] = NO_LIST;
                }
                self.timelines -= 1;
            }
        }
        if timelines > 1 && self.timelines == 1 {
            self.unite_lists();
        }
    }

    /// A single timeline is left: what lies in its list beside ready memory merges with it, as it
    /// does from now on.
    pub(super) fn unite_lists(&mut self) {
        for list in 1..self.lists.len() {
            for _ in 0..self.lists[list].index.count() {
                // A merged block has gone to the end of the order of release, or no longer exists.
                let id = self.lists[list].oldest;
                if id == NIL {
                    break;
                }
                let timepoint = self.extents.timepoint(id);
                self.unlink_free(id);
                self.coalesce(id, list as u8, timepoint, true);
            }
        }
    }
}
