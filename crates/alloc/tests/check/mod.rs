//! The check of an allocator's tables against each other, for tests (feature `check`). It walks
//! everything under the lock, and changes nothing.

use crate::allocator::Allocator;
use crate::extent::{Extent, NIL, State};
use crate::heap::Heap;
use crate::ranges::{Busy, Ranges};
use crate::residency::{PieceState, Residency};

impl Allocator {
    /// Checks every invariant of the allocator's tables.
    ///
    /// # Errors
    /// The broken invariant, in words.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), String> {
        let core = self.inner().core.lock();
        core.store.heap.check()?;
        core.store.slabs.check(&core.store.heap)?;
        core.ranges.check(&core.store.heap.res)
    }
}

impl Heap {
    /// Checks every invariant of spans, extents, indexes and residency.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut indexed = vec![false; self.extents.rows.len()];
        for (i, list) in self.lists.iter().enumerate() {
            let mut wrong = None;
            list.index.check(&self.extents.rows, |id| {
                indexed[id as usize] = true;
                let n = &self.extents[id];
                if n.state != State::Free || usize::from(n.list) != i {
                    wrong = Some(id);
                }
            })?;
            if let Some(id) = wrong {
                return Err(format!("list {i} indexes extent {id}: {:?}", self.extents[id]));
            }
        }
        for span in self.spans.iter().filter(|s| s.live) {
            let (mut at, mut prev, mut unit) = (span.first, NIL, span.unit);
            while at != NIL {
                let n = &self.extents[at];
                if n.prev != prev || n.start != unit || n.units == 0 {
                    let wanted = format!("expected start {unit}, prev {prev}");
                    return Err(format!("extent {at} does not tile its span: {n:?}, {wanted}"));
                }
                if (n.state == State::Free) != indexed[at as usize] {
                    return Err(format!("extent {at} and the indexes disagree: {n:?}"));
                }
                if prev != NIL {
                    let p = &self.extents[prev];
                    let both = |s: State| p.state == s && n.state == s;
                    if both(State::Free) && p.list == n.list {
                        return Err(format!("extents {prev}, {at} should be one: {p:?} {n:?}"));
                    }
                }
                if span.paged {
                    self.res.check_extent(n)?;
                }
                unit = n.end();
                prev = at;
                at = n.next;
            }
            if unit != span.unit + span.units {
                return Err(format!("span {span:?} is tiled up to {unit} only"));
            }
        }
        self.res.check()
    }
}

impl Residency {
    /// An extent of a paged span agrees with the granules under it.
    fn check_extent(&self, n: &Extent) -> Result<(), String> {
        let (from, to) = (n.start.div_ceil(1 << self.shift), n.end() >> self.shift);
        let whole = if from < to { self.missing(from << self.shift, to << self.shift) } else { 0 };
        let touched = self.missing(n.start, n.end());
        match n.state {
            State::Free if n.holes != whole => {
                Err(format!("{whole} granules are unbacked in {n:?}"))
            }
            State::Free if touched != whole => {
                Err(format!("an unbacked granule reaches out of {n:?}"))
            }
            State::Used | State::Waiting if touched != 0 => {
                Err(format!("{touched} granules are unbacked in {n:?}"))
            }
            _ => Ok(()),
        }
    }

    /// A piece of a growing block agrees with that.
    fn check_elsewhere(&self, id: u32) -> Result<(), String> {
        let p = &self.pieces[id as usize];
        let fine = p.at == NIL && matches!(p.state, PieceState::Mapped | PieceState::Lost);
        if fine { Ok(()) } else { Err(format!("piece {id} of a growing block is {p:?}")) }
    }

    /// Pieces and granules name each other.
    fn check(&self) -> Result<(), String> {
        for (id, p) in self.pieces.iter().enumerate() {
            if matches!(p.state, PieceState::Mapped | PieceState::Lost)
                && p.at != NIL
                && (p.at..p.at + p.granules).any(|g| self.piece_of(g) != id as u32)
            {
                return Err(format!("piece {id} is not where it says: {p:?}"));
            }
        }
        for (g, granule) in self.granules.iter().enumerate() {
            if granule.piece != NIL {
                let p = &self.pieces[granule.piece as usize];
                if p.state == PieceState::Vacant || p.state == PieceState::Cached {
                    let (piece, state) = (granule.piece, &p.state);
                    return Err(format!("granule {g} names piece {piece} which is {state:?}"));
                }
            }
        }
        Ok(())
    }
}

impl Ranges {
    /// Checks the growing blocks against the pieces.
    fn check(&self, res: &Residency) -> Result<(), String> {
        let pieces = &res.pieces;
        let mut seen = vec![0; pieces.len()];
        for (at, range) in self.0.iter().enumerate() {
            let Some(range) = range.as_ref().filter(|r| r.busy == Busy::No) else {
                continue;
            };
            let bytes: u64 = range.pieces.iter().map(|&p| res.bytes_of(p)).sum();
            if range.chunk.is_none() && bytes != range.mapped || range.committed > range.mapped {
                let (committed, mapped) = (range.committed, range.mapped);
                return Err(format!("block {at} has {bytes} of {mapped}, uses {committed}"));
            }
            let mut end = 0;
            for &piece in &range.pieces {
                end += res.bytes_of(piece);
                seen[piece as usize] += 1;
                if seen[piece as usize] > 1 + pieces[piece as usize].more {
                    return Err(format!("piece {piece} is in {} places", seen[piece as usize]));
                }
                if pieces[piece as usize].more > 0 && end > range.shared {
                    return Err(format!("piece {piece} is shared, and block {at} may write it"));
                }
                res.check_elsewhere(piece)?;
            }
        }
        Ok(())
    }
}
