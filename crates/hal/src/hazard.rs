//! Hazards: which operations must come before which, from what they declare to touch.
//!
//! One algorithm for graph edges, Metal's barriers and the race detector: a map of address ranges, each with its last writer and
//! the readers since. A read waits for the last write; a write waits for the last write and all reads since.
//!
//! Eager streams do not come here: a buffer's record keeps its points (document 002's stream order), which is a few loads.
//!
//! This module must not know what a node is.

use crate::kernel::Access;
use leasehold_core::defects::{Defect, planted};
use std::collections::BTreeMap;

#[derive(Debug, Clone, Default)]
struct Segment {
    end: u64,
    write: Option<u32>,
    reads: Vec<u32>,
}

/// Ranges and who touched them last. Nodes are numbers that grow from call to call (or stay).
///
/// A write leaves one segment behind, however many it found, so a long list costs `O(log n)` an access beside the dependencies
/// that it reports.
#[derive(Debug, Clone, Default)]
pub struct Tracker {
    /// By start; segments do not overlap.
    segments: BTreeMap<u64, Segment>,
    /// Room for ranges that nobody had touched, and for segments that a write swallows.
    gaps: Vec<(u64, u64)>,
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
    pub fn access(&mut self, node: u32, addr: u64, len: u64, access: Access, dep: impl FnMut(u32)) {
        let end = addr.saturating_add(len);
        if end <= addr {
            return;
        }
        self.split(addr);
        self.split(end);
        if access.writes() { self.write(node, addr, end, dep) } else { self.read(node, addr, end, dep) }
    }

    fn write(&mut self, node: u32, addr: u64, end: u64, mut dep: impl FnMut(u32)) {
        self.gaps.clear();
        let mut first = None;
        for (&start, segment) in self.segments.range_mut(addr..end) {
            segment.write.iter().chain(&segment.reads).filter(|&&n| n != node).for_each(|&n| dep(n));
            if start == addr {
                first = Some(segment);
            } else {
                self.gaps.push((start, 0));
            }
        }
        match first {
            Some(segment) => {
                segment.end = end;
                segment.write = Some(node);
                segment.reads.clear();
            }
            None => {
                self.segments.insert(addr, Segment { end, write: Some(node), reads: Vec::new() });
            }
        }
        for (start, _) in self.gaps.drain(..) {
            self.segments.remove(&start);
        }
    }

    fn read(&mut self, node: u32, addr: u64, end: u64, mut dep: impl FnMut(u32)) {
        self.gaps.clear();
        let mut at = addr;
        for (&start, segment) in self.segments.range_mut(addr..end) {
            if start > at {
                self.gaps.push((at, start));
            }
            if let Some(w) = segment.write
                && w != node
                && !planted(Defect::ReadBeforeWrite)
            {
                dep(w);
            }
            if segment.write != Some(node) && segment.reads.last() != Some(&node) {
                segment.reads.push(node);
            }
            at = segment.end;
        }
        if at < end {
            self.gaps.push((at, end));
        }
        for (start, end) in self.gaps.drain(..) {
            self.segments.insert(start, Segment { end, write: None, reads: vec![node] });
        }
    }
}
