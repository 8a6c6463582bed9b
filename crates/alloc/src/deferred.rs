//! Deferred frees: rows that are freed but still in use by a stream.
//!
//! Several streams may still be using such a row's block, or one stream what the row keeps alive.
//! The row stays as it was, with the record of its uses, in a list through its header. So a free
//! needs no host memory, however many streams used the block. The allocator's lock guards the lists
//! and links. PyTorch's caching allocator keeps events for this; here the record takes their place.

use crate::buffer::Row;
use crate::host;
use crate::state::{Core, Deferred, Inner, NONE};
use crate::store::Placement;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{PackedTimepoint, Timeline, TimelineId, Timepoint};
use std::time::Duration;

impl Inner {
    /// Puts a row that nobody holds into a list, under a new generation, with its record as it is.
    pub(crate) fn put_aside(
        &self,
        core: &mut Core,
        row: &Row,
        list: impl Fn(&mut Core) -> &mut Deferred,
    ) {
        // Whether it may be used again is asked once it comes back.
        let _ = self.table.bump_generation(row);
        core.vacant.live -= 1;
        self.append(list(core), row);
    }

    /// Puts a row at the end of a list.
    pub(crate) fn append(&self, list: &mut Deferred, row: &Row) {
        row.header.next.store(NONE, Ordering::Relaxed);
        let last = std::mem::replace(&mut list.last, row.header.index());
        match self.table.get(last) {
            Some(last) => last.header.next.store(row.header.index(), Ordering::Relaxed),
            None => list.first = row.header.index(),
        }
    }

    /// Takes the first row out of a list.
    pub(crate) fn take_aside(&self, list: &mut Deferred) -> Option<&Row> {
        let row = self.table.get(list.first)?;
        list.first = row.header.next.load(Ordering::Relaxed);
        if list.first == NONE {
            list.last = NONE;
        }
        Some(row)
    }

    /// Calls `f` with every row of a list.
    pub(crate) fn each_aside(&self, list: Deferred, mut f: impl FnMut(&Row)) {
        let mut at = list.first;
        while let Some(row) = self.table.get(at) {
            at = row.header.next.load(Ordering::Relaxed);
            f(row);
        }
    }

    /// Looks at up to `most` deferred rows, the oldest first. Blocks that one timeline at most may
    /// still be using go back. The others go to the end, so that the next look is at others.
    pub(crate) fn free_deferred(&self, core: &mut Core, most: u32) {
        let Core { deferred, store, vacant, .. } = core;
        let end = deferred.last;
        for _ in 0..most {
            let Some(row) = self.take_aside(deferred) else { return };
            let last = row.header.index() == end;
            match row.buffer.used_until() {
                None => self.append(deferred, row),
                Some(timepoint) => {
                    row.buffer.reset();
                    store.free_deferred(row.placement(), timepoint);
                    self.table.restore(vacant, row);
                }
            }
            if last {
                return;
            }
        }
    }

    /// Calls `f` with the bytes of every deferred block and each timepoint that it waits for.
    pub(crate) fn each_deferred(&self, core: &Core, mut f: impl FnMut(u64, PackedTimepoint)) {
        self.each_aside(core.deferred, |row| {
            let bytes = core.store.bytes(row.placement());
            row.buffer.for_each_use(|s| f(bytes, s));
        });
    }

    /// Bytes free and ready, and free but still in use by a timeline, as
    /// [`Store::free_bytes`](crate::store::Store::free_bytes). A deferred block whose uses are over
    /// counts as ready.
    pub(crate) fn free_bytes(&self, core: &Core) -> (u64, u64) {
        let (ready, pending) = core.store.free_bytes();
        let mut over = 0;
        self.each_aside(core.deferred, |row| {
            let placement = row.placement();
            let is_over = row.buffer.used_until().is_some_and(PackedTimepoint::is_never);
            if matches!(placement, Placement::Extent(_)) && is_over {
                over += core.store.bytes(placement);
            }
        });
        (ready + over, pending - over)
    }

    /// Asks the external timelines that free memory waits for how far they are. Their owners do not
    /// see submissions, so nothing else makes them progress. Without external timelines the call
    /// does nothing. Called without the lock: it calls the driver.
    #[cold]
    pub(crate) fn ask_external(&self) {
        if !Timeline::any_external() {
            return;
        }
        let mut timelines: Vec<TimelineId> = Vec::new();
        let mut note = |id: TimelineId| {
            if id.get() != 0 && !timelines.contains(&id) {
                // A timeline without host memory for its entry is asked by a later call.
                host::push(&mut timelines, id);
            }
        };
        {
            let core = self.core.lock();
            let heap = &core.store.heap;
            heap.pending_by_timeline().for_each(|(_, timeline)| note(timeline));
            // A use that is over is not asked for: its stream may be gone.
            let mut pending = |s: PackedTimepoint| {
                if !s.has_passed() {
                    note(s.timeline_id());
                }
            };
            heap.waiting(|_, s| pending(s));
            heap.old_mappings.timepoints().for_each(&mut pending);
            core.store.slabs.pending(|_, s| pending(s));
            for list in [core.deferred, core.retired] {
                self.each_aside(list, |row| row.buffer.for_each_use(&mut pending));
            }
        }
        for id in timelines {
            let point = PackedTimepoint::from_bits(u64::from(id.get()) << 48 | 1).timepoint();
            if let Some(timeline) = point.map(Timepoint::timeline).filter(|t| t.is_external()) {
                // The timeline shows the result of this wait.
                let _ = timeline.wait(timeline.submitted(), Some(Duration::ZERO));
            }
        }
    }

    /// Brings everything whose last use is over to where everybody can take it. Slow path.
    pub(crate) fn settle(&self, core: &mut Core) {
        self.free_deferred(core, u32::MAX);
        core.store.drain();
    }
}
