//! The page map: from a unit of the heap to the used block that holds it, without hashing and without a walk.
//!
//! A row for each leaf of 2 MiB: for each page of 1 MiB a node that starts in it, and the block that lies across the leaf's beginning.
//! Blocks of their own are larger than 64 KiB, apart from some with a large alignment, so the others that start in a page are a few steps
//! away. A name may be out of date: a page's is believed only if its node is one and starts there, a leaf's only if it is a block in use that
//! holds the unit; nodes tile the spans, so such a block is the one. What must not happen is that a page where live blocks start names no
//! node of it. So blocks are entered, but need not be taken out; only nodes that no longer start where they did leave it to a neighbour.
//!
//! Pages are that large for the sake of the table's size: with one of 64 KiB, each allocation wrote a cache line of its own, and with
//! 10,000 blocks of 2 MiB that alone was half of a processor's second-level cache.
//!
//! Must not know spans, lanes or leases.

use crate::node::{NIL, Node, State};
use leasehold_core::{Error, OutOfMemory, Result};
use std::hint::select_unpredictable;

/// log2 of a page in units.
const PAGE: u32 = 11;
/// log2 of a leaf in units.
const LEAF: u32 = 12;

/// Pages of a leaf.
const PAGES: usize = 1 << (LEAF - PAGE);

/// What is known about a leaf.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Leaf {
    /// For each page, a block that starts there.
    pages: [u32; PAGES],
    /// The block that lies across the beginning.
    across: u32,
}

impl Leaf {
    const EMPTY: Leaf = Leaf { pages: [NIL; PAGES], across: NIL };
}

#[inline]
fn leaf_of(unit: u32) -> usize {
    (unit >> LEAF) as usize
}

/// The page of its leaf that a unit lies in.
#[inline]
fn page_of(unit: u32) -> usize {
    (unit >> PAGE) as usize % PAGES
}

/// The map.
pub(crate) struct PageMap {
    leaves: Vec<Leaf>,
}

impl PageMap {
    pub(crate) fn new() -> Self {
        Self { leaves: Vec::new() }
    }

    /// Makes room for blocks that start below `end`, so that entering one needs no host memory.
    pub(crate) fn reach(&mut self, end: u32) -> Result<()> {
        let leaves = leaf_of(end.saturating_sub(1)) + 1;
        if leaves > self.leaves.len() {
            // Half as much again, so that a heap that grows step by step copies little.
            let leaves = leaves + self.leaves.len() / 2;
            let bytes = leaves * size_of::<Leaf>();
            let host = |_| -> Error { OutOfMemory::new("host memory for the page map", bytes as u64).into() };
            self.leaves.try_reserve_exact(leaves - self.leaves.len()).map_err(host)?;
            let spare = self.leaves.spare_capacity_mut();
            crate::pages::prefer_large(spare.as_ptr().cast(), size_of_val(spare));
            self.leaves.resize(leaves, Leaf::EMPTY);
        }
        Ok(())
    }

    /// Bytes of host memory that it takes.
    pub(crate) fn host_bytes(&self) -> u64 {
        (self.leaves.capacity() * size_of::<Leaf>()) as u64
    }

    /// A block is in use from now on.
    #[inline]
    pub(crate) fn enter(&mut self, start: u32, units: u32, id: u32) {
        let (first, last) = (leaf_of(start), leaf_of(start + units - 1));
        self.starts(start, id);
        // Whether and how many leaves begin within it is as good as random: nothing lies across the beginning of the first of all, so that
        // row takes what belongs to none.
        let (second, end) = select_unpredictable(last > first, (first + 1, last), (0, 0));
        self.leaves[second].across = id;
        self.leaves[end].across = id;
        if last > first + 2 {
            self.leaves[first + 2..last].iter_mut().for_each(|leaf| leaf.across = id);
        }
    }

    /// A node starts at a unit.
    #[inline]
    pub(crate) fn starts(&mut self, unit: u32, id: u32) {
        self.leaves[leaf_of(unit)].pages[page_of(unit)] = id;
    }

    /// No node starts at a unit any more: the one below starts at `below.0`, the one above starts later. (If neither starts in the same page,
    /// none does, and the name says nothing.)
    #[inline]
    pub(crate) fn merged(&mut self, unit: u32, below: (u32, u32), above: u32) {
        self.starts(unit, select_unpredictable(below.0 >> PAGE == unit >> PAGE, below.1, above));
    }

    /// The block in use that holds a unit.
    pub(crate) fn find(&self, nodes: &[Node], unit: u32) -> Option<u32> {
        let used = |id: u32| nodes.get(id as usize).filter(|n| matches!(n.state, State::Used | State::Suspended));
        let holds = |id: u32| used(id).is_some_and(|n| n.start <= unit && unit < n.end());
        let leaf = self.leaves.get(leaf_of(unit))?;
        let starts =
            |id: u32, page| nodes.get(id as usize).is_some_and(|n| n.state != State::Vacant && n.start >> PAGE == page);
        let first = unit >> LEAF << (LEAF - PAGE);
        for page in (first..=unit >> PAGE).rev() {
            let mut at = leaf.pages[(page - first) as usize];
            if !starts(at, page) {
                continue;
            }
            // Down or up to the one at the unit.
            while at != NIL && nodes[at as usize].start > unit {
                at = nodes[at as usize].prev;
            }
            while at != NIL && nodes[at as usize].end() <= unit && nodes[at as usize].start >> PAGE == page {
                at = nodes[at as usize].next;
            }
            if holds(at) {
                return Some(at);
            }
        }
        Some(leaf.across).filter(|&id| holds(id))
    }
}
