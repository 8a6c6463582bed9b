//! Residency: which granules of the paged spans are backed, by which piece of physical memory, and
//! the plans that change it.
//!
//! A change is a [`Plan`]: made under the heap's lock (the extents it concerns are taken out of
//! circulation), carried out by [`Plan::run`] without it, and brought back by
//! [`Heap::finish`](crate::heap::Heap) under it. A plan that fails is undone as far as the driver
//! lets it; what the driver does not take back is quarantined and stays counted.

use crate::backing::Backing;
use crate::extent::{Extent, NIL};
use crate::host;
use leasehold_core::{PackedTimepoint, Result, TimelineId};

/// The piece that backs a granule, and the granule's last uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Granule {
    pub(crate) piece: u32,
    /// The last use by one timeline, as reported by its frees.
    last: PackedTimepoint,
    /// The same of a second timeline; [`MANY`] once there were more at a time.
    other: PackedTimepoint,
}

/// More timelines than are kept apart.
const MANY: PackedTimepoint = PackedTimepoint::from_bits(1);

impl Granule {
    const VACANT: Granule =
        Granule { piece: NIL, last: PackedTimepoint::NEVER, other: PackedTimepoint::NEVER };

    /// The last pending use, if it is `timeline`'s. `NEVER`: none is pending. `None`: another
    /// timeline's is.
    #[inline]
    pub(crate) fn last_of(&self, timeline: TimelineId) -> Option<PackedTimepoint> {
        let over = |s: PackedTimepoint| s != MANY && s.has_passed();
        match (over(self.last), over(self.other)) {
            (true, true) => Some(PackedTimepoint::NEVER),
            (false, true) => Some(self.last).filter(|s| s.timeline_id() == timeline),
            (true, false) => Some(self.other).filter(|&s| s != MANY && s.timeline_id() == timeline),
            (false, false) => None,
        }
    }

    /// A part of it was released until `timepoint`. Releases need not come in the order of their
    /// timepoints.
    fn note(&mut self, timepoint: PackedTimepoint) {
        for word in [&mut self.last, &mut self.other] {
            if *word == MANY {
                return;
            }
            if word.timeline_id() == timepoint.timeline_id() {
                if word.value() < timepoint.value() {
                    *word = timepoint;
                }
                return;
            }
            if word.has_passed() {
                *word = timepoint;
                return;
            }
        }
        self.other = MANY;
    }
}

/// Where a piece of physical memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceState {
    /// A vacant table entry.
    Vacant,
    /// Mapped at its granule.
    Mapped,
    /// Mapped nowhere, kept for the next growth.
    Cached,
    /// In a plan.
    Moving,
    /// In a range that the driver would not take back.
    Lost,
}

/// A piece of physical memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    /// The heap's granule that it is mapped at. [`NIL`]: none of the heap's, but perhaps a place in
    /// a growing block.
    pub(crate) at: u32,
    pub(crate) granules: u32,
    pub(crate) handle: u64,
    pub(crate) state: PieceState,
    /// Growing blocks that it is mapped in, beyond the first one.
    pub(crate) more: u32,
}

/// The tables.
#[derive(Default)]
pub(crate) struct Residency {
    /// log2 of a granule in units.
    pub(crate) shift: u32,
    pub(crate) granules: Vec<Granule>,
    pub(crate) pieces: Vec<Piece>,
    vacant: Vec<u32>,
    pub(crate) cached: Vec<u32>,
    pub(crate) quarantined: u64,
    /// Bytes that growing blocks have mapped once more than there is memory.
    pub(crate) shared: u64,
}

impl Residency {
    pub(crate) fn new(shift: u32) -> Self {
        Self { shift, ..Self::default() }
    }

    /// Bytes of a number of granules.
    #[inline]
    pub(crate) fn bytes(&self, granules: u32) -> u64 {
        u64::from(granules) << (self.shift + crate::layout::UNIT_SHIFT)
    }

    /// Granules of pieces in hand that are mapped nowhere.
    pub(crate) fn cached_granules(&self) -> u32 {
        self.cached.iter().map(|&p| self.pieces[p as usize].granules).sum()
    }

    /// Bytes of these.
    pub(crate) fn cached_bytes(&self) -> u64 {
        self.bytes(self.cached_granules())
    }

    /// Remembers who used an extent's memory last.
    #[inline]
    pub(crate) fn note_use(&mut self, extent: &Extent, timepoint: PackedTimepoint) {
        let from = (extent.start >> self.shift) as usize;
        let to = ((extent.end() - 1) >> self.shift) as usize;
        let whole = (extent.start.div_ceil(1 << self.shift) as usize)
            ..(extent.end() >> self.shift) as usize;
        if let Some(range) = self.granules.get_mut(from..=to) {
            for (g, granule) in (from..).zip(range) {
                if whole.contains(&g) {
                    // Nobody else has any of it, and the extent's timepoint stands for all uses
                    // before.
                    (granule.last, granule.other) = (timepoint, PackedTimepoint::NEVER);
                } else {
                    granule.note(timepoint);
                }
            }
        }
    }

    #[inline]
    pub(crate) fn piece_of(&self, granule: u32) -> u32 {
        self.granules.get(granule as usize).map_or(NIL, |g| g.piece)
    }

    /// Whether a granule under free memory that `timeline` used last has no memory, or its last use
    /// is over.
    pub(crate) fn is_idle(&self, granule: u32, timeline: TimelineId) -> bool {
        let known = self.granules.get(granule as usize).filter(|g| g.piece != NIL);
        known.is_none_or(|g| g.last_of(timeline).is_some_and(PackedTimepoint::has_passed))
    }

    /// Makes the granule table reach up to `end`.
    pub(crate) fn reach(&mut self, end: u32) -> Result<()> {
        let end = end as usize;
        if self.granules.len() < end {
            let more = end - self.granules.len();
            host::room(&mut self.granules, more)?;
            self.granules.resize(end, Granule::VACANT);
        }
        Ok(())
    }

    /// Makes room for so many new pieces.
    pub(crate) fn room(&mut self, more: usize) -> Result<()> {
        let all = self.pieces.len() + more;
        host::room(&mut self.pieces, more)?;
        host::room(&mut self.vacant, all)?;
        host::room(&mut self.cached, all)
    }

    /// A piece that the driver is to make. There is [`room`](Self::room) for it.
    pub(crate) fn new_piece(&mut self, granules: u32) -> u32 {
        let state = PieceState::Moving;
        let piece = Piece { at: NIL, granules, handle: 0, state, more: 0 };
        if let Some(id) = self.vacant.pop() {
            self.pieces[id as usize] = piece;
            return id;
        }
        debug_assert!(self.pieces.len() < self.pieces.capacity());
        self.pieces.push(piece);
        self.pieces.len() as u32 - 1
    }

    pub(crate) fn drop_piece(&mut self, id: u32) {
        self.pieces[id as usize].state = PieceState::Vacant;
        self.vacant.push(id);
    }

    pub(crate) fn set_mapped(&mut self, id: u32, at: u32, state: PieceState) {
        let p = &mut self.pieces[id as usize];
        p.at = at;
        p.state = state;
        if at == NIL {
            return;
        }
        for g in at..at + p.granules {
            self.granules[g as usize].piece = id;
        }
    }

    pub(crate) fn set_unmapped(&mut self, at: u32, granules: u32) {
        if at == NIL {
            return;
        }
        for g in at..at + granules {
            self.granules[g as usize] = Granule::VACANT;
        }
    }

    pub(crate) fn put_cached(&mut self, id: u32) {
        let p = &mut self.pieces[id as usize];
        p.at = NIL;
        p.state = PieceState::Cached;
        self.cached.push(id);
    }

    /// Whether a piece is in hand.
    pub(crate) fn is_cached(&self, piece: u32) -> bool {
        self.pieces[piece as usize].state == PieceState::Cached
    }

    /// Bytes of a piece.
    pub(crate) fn bytes_of(&self, piece: u32) -> u64 {
        self.bytes(self.pieces[piece as usize].granules)
    }

    /// Whether a piece that leaves a growing block is mapped nowhere then.
    pub(crate) fn is_alone(&self, piece: u32) -> bool {
        let p = &self.pieces[piece as usize];
        p.more == 0 && p.state == PieceState::Mapped
    }

    /// A piece is about to be mapped in one more growing block.
    pub(crate) fn share(&mut self, piece: u32) {
        self.pieces[piece as usize].more += 1;
        self.shared += self.bytes_of(piece);
    }

    /// Writes down how a step of a piece with several mappings ended. A mapping that the driver
    /// keeps is lost with the piece, which its other blocks use on.
    pub(crate) fn end_shared(&mut self, s: &Step) {
        let p = &mut self.pieces[s.piece as usize];
        match (s.source, s.end) {
            (_, End::Mapped) | (Source::Unshared { .. }, End::Untouched) => return,
            (_, End::LostAtSource | End::LostAtTarget) if p.state != PieceState::Lost => {
                p.state = PieceState::Lost;
                self.quarantined += s.bytes;
            }
            _ => {}
        }
        match (p.more, p.state) {
            (0, PieceState::Mapped) => self.put_cached(s.piece),
            (0, _) => {}
            (more, _) => {
                p.more = more - 1;
                self.shared -= s.bytes;
            }
        }
    }

    /// Bytes of host memory that the tables take.
    pub(crate) fn host_bytes(&self) -> u64 {
        (self.granules.capacity() * size_of::<Granule>()
            + self.pieces.capacity() * size_of::<Piece>()) as u64
    }

    /// Unbacked granules that `[start, end)` touches.
    #[inline]
    pub(crate) fn missing(&self, start: u32, end: u32) -> u32 {
        let (from, to) = ((start >> self.shift) as usize, ((end - 1) >> self.shift) as usize + 1);
        let known = &self.granules[from.min(self.granules.len())..to.min(self.granules.len())];
        let beyond = to - from - known.len();
        known.iter().filter(|g| g.piece == NIL).count() as u32 + beyond as u32
    }

    /// Whether all granules that `[start, end)` touches are backed.
    #[inline]
    pub(crate) fn is_backed(&self, start: u32, end: u32) -> bool {
        let touched = (start >> self.shift) as usize..((end - 1) >> self.shift) as usize + 1;
        self.granules.get(touched).is_some_and(|known| known.iter().all(|g| g.piece != NIL))
    }
}

/// Where a step takes its piece from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The cache of unmapped pieces.
    Cached,
    /// From under free memory, or from a growing block's end; the granule, [`NIL`] for a growing
    /// block, and the address it is unmapped from.
    Reclaimed { from: u32, from_addr: u64 },
    /// From under free memory that the block's own timeline may use until `until`. The old mapping
    /// stays until then.
    Aliased { from: u32, from_addr: u64, until: PackedTimepoint },
    /// The driver.
    New,
    /// Another growing block, where it stays mapped.
    Shared,
    /// A growing block's end, while it is mapped in others too.
    Unshared { from_addr: u64 },
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Nothing happened; a reclaimed piece is still where it was.
    Untouched,
    /// Mapped at its new place.
    Mapped,
    /// In hand, mapped nowhere.
    Loose,
    /// The driver did not unmap it from where it was reclaimed.
    LostAtSource,
    /// The driver did not unmap it from its new place.
    LostAtTarget,
    /// The driver took it back.
    Destroyed,
    /// The driver did not take it back, and it is mapped nowhere.
    Leaked,
}

/// Maps one piece.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    /// The free extent that the piece is taken from under, out of circulation; or `NIL`.
    pub(crate) emptied: u32,
    pub(crate) piece: u32,
    /// The heap's granule; [`NIL`] for a place in a growing block, and for none.
    pub(crate) at: u32,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) handle: u64,
    pub(crate) source: Source,
    pub(crate) end: End,
}

impl Step {
    /// Where the piece is mapped at first.
    pub(crate) fn source_addr(&self) -> Option<u64> {
        match self.source {
            Source::Reclaimed { from_addr, .. } | Source::Unshared { from_addr } => Some(from_addr),
            _ => None,
        }
    }

    /// Gets hold of the piece.
    pub(crate) fn obtain(&mut self, backing: &dyn Backing) -> Result<()> {
        match self.source {
            Source::Cached => {}
            // The piece is where it was as long as it is not mapped elsewhere.
            Source::Aliased { .. } | Source::Shared => return Ok(()),
            Source::New => self.handle = backing.create(self.bytes)?,
            Source::Reclaimed { from_addr, .. } | Source::Unshared { from_addr } => {
                // SAFETY: the planner took the granule out of those whose last use is over; its
                // piece is mapped there.
                unsafe { backing.unmap(from_addr, self.bytes) }
                    .inspect_err(|_| self.end = End::LostAtSource)?;
            }
        }
        self.end = End::Loose;
        Ok(())
    }

    /// Gives the piece back to the driver.
    pub(crate) fn destroy(&mut self, backing: &dyn Backing) {
        if self.obtain(backing).is_ok() {
            // SAFETY: the piece is loose, so mapped nowhere, and the step that knows its handle
            // ends here.
            let gone = unsafe { backing.destroy(self.handle, self.bytes) };
            self.end = if gone.is_ok() { End::Destroyed } else { End::Leaked };
        }
    }
}

/// A change of residency that ends with a used block, or with a longer growing block.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The block with the granules that it needs, out of circulation; [`NIL`] for a growing block.
    pub(crate) target: u32,
    pub(crate) start: u32,
    pub(crate) units: u32,
    pub(crate) list: u8,
    pub(crate) timepoint: PackedTimepoint,
    pub(crate) steps: Vec<Step>,
    /// Bytes of new memory, which the budget has reserved.
    pub(crate) new_bytes: u64,
    pub(crate) extents_held: u32,
    pub(crate) mappings_held: usize,
}

impl Plan {
    pub(crate) fn reclaims(&self) -> bool {
        let reclaims =
            |s: &Step| matches!(s.source, Source::Reclaimed { .. } | Source::Aliased { .. });
        self.steps.iter().any(reclaims)
    }

    /// Carries the plan out. On an error everything was undone as far as the driver lets it; the
    /// steps say how they ended.
    pub(crate) fn run(&mut self, backing: &dyn Backing) -> Result<()> {
        let result = self.try_run(backing);
        if result.is_err() {
            for step in self.steps.iter_mut().filter(|s| s.end == End::Mapped) {
                // SAFETY: this plan mapped the step at its address just now, and nobody was told of
                // it.
                let undone = unsafe { backing.unmap(step.addr, step.bytes) };
                step.end = match (undone, step.source) {
                    (Err(_), _) => End::LostAtTarget,
                    (Ok(()), Source::Aliased { .. } | Source::Shared) => End::Untouched,
                    (Ok(()), _) => End::Loose,
                };
            }
        }
        result
    }

    fn try_run(&mut self, backing: &dyn Backing) -> Result<()> {
        for step in &mut self.steps {
            step.obtain(backing)?;
            // SAFETY: the planner marked the step's address, in our reservation, as being backed by
            // this plan alone; the piece is loose, or the backing can do aliases.
            unsafe { backing.map(step.addr, step.handle, step.bytes) }?;
            step.end = End::Mapped;
        }
        let mut i = 0;
        while i < self.steps.len() {
            let (addr, mut end) = (self.steps[i].addr, self.steps[i].addr + self.steps[i].bytes);
            i += 1;
            while i < self.steps.len() && self.steps[i].addr == end {
                end += self.steps[i].bytes;
                i += 1;
            }
            // SAFETY: the loop above mapped all steps of this run.
            unsafe { backing.enable(addr, end - addr) }?;
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/residency.rs"]
mod tests;
