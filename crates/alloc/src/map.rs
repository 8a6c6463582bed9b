//! The page map: from a unit of the heap to the used block that holds it, without hashing and without a walk.
//!
//! Two tables of node names. One has an entry for each page of 64 KiB, the block that starts in it: blocks of their own are larger than
//! that, apart from some with a large alignment, so there is seldom a second. The other has an entry for each leaf of 2 MiB, the block that
//! lies across its beginning. An entry may be out of date: it is believed only if the block that it names is in use and holds the unit,
//! and nodes tile the spans, so a block that holds it is the one. What must not happen is that a live block's entry is displaced.
//!
//! Must not know spans, lanes or leases.

use crate::node::{NIL, Node, State};
use leasehold_core::{Error, OutOfMemory, Result};

/// log2 of a page in units.
const PAGE: u32 = 7;
/// log2 of a leaf in units.
const LEAF: u32 = 12;

/// The map.
pub(crate) struct PageMap {
    pages: Vec<u32>,
    leaves: Vec<u32>,
}

impl PageMap {
    pub(crate) fn new() -> Self {
        Self { pages: Vec::new(), leaves: Vec::new() }
    }

    /// Makes room for blocks that start below `end`, so that entering one needs no host memory.
    pub(crate) fn reach(&mut self, end: u32) -> Result<()> {
        let leaves = ((end.saturating_sub(1) >> LEAF) + 1) as usize;
        if leaves > self.leaves.len() {
            // Half as much again, so that a heap that grows step by step copies little.
            let leaves = leaves + self.leaves.len() / 2;
            let pages = leaves << (LEAF - PAGE);
            let host = |_| -> Error { OutOfMemory::new("host memory for the page map", pages as u64 * 4).into() };
            self.pages.try_reserve_exact(pages - self.pages.len()).map_err(host)?;
            self.leaves.try_reserve_exact(leaves - self.leaves.len()).map_err(host)?;
            self.pages.resize(pages, NIL);
            self.leaves.resize(leaves, NIL);
        }
        Ok(())
    }

    /// Bytes of host memory that it takes.
    pub(crate) fn host_bytes(&self) -> u64 {
        (self.pages.capacity() + self.leaves.capacity()) as u64 * 4
    }

    /// A block is in use from now on.
    #[inline]
    pub(crate) fn enter(&mut self, n: &Node, id: u32) {
        self.pages[(n.start >> PAGE) as usize] = id;
        let (first, last) = ((n.start >> LEAF) as usize, ((n.end() - 1) >> LEAF) as usize);
        if first != last {
            self.leaves[first + 1..=last].fill(id);
        }
    }

    /// A block is about to be free. Another one that starts in its page takes the entry over.
    #[inline]
    pub(crate) fn leave(&mut self, nodes: &[Node], id: u32) {
        let n = &nodes[id as usize];
        let page = n.start >> PAGE;
        // Only a block that ends in the page lets another start in it.
        let before = n.prev != NIL && nodes[n.prev as usize].start >> PAGE == page;
        if before || n.end() >> PAGE == page {
            self.leave_slow(nodes, id);
        }
    }

    #[cold]
    fn leave_slow(&mut self, nodes: &[Node], id: u32) {
        let page = nodes[id as usize].start >> PAGE;
        if self.pages[page as usize] != id {
            return;
        }
        for next in [|n: &Node| n.prev, |n: &Node| n.next] {
            let mut at = next(&nodes[id as usize]);
            while at != NIL && nodes[at as usize].start >> PAGE == page {
                if matches!(nodes[at as usize].state, State::Used | State::Suspended) {
                    self.pages[page as usize] = at;
                    return;
                }
                at = next(&nodes[at as usize]);
            }
        }
    }

    /// The block in use that holds a unit.
    pub(crate) fn find(&self, nodes: &[Node], unit: u32) -> Option<u32> {
        let used = |id: u32| nodes.get(id as usize).filter(|n| matches!(n.state, State::Used | State::Suspended));
        let holds = |id: u32| used(id).is_some_and(|n| n.start <= unit && unit < n.end());
        let leaf = unit >> LEAF;
        let first = leaf << (LEAF - PAGE);
        for page in (first..=unit >> PAGE).rev() {
            let mut at = *self.pages.get(page as usize)?;
            if used(at).is_none_or(|n| n.start >> PAGE != page) {
                continue;
            }
            // Blocks that start in one page: down or up to the one at the unit.
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
        self.leaves.get(leaf as usize).copied().filter(|&id| holds(id))
    }
}
