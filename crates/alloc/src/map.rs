//! The page map: from a unit of the heap to the used block that holds it, without hashing and without a walk.
//!
//! For each page of 1 MiB a node that starts in it, and for each leaf of 2 MiB the block that lies across its beginning.
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

#[inline]
fn leaf_of(unit: u32) -> usize {
    (unit >> LEAF) as usize
}

#[inline]
fn page_of(unit: u32) -> usize {
    (unit >> PAGE) as usize
}

/// The map.
pub(crate) struct PageMap {
    /// For each page, a node that starts there.
    pages: Vec<u32>,
    /// For each leaf, the block that lies across its beginning.
    across: Vec<u32>,
}

impl PageMap {
    pub(crate) fn new() -> Self {
        Self { pages: Vec::new(), across: Vec::new() }
    }

    /// Makes room for blocks that start below `end`, so that entering one needs no host memory.
    pub(crate) fn reach(&mut self, end: u32) -> Result<()> {
        let leaves = leaf_of(end.saturating_sub(1)) + 1;
        if leaves > self.across.len() {
            // Half as much again, so that a heap that grows step by step copies little.
            let leaves = leaves + self.across.len() / 2;
            for (list, entries) in [(&mut self.across, leaves), (&mut self.pages, leaves << (LEAF - PAGE))] {
                let host = |_| -> Error { OutOfMemory::new("host memory for the page map", entries as u64 * 4).into() };
                list.try_reserve_exact(entries.saturating_sub(list.len())).map_err(host)?;
                let spare = list.spare_capacity_mut();
                crate::pages::prefer_large(spare.as_ptr().cast(), size_of_val(spare));
            }
            self.across.resize(leaves, NIL);
            self.pages.resize(leaves << (LEAF - PAGE), NIL);
        }
        Ok(())
    }

    /// Bytes of host memory that it takes.
    pub(crate) fn host_bytes(&self) -> u64 {
        ((self.pages.capacity() + self.across.capacity()) * 4) as u64
    }

    /// A block is in use from now on.
    #[inline]
    pub(crate) fn enter(&mut self, start: u32, units: u32, id: u32) {
        let (first, last) = (leaf_of(start), leaf_of(start + units - 1));
        self.starts(start, id);
        // Whether and how many leaves begin within it is as good as random: nothing lies across the beginning of the first of all, so that
        // entry takes what belongs to none.
        let (second, end) = select_unpredictable(last > first, (first + 1, last), (0, 0));
        self.across[second] = id;
        self.across[end] = id;
        if last > first + 2 {
            self.across[first + 2..last].fill(id);
        }
    }

    /// A node starts at a unit.
    #[inline]
    pub(crate) fn starts(&mut self, unit: u32, id: u32) {
        self.pages[page_of(unit)] = id;
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
        let across = *self.across.get(leaf_of(unit))?;
        let starts =
            |id: u32, page| nodes.get(id as usize).is_some_and(|n| n.state != State::Vacant && n.start >> PAGE == page);
        let first = unit >> LEAF << (LEAF - PAGE);
        for page in (first..=unit >> PAGE).rev() {
            let mut at = self.pages[page as usize];
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
        Some(across).filter(|&id| holds(id))
    }
}
