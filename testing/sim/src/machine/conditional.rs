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
//! This module must not know queues or memory.

use super::command::{NodeAction, Running};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::AtomicU32;
use leasehold_core::{Error, Result};
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
    head: u32,
    end: u32,
    /// The tick with which the round began.
    began: u64,
    /// The number of rounds so far.
    rounds: u64,
}

/// The rounds that contain a node, and the tick of its access.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rounds {
    pub(crate) tick: u64,
    of: Vec<Round>,
}

impl Rounds {
    /// Returns whether node `earlier` made its access at `tick` in a former round of a loop that
    /// has both nodes.
    pub(crate) fn follow(&self, earlier: u32, tick: u64) -> bool {
        self.of.iter().any(|r| r.contains(earlier) && tick < r.began)
    }
}

impl Round {
    /// Whether the node is of the body, or the end.
    fn contains(&self, node: u32) -> bool {
        self.head < node && node <= self.end
    }

    /// The parts of a list of nodes: a head and an end enclose each.
    pub(crate) fn of<'a>(actions: impl Iterator<Item = &'a NodeAction>) -> Vec<Self> {
        let (mut open, mut all) = (Vec::new(), Vec::new());
        for (node, action) in actions.enumerate() {
            match action {
                NodeAction::Head(_) => open.push(node as u32),
                NodeAction::End(_) => all.extend(open.pop().map(|head| Self {
                    head,
                    end: node as u32,
                    began: 0,
                    rounds: 0,
                })),
                _ => {}
            }
        }
        all
    }
}

/// Checks that an action can run more than once in a launch.
///
/// # Errors
/// `Unsupported` for one that cannot.
pub(super) fn check_body(action: &NodeAction) -> Result<()> {
    match action {
        NodeAction::Host { .. }
        | NodeAction::Record(_)
        | NodeAction::Wait(_)
        | NodeAction::WaitValue { .. }
        | NodeAction::Meet(_) => Err(Error::Unsupported(
            "host functions, events, waits and meetings cannot be nodes of a conditional body"
                .into(),
        )),
        _ => Ok(()),
    }
}

impl Running {
    /// The rounds in which a node runs.
    pub(crate) fn rounds_of(&self, node: u32) -> Rounds {
        let of = self.parts.iter().filter(|r| r.contains(node)).copied().collect();
        Rounds { tick: self.tick, of }
    }

    /// Goes on after a head or the end of a loop, which has tested its word.
    ///
    /// # Errors
    /// The text of a fault if the loop has had `bound` rounds already.
    pub(crate) fn tested(&mut self, node: u32, go_on: bool, bound: u64) -> Result<(), String> {
        let Some(at) = self.parts.iter().position(|p| p.head == node || p.end == node) else {
            return Err("a test outside a conditional node".to_owned());
        };
        let Round { head, end, rounds, .. } = self.parts[at];
        if !go_on {
            if node == head {
                self.left -= (end - head) as usize;
            }
            self.finish(end);
            return Ok(());
        }
        let rounds = if node == head {
            self.left -= 1;
            0
        } else {
            rounds
        };
        if rounds == bound {
            return Err(format!(
                "it has run {bound} times, and its flag is still set: the loop has no end, or MachineConfig::loop_bound is too low"
            ));
        }
        self.tick += 1;
        (self.parts[at].began, self.parts[at].rounds) = (self.tick, rounds + 1);
        if node == end {
            self.left += (end - head - 1) as usize;
            for body in head + 1..=end {
                self.waits[body as usize] = self.edges.pred[body as usize].len() as u32;
            }
        }
        self.release(head);
        Ok(())
    }
}
