//! Granules that are mapped at a second address, so that what is free at their edges counts.
//!
//! A live block rarely ends where a granule does. What is left of the granule is of use to small blocks only, and in a heap of a hundred
//! granules those edges are what it takes more than its live bytes. But a piece of physical memory may be mapped at several addresses:
//! where the end of one granule is free and so is the beginning of another one, a block lies across both, as if they were neighbours.
//!
//! ```text
//! addresses    ... |used      free1| ... |free2    used| ... |        free1|full granule |free2        |
//! memory            granule A             granule B           A again       another one   B again
//! ```
//!
//! What is lent so is out of circulation at home ([`State::Aliased`]), and so is what a second mapping shows of the rest of its granule: at
//! every time each byte of memory is in circulation at one address. Where it is mapped again it is memory like any other: freed, it may be cut,
//! merged and lent; once all of it lies free, and its last use is over, it can go home.
//!
//! CUDA allows it ("virtual aliasing"): writes through one address are seen through another one once the kernel or the copy that wrote is
//! complete. Bytes change hands between addresses only here, and only between operations that a stream orders.
//!
//! This module must not know budgets or the driver.

use super::{Heap, READY, passed};
use crate::backing::Aliased;
use crate::host;
use crate::layout::UNIT_SHIFT;
use crate::node::{NIL, State};
use crate::residency::Place;
use leasehold_core::{Result, Stamp};

/// Second addresses lie among the first so many times as many granules as there are pieces, and as if there were so many pieces at least:
/// the table of granules reaches up to them.
const SPREAD: usize = 4;
const FEW: usize = 1024;

/// A granule that is mapped at a second address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Alias {
    /// The piece that stands for the second mapping.
    pub(crate) piece: u32,
    /// What is lent, where the granule lies otherwise.
    pub(crate) home: u32,
    /// What is not, at the second address.
    pub(crate) shadow: u32,
}

/// The free end or beginning of a backed granule.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Edge {
    /// The free node that it lies in.
    pub(crate) node: u32,
    /// Its first unit.
    pub(crate) from: u32,
    pub(crate) units: u32,
}

/// A block across edges and whole granules: the free node whose addresses it gets, and the first granule there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Across {
    pub(crate) node: u32,
    pub(crate) at: u32,
    /// The end of a granule that the block begins with.
    pub(crate) head: Option<Edge>,
    /// Granules that it fills.
    pub(crate) whole: u32,
    /// The beginning of a granule that the block ends with.
    pub(crate) tail: Option<Edge>,
}

/// An alias that goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Homeward {
    alias: Alias,
    /// What was in circulation at the second address.
    node: u32,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) part: Aliased,
    /// The driver has unmapped it.
    pub(crate) gone: bool,
}

impl Heap {
    /// The edges of granules that lie free for `lane`: ends and beginnings.
    fn edges(&self, lane: u8) -> Result<(Vec<Edge>, Vec<Edge>)> {
        let mask = (1u32 << self.res.shift) - 1;
        let (mut ends, mut beginnings) = (Vec::new(), Vec::new());
        for (node, n) in (0..).zip(&self.nodes.rows) {
            let mine = n.state == State::Free && (n.lane == lane || n.lane == READY);
            if !mine || !self.spans[usize::from(n.span)].paged {
                continue;
            }
            let single = |unit: u32| {
                let piece = self.res.pieces.get(self.res.piece_of(unit >> self.res.shift) as usize);
                piece.is_some_and(|p| p.place == Place::Mapped && p.granules == 1)
            };
            let (to, from) = ((n.start | mask) + 1, n.end() & !mask);
            if n.start & mask != 0 && to <= n.end() && single(n.start) {
                host::room(&mut ends, 1)?;
                ends.push(Edge { node, from: n.start, units: to - n.start });
            }
            if n.end() & mask != 0 && from >= n.start && single(from) {
                host::room(&mut beginnings, 1)?;
                beginnings.push(Edge { node, from, units: n.end() - from });
            }
        }
        Ok((ends, beginnings))
    }

    /// Where a block lies across edges so that it fills fewer than `most` granules of its own; the fewest that there are.
    pub(crate) fn across(&self, units: u32, align: u32, lane: u8, most: u32) -> Result<Option<Across>> {
        let granule = 1u32 << self.res.shift;
        let (whole, rest) = (units >> self.res.shift, units & (granule - 1));
        if align > granule {
            return Ok(None);
        }
        let (mut ends, mut beginnings) = self.edges(lane)?;
        // A block that begins within a granule is not aligned to more than a unit.
        if align > 1 {
            ends.clear();
        }
        ends.sort_unstable_by_key(|e| e.units);
        beginnings.sort_unstable_by_key(|e| e.units);
        for (whole, rest) in [(whole.wrapping_sub(1), rest + granule), (whole, rest)] {
            if whole >= most || rest == 0 {
                continue;
            }
            let Some((head, tail)) = cover(&ends, &beginnings, rest, granule) else { continue };
            let all = whole + u32::from(head.is_some()) + u32::from(tail.is_some());
            return Ok(self.bare(all, lane).map(|(node, at)| Across { node, at, head, whole, tail }));
        }
        Ok(None)
    }

    /// Addresses for so many granules that nothing backs: a free node, and a granule. They are high ones, where nothing else lies as long
    /// as there is room below: so a block across edges parts no neighbours, and nothing comes to lie where it was before it went home.
    fn bare(&self, granules: u32, lane: u8) -> Option<(u32, u32)> {
        let shift = self.res.shift;
        let most = self.res.pieces.len().max(FEW).saturating_mul(SPREAD).next_power_of_two();
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        let mut highest: Option<(u32, u32)> = None;
        for (node, n) in (0..).zip(&self.nodes.rows) {
            let span = &self.spans[usize::from(n.span)];
            let mine = n.state == State::Free && (n.lane == lane || n.lane == READY) && span.paged;
            if !mine || n.holes < granules {
                continue;
            }
            let first = n.start.div_ceil(1 << shift);
            let mut at = (n.end() >> shift).min((span.unit >> shift).saturating_add(most));
            let mut run = 0;
            while at > first && run < granules {
                at -= 1;
                run = if self.res.piece_of(at) == NIL { run + 1 } else { 0 };
            }
            if run == granules && highest.is_none_or(|h| h.1 < at) {
                highest = Some((node, at));
            }
        }
        highest
    }

    /// Room for two more, and those of all plans in flight: each has a piece of its own.
    pub(crate) fn room_for_aliases(&mut self) -> Result<()> {
        let most = self.res.pieces.len() + 2;
        let more = most.saturating_sub(self.aliases.len());
        host::room(&mut self.aliases, more)
    }

    /// A plan has mapped a granule again.
    pub(crate) fn set_alias(&mut self, piece: u32, home: u32, shadow: u32) {
        self.nodes[home].state = State::Aliased;
        self.nodes[shadow].state = State::Aliased;
        self.aliases.push(Alias { piece, home, shadow });
    }

    /// Units of memory that are in circulation at a second address.
    pub(crate) fn aliased_units(&self) -> u64 {
        self.aliases.iter().map(|a| u64::from(self.nodes[a.home].units)).sum()
    }

    /// What is mapped twice is in circulation once.
    pub(super) fn check_aliases(&self) -> Result<(), String> {
        let mask = (1u32 << self.res.shift) - 1;
        let out = self.nodes.rows.iter().filter(|n| n.state == State::Aliased).count();
        if out != 2 * self.aliases.len() {
            return Err(format!("{out} nodes are out of circulation for {} aliases", self.aliases.len()));
        }
        for alias in &self.aliases {
            let (home, shadow, second) =
                (self.nodes[alias.home], self.nodes[alias.shadow], self.res.pieces[alias.piece as usize]);
            let piece = self.res.pieces.get(self.res.piece_of(home.start >> self.res.shift) as usize);
            let (offset, rest) = (home.start & mask, shadow.start & mask);
            let whole = match offset {
                0 => rest == home.units && rest + shadow.units == mask + 1,
                _ => rest == 0 && shadow.units == offset && offset + home.units == mask + 1,
            };
            let there = shadow.start >> self.res.shift == second.at && second.place == Place::Alias;
            if !whole || !there || piece.is_none_or(|p| p.handle != second.handle || p.granules != 1) {
                return Err(format!("{alias:?}: {home:?}, {shadow:?}, {second:?} of {piece:?}"));
            }
        }
        Ok(())
    }

    /// Takes out of circulation what lies free at second addresses, all of it, to go home.
    pub(crate) fn plan_home(&mut self) -> Result<Vec<Homeward>> {
        let shift = self.res.shift;
        let mut out = Vec::new();
        host::room(&mut out, self.aliases.len())?;
        let mut i = 0;
        while i < self.aliases.len() {
            let alias = self.aliases[i];
            let (home, shadow) = (self.nodes[alias.home], self.nodes[alias.shadow]);
            let at = self.res.pieces[alias.piece as usize].at;
            let from = (at << shift) + (home.start & ((1 << shift) - 1));
            let node = if shadow.start < from { shadow.next } else { shadow.prev };
            let n = self.nodes[node];
            let last = self.nodes.stamp(node);
            let idle = n.state == State::Free && n.start <= from && from + home.units <= n.end();
            let over = || passed(last) || self.last_use(at, at + 1, last).is_never();
            if !(idle && over()) || self.nodes.ensure(2).is_err() {
                i += 1;
                continue;
            }
            let (node, _) = self.isolate(node, from, from + home.units);
            let span = &self.spans[usize::from(self.nodes[node].span)];
            let addr = span.addr(at << shift);
            let bytes = u64::from(home.units) << UNIT_SHIFT;
            let part = Aliased { home: self.addr(alias.home), at: self.addr(node), bytes };
            out.push(Homeward { alias, node, addr, bytes: self.res.bytes(1), part, gone: false });
            self.aliases.swap_remove(i);
        }
        Ok(out)
    }

    /// The driver keeps a granule mapped at a second address: what was lent there is never used again, and the granule stays where it is, with
    /// what else lies in it.
    pub(crate) fn quarantine(&mut self, home: u32) {
        self.nodes[home].state = State::Quarantined;
        let piece = self.res.piece_of(self.nodes[home].start >> self.res.shift);
        if std::mem::replace(&mut self.res.pieces[piece as usize].place, Place::Lost) != Place::Lost {
            self.res.quarantined += self.res.bytes(1);
        }
    }

    /// Brings it back to where it came from. What the driver has not unmapped stays out for ever.
    pub(crate) fn finish_home(&mut self, all: Vec<Homeward>) {
        for Homeward { alias: Alias { piece, home, shadow }, node, gone, .. } in all {
            let at = self.res.pieces[piece as usize].at;
            if !gone {
                self.res.pieces[piece as usize].place = Place::Lost;
                self.quarantine(home);
                for node in [shadow, node] {
                    self.nodes[node].state = State::Quarantined;
                }
                continue;
            }
            self.res.set_unmapped(at, 1);
            self.res.drop_piece(piece);
            let (low, high) =
                if self.nodes[shadow].start < self.nodes[node].start { (shadow, node) } else { (node, shadow) };
            let (_, units, _) = self.join_above(low);
            let whole = &mut self.nodes[high];
            whole.start -= units;
            whole.units += units;
            whole.holes = 1;
            whole.state = State::Moving;
            self.resettle(high, READY, Stamp::NEVER);
            self.nodes[home].state = State::Moving;
            self.resettle(home, READY, Stamp::NEVER);
        }
    }
}

/// Edges that hold `units` together, with the least that is left of them: (end, beginning), each cut to what is needed.
fn cover(ends: &[Edge], beginnings: &[Edge], units: u32, granule: u32) -> Option<(Option<Edge>, Option<Edge>)> {
    let end = |e: &Edge, units: u32| Edge { from: e.from + e.units - units, units, ..*e };
    let beginning = |e: &Edge, units: u32| Edge { units, ..*e };
    let least = |list: &[Edge], units: u32| list.partition_point(|e| e.units < units);
    if units < granule {
        let (e, b) = (ends.get(least(ends, units)), beginnings.get(least(beginnings, units)));
        match (e, b) {
            (Some(e), Some(b)) if e.units < b.units => return Some((Some(end(e, units)), None)),
            (_, Some(b)) => return Some((None, Some(beginning(b, units)))),
            (Some(e), None) => return Some((Some(end(e, units)), None)),
            (None, None) => {}
        }
    }
    let mut best: Option<(u32, &Edge, &Edge)> = None;
    for e in ends.iter().filter(|e| e.units < units) {
        let Some(b) = beginnings.get(least(beginnings, units - e.units)) else { continue };
        let left = e.units + b.units - units;
        if best.is_none_or(|best| left < best.0) {
            best = Some((left, e, b));
        }
    }
    best.map(|(_, e, b)| (Some(end(e, e.units)), Some(beginning(b, units - e.units))))
}
