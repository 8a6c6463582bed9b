//! Conditional nodes: parts of a graph that run if a word is not zero, or as long as it is not.
//!
//! In an executable graph such a part is a range of nodes: a *head* that tests the word, the body,
//! and an *end*. The body's first nodes wait for the head, and the end waits for its last ones. A
//! head whose word is zero ends the whole range. The end of a loop tests the word again; if it is
//! not zero, the nodes after the head begin anew: another *round*.
//!
//! All of a round comes before all of the next. The edges do not say so, since both are the same
//! nodes. So each access notes the launch's tick, and a round the tick with which it began.
//!
//! This module must not know queues, memory, or how nodes run.

use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::AtomicU32;
use leasehold_hal::ConditionalKind;

/// The word on which a part of a graph depends.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Condition {
    /// The 32-bit word at an address. The test is an access of the node.
    Flag(u64),
    /// A word of the driver's own, which kernels set.
    Cell(Arc<AtomicU32>),
}

/// A part of a graph under a condition.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) kind: ConditionalKind,
    pub(crate) name: Arc<str>,
    pub(crate) condition: Condition,
}

/// A part of a running graph: its nodes, and its present round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Round {
    pub(super) head: u32,
    pub(super) end: u32,
    /// The tick with which the round began.
    pub(super) began: u64,
    /// The number of rounds so far.
    pub(super) rounds: u64,
}

/// The rounds that contain a node, and the tick of its access.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rounds {
    pub(crate) tick: u64,
    pub(super) of: Vec<Round>,
}

impl Rounds {
    /// Returns whether node `earlier` made its access at `tick` in a former round of a loop that
    /// has both nodes.
    pub(crate) fn follow(&self, earlier: u32, tick: u64) -> bool {
        self.of.iter().any(|r| r.contains(earlier) && tick < r.began)
    }
}

impl Round {
    /// A part that has had no round.
    pub(super) fn new(head: u32, end: u32) -> Self {
        Self { head, end, began: 0, rounds: 0 }
    }

    /// Whether the node is of the body, or the end.
    pub(super) fn contains(&self, node: u32) -> bool {
        self.head < node && node <= self.end
    }
}
