//! The free-block index: the lowest address that fits, by a tree of maxima over the addresses.
//!
//! An [`Index`] holds the free nodes of one kind (ready for everybody, or still in use by one line). Addresses are cut into *leaves* of
//! 2 MiB. A leaf has a list of the free nodes that start in it, and the size of the largest of them; above lie rows of maxima, each over
//! sixteen of the row below. A search walks down from the top to the first leaf whose maximum suffices, so it costs a handful of cache lines
//! whatever the number of free blocks, and so does a change, which walks up as long as a maximum changes.
//!
//! First fit, because it packs blocks of mixed sizes densely whatever their order, where best fit is chaotic (on the shared decoding
//! trace, 2 % to 8 % more granules in use than bytes, depending on a few bytes at the beginning). It was reached before by two-level
//! segregated bins in address order, which had to look at many bins for it and walked lists whose nodes were no longer in a cache.
//! Where a block goes depends on the set of free blocks and the request only.
//!
//! Must not know spans, streams or budgets.

use crate::node::{NIL, Node};
use leasehold_core::{Error, OutOfMemory, Result};

/// log2 of a leaf in units.
const LEAF: u32 = 12;
/// log2 of how many entries of a row one entry of the row above stands for.
const FAN: u32 = 4;
const WIDE: usize = 1 << FAN;
/// Rows over the leaves of the whole space of units.
const ROWS: usize = (u32::BITS - LEAF).div_ceil(FAN) as usize;

/// Sixteen maxima: one cache line. Signed, since that is what every x86-64 processor compares four at a time; what is larger than an
/// entry counts as the largest entry.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([i32; WIDE]);

impl Line {
    const EMPTY: Line = Line([0; WIDE]);

    #[inline]
    fn max(&self) -> i32 {
        self.0.into_iter().fold(0, i32::max)
    }

    /// Which entries suffice, as bits.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn enough(&self, units: i32) -> u32 {
        use std::arch::x86_64 as sse;
        // SAFETY: every x86-64 processor has SSE2, and a line is four aligned vectors.
        unsafe {
            let least = sse::_mm_set1_epi32(units - 1);
            let at = self.0.as_ptr().cast::<sse::__m128i>();
            let more = |i| sse::_mm_cmpgt_epi32(sse::_mm_load_si128(at.add(i)), least);
            let halves = [(0, 1), (2, 3)].map(|(i, j)| sse::_mm_packs_epi32(more(i), more(j)));
            sse::_mm_movemask_epi8(sse::_mm_packs_epi16(halves[0], halves[1])).cast_unsigned()
        }
    }

    /// Which entries suffice, as bits.
    #[cfg(not(target_arch = "x86_64"))]
    #[inline]
    fn enough(&self, units: i32) -> u32 {
        let mut mask = 0;
        for (i, max) in self.0.into_iter().enumerate() {
            mask |= u32::from(max >= units) << i;
        }
        mask
    }
}

#[inline]
fn entry(units: u32) -> i32 {
    i32::try_from(units).unwrap_or(i32::MAX)
}

/// A set of free nodes, searchable by size.
pub(crate) struct Index {
    /// The first node of each leaf's list.
    heads: Vec<u32>,
    /// The leaves' maxima, then rows of maxima up to one line.
    rows: [Vec<Line>; ROWS],
    /// The row that is one line.
    top: usize,
    units: u64,
    holes: u64,
    count: u32,
}

#[inline]
fn leaf_of(start: u32) -> usize {
    (start >> LEAF) as usize
}

impl Index {
    pub(crate) fn new() -> Self {
        Self { heads: Vec::new(), rows: std::array::from_fn(|_| Vec::new()), top: 0, units: 0, holes: 0, count: 0 }
    }

    /// Makes room for nodes that start below `end` units, so that [`insert`](Self::insert) needs no host memory.
    pub(crate) fn reach(&mut self, end: u32) -> Result<()> {
        let leaves = leaf_of(end.saturating_sub(1)) + 1;
        if leaves <= self.heads.len() {
            return Ok(());
        }
        let host = |n: usize| -> Error { OutOfMemory::new("host memory for the free-block index", n as u64).into() };
        // Half as much again, so that a heap that grows step by step copies little.
        let leaves = (leaves + self.heads.len() / 2).next_multiple_of(WIDE);
        self.heads.try_reserve_exact(leaves - self.heads.len()).map_err(|_| host(leaves * 4))?;
        let mut lines = leaves / WIDE;
        let mut row = 0;
        loop {
            let more = lines.saturating_sub(self.rows[row].len());
            self.rows[row].try_reserve_exact(more).map_err(|_| host(more * WIDE * 4))?;
            if lines <= 1 {
                break;
            }
            (lines, row) = (lines.div_ceil(WIDE), row + 1);
        }
        let top = row;
        // Nothing fails from here on.
        self.heads.resize(leaves, NIL);
        let mut lines = leaves / WIDE;
        for row in 0..=top {
            self.rows[row].resize(lines, Line::EMPTY);
            if row > self.top {
                // A new row begins with what the one below, so far the top, amounts to.
                self.rows[row][0].0[0] = self.rows[row - 1][0].max();
            }
            lines = lines.div_ceil(WIDE);
        }
        self.top = top.max(self.top);
        Ok(())
    }

    /// Units in the set.
    #[inline]
    pub(crate) fn units(&self) -> u64 {
        self.units
    }

    /// Unbacked granules in the set.
    pub(crate) fn holes(&self) -> u64 {
        self.holes
    }

    /// Nodes in the set.
    #[inline]
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of host memory that it takes.
    pub(crate) fn host_bytes(&self) -> u64 {
        let lines: usize = self.rows.iter().map(Vec::capacity).sum();
        (self.heads.capacity() * 4 + lines * size_of::<Line>()) as u64
    }

    /// A leaf's maximum falls to `max`.
    #[inline]
    fn lower(&mut self, leaf: usize, mut max: i32) {
        let mut at = leaf;
        for row in 0..=self.top {
            let line = &mut self.rows[row][at / WIDE];
            let old = std::mem::replace(&mut line.0[at % WIDE], max);
            at /= WIDE;
            // Above, something changes only if this was the largest, and no other is as large.
            if row == self.top || old < self.rows[row + 1][at / WIDE].0[at % WIDE] {
                return;
            }
            max = self.rows[row][at].max();
            if max == old {
                return;
            }
        }
    }

    /// A leaf's maximum grows to `units`, unless it is larger.
    #[inline]
    fn raise(&mut self, leaf: usize, units: i32) {
        let mut at = leaf;
        for row in &mut self.rows[..=self.top] {
            let max = &mut row[at / WIDE].0[at % WIDE];
            if *max >= units {
                return;
            }
            *max = units;
            at /= WIDE;
        }
    }

    /// A node of `units` is gone from a leaf's list, or smaller.
    #[inline]
    fn less(&mut self, nodes: &[Node], leaf: usize, units: u32) {
        if entry(units) >= self.rows[0][leaf / WIDE].0[leaf % WIDE] {
            let (mut at, mut max) = (self.heads[leaf], 0);
            while at != NIL {
                let node = &nodes[at as usize];
                max = max.max(node.units);
                at = node.link[1];
            }
            if max < units {
                self.lower(leaf, entry(max));
            }
        }
    }

    #[inline]
    fn link(&mut self, nodes: &mut [Node], id: u32, leaf: usize) {
        let after = std::mem::replace(&mut self.heads[leaf], id);
        let node = &mut nodes[id as usize];
        node.link = [NIL, after];
        if after != NIL {
            nodes[after as usize].link[0] = id;
        }
    }

    #[inline]
    fn unlink(&mut self, nodes: &mut [Node], id: u32, leaf: usize) {
        let [before, after] = nodes[id as usize].link;
        if after != NIL {
            nodes[after as usize].link[0] = before;
        }
        if before != NIL {
            nodes[before as usize].link[1] = after;
        } else {
            self.heads[leaf] = after;
        }
    }

    /// Adds a node. What it describes may change only through [`change`](Self::change) while it is in.
    #[inline]
    pub(crate) fn insert(&mut self, nodes: &mut [Node], id: u32) {
        let Node { start, units, holes, .. } = nodes[id as usize];
        let leaf = leaf_of(start);
        self.link(nodes, id, leaf);
        self.raise(leaf, entry(units));
        self.units += u64::from(units);
        self.holes += u64::from(holes);
        self.count += 1;
    }

    /// Takes a node out.
    #[inline]
    pub(crate) fn remove(&mut self, nodes: &mut [Node], id: u32) {
        let Node { start, units, holes, .. } = nodes[id as usize];
        let leaf = leaf_of(start);
        self.unlink(nodes, id, leaf);
        self.less(nodes, leaf, units);
        self.units -= u64::from(units);
        self.holes -= u64::from(holes);
        self.count -= 1;
    }

    /// A node that is in gets another beginning, length and number of holes.
    #[inline]
    pub(crate) fn change(&mut self, nodes: &mut [Node], id: u32, start: u32, units: u32, holes: u32) {
        let node = &mut nodes[id as usize];
        let old = (node.start, node.units, node.holes);
        (node.start, node.units, node.holes) = (start, units, holes);
        self.units = self.units + u64::from(units) - u64::from(old.1);
        self.holes = self.holes + u64::from(holes) - u64::from(old.2);
        let (from, to) = (leaf_of(old.0), leaf_of(start));
        if from != to {
            self.unlink(nodes, id, from);
            self.link(nodes, id, to);
            self.raise(to, entry(units));
            self.less(nodes, from, old.1);
        } else if units > old.1 {
            self.raise(to, entry(units));
        } else {
            self.less(nodes, from, old.1);
        }
    }

    /// The first leaf from `from` on with a node of `units`.
    #[inline]
    fn leaf(&self, from: usize, units: i32) -> Option<usize> {
        let (mut row, mut at) = (self.top, 0);
        if from > 0 {
            // Up until a later neighbour suffices.
            (row, at) = (0, from);
            loop {
                let line = self.rows[row].get(at / WIDE)?;
                let mask = line.enough(units) & (u32::MAX << (at % WIDE));
                if mask != 0 {
                    at = at / WIDE * WIDE + mask.trailing_zeros() as usize;
                    break;
                }
                if row == self.top {
                    return None;
                }
                (row, at) = (row + 1, at / WIDE + 1);
            }
        } else {
            let mask = self.rows[row].first()?.enough(units);
            if mask == 0 {
                return None;
            }
            at += mask.trailing_zeros() as usize;
        }
        while row > 0 {
            row -= 1;
            let mask = self.rows[row][at].enough(units);
            debug_assert!(mask != 0, "a maximum without its element");
            at = at * WIDE + (mask.trailing_zeros() as usize & (WIDE - 1));
        }
        Some(at)
    }

    /// The node at the lowest address that holds `units` aligned to `align` units (a power of two), or `NIL`. It stays in the set.
    #[inline]
    pub(crate) fn find(&self, nodes: &[Node], units: u32, align: u32) -> u32 {
        if self.count == 0 {
            return NIL;
        }
        self.find_where(nodes, units, align, |_| true)
    }

    /// As [`find`](Self::find), among the nodes that `accept` takes.
    #[inline]
    pub(crate) fn find_where(
        &self,
        nodes: &[Node],
        units: u32,
        align: u32,
        mut accept: impl FnMut(&Node) -> bool,
    ) -> u32 {
        let mut from = 0;
        while let Some(leaf) = self.leaf(from, entry(units.max(1))) {
            let (mut at, mut best, mut lowest) = (self.heads[leaf], NIL, u32::MAX);
            while at != NIL {
                let node = &nodes[at as usize];
                if node.start < lowest && node.holds(units, align) && accept(node) {
                    (best, lowest) = (at, node.start);
                }
                at = node.link[1];
            }
            if best != NIL {
                return best;
            }
            from = leaf + 1;
        }
        NIL
    }

    /// Checks the index against itself; `each` is told every node. For tests.
    pub(crate) fn check(&self, nodes: &[Node], mut each: impl FnMut(u32)) -> Result<(), String> {
        let (mut units, mut count) = (0u64, 0u32);
        for (leaf, &head) in self.heads.iter().enumerate() {
            let (mut at, mut prev, mut max) = (head, NIL, 0);
            while at != NIL {
                let node = &nodes[at as usize];
                if leaf_of(node.start) != leaf || node.link[0] != prev {
                    return Err(format!("node {at} is in the wrong leaf or badly linked"));
                }
                max = max.max(node.units);
                units += u64::from(node.units);
                count += 1;
                each(at);
                prev = at;
                at = node.link[1];
            }
            if self.rows[0][leaf / WIDE].0[leaf % WIDE] != entry(max) {
                return Err(format!("leaf {leaf}: its maximum is {max}"));
            }
        }
        for row in 1..=self.top {
            for (i, below) in self.rows[row - 1].iter().enumerate() {
                let max = below.max();
                if self.rows[row][i / WIDE].0[i % WIDE] != max {
                    return Err(format!("row {row}, entry {i}: its maximum is {max}"));
                }
            }
        }
        if (units, count) != (self.units, self.count) {
            return Err(format!("index counts {}/{} but holds {units}/{count}", self.units, self.count));
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The tree against a list: what it finds is the lowest that fits.
        #[test]
        fn the_lowest_that_fits(ops in prop::collection::vec((0u32..200, 1u32..9000, 0u32..13, any::<bool>()), 1..300)) {
            let mut nodes = vec![Node::VACANT; 200];
            let mut index = Index::new();
            let mut inside = [false; 200];
            for (id, units, align, take) in ops {
                let at = id as usize;
                if inside[at] && take {
                    let start = nodes[at].start.saturating_sub(units);
                    index.change(&mut nodes, id, start, units, 0);
                } else if inside[at] {
                    index.remove(&mut nodes, id);
                    inside[at] = false;
                } else {
                    nodes[at] = Node { start: id * id * 997 % 4_000_000, units, ..Node::VACANT };
                    index.reach(nodes[at].start + 1).unwrap();
                    index.insert(&mut nodes, id);
                    inside[at] = true;
                }
                let accept = |n: &Node| !take || n.units.is_multiple_of(2);
                let fits = |&i: &usize| inside[i] && nodes[i].holds(units, 1 << align) && accept(&nodes[i]);
                let lowest = (0..200).filter(fits).map(|i| nodes[i].start).min();
                let found = index.find_where(&nodes, units, 1 << align, accept);
                prop_assert_eq!(lowest, (found != NIL).then(|| nodes[found as usize].start));
                index.check(&nodes, |_| {}).map_err(TestCaseError::fail)?;
            }
        }
    }
}
