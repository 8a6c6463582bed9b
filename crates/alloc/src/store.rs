//! The store: heap and slabs together, behind one pair of calls.
//!
//! One allocator's lock guards the store. Pure state: no driver call, no lease, no thread.

use crate::extent::{Block, Placement};
use crate::heap::{Heap, READY};
use crate::layout::{MIN_ALIGN, NO_CLASS, SLAB_MAX, UNIT, UNIT_SHIFT, class_of};
use crate::slab::Slabs;
use leasehold_core::{PackedTimepoint, Result, Timeline};

/// A block, if there is memory for it.
pub(crate) type Found = Result<Option<Block>>;

/// The memory that the heap must supply when no free block fits: the request itself, or a slab run
/// for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// Units of a block of its own; for a slab class see [`Store::units`].
    pub(crate) units: u32,
    pub(crate) align: u32,
    pub(crate) class: Option<u16>,
}

impl Need {
    /// The need of a request of `size > 0` bytes aligned to `align`. `None`: more than the space of
    /// units.
    pub(crate) fn of(size: u64, align: u64) -> Option<Need> {
        if size <= SLAB_MAX && align <= MIN_ALIGN {
            return Some(Need { units: 0, align: 1, class: Some(class_of(size) as u16) });
        }
        Need::exact(size, align)
    }

    /// The same request without rounding: a block of its own instead of a slab, alignment as asked.
    /// For when memory runs out, and for what is in no slab class.
    #[inline]
    pub(crate) fn exact(size: u64, align: u64) -> Option<Need> {
        let most = u64::from(u32::MAX) << UNIT_SHIFT;
        let units = |bytes: u64| (bytes <= most).then(|| bytes.div_ceil(UNIT) as u32);
        Some(Need { units: units(size)?, align: units(align)?, class: None })
    }
}

/// Heap and slabs.
pub(crate) struct Store {
    pub(crate) heap: Heap,
    pub(crate) slabs: Slabs,
}

impl Store {
    pub(crate) fn new(granule: u64) -> Self {
        Self { heap: Heap::new(granule), slabs: Slabs::new() }
    }

    /// Units that the heap must supply for a need.
    #[inline]
    pub(crate) fn units(&self, need: Need) -> u32 {
        need.class.map_or(need.units, |class| self.slabs.run_units(class.into()))
    }

    /// Takes a block from what is resident and free for `timeline`. `None`: nothing fits.
    #[inline(always)]
    pub(crate) fn take(&mut self, need: Need, timeline: &Timeline) -> Found {
        if let Some(class) = need.class {
            return self.take_slot(class.into(), timeline);
        }
        Ok(self.heap.take(need.units, need.align, timeline)?.map(|extent| self.block(extent)))
    }

    #[inline(always)]
    pub(crate) fn take_slot(&mut self, class: usize, timeline: &Timeline) -> Found {
        match self.slabs.take(class, timeline.id()) {
            None => self.take_run_slow(class, timeline),
            block => Ok(block),
        }
    }

    #[cold]
    fn take_run_slow(&mut self, class: usize, timeline: &Timeline) -> Found {
        let timepoints = self.slabs.ensure_run(class)?;
        let Some(extent) = self.heap.take(self.slabs.run_units(class), 1, timeline)? else {
            return Ok(None);
        };
        Ok(Some(self.first_slot(extent, class, timepoints)))
    }

    /// The first slot of a run that a used extent becomes.
    fn first_slot(&mut self, extent: u32, class: usize, room: Vec<PackedTimepoint>) -> Block {
        let run = self.slabs.add_run(&mut self.heap, extent, class, room);
        self.slabs.take_first(run)
    }

    /// As [`take`](Self::take), but anything that is resident, however badly it fits.
    pub(crate) fn take_resident(&mut self, need: Need, timeline: &Timeline) -> Found {
        let list = self.heap.list_for(timeline);
        let extent = self.heap.take_resident(self.units(need), need.align, list)?;
        extent.map_or(Ok(None), |extent| self.block_for(extent, need))
    }

    /// As [`take`](Self::take), from memory that other timelines may still be using, where
    /// `allowed` accepts the timepoint.
    pub(crate) fn take_foreign(
        &mut self,
        need: Need,
        timeline: &Timeline,
        allowed: impl FnMut(PackedTimepoint) -> bool,
    ) -> Found {
        let list = self.heap.list_for(timeline);
        let extent = self.heap.take_foreign(self.units(need), need.align, list, allowed)?;
        extent.map_or(Ok(None), |extent| self.block_for(extent, need))
    }

    /// Turns a used extent that a plan made into the block that was asked for.
    pub(crate) fn block_for(&mut self, extent: u32, need: Need) -> Found {
        match need.class {
            None => Ok(Some(self.block(extent))),
            Some(class) => match self.slabs.ensure_run(class.into()) {
                Ok(timepoints) => Ok(Some(self.first_slot(extent, class.into(), timepoints))),
                Err(e) => {
                    let timepoint = self.heap.extents.timepoint(extent);
                    self.free(Placement::Extent(extent), timepoint);
                    Err(e)
                }
            },
        }
    }

    #[inline(always)]
    pub(crate) fn block(&self, extent: u32) -> Block {
        let (addr, native) = self.heap.place(extent);
        let list = self.heap.extents[extent].list;
        let timepoint = if list == READY { PackedTimepoint::NEVER } else { self.pending(extent) };
        Block { placement: Placement::Extent(extent), addr, native, class: NO_CLASS, timepoint }
    }

    /// Until when an extent of a timeline's list may be in use; never, if its last use is over.
    #[inline(never)]
    fn pending(&self, extent: u32) -> PackedTimepoint {
        let timepoint = self.heap.extents.cold[extent as usize].timepoint;
        if timepoint.has_passed() { PackedTimepoint::NEVER } else { timepoint }
    }

    /// Gives a block back whose last use is over at `timepoint`.
    #[inline(always)]
    pub(crate) fn free(&mut self, placement: Placement, timepoint: PackedTimepoint) {
        match placement {
            Placement::Slot(run, slot) => self.slabs.free(&mut self.heap, run, slot, timepoint),
            Placement::Extent(extent) => self.heap.release(extent, timepoint),
        }
    }

    /// Bytes that a block takes.
    pub(crate) fn bytes(&self, placement: Placement) -> u64 {
        match placement {
            Placement::Slot(run, _) => self.slabs.slot_bytes(run),
            Placement::Extent(extent) => u64::from(self.heap.extents[extent].units) << UNIT_SHIFT,
        }
    }
}
