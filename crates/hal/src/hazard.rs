//! Hazards: which operations must come before which, from what they declare to touch.
//!
//! One algorithm for graph edges, Metal's barriers and the race detector: a map of address ranges, each with its last writer and
//! the readers since. A read waits for the last write; a write waits for the last write and all reads since.
//!
//! Eager streams do not come here: a buffer's record keeps its points (document 002's stream order), which is a few loads.
//!
//! This module must not know what a node is.

use crate::kernel::Access;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Default)]
struct Segment {
    end: u64,
    write: Option<u32>,
    reads: Vec<u32>,
}

/// Ranges and who touched them last. Nodes are numbers that grow.
#[derive(Debug, Clone, Default)]
pub struct Tracker {
    /// By start; segments do not overlap.
    segments: BTreeMap<u64, Segment>,
}

impl Tracker {
    /// A tracker that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether it has seen nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Forgets everything, as after a barrier.
    pub fn clear(&mut self) {
        self.segments.clear();
    }

    /// Splits the segment that spans `at`, so that one begins there.
    fn split(&mut self, at: u64) {
        if let Some((&start, segment)) = self.segments.range_mut(..at).next_back()
            && segment.end > at
        {
            let tail = Segment { end: segment.end, write: segment.write, reads: segment.reads.clone() };
            segment.end = at;
            debug_assert!(start < at);
            self.segments.insert(at, tail);
        }
    }

    /// Notes that `node` touches `len` bytes at `addr`, and calls `dep` with each earlier node that must come before. May call it
    /// several times with the same node. A range that wraps is cut at the end of the address space.
    pub fn access(&mut self, node: u32, addr: u64, len: u64, access: Access, mut dep: impl FnMut(u32)) {
        let end = addr.saturating_add(len);
        if end <= addr {
            return;
        }
        self.split(addr);
        self.split(end);
        let mut at = addr;
        let mut gaps = Vec::new();
        for (&start, segment) in self.segments.range_mut(addr..end) {
            if start > at {
                gaps.push((at, start));
            }
            if let Some(w) = segment.write
                && w != node
            {
                dep(w);
            }
            if access.writes() {
                for &r in &segment.reads {
                    if r != node {
                        dep(r);
                    }
                }
                segment.reads.clear();
                segment.write = Some(node);
            } else if segment.write != Some(node) && segment.reads.last() != Some(&node) {
                segment.reads.push(node);
            }
            at = segment.end;
        }
        if at < end {
            gaps.push((at, end));
        }
        for (start, end) in gaps {
            let segment = if access.writes() {
                Segment { end, write: Some(node), reads: Vec::new() }
            } else {
                Segment { end, write: None, reads: vec![node] }
            };
            self.segments.insert(start, segment);
        }
    }
}
