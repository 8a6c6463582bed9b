//! Plans: lists of operations with the dependencies of each.
//!
//! This module must not know which device will run it.

use crate::conditional::{Body, Conditional, ConditionalKind};
use crate::hazard::{Tracker, Written};
use crate::kernel::{Access, Binding};
use crate::list::OpList;
use crate::op::Op;
use crate::partition::Partition;
use leasehold_core::{Error, Lease, Name, Result};
use std::any::Any;
use std::sync::Arc;

/// A list of operations with dependencies, in topological order.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The operations.
    pub ops: OpList,
    /// Predecessors of all nodes, one after the other.
    pub pred: Vec<u32>,
    /// The start of the predecessors of node `i`: `pred[pred_at[i]..pred_at[i + 1]]`. One entry
    /// longer than `ops`.
    pub pred_at: Vec<u32>,
    /// The grants of [`early_reads`](Self::early_reads), by node. Shorter if the rest is 0.
    pub early: Vec<u32>,
    /// The partitions of the nodes that have one, in the order of the nodes.
    pub partitions: Vec<(u32, Lease<Partition>)>,
}

impl Plan {
    /// Derives the dependencies from the declared accesses. Edges that follow from others are
    /// omitted.
    ///
    /// Operations with undeclared accesses (host calls, timestamps, graphs) are barriers.
    #[must_use]
    pub fn new(ops: OpList) -> Self {
        let n = ops.len();
        let (mut pred, mut pred_at) = (Vec::new(), Vec::with_capacity(n + 1));
        pred_at.push(0);
        let mut tracker = Tracker::new();
        let mut barrier: Option<u32> = None;
        // For each node: whether a later node waits for it.
        let mut followed = vec![false; n];
        let mut reducer = Reducer { seen: vec![u32::MAX; n], stack: Vec::new() };
        let mut deps: Vec<u32> = Vec::new();
        for (i, op) in ops.iter().enumerate() {
            let node = i as u32;
            deps.clear();
            if op.is_barrier() {
                // The nodes since the last barrier without a successor; every other node precedes
                // one of them.
                let since = barrier.map_or(0, |b| b + 1);
                deps.extend((since..node).filter(|&d| !followed[d as usize]));
                tracker.clear();
            } else {
                op.for_each_access(|addr, len, access| {
                    tracker.access(node, addr, len, access, |d| deps.push(d))
                });
                deps.sort_unstable();
                deps.dedup();
                reducer.reduce(node, &mut deps, &pred, &pred_at);
            }
            if deps.is_empty() {
                deps.extend(barrier);
            }
            if op.is_barrier() {
                barrier = Some(node);
            }
            deps.iter().for_each(|&d| followed[d as usize] = true);
            pred.extend_from_slice(&deps);
            pred_at.push(pred.len() as u32);
        }
        let early = grants(&ops);
        Self { ops, pred, pred_at, early, partitions: Vec::new() }
    }

    /// Checks that a backend can run the plan; for `instantiate`.
    ///
    /// # Errors
    /// `InvalidArgument` for nodes that do not come after their predecessors; `Unsupported` for
    /// several copies in one node, whose place single copies take; as
    /// [`Conditional::check`](crate::Conditional::check).
    pub fn check(&self) -> Result<()> {
        let n = self.len();
        if n != 0 && self.pred_at.len() != n + 1
            || (0..n).any(|i| self.predecessors(i).iter().any(|&p| p as usize >= i))
        {
            return Err(Error::invalid("a plan whose nodes do not come after what they wait for"));
        }
        for (node, op) in self.ops.iter().enumerate() {
            match op {
                Op::Copies(_) => {
                    return Err(Error::Unsupported(
                        format!("node {node} has several copies; give each a node of its own")
                            .into(),
                    ));
                }
                Op::Conditional(conditional) => conditional.check()?,
                _ => {}
            }
        }
        Ok(())
    }

    /// The bindings that node `i` may read before the nodes in front of it are over, bit `b` for
    /// binding `b`. They are those that its kernel can read early
    /// ([`KernelDesc::early_reads`](crate::KernelDesc::early_reads)) and that no node writes.
    ///
    /// Nobody else writes them meanwhile, because a launch comes after all earlier writes of its
    /// memory and before all later ones. So the one condition for a backend is that no node begins
    /// before the launch does.
    #[must_use]
    pub fn early_reads(&self, i: usize) -> u32 {
        self.early.get(i).copied().unwrap_or(0)
    }

    /// The partition that runs node `i`, on whichever stream the graph is launched; `None` for all
    /// of the device.
    #[must_use]
    pub fn partition(&self, i: usize) -> Option<&Lease<Partition>> {
        let at = self.partitions.binary_search_by_key(&(i as u32), |&(node, _)| node).ok()?;
        Some(&self.partitions[at].1)
    }

    /// The number of nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// The number of nodes, those of bodies of loops and branches included.
    #[must_use]
    pub fn total(&self) -> usize {
        let inside = |op: Op<'_>| match op {
            Op::Conditional(conditional) => conditional.body().total(),
            _ => 0,
        };
        self.len() + self.ops.iter().map(inside).sum::<usize>()
    }

    /// Returns whether the plan has no nodes.
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

    /// Returns whether each node waits for the one before it, so that the order itself is the
    /// schedule.
    #[must_use]
    pub fn is_chain(&self) -> bool {
        (1..self.len()).all(|i| self.predecessors(i).contains(&(i as u32 - 1)))
    }
}

/// Conditional nodes with their plans.
impl Conditional {
    /// A conditional node. The flag is one `u32`; the body's dependencies are derived.
    ///
    /// # Errors
    /// `InvalidArgument` for a flag that is not four aligned bytes, an empty body, and a loop whose
    /// body does not write the flag; `Unsupported` for operations that a body cannot have.
    pub fn new(
        kind: ConditionalKind,
        name: Option<Name>,
        flag: Binding,
        body: OpList,
    ) -> Result<Self> {
        let flag = Binding { access: Access::Read, ..flag };
        let new = Self { kind, name, flag, body: Arc::new(Plan::new(body)) };
        new.check()?;
        Ok(new)
    }

    /// The operations that run under the condition.
    #[must_use]
    pub fn body(&self) -> &Plan {
        let body: &dyn Any = &*self.body;
        // `new` and `rebased` alone make bodies.
        body.downcast_ref().unwrap_or(&NO_BODY)
    }

    /// Checks flag and body again, as they are now.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn check(&self) -> Result<()> {
        let Binding { addr, len, .. } = self.flag;
        if len != 4 || !addr.is_multiple_of(4) {
            return Err(Error::invalid(format!(
                "the flag of a {self} is {len} bytes at {addr:#x}; give one u32 (4 bytes at a multiple of 4)"
            )));
        }
        if self.body().is_empty() {
            return Err(Error::invalid(format!(
                "the body of a {self} is empty; record at least one operation with the runtime that the body is lent"
            )));
        }
        let mut writes_flag = false;
        for op in self.body().ops.iter() {
            Self::admit(&op)?;
            if let Op::Conditional(inner) = &op {
                inner.check()?;
            }
            op.for_each_access(|at, bytes, access| {
                let touched = Binding { addr: at, len: bytes, ..self.flag };
                writes_flag |= access.writes() && touched.overlaps(&self.flag);
            });
        }
        if self.kind == ConditionalKind::While && !writes_flag {
            return Err(Error::invalid(format!(
                "nothing in the body of a {self} writes its flag, so it would never end; write the flag in the body, or record a branch"
            )));
        }
        Ok(())
    }

    /// Checks that a body can have the operation.
    ///
    /// # Errors
    /// `Unsupported` for one that it cannot have.
    pub fn admit(op: &Op<'_>) -> Result<()> {
        match op {
            Op::Dispatch(_) | Op::Copy(_) | Op::Fill(_) | Op::Foreign(_) | Op::Conditional(_) => {
                Ok(())
            }
            other => Err(Error::Unsupported(
                format!(
                    "a {} in the body of a loop or branch, which has launches, copies within the device, fills, library calls, loops and branches: \
                     record it outside the body",
                    other.kind()
                )
                .into(),
            )),
        }
    }
}

static NO_BODY: Plan = Plan {
    ops: OpList::new(),
    pred: Vec::new(),
    pred_at: Vec::new(),
    early: Vec::new(),
    partitions: Vec::new(),
};

impl Body for Plan {
    fn touches(&self, f: &mut dyn FnMut(u64, u64, Access)) {
        self.ops.iter().for_each(|op| op.for_each_access(&mut *f));
    }

    fn rebased(&self, map: &mut dyn FnMut(u64) -> Option<(u64, u64)>) -> Arc<dyn Body> {
        let mut ops = self.ops.clone();
        ops.rebind_with(map);
        Arc::new(Plan::new(ops))
    }
}

/// For each operation, the bindings that it may read early. Empty if there are none.
fn grants(ops: &OpList) -> Vec<u32> {
    let asks = |op: &Op<'_>| matches!(op, Op::Dispatch(d) if d.pipeline.early_reads != 0);
    if !ops.iter().any(|op| asks(&op)) {
        return Vec::new();
    }
    let Some(written) = Written::by(ops) else { return Vec::new() };
    let of = |op: Op<'_>| match op {
        Op::Dispatch(d) => (0..d.bindings.len().min(32))
            .filter(|&i| d.pipeline.early_reads >> i & 1 != 0)
            .filter(|&i| !written.meets(d.bindings[i].addr, d.bindings[i].len))
            .fold(0, |all, i| all | 1 << i),
        _ => 0,
    };
    ops.iter().map(of).collect()
}

/// The number of edges that the reduction follows backwards from one node to find its redundant
/// edges. A longer way leaves a redundant edge, which costs a little at a launch and is never
/// wrong.
const REDUCE_STEPS: usize = 256;

/// Removes edges that follow from others. Its buffers are reused from node to node.
struct Reducer {
    /// For each earlier node: the last node that has a dependency with this node as an ancestor.
    seen: Vec<u32>,
    stack: Vec<u32>,
}

impl Reducer {
    /// Removes those of `deps` (sorted, without duplicates) that are an ancestor of another one of
    /// them.
    fn reduce(&mut self, node: u32, deps: &mut Vec<u32>, pred: &[u32], pred_at: &[u32]) {
        let Some(&lowest) = deps.first() else { return };
        if deps.len() < 2 {
            return;
        }
        let mut steps = REDUCE_STEPS + deps.len();
        // From the latest: an ancestor has a lower number than its descendant, and a visited node
        // needs no walk of its own.
        for &d in deps.iter().rev() {
            if self.seen[d as usize] == node {
                continue;
            }
            self.stack.push(d);
            while let Some(at) = self.stack.pop() {
                for &p in &pred[pred_at[at as usize] as usize..pred_at[at as usize + 1] as usize] {
                    if p >= lowest && self.seen[p as usize] != node && steps > 0 {
                        steps -= 1;
                        self.seen[p as usize] = node;
                        self.stack.push(p);
                    }
                }
                if steps == 0 {
                    self.stack.clear();
                }
            }
        }
        deps.retain(|&d| self.seen[d as usize] != node);
    }
}
