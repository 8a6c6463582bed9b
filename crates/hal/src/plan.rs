//! A plan: a list of operations and, for each, the earlier ones it must wait for.
//!
//! This module must not know which device will run it.

use crate::hazard::Tracker;
use crate::list::OpList;

/// A list with dependencies. Nodes are in an order that respects them.
#[derive(Debug, Default)]
pub struct Plan {
    /// The operations.
    pub ops: OpList,
    /// Predecessors of all nodes, one after the other.
    pub pred: Vec<u32>,
    /// Where the predecessors of node `i` begin: `pred[pred_at[i]..pred_at[i + 1]]`. One longer than `ops`.
    pub pred_at: Vec<u32>,
}

impl Plan {
    /// Derives the dependencies from the declared accesses. Edges that follow from others are left out.
    ///
    /// Operations with undeclared accesses (host calls, time stamps, graphs) are barriers.
    #[must_use]
    pub fn new(ops: OpList) -> Self {
        let n = ops.len();
        let (mut pred, mut pred_at) = (Vec::new(), Vec::with_capacity(n + 1));
        pred_at.push(0);
        let mut tracker = Tracker::new();
        let mut barrier = None;
        // Nodes since the last barrier that no later node waits for.
        let mut leaves: Vec<u32> = Vec::new();
        let mut deps: Vec<u32> = Vec::new();
        for (i, op) in ops.iter().enumerate() {
            let node = i as u32;
            deps.clear();
            if op.is_barrier() {
                deps.append(&mut leaves);
                if deps.is_empty() {
                    deps.extend(barrier);
                }
                tracker.clear();
                barrier = Some(node);
            } else {
                op.for_each_access(|addr, len, access| tracker.access(node, addr, len, access, |d| deps.push(d)));
                if deps.is_empty() {
                    deps.extend(barrier);
                }
                deps.sort_unstable();
                deps.dedup();
                reduce(&mut deps, &pred, &pred_at);
                leaves.retain(|l| !deps.contains(l));
                leaves.push(node);
            }
            pred.extend_from_slice(&deps);
            pred_at.push(pred.len() as u32);
        }
        Self { ops, pred, pred_at }
    }

    /// How many nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// The nodes that node `i` waits for.
    #[must_use]
    pub fn predecessors(&self, i: usize) -> &[u32] {
        match (self.pred_at.get(i), self.pred_at.get(i + 1)) {
            (Some(&from), Some(&to)) => &self.pred[from as usize..to as usize],
            _ => &[],
        }
    }

    /// Whether each node waits for the one before it: then the order itself is the schedule.
    #[must_use]
    pub fn is_chain(&self) -> bool {
        (1..self.len()).all(|i| self.predecessors(i).contains(&(i as u32 - 1)))
    }
}

/// How far back an edge is followed to find out that it follows from others. Longer detours leave a redundant edge.
const REDUCE_STEPS: usize = 64;

/// Removes from sorted `deps` what is an ancestor of another of them.
fn reduce(deps: &mut Vec<u32>, pred: &[u32], pred_at: &[u32]) {
    if deps.len() < 2 {
        return;
    }
    let lowest = deps[0];
    let mut redundant = Vec::new();
    let mut stack = Vec::new();
    for &d in deps.iter() {
        stack.push(d);
        let mut steps = 0;
        while let Some(node) = stack.pop() {
            for &p in &pred[pred_at[node as usize] as usize..pred_at[node as usize + 1] as usize] {
                if p >= lowest {
                    redundant.push(p);
                    steps += 1;
                    if steps < REDUCE_STEPS {
                        stack.push(p);
                    }
                }
            }
            if steps >= REDUCE_STEPS {
                stack.clear();
            }
        }
    }
    deps.retain(|d| !redundant.contains(d));
}
