//! Hazard tracking: derives the order of operations from their declared memory accesses.
//!
//! One algorithm serves graph edges, Metal's barriers and the race detector. A map of address
//! ranges holds for each range the last writer and the readers since then. A read waits for the
//! last write; a write waits for the last write and all reads since.
//!
//! Eager streams do not use this module. They use the timepoints in a buffer's record (document
//! 002's stream order), which costs a few loads.
//!
//! `Written` answers another question: which memory does no operation of a list write? A kernel
//! may read such memory before the operations in front of it are over.
//!
//! This module must not know what a node is.

use crate::kernel::Access;
use crate::list::OpList;
use crate::op::Op;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Default)]
struct Segment {
    end: u64,
    write: Option<u32>,
    reads: Vec<u32>,
}

/// Address ranges with their last accesses. Nodes are numbers that do not decrease from call to
/// call.
///
/// A write leaves one segment, however many segments it covered. So an access to a long list costs
/// `O(log n)`, plus the reported dependencies.
#[derive(Debug, Clone, Default)]
pub struct Tracker {
    /// Segments by start; they do not overlap.
    segments: BTreeMap<u64, Segment>,
    /// Room for ranges without former accesses, and for segments that a write replaces.
    gaps: Vec<(u64, u64)>,
}

impl Tracker {
    /// A tracker without accesses.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns whether the tracker has no accesses.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Removes all accesses, as after a barrier.
    pub fn clear(&mut self) {
        self.segments.clear();
    }

    /// Splits the segment that spans `at`, so that a segment begins at `at`.
    fn split(&mut self, at: u64) {
        if let Some((&start, segment)) = self.segments.range_mut(..at).next_back()
            && segment.end > at
        {
            let tail =
                Segment { end: segment.end, write: segment.write, reads: segment.reads.clone() };
            segment.end = at;
            debug_assert!(start < at);
            self.segments.insert(at, tail);
        }
    }

    /// Records that `node` accesses `len` bytes at `addr`, and calls `dep` with each earlier node
    /// that must come before. May call `dep` several times with the same node. A range that wraps
    /// is cut at the end of the address space.
    pub fn access(&mut self, node: u32, addr: u64, len: u64, access: Access, dep: impl FnMut(u32)) {
        let end = addr.saturating_add(len);
        if end <= addr {
            return;
        }
        self.split(addr);
        self.split(end);
        if access.writes() {
            self.write(node, addr, end, dep)
        } else {
            self.read(node, addr, end, dep)
        }
    }

    fn write(&mut self, node: u32, addr: u64, end: u64, mut dep: impl FnMut(u32)) {
        self.gaps.clear();
        let mut first = None;
        for (&start, segment) in self.segments.range_mut(addr..end) {
            segment
                .write
                .iter()
                .chain(&segment.reads)
                .filter(|&&n| n != node)
                .for_each(|&n| dep(n));
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

/// The memory that a list of operations writes.
#[derive(Debug)]
pub(crate) struct Written {
    /// Ranges that do not touch, by start.
    ranges: Vec<(u64, u64)>,
}

impl Written {
    /// The memory that the operations write. `None` if one of them may write more than it declares:
    /// a host call, a wait for other work, a graph.
    pub(crate) fn by(ops: &OpList) -> Option<Self> {
        let mut all = Vec::new();
        for op in ops.iter() {
            if op.is_barrier() && !matches!(op, Op::WriteTimestamp(_)) {
                return None;
            }
            op.for_each_access(|addr, len, access| {
                let end = addr.saturating_add(len);
                if access.writes() && addr < end {
                    all.push((addr, end));
                }
            });
        }
        all.sort_unstable();
        let mut ranges: Vec<(u64, u64)> = Vec::with_capacity(all.len());
        for (from, to) in all {
            match ranges.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ => ranges.push((from, to)),
            }
        }
        Some(Self { ranges })
    }

    /// Whether an operation writes one of `len` bytes at `addr`.
    pub(crate) fn meets(&self, addr: u64, len: u64) -> bool {
        let end = addr.saturating_add(len);
        let next = self.ranges.partition_point(|r| r.1 <= addr);
        addr < end && self.ranges.get(next).is_some_and(|r| r.0 < end)
    }
}
