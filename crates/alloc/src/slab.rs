//! Slabs: runs of equal slots for requests up to 64 KiB.
//!
//! A run is one extent of the heap. Its slots are free and ready, free but still in use by a
//! timeline (pending), or lent. While all pending slots of a run belong to one timeline, one
//! comparison with the latest timepoint tells whether they are ready. Otherwise each slot's own
//! timepoint is asked. An empty run goes back to the heap, except one per class, which the slow
//! path takes too.
//!
//! Plain single-threaded state, like the heap. Must not know leases.

use crate::extent::{Block, NIL, Placement};
use crate::heap::{Heap, READY};
use crate::host;
use crate::layout::{CLASSES, UNIT, UNIT_SHIFT, class_size};
use leasehold_core::{PackedTimepoint, Result, TimelineId};

const WORDS: usize = 8;
const RUN_FIRST: u64 = 64 << 10;
const RUN_SMALL: u64 = 128 << 10;
const RUN_LARGE: u64 = 512 << 10;
/// Runs looked at before a new one is made.
const PROBE: usize = 4;

/// The bytes of the next run of `class`, of which there are `runs`: few slots at first, since most
/// classes never need more.
fn run_bytes(class: usize, runs: u32) -> u64 {
    let size = class_size(class);
    let most = if size <= 8 << 10 { RUN_SMALL } else { (size * 8).clamp(RUN_SMALL, RUN_LARGE) };
    let first = (size * 2).max(RUN_FIRST);
    (first << runs.min(6)).min(most).next_multiple_of(UNIT)
}

/// The timelines that may take the pending slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pending {
    None,
    Timeline(TimelineId),
    Several,
}

struct Run {
    extent: u32,
    class: u8,
    slots: u16,
    free: u16,
    listed: bool,
    pending: Pending,
    latest: PackedTimepoint,
    prev: u32,
    next: u32,
    ready_bits: [u64; WORDS],
    pending_bits: [u64; WORDS],
    timepoints: Vec<PackedTimepoint>,
    addr: u64,
    native: u64,
}

/// All runs.
pub(crate) struct Slabs {
    runs: Vec<Run>,
    vacant: Vec<u32>,
    /// Runs with a free slot, by class.
    heads: [u32; CLASSES],
    empty: [u32; CLASSES],
    counts: [u32; CLASSES],
    free_bytes: u64,
    run_bytes: u64,
}

impl Slabs {
    pub(crate) fn new() -> Self {
        Self {
            runs: Vec::new(),
            vacant: Vec::new(),
            heads: [NIL; CLASSES],
            empty: [0; CLASSES],
            counts: [0; CLASSES],
            free_bytes: 0,
            run_bytes: 0,
        }
    }

    /// Bytes of runs, and of the free slots in them.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.run_bytes, self.free_bytes)
    }

    /// A slot of `class` for `timeline`, from the runs there are.
    #[inline(always)]
    pub(crate) fn take(&mut self, class: usize, timeline: TimelineId) -> Option<Block> {
        let mut at = self.heads[class];
        let mut left = PROBE;
        while at != NIL && left > 0 {
            let run = &mut self.runs[at as usize];
            if let Some(popped) = run.pop(timeline) {
                return Some(self.lend(at, class, popped));
            }
            at = run.next;
            left -= 1;
        }
        None
    }

    /// A slot of a run that was just made, whoever may use it still.
    pub(crate) fn take_first(&mut self, id: u32) -> Block {
        let run = &mut self.runs[id as usize];
        let class = usize::from(run.class);
        let (slot, timepoint) = match pop_bit(&mut run.ready_bits) {
            Some(slot) => (slot, PackedTimepoint::NEVER),
            None => {
                // A new run is ready, or all of it is pending: it has its first slot either way.
                run.pending_bits[0] &= !1;
                (0, run.timepoints[0])
            }
        };
        run.free -= 1;
        self.lend(id, class, (slot, timepoint))
    }

    /// A slot that was popped is lent.
    #[inline(always)]
    fn lend(&mut self, id: u32, class: usize, popped: (u16, PackedTimepoint)) -> Block {
        let (run, (slot, timepoint)) = (&self.runs[id as usize], popped);
        let (addr, native) = (run.addr + u64::from(slot) * class_size(class), run.native);
        if run.free + 1 == run.slots {
            self.empty[class] -= 1;
        }
        if run.free == 0 {
            self.unlist(id);
        }
        self.free_bytes -= class_size(class);
        Block { placement: Placement::Slot(id, slot), addr, native, class: class as u16, timepoint }
    }

    /// Units of the next run of a class.
    #[inline]
    pub(crate) fn run_units(&self, class: usize) -> u32 {
        (run_bytes(class, self.counts[class]) >> UNIT_SHIFT) as u32
    }

    /// Makes room for one more run, so that [`add_run`](Self::add_run) cannot fail.
    pub(crate) fn ensure_run(&mut self, class: usize) -> Result<Vec<PackedTimepoint>> {
        let slots =
            (RUN_LARGE.min(class_size(class) * WORDS as u64 * 64) / class_size(class)) as usize;
        let mut timepoints = Vec::new();
        host::room(&mut timepoints, slots)?;
        if self.vacant.is_empty() {
            host::room(&mut self.runs, 1)?;
            host::room(&mut self.vacant, self.runs.len() + 1)?;
        }
        Ok(timepoints)
    }

    /// Makes a run of a used extent. Returns its name.
    pub(crate) fn add_run(
        &mut self,
        heap: &mut Heap,
        extent: u32,
        class: usize,
        mut timepoints: Vec<PackedTimepoint>,
    ) -> u32 {
        let bytes = u64::from(heap.extents[extent].units) << UNIT_SHIFT;
        let slots = (bytes / class_size(class)).min(WORDS as u64 * 64) as u16;
        let timepoint = heap.extents.timepoint(extent);
        timepoints.resize(usize::from(slots), timepoint);
        let mut bits = [0u64; WORDS];
        for s in 0..usize::from(slots) {
            bits[s / 64] |= 1 << (s % 64);
        }
        let over = timepoint.has_passed();
        let (addr, native) = heap.place(extent);
        let run = Run {
            extent,
            class: class as u8,
            slots,
            free: slots,
            listed: false,
            pending: if over { Pending::None } else { Pending::Timeline(timepoint.timeline_id()) },
            latest: timepoint,
            prev: NIL,
            next: NIL,
            ready_bits: if over { bits } else { [0; WORDS] },
            pending_bits: if over { [0; WORDS] } else { bits },
            timepoints,
            addr,
            native,
        };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.runs[id as usize] = run;
                id
            }
            None => {
                self.runs.push(run);
                self.runs.len() as u32 - 1
            }
        };
        heap.extents[extent].link[0] = id;
        self.run_bytes += bytes;
        self.free_bytes += u64::from(slots) * class_size(class);
        self.empty[class] += 1;
        self.counts[class] += 1;
        self.list(id);
        id
    }

    /// Gives a slot back whose last use is at `timepoint`.
    #[inline]
    pub(crate) fn free(&mut self, heap: &mut Heap, id: u32, slot: u16, timepoint: PackedTimepoint) {
        let run = &mut self.runs[id as usize];
        let class = usize::from(run.class);
        run.push(slot, timepoint);
        self.free_bytes += class_size(class);
        if !run.listed {
            self.list(id);
        }
        let run = &self.runs[id as usize];
        if run.free == run.slots {
            self.empty[class] += 1;
            if self.empty[class] > 1 {
                self.retire(heap, id);
            }
        }
    }

    /// Returns empty runs to the heap. Slow path.
    pub(crate) fn drain(&mut self, heap: &mut Heap) {
        for class in 0..CLASSES {
            let mut at = self.heads[class];
            while at != NIL && self.empty[class] > 0 {
                let run = &self.runs[at as usize];
                let next = run.next;
                if run.free == run.slots {
                    self.retire(heap, at);
                }
                at = next;
            }
        }
    }

    /// Bytes of a slot of a run.
    pub(crate) fn slot_bytes(&self, run: u32) -> u64 {
        class_size(usize::from(self.runs[run as usize].class))
    }

    /// The timepoints that pending slots wait for, with their bytes. A walk.
    pub(crate) fn pending(&self, mut f: impl FnMut(u64, PackedTimepoint)) {
        for head in self.heads {
            let mut at = head;
            while at != NIL {
                let run = &self.runs[at as usize];
                if run.pending != Pending::None && !run.latest.is_never() {
                    f(u64::from(run.free) * class_size(usize::from(run.class)), run.latest);
                }
                at = run.next;
            }
        }
    }

    /// Returns an empty run to the heap, unless several timelines still use it.
    fn retire(&mut self, heap: &mut Heap, id: u32) {
        let run = &mut self.runs[id as usize];
        run.refresh();
        let list = match run.pending {
            Pending::None => READY,
            Pending::Timeline(_) => match heap.list_of(run.latest) {
                Some(list) => list,
                None => return,
            },
            Pending::Several => return,
        };
        let (extent, latest, class) = (run.extent, run.latest, usize::from(run.class));
        let bytes = u64::from(heap.extents[extent].units) << UNIT_SHIFT;
        self.run_bytes -= bytes;
        self.free_bytes -= u64::from(run.slots) * class_size(class);
        self.empty[class] -= 1;
        self.counts[class] -= 1;
        self.unlist(id);
        self.runs[id as usize].timepoints = Vec::new();
        self.vacant.push(id);
        heap.extents[extent].link[0] = NIL;
        heap.free(extent, list, if list == READY { PackedTimepoint::NEVER } else { latest });
    }

    fn list(&mut self, id: u32) {
        let class = usize::from(self.runs[id as usize].class);
        let head = self.heads[class];
        let run = &mut self.runs[id as usize];
        (run.prev, run.next, run.listed) = (NIL, head, true);
        if head != NIL {
            self.runs[head as usize].prev = id;
        }
        self.heads[class] = id;
    }

    #[inline]
    fn unlist(&mut self, id: u32) {
        let Run { prev, next, class, .. } = self.runs[id as usize];
        self.runs[id as usize].listed = false;
        if next != NIL {
            self.runs[next as usize].prev = prev;
        }
        if prev != NIL {
            self.runs[prev as usize].next = next;
        } else {
            self.heads[usize::from(class)] = next;
        }
    }

    /// Address, class and number of slots of a run. For snapshots.
    pub(crate) fn run(&self, run: u32) -> (u64, usize, u16) {
        let run = &self.runs[run as usize];
        (run.addr, usize::from(run.class), run.slots)
    }

    /// Until when a free slot may still be used (never: ready). `None`: it is lent, or several
    /// timelines used it last. For snapshots.
    pub(crate) fn free_slot(&self, run: u32, slot: u16) -> Option<PackedTimepoint> {
        let run = &self.runs[run as usize];
        let (word, bit) = (usize::from(slot / 64), 1u64 << (slot % 64));
        if run.ready_bits[word] & bit != 0 {
            Some(PackedTimepoint::NEVER)
        } else {
            (run.pending_bits[word] & bit != 0).then(|| run.timepoints[usize::from(slot)])
        }
    }

    /// Bytes of host memory that the tables take.
    pub(crate) fn host_bytes(&self) -> u64 {
        self.runs.capacity() as u64 * size_of::<Run>() as u64
            + self.runs.iter().map(|r| r.timepoints.capacity() as u64 * 8).sum::<u64>()
    }
}

impl Run {
    #[inline]
    fn pop(&mut self, timeline: TimelineId) -> Option<(u16, PackedTimepoint)> {
        if let Some(slot) = pop_bit(&mut self.ready_bits) {
            self.free -= 1;
            return Some((slot, PackedTimepoint::NEVER));
        }
        match self.pending {
            Pending::None => None,
            Pending::Timeline(l) if l == timeline => {
                let slot = pop_bit(&mut self.pending_bits)?;
                self.free -= 1;
                Some((slot, self.timepoints[usize::from(slot)]))
            }
            _ => self.pop_slow(timeline),
        }
    }

    #[cold]
    fn pop_slow(&mut self, timeline: TimelineId) -> Option<(u16, PackedTimepoint)> {
        self.refresh();
        let found = pop_bit(&mut self.ready_bits).map(|slot| (slot, PackedTimepoint::NEVER));
        let found = found.or_else(|| {
            let own = |slot: &usize| {
                self.pending_bits[slot / 64] >> (slot % 64) & 1 == 1
                    && self.timepoints[*slot].timeline_id() == timeline
            };
            let slot = (0..usize::from(self.slots)).find(own)?;
            self.pending_bits[slot / 64] &= !(1 << (slot % 64));
            Some((slot as u16, self.timepoints[slot]))
        })?;
        self.free -= 1;
        Some(found)
    }

    #[inline]
    fn push(&mut self, slot: u16, timepoint: PackedTimepoint) {
        let (word, bit) = (usize::from(slot / 64), 1u64 << (slot % 64));
        let free = (self.ready_bits[word] | self.pending_bits[word]) & bit;
        debug_assert!(free == 0, "a slot is freed twice");
        self.free += 1;
        if timepoint.is_never() || timepoint.has_passed() {
            self.ready_bits[word] |= bit;
            return;
        }
        self.pending_bits[word] |= bit;
        self.timepoints[usize::from(slot)] = timepoint;
        match self.pending {
            Pending::Timeline(l) if l == timepoint.timeline_id() => {
                if timepoint.value() > self.latest.value() {
                    self.latest = timepoint;
                }
            }
            Pending::None => {
                (self.pending, self.latest) =
                    (Pending::Timeline(timepoint.timeline_id()), timepoint)
            }
            Pending::Timeline(_) if self.latest.has_passed() => {
                self.pending_bits[word] &= !bit;
                self.refresh();
                self.pending_bits[word] |= bit;
                (self.pending, self.latest) =
                    (Pending::Timeline(timepoint.timeline_id()), timepoint);
            }
            _ => self.pending = Pending::Several,
        }
    }

    /// Makes what has passed ready.
    fn refresh(&mut self) {
        match self.pending {
            Pending::None => {}
            Pending::Timeline(_) if self.latest.has_passed() => {
                for w in 0..WORDS {
                    self.ready_bits[w] |= std::mem::take(&mut self.pending_bits[w]);
                }
                self.pending = Pending::None;
            }
            Pending::Timeline(_) | Pending::Several => {
                let mut left = Pending::None;
                let mut latest = PackedTimepoint::NEVER;
                for w in 0..WORDS {
                    let mut bits = self.pending_bits[w];
                    while bits != 0 {
                        let bit = bits & bits.wrapping_neg();
                        bits &= bits - 1;
                        let timepoint = self.timepoints[w * 64 + bit.trailing_zeros() as usize];
                        if timepoint.has_passed() {
                            self.pending_bits[w] &= !bit;
                            self.ready_bits[w] |= bit;
                            continue;
                        }
                        left = match left {
                            Pending::None => Pending::Timeline(timepoint.timeline_id()),
                            Pending::Timeline(l) if l == timepoint.timeline_id() => left,
                            _ => Pending::Several,
                        };
                        if timepoint.value() > latest.value() {
                            latest = timepoint;
                        }
                    }
                }
                (self.pending, self.latest) = (left, latest);
            }
        }
    }
}

#[inline]
fn pop_bit(words: &mut [u64; WORDS]) -> Option<u16> {
    for (i, w) in words.iter_mut().enumerate() {
        if *w != 0 {
            let bit = w.trailing_zeros();
            *w &= *w - 1;
            return Some((i * 64) as u16 + bit as u16);
        }
    }
    None
}

#[cfg(feature = "check")]
#[path = "../tests/check/slab.rs"]
mod check;
