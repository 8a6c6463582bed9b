//! Memory that goes from one heap to another: a used block of the one is a span of the other, and comes back whole, or block by block.
//!
//! This module must not know why, or who guards the two.

use super::{Heap, READY, Span, passed};
use crate::node::{NIL, State};
use leasehold_core::{Line, Result, Stamp};

/// What a block was that another heap held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Lent, to this row of the block table.
    Used(u32),
    /// Out of circulation, because several lines may still be using it, as this row knows.
    Parked(u32),
    /// Free, once this stamp has passed.
    Free(Stamp),
}

impl Heap {
    /// Gives a used node back whose last use is over at `stamp`. Never fails, never takes host memory.
    #[inline(always)]
    pub(crate) fn release(&mut self, node: u32, stamp: Stamp) {
        if stamp.is_never() || passed(stamp) {
            self.give_ready(node);
        } else {
            match self.lane_of(stamp) {
                Some(lane) => self.give(node, lane, stamp),
                None => self.give_later(node, stamp),
            }
        }
    }

    /// Adds memory that another heap lent to `line`, which may still be using it until `stamp`.
    pub(crate) fn borrow_span(
        &mut self,
        base: u64,
        bytes: u64,
        native: u64,
        line: &Line,
        stamp: Stamp,
    ) -> Result<usize> {
        if !passed(stamp) {
            self.lane_for(line);
        }
        let slot = self.add_span_in_use(base, bytes, native, false)?;
        self.release(self.spans[slot].first, stamp);
        Ok(slot)
    }

    /// Whether a span lies free as one block.
    #[inline]
    pub(crate) fn is_whole(&self, slot: usize) -> bool {
        let span = &self.spans[slot];
        let first = &self.nodes[span.first];
        first.units == span.units && first.state == State::Free && span.live
    }

    /// Takes out a span that lies free as one block, and says when its last use is over.
    pub(crate) fn return_span(&mut self, slot: usize) -> Option<(Span, Stamp)> {
        if !self.is_whole(slot) {
            return None;
        }
        let span = self.spans[slot];
        let stamp = self.nodes.stamp(span.first);
        self.unlink_free(span.first);
        self.nodes.put(span.first);
        self.spans[slot].live = false;
        self.order.retain(|&s| usize::from(s) != slot);
        self.gaps.push(span.room);
        Some((span, stamp))
    }

    /// Blocks that tile the live spans.
    pub(crate) fn blocks(&self) -> usize {
        self.spans.iter().filter(|s| s.live).map(|s| self.nodes_from(s.first).count()).sum()
    }

    /// The nodes from one on, by address.
    pub(crate) fn nodes_from(&self, first: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(first), |&at| Some(self.nodes[at].next).filter(|&next| next != NIL))
    }

    /// Gives up every span, block by block (the page map's entries are not believed any more): `each` is told the span's place in the list of spans, the block's units and what it is.
    /// `rows`: parked nodes with the rows that know who uses them.
    pub(crate) fn empty(&mut self, rows: impl Iterator<Item = (u32, u32)>, mut each: impl FnMut(usize, u32, Part)) {
        for (node, row) in rows {
            // Nothing else has a meaning there while a node waits.
            self.nodes[node].link[0] = row;
        }
        self.waiting = NIL;
        self.parked = 0;
        for slot in 0..self.spans.len() {
            let span = self.spans[slot];
            let mut at = if span.live { span.first } else { NIL };
            while at != NIL {
                let (n, stamp) = (self.nodes[at], self.nodes.cold[at as usize].stamp);
                let part = match n.state {
                    State::Used => Part::Used(n.link[1]),
                    State::Waiting if n.link[0] != NIL => Part::Parked(n.link[0]),
                    State::Waiting => Part::Free(stamp),
                    _ => {
                        self.unlink_free(at);
                        Part::Free(if n.lane == READY { Stamp::NEVER } else { stamp })
                    }
                };
                each(slot, n.units, part);
                self.nodes.put(at);
                at = n.next;
            }
            self.spans[slot].live = false;
        }
        self.order.clear();
        self.gaps.clear();
        self.unit_end = 0;
    }

    /// Takes a block back that another heap held, cutting `units` off the front of the used node `at`. Returns what is left of it. Wants
    /// a spare node.
    pub(crate) fn put_part(&mut self, at: u32, units: u32, part: Part) -> Option<u32> {
        // (The node's own entry in the page map is believed only for what it holds.)
        let rest = (self.nodes[at].units > units).then(|| self.split(at, units));
        match part {
            Part::Used(row) => {
                self.nodes[at].link = [NIL, row];
                let n = self.nodes[at];
                self.pages.enter(n.start, n.units, at);
            }
            Part::Parked(row) => {
                self.nodes[at].link = [NIL, row];
                self.park(at);
            }
            Part::Free(stamp) => self.release(at, stamp),
        }
        rest
    }
}
