//! The state that an allocator's lock guards: the store, the growing blocks, and the rows that are
//! vacant, deferred and retired.

use crate::buffer::{Buffer, Row};
use crate::extent::{Block, Placement};
use crate::host;
use crate::layout::UNIT_SHIFT;
use crate::lock::Lock;
use crate::ranges::Ranges;
use crate::store::Store;
use crate::table::{Deferred, Table, Vacant};
use leasehold_core::{PackedTimepoint, Result, Timeline, TimelineId, Timepoint};
use std::any::Any;
use std::time::Duration;

/// An object that must outlast a buffer.
pub(crate) enum Keep {
    /// The owner of imported memory: it outlasts the last use, too.
    Import(#[expect(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>),
    /// The memory of an arena that a member lies in.
    Member(Box<dyn ArenaMemory>),
    /// The place of a growing block.
    Growing(u32),
}

/// The memory of an arena, for its members.
pub(crate) trait ArenaMemory: Send + Sync {
    /// The last lease of `member` was dropped: its uses are the memory's from now on.
    fn take_uses(&self, member: &Buffer);
}

/// The guarded state.
pub(crate) struct Core {
    pub(crate) store: Store,
    /// The growing blocks.
    pub(crate) ranges: Ranges,
    pub(crate) vacant: Vacant,
    /// The keeper is gone; what comes back counts down the allocator's counts.
    pub(crate) orphan: bool,
    /// The objects that buffers keep alive, by row.
    pub(crate) keeps: Vec<Option<Keep>>,
    /// Rows whose blocks several timelines may still be using.
    pub(crate) deferred: Deferred,
    /// Rows whose keeps wait for their last use to be over.
    pub(crate) retired: Deferred,
    pub(crate) imported: u64,
    pub(crate) imported_bytes: u64,
    pub(crate) allocations: u64,
}

impl Core {
    /// The state of an allocator whose blocks are all free in `store`.
    pub(crate) fn new(store: Store) -> Self {
        Self {
            store,
            ranges: Ranges::default(),
            vacant: Vacant::new(),
            orphan: false,
            keeps: Vec::new(),
            deferred: Deferred::NONE,
            retired: Deferred::NONE,
            imported: 0,
            imported_bytes: 0,
            allocations: 0,
        }
    }

    /// A row that may keep something alive.
    pub(crate) fn take_keeping_row<'a>(&mut self, table: &'a Table) -> Result<&'a Row> {
        let row = table.take(&mut self.vacant)?;
        let room = self.room_to_keep(row.header.index());
        room.inspect_err(|_| table.put(&mut self.vacant, row)).map(|()| row)
    }

    /// Keeps something alive until nobody holds the row and its last use is over. Returns what the
    /// row has kept so far, to be dropped without the lock. Wants [`room`](Self::room_to_keep) for
    /// it.
    pub(crate) fn keep(&mut self, row: u32, keep: Keep) -> Option<Keep> {
        self.keeps.get_mut(row as usize).and_then(|k| k.replace(keep))
    }

    /// Nobody holds the row, and its last use is over. Returns what it has kept, to be dropped
    /// without the lock.
    pub(crate) fn end_keep(&mut self, row: u32) -> Option<Keep> {
        let keep = self.keeps.get_mut(row as usize).and_then(Option::take);
        if let Some(Keep::Growing(at)) = keep {
            self.ranges.park(at);
        }
        keep
    }

    /// Makes room for what a row keeps.
    pub(crate) fn room_to_keep(&mut self, row: u32) -> Result<()> {
        let rows = row as usize + 1;
        if self.keeps.len() < rows {
            let more = rows - self.keeps.len();
            host::room(&mut self.keeps, more)?;
            self.keeps.resize_with(rows, || None);
        }
        Ok(())
    }

    /// Looks at up to `most` deferred rows, the oldest first. Blocks that one timeline at most may
    /// still be using go back. The others go to the end, so that the next look is at others.
    pub(crate) fn free_deferred(&mut self, table: &Table, most: u32) {
        let Self { deferred, store, vacant, .. } = self;
        let end = deferred.last;
        for _ in 0..most {
            let Some(row) = deferred.take(table) else { return };
            let last = row.header.index() == end;
            match row.buffer.used_until() {
                None => deferred.append(table, row),
                Some(timepoint) => {
                    row.buffer.reset();
                    match row.placement() {
                        Placement::Extent(extent) => store.heap.free_deferred(extent, timepoint),
                        slot => store.free(slot, timepoint),
                    }
                    table.restore(vacant, row);
                }
            }
            if last {
                return;
            }
        }
    }

    /// Calls `f` with the bytes of every free or idle block that work may still use, outside the
    /// heap's lists, and each timepoint that it waits for.
    pub(crate) fn each_pending(&self, table: &Table, mut f: impl FnMut(u64, PackedTimepoint)) {
        self.deferred.each(table, |row| {
            let bytes = self.store.bytes(row.placement());
            row.buffer.for_each_use(|s| f(bytes, s));
        });
        self.store.slabs.pending(&mut f);
        self.ranges.pending(&mut f);
    }

    /// Bytes free and ready, and free but still in use by a timeline. Both without the free slots
    /// of slabs. A deferred block whose uses are over counts as ready. A walk.
    pub(crate) fn free_bytes(&self, table: &Table) -> (u64, u64) {
        let (ready, pending) = self.store.heap.free_units_now();
        let mut over = 0;
        self.deferred.each(table, |row| {
            let placement = row.placement();
            let is_over = row.buffer.used_until().is_some_and(PackedTimepoint::is_never);
            if matches!(placement, Placement::Extent(_)) && is_over {
                over += self.store.bytes(placement);
            }
        });
        ((ready << UNIT_SHIFT) + over, (pending << UNIT_SHIFT) - over)
    }

    /// Brings everything whose last use is over to where everybody can take it. Slow path.
    pub(crate) fn settle(&mut self, table: &Table) {
        self.free_deferred(table, u32::MAX);
        let Store { heap, slabs } = &mut self.store;
        slabs.drain(heap);
        heap.drain_all();
    }

    /// Whether every stream is done with the memory.
    pub(crate) fn is_over(&mut self, table: &Table) -> bool {
        self.settle(table);
        let mut over = !self.deferred.any();
        self.store.slabs.pending(|_, s| over &= s.has_passed());
        self.retired.each(table, |row| {
            over &= row.buffer.used_until() == Some(PackedTimepoint::NEVER);
        });
        over && self.ranges.is_over() && self.store.heap.is_over()
    }

    /// A row for a block that was taken, which goes back if there is no row.
    #[inline(always)]
    pub(crate) fn row_of<'a>(
        &mut self,
        table: &'a Table,
        block: Block,
        size: u64,
        timeline: &'static Timeline,
    ) -> Result<&'a Row> {
        match table.take(&mut self.vacant) {
            Ok(row) => {
                table.fill(row, block, size, timeline);
                self.allocations += 1;
                Ok(row)
            }
            Err(e) => {
                self.store.free(block.placement, block.timepoint);
                Err(e)
            }
        }
    }
}

/// Asks the external timelines that free memory waits for how far they are. Their owners do not see
/// submissions, so nothing but a question makes them progress. Called without the lock: it calls
/// the driver.
#[cold]
pub(crate) fn ask_external(core: &Lock<Core>, table: &Table) {
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
        let core = core.lock();
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
        core.retired.each(table, |row| row.buffer.for_each_use(&mut pending));
        core.each_pending(table, |_, s| pending(s));
    }
    for id in timelines {
        let point = PackedTimepoint::from_bits(u64::from(id.get()) << 48 | 1).timepoint();
        if let Some(timeline) = point.map(Timepoint::timeline).filter(|t| t.is_external()) {
            // The timeline shows the result of this wait.
            let _ = timeline.wait(timeline.submitted(), Some(Duration::ZERO));
        }
    }
}
