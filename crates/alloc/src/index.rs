//! The free-block index: the lowest address that fits, by a tree of maxima over the addresses.
//!
//! An [`Index`] holds the free extents of one kind (ready for everybody, or still in use by one
//! stream). Addresses are cut into *leaves* of 1 MiB. A leaf has a list of the free extents that
//! end in it, and the size of the largest of them; above lie rows of maxima, each over thirty-two
//! of the row below. A search walks down from the top to the first leaf whose maximum suffices, so
//! it costs a handful of cache lines whatever the number of free blocks, and so does a change,
//! which walks up as long as a maximum changes.
//!
//! (Extents do not overlap, so they lie in the same order by their ends as by their beginnings; and
//! a block is cut off at the beginning, so that what is left stays in its leaf. The last leaf has
//! the extents that end beyond it, too.)
//!
//! Maxima are kept in sixteen bits, so that thirty-two lie in a cache line and few rows do: exact
//! up to 1 MiB, with eleven significant bits above ([`code`]). A leaf that seems to suffice may
//! therefore have nothing that does, and the search goes on.
//!
//! First fit, because it packs blocks of mixed sizes densely whatever their order, where best fit
//! is chaotic (on the shared decoding trace, 2 % to 8 % more granules in use than bytes, depending
//! on a few bytes at the beginning). It was reached before by two-level segregated bins in address
//! order, which had to look at many bins for it and walked lists whose extents were no longer in a
//! cache. Where a block goes depends on the set of free blocks and the request only.
//!
//! Must not know spans, streams or budgets.

use crate::extent::{Extent, NIL, or_dummy};
use crate::host::{self, fetch_entry};
use leasehold_core::Result;
use std::hint::select_unpredictable;

/// log2 of a leaf in units. With half as much there are more rows, with twice as much more leaves
/// with several extents; both took longer with sizes up to 4 MiB.
const LEAF: u32 = 11;
/// log2 of how many entries of a row one entry of the row above stands for.
const FAN: u32 = 5;
const WIDE: usize = 1 << FAN;
/// Rows over the leaves of the whole space of units.
const ROWS: usize = (u32::BITS - LEAF).div_ceil(FAN) as usize;

/// Thirty-two maxima: one cache line. Signed, since that is what every x86-64 processor compares
/// eight at a time.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Node([i16; WIDE]);

impl Node {
    const EMPTY: Node = Node([0; WIDE]);

    #[inline]
    fn max(&self) -> i16 {
        // (From the least number there is, which costs nothing.)
        self.0.into_iter().fold(i16::MIN, i16::max)
    }

    /// Which entries are more than a code, as bits.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn above(&self, less: i16) -> u32 {
        use std::arch::x86_64 as sse;
        // SAFETY: every x86-64 processor has SSE2, and a node is four aligned vectors.
        unsafe {
            let (at, less) = (self.0.as_ptr().cast::<sse::__m128i>(), sse::_mm_set1_epi16(less));
            let more = |i| sse::_mm_cmpgt_epi16(sse::_mm_load_si128(at.add(i)), less);
            let half = |i| {
                sse::_mm_movemask_epi8(sse::_mm_packs_epi16(more(i), more(i + 1))).cast_unsigned()
            };
            half(0) | half(2) << 16
        }
    }

    /// Which entries are more than a code, as bits.
    #[cfg(not(target_arch = "x86_64"))]
    #[inline]
    fn above(&self, less: i16) -> u32 {
        let mut mask = 0;
        for (i, max) in self.0.into_iter().enumerate() {
            mask |= u32::from(max > less) << i;
        }
        mask
    }
}

/// Bits of a size that its code keeps at most.
const EXACT: u32 = 11;

/// A size as it stands in a row: itself where it has at most [`EXACT`] bits; otherwise its highest
/// ones, and how many more it has. Larger sizes have larger codes, or the same.
#[inline]
fn code(units: u32) -> i16 {
    // Sizes of fewer bits are like those of so many.
    let more = (units | 1 << (EXACT - 1)).ilog2() - (EXACT - 1);
    ((more << (EXACT - 1)) + (units >> more)) as i16
}

const _: () = assert!(((u32::BITS - EXACT) << (EXACT - 1)) + (1 << EXACT) <= 1 << 15);

/// A set of free extents, searchable by size.
#[derive(Default)]
pub(crate) struct Index {
    /// The first extent of each leaf's list.
    heads: Vec<u32>,
    /// The leaves' maxima, then rows of maxima up to one node.
    rows: [Vec<Node>; ROWS],
    /// The last leaf.
    last: usize,
    /// The row that is one node.
    top: usize,
    units: u64,
    holes: u64,
    count: u32,
}

impl Index {
    /// The leaf of an extent that ends at a unit. Needs one leaf at least.
    #[inline]
    fn leaf_of(&self, end: u32) -> usize {
        (((end - 1) >> LEAF) as usize).min(self.last)
    }

    /// Makes room for extents that start below `end` units, so that [`insert`](Self::insert) needs
    /// no host memory.
    pub(crate) fn reach(&mut self, extents: &mut [Extent], end: u32) -> Result<()> {
        let leaves = (end.saturating_sub(1) >> LEAF) as usize + 1;
        if leaves <= self.heads.len() {
            return Ok(());
        }
        // Half as much again, so that a heap that grows step by step copies little.
        let leaves = (leaves + self.heads.len() / 2).next_multiple_of(WIDE);
        let more = leaves - self.heads.len();
        host::room(&mut self.heads, more)?;
        let mut nodes = leaves / WIDE;
        let mut row = 0;
        loop {
            let more = nodes.saturating_sub(self.rows[row].len());
            host::room(&mut self.rows[row], more)?;
            if nodes <= 1 {
                break;
            }
            (nodes, row) = (nodes.div_ceil(WIDE), row + 1);
        }
        let top = row;
        // Nothing fails from here on.
        let last = self.heads.len().checked_sub(1);
        self.heads.resize(leaves, NIL);
        self.last = leaves - 1;
        let mut nodes = leaves / WIDE;
        for row in 0..=top {
            self.rows[row].resize(nodes, Node::EMPTY);
            if row > self.top {
                // A new row begins with what the one below, so far the top, amounts to.
                self.rows[row][0].0[0] = self.rows[row - 1][0].max();
            }
            nodes = nodes.div_ceil(WIDE);
        }
        self.top = top.max(self.top);
        if let Some(last) = last {
            self.spread(extents, last);
        }
        Ok(())
    }

    /// There are leaves now for those extents of the one that was the last which end beyond it.
    fn spread(&mut self, extents: &mut [Extent], last: usize) {
        let mut at = self.heads[last];
        while at != NIL {
            let extent = extents[at as usize];
            let to = self.leaf_of(extent.end());
            if to != last {
                self.unlink(extents, at, last);
                self.link(extents, at, to);
                self.raise(to, extent.units);
            }
            at = extent.link[1];
        }
        self.less(extents, last);
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

    /// Extents in the set.
    #[inline]
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of host memory that it takes.
    pub(crate) fn host_bytes(&self) -> u64 {
        let nodes: usize = self.rows.iter().map(Vec::capacity).sum();
        (self.heads.capacity() * 4 + nodes * size_of::<Node>()) as u64
    }

    /// In a node of the leaves' row, something that was `old` at most has gone, and something that
    /// is `max` has come.
    #[inline(never)]
    fn pass_up(&mut self, mut at: usize, mut old: i16, mut max: i16) {
        let mut rows = self.rows.iter_mut();
        let Some(mut below) = rows.next() else { return };
        for row in rows {
            // Above the top the rows are empty.
            let Some(node) = row.get_mut(at / WIDE) else { return };
            let entry = &mut node.0[at % WIDE];
            let was = *entry;
            if max < was {
                if old < was {
                    // There was a larger one, and still is.
                    return;
                }
                max = below[at].max();
            }
            if max == was {
                return;
            }
            (*entry, old) = (max, was);
            (at, below) = (at / WIDE, row);
        }
    }

    /// The code of the largest extent in a leaf's list.
    #[inline]
    fn largest(&self, extents: &[Extent], leaf: usize) -> i16 {
        // Whether there is one is not predictable, so there is no branch.
        let head = self.heads[leaf];
        let extent = &extents[or_dummy(head) as usize];
        let (mut max, mut at) =
            select_unpredictable(head == NIL, (0, NIL), (extent.units, extent.link[1]));
        while at != NIL {
            let extent = &extents[at as usize];
            max = max.max(extent.units);
            at = extent.link[1];
        }
        code(max)
    }

    /// A leaf has an extent of `units`.
    #[inline]
    fn raise(&mut self, leaf: usize, units: u32) {
        let max = &mut self.rows[0][leaf / WIDE].0[leaf % WIDE];
        let (old, new) = (*max, code(units));
        if new > old {
            *max = new;
            self.pass_up(leaf / WIDE, old, new);
        }
    }

    /// An extent is gone from a leaf's list, or has another length.
    #[inline]
    fn less(&mut self, extents: &[Extent], leaf: usize) {
        let rest = self.largest(extents, leaf);
        self.set(leaf, rest);
    }

    /// A leaf's maximum may be less than it was.
    #[inline]
    fn set(&mut self, leaf: usize, rest: i16) {
        let old = std::mem::replace(&mut self.rows[0][leaf / WIDE].0[leaf % WIDE], rest);
        self.pass_up(leaf / WIDE, old, rest);
    }

    /// An extent of a leaf ends elsewhere and is longer.
    #[inline]
    fn relink(&mut self, extents: &mut [Extent], id: u32, from: usize) {
        let Extent { start, units, link, .. } = extents[id as usize];
        let to = self.leaf_of(start + units);
        if to == from {
            return self.raise(from, units);
        }
        // Most often it was the only one.
        let rest = if link == [NIL; 2] {
            self.heads[from] = NIL;
            0
        } else {
            self.unlink(extents, id, from);
            self.largest(extents, from)
        };
        self.link(extents, id, to);
        if from / WIDE != to / WIDE {
            self.raise(to, units);
            return self.set(from, rest);
        }
        // Both in one node: what lies above looks at it once.
        let node = &mut self.rows[0][from / WIDE].0;
        let old = std::mem::replace(&mut node[from % WIDE], rest);
        let new = code(units).max(node[to % WIDE]);
        node[to % WIDE] = new;
        self.pass_up(from / WIDE, old, new);
    }

    /// As [`less`](Self::less). Out of line: the common path then needs no stack frame.
    #[inline(never)]
    fn less_slow(&mut self, extents: &[Extent], leaf: usize) {
        self.less(extents, leaf);
    }

    #[inline]
    fn link(&mut self, extents: &mut [Extent], id: u32, leaf: usize) {
        let after = std::mem::replace(&mut self.heads[leaf], id);
        extents[id as usize].link = [NIL, after];
        extents[or_dummy(after) as usize].link[0] = id;
    }

    #[inline]
    fn unlink(&mut self, extents: &mut [Extent], id: u32, leaf: usize) {
        let [before, after] = extents[id as usize].link;
        extents[or_dummy(after) as usize].link[0] = before;
        extents[or_dummy(before) as usize].link[1] = after;
        let head = &mut self.heads[leaf];
        *head = select_unpredictable(before == NIL, after, *head);
    }

    /// Adds an extent. The range that the extent describes may change only through
    /// [`cut`](Self::cut), [`extend_up`](Self::extend_up) and [`extend_down`](Self::extend_down)
    /// while the extent is in.
    #[inline]
    pub(crate) fn insert(&mut self, extents: &mut [Extent], id: u32) {
        let Extent { start, units, holes, .. } = extents[id as usize];
        let leaf = self.leaf_of(start + units);
        self.link(extents, id, leaf);
        self.raise(leaf, units);
        self.units += u64::from(units);
        self.holes += u64::from(holes);
        self.count += 1;
    }

    /// Takes an extent out.
    #[inline]
    pub(crate) fn remove(&mut self, extents: &mut [Extent], id: u32) {
        let Extent { start, units, holes, link, .. } = extents[id as usize];
        let leaf = self.leaf_of(start + units);
        self.units -= u64::from(units);
        self.holes -= u64::from(holes);
        self.count -= 1;
        // Most often the only one.
        if link == [NIL; 2] {
            self.heads[leaf] = NIL;
            self.set(leaf, 0);
        } else {
            self.unlink(extents, id, leaf);
            self.less_slow(extents, leaf);
        }
    }

    /// An extent that is in begins `units` earlier and has `holes` more.
    #[inline]
    pub(crate) fn extend_down(&mut self, extents: &mut [Extent], id: u32, units: u32, holes: u32) {
        let extent = &mut extents[id as usize];
        extent.start -= units;
        extent.units += units;
        extent.holes += holes;
        let (leaf, new) = (self.leaf_of(extent.end()), extent.units);
        self.units += u64::from(units);
        self.holes += u64::from(holes);
        self.raise(leaf, new);
    }

    /// An extent that is in ends `units` later and has `holes` more.
    #[inline]
    pub(crate) fn extend_up(&mut self, extents: &mut [Extent], id: u32, units: u32, holes: u32) {
        let extent = &mut extents[id as usize];
        let from = self.leaf_of(extent.end());
        extent.units += units;
        extent.holes += holes;
        self.units += u64::from(units);
        self.holes += u64::from(holes);
        self.relink(extents, id, from);
    }

    /// An extent that is in begins `units` later, which is less than it has.
    #[inline]
    pub(crate) fn cut(&mut self, extents: &mut [Extent], id: u32, units: u32) {
        let extent = &mut extents[id as usize];
        extent.start += units;
        extent.units -= units;
        let Extent { units: rest, link, .. } = *extent;
        let leaf = self.leaf_of(extent.end());
        self.units -= u64::from(units);
        // Most often the only one.
        if link == [NIL; 2] {
            self.set(leaf, code(rest));
        } else {
            self.less_slow(extents, leaf);
        }
    }

    /// Tells the processor that an extent that ends at a unit will come or go.
    #[inline]
    pub(crate) fn expect(&self, end: u32) {
        let leaf = ((end - 1) >> LEAF) as usize;
        fetch_entry(&self.heads, leaf);
        fetch_entry(&self.rows[0], leaf / WIDE);
    }

    /// The first leaf whose maximum suffices for `units`, which is not zero.
    #[inline]
    fn first(&self, units: u32) -> Option<usize> {
        let (less, mut at) = (code(units) - 1, 0);
        for row in self.rows[1..=self.top].iter().rev() {
            let mask = row[at].above(less);
            if mask == 0 {
                // At the top: nothing below suffices without a maximum above that does.
                return None;
            }
            at = at * WIDE + (mask.trailing_zeros() as usize & (WIDE - 1));
        }
        // One of these is needed next: half of a node's heads lie in a cache line.
        fetch_entry(&self.heads, at * WIDE);
        fetch_entry(&self.heads, at * WIDE + WIDE / 2);
        let mask = self.rows[0].get(at)?.above(less);
        (mask != 0).then(|| at * WIDE + (mask.trailing_zeros() as usize & (WIDE - 1)))
    }

    /// The first leaf after one whose maximum suffices for `units`.
    #[cold]
    fn after(&self, leaf: usize, units: u32) -> Option<usize> {
        let less = code(units) - 1;
        // Up until a later neighbour suffices.
        let (mut row, mut at) = (0, leaf + 1);
        loop {
            let mask = self.rows[row].get(at / WIDE)?.above(less) & (u32::MAX << (at % WIDE));
            if mask != 0 {
                at = at / WIDE * WIDE + mask.trailing_zeros() as usize;
                break;
            }
            if row == self.top {
                return None;
            }
            (row, at) = (row + 1, at / WIDE + 1);
        }
        while row > 0 {
            row -= 1;
            let mask = self.rows[row][at].above(less);
            debug_assert!(mask != 0, "a maximum without its element");
            at = at * WIDE + (mask.trailing_zeros() as usize & (WIDE - 1));
        }
        Some(at)
    }

    /// The extent at the lowest address that holds `units` aligned to `align` units (a power of
    /// two), or `NIL`. It stays in the set.
    #[inline(always)]
    pub(crate) fn find(&self, extents: &[Extent], units: u32, align: u32) -> u32 {
        if self.count == 0 {
            return NIL;
        }
        let Some(leaf) = self.first(units) else { return NIL };
        let at = self.heads[leaf];
        // Most often the only one.
        match extents.get(at as usize) {
            Some(extent) if extent.link[1] == NIL && extent.holds(units, align) => at,
            _ => self.find_from(extents, leaf, units, align),
        }
    }

    #[inline(never)]
    fn find_from(&self, extents: &[Extent], leaf: usize, units: u32, align: u32) -> u32 {
        self.search(extents, Some(leaf), units, align, |_| true)
    }

    /// As [`find`](Self::find), among the extents that `accept` takes.
    pub(crate) fn find_where(
        &self,
        extents: &[Extent],
        units: u32,
        align: u32,
        accept: impl FnMut(&Extent) -> bool,
    ) -> u32 {
        self.search(extents, self.first(units), units, align, accept)
    }

    /// As [`find_where`](Self::find_where), from the first leaf that seems to suffice.
    #[inline]
    fn search(
        &self,
        extents: &[Extent],
        mut first: Option<usize>,
        units: u32,
        align: u32,
        mut accept: impl FnMut(&Extent) -> bool,
    ) -> u32 {
        while let Some(leaf) = first {
            let (mut at, mut best, mut lowest) = (self.heads[leaf], NIL, u32::MAX);
            while let Some(extent) = extents.get(at as usize) {
                if extent.start < lowest && extent.holds(units, align) && accept(extent) {
                    (best, lowest) = (at, extent.start);
                }
                at = extent.link[1];
            }
            if best != NIL {
                return best;
            }
            first = self.after(leaf, units);
        }
        NIL
    }
}

#[cfg(feature = "check")]
#[path = "../tests/check/index.rs"]
mod check;

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/index.rs"]
mod tests;
