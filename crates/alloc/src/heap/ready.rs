//! What most often happens to memory that is ready for everybody: a block is cut off the lowest free node that holds it, or comes back beside
//! others of lane 0.
//!
//! This module must not know lines, stamps or granules.

use super::{Heap, READY};
use crate::node::{Node, Nodes, State, or_sink};
use leasehold_core::Stamp;

impl Heap {
    /// As [`take_lowest`](Self::take_lowest), ready and of no alignment: mostly the beginning of a larger node.
    #[inline(never)]
    pub(super) fn take_ready(&mut self, units: u32) -> u32 {
        let Nodes { rows, .. } = &mut self.nodes;
        let at = self.lanes[usize::from(READY)].index.cut_lowest(rows, units);
        match at {
            Some(at) => self.split_off(at, units),
            None => self.take_lowest(units, 1, READY),
        }
    }

    /// A used node for the units below a free and ready one, which began with them before.
    #[inline(always)]
    fn split_off(&mut self, at: u32, units: u32) -> u32 {
        let id = self.nodes.take();
        let rows = &mut self.nodes.rows[..];
        let rest = &mut rows[at as usize];
        let (start, prev, span) = (rest.start - units, std::mem::replace(&mut rest.prev, id), rest.span);
        rows[id as usize] = Node { start, units, prev, next: at, span, state: State::Used, ..Node::VACANT };
        match rows.get_mut(prev as usize) {
            Some(prev) => prev.next = id,
            None => self.spans[usize::from(span)].first = id,
        }
        self.pages.enter(start, units, id);
        id
    }

    /// As [`give`](Self::give), free for everybody at once.
    #[inline(never)]
    pub(crate) fn give_ready(&mut self, id: u32) {
        self.announce(id, READY);
        let Node { prev, next, .. } = self.nodes[id];
        let free = |at: u32| self.nodes.rows.get(at as usize).filter(|n| n.state == State::Free);
        // Each by itself, so that none has a frame for what another one does.
        match (free(prev), free(next)) {
            (Some(n), _) | (None, Some(n)) if n.lane != READY => self.settle(id, READY, Stamp::NEVER, true),
            (Some(_), Some(n)) if n.lane != READY => self.settle(id, READY, Stamp::NEVER, true),
            (None, None) => self.enter_ready(id),
            (Some(_), None) => self.merge_below_ready(id, prev),
            (None, Some(_)) => self.merge_above_ready(id),
            (Some(_), Some(_)) => self.merge_between_ready(id, prev, next),
        }
    }

    /// A node that was used is free and ready.
    #[inline(never)]
    fn enter_ready(&mut self, id: u32) {
        let rows = &mut self.nodes.rows[..];
        (rows[id as usize].state, rows[id as usize].lane) = (State::Free, READY);
        self.lanes[usize::from(READY)].index.insert(rows, id);
    }

    /// The free and ready neighbour below grows over a node.
    #[inline(never)]
    fn merge_below_ready(&mut self, id: u32, prev: u32) {
        let Node { start, units, holes, next, .. } = self.nodes[id];
        self.nodes.put(id);
        let rows = &mut self.nodes.rows[..];
        rows[or_sink(next) as usize].prev = prev;
        let below = &mut rows[prev as usize];
        below.next = next;
        self.pages.merged(start, (below.start, prev), next);
        self.lanes[usize::from(READY)].index.extend_up(rows, prev, units, holes);
    }

    /// The free and ready neighbour above grows over a node.
    #[inline(never)]
    fn merge_above_ready(&mut self, id: u32) {
        let (next, units, holes) = self.join_above(id);
        self.lanes[usize::from(READY)].index.extend_down(&mut self.nodes.rows, next, units, holes);
    }

    /// The free and ready neighbour above, which stays where it is in the index, grows over a node and over the one below.
    #[inline(never)]
    fn merge_between_ready(&mut self, id: u32, prev: u32, next: u32) {
        let Node { start, units, holes, .. } = self.nodes[id];
        let below = self.nodes[prev];
        self.nodes.put(id);
        self.lanes[usize::from(READY)].index.remove(&mut self.nodes.rows, prev);
        self.nodes.put(prev);
        let rows = &mut self.nodes.rows[..];
        let above = &mut rows[next as usize];
        above.prev = below.prev;
        let whole = (below.start, next);
        self.pages.merged(above.start, whole, above.next);
        self.pages.merged(start, whole, above.next);
        self.pages.starts(below.start, next);
        match rows.get_mut(below.prev as usize) {
            Some(prev) => prev.next = next,
            None => self.spans[usize::from(below.span)].first = next,
        }
        let (units, holes) = (units + below.units, holes + below.holes);
        self.lanes[usize::from(READY)].index.extend_down(rows, next, units, holes);
    }
}
