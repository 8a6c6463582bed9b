//! Where a large block lies while each granule counts: so that it touches no more granules than it fills.
//!
//! A block that is freed leaves the granules that it filled to be moved, whoever lies beside it then; one that begins where its neighbour
//! happens to end touches one more as often as not, and when the neighbour has gone both edges of it are holes that nothing large fits
//! into. So it begins within a granule only if it still touches no more than it fills; otherwise it leaves the rest of that granule to
//! small blocks, if that is little beside it. (Always to do so costs caches of keys and values of an awkward size up to 4 % each.)
//!
//! In a workload that repeats, a block lies where the least memory must be moved instead.
//!
//! This module must not know budgets or the driver.

use super::{EVEN_FROM, Heap, READY, SLACK};
use crate::node::{NIL, Node};

/// A block leaves at most one part in so many of itself empty below it.
const WORTH: u32 = 48;

impl Heap {
    /// Where a large block begins in a free node. It need not fit.
    fn begin(&self, n: &Node, units: u32, align: u32) -> u32 {
        let granule = 1u32 << self.res.shift;
        let low = n.start.next_multiple_of(align.max(1));
        let even = n.start.next_multiple_of(align.max(granule));
        let rest = units.wrapping_neg() & (granule - 1);
        if low & (granule - 1) <= rest {
            return low;
        }
        let whole = units >= EVEN_FROM << self.res.shift && rest <= granule / SLACK;
        if whole || (even - low).saturating_mul(WORTH) <= units { even } else { low }
    }

    /// The lowest place for a large block: a free node, and a unit in it. `None` for one that is not large, while several lines use the
    /// heap, and while granules do not count that much.
    pub(crate) fn dense_place(&self, units: u32, align: u32, lane: u8) -> Option<(u32, u32)> {
        if units < self.dense_from || !self.single() {
            return None;
        }
        let mut lowest: Option<(u32, u32)> = None;
        for lane in [lane, READY] {
            let index = &self.lanes[usize::from(lane)].index;
            let at = index.find_where(&self.nodes.rows, units, align, |n| {
                self.begin(n, units, align).checked_add(units).is_some_and(|end| end <= n.end())
            });
            if at != NIL {
                let start = self.begin(&self.nodes[at], units, align);
                lowest = lowest.filter(|l| l.1 <= start).or(Some((at, start)));
            }
        }
        lowest
    }

    /// The place that lacks the least memory, the lowest of several: a free node, and a unit in it. Looks at every granule.
    pub(crate) fn backed_place(&self, units: u32, align: u32, lane: u8) -> Option<(u32, u32)> {
        let (shift, align) = (self.res.shift, align.max(1));
        let mut best: Option<((u32, u32), Node)> = None;
        for lane in [lane, READY] {
            let index = &self.lanes[usize::from(lane)].index;
            index.find_where(&self.nodes.rows, units, align, |n| {
                let (mut start, last) = (n.start.next_multiple_of(align), n.end() - units);
                loop {
                    let key = (self.res.missing(start, start + units), start);
                    if best.is_none_or(|b| key < b.0) {
                        best = Some((key, *n));
                    }
                    let next = (start >> shift) + 1;
                    // Beyond what was ever backed nothing is better.
                    if next as usize > self.res.granules.len() || next << shift > last {
                        return false;
                    }
                    match (next << shift).checked_next_multiple_of(align) {
                        Some(next) if next <= last => start = next,
                        _ => return false,
                    }
                }
            });
        }
        let ((_, start), n) = best?;
        Some((if n.prev == NIL { self.spans[usize::from(n.span)].first } else { self.nodes[n.prev].next }, start))
    }

    /// Takes a large block from its lowest place. `None`: it has no memory there.
    #[cold]
    pub(super) fn take_dense(&mut self, (at, start): (u32, u32), units: u32) -> Option<u32> {
        let bare = self.nodes[at].holes > 0 && self.res.missing(start, start + units) > 0;
        (!bare).then(|| self.carve_at(at, start, units))
    }
}
