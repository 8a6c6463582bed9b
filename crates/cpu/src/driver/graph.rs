//! Replay of plans.
//!
//! If each node of a plan waits for its predecessor, a launch is a loop. Otherwise nodes are sorted
//! by their depth in the dependencies. Nodes of one depth (a *wave*) do not wait for each other. So
//! the pool runs their tiles as one job, if the measured costs say that sharing pays. One launch in
//! every `MEASURE_EVERY` runs node by node and measures. In all cases a node computes the same
//! bits.
//!
//! A launch allocates nothing. The graph's lock serialises its launches.
//!
//! This module must not know streams or managers.

use super::float;
use super::queue::{Failure, Runner};
use super::work::Work;
use leasehold_core::panics::caught;
use leasehold_core::sync::{Mutex, MutexGuard};
use leasehold_core::{Error, Result};
use leasehold_hal::{ConditionalKind, NodePatch, Op, Plan};
use std::cell::Cell;
use std::ops::Range;

/// One launch in this many runs node by node, to measure costs again.
const MEASURE_EVERY: u64 = 32;

/// An instantiated plan.
pub(crate) struct Program {
    state: Mutex<RunState>,
    nodes: usize,
    bytes: u64,
}

struct RunState {
    plan: Plan,
    /// Nodes sorted by wave.
    order: Vec<u32>,
    /// Ranges of `order`, one per wave; empty for a chain.
    waves: Vec<Range<u32>>,
    /// For the current wave: the number of tiles before each of its nodes.
    before: Vec<u64>,
    launches: u64,
    /// The bodies of loops and branches, by node.
    bodies: Vec<(u32, Program)>,
}

impl Program {
    /// Sorts a plan's nodes into waves.
    ///
    /// # Errors
    /// As [`Plan::check`].
    pub(crate) fn new(plan: Plan) -> Result<Self> {
        plan.check()?;
        let n = plan.len();
        let mut order = Vec::new();
        let mut waves = Vec::new();
        let mut widest = 0;
        if !plan.is_chain() {
            let mut depth = vec![0u32; n];
            for i in 0..n {
                depth[i] =
                    plan.predecessors(i).iter().map(|&p| depth[p as usize] + 1).max().unwrap_or(0);
            }
            order = (0..n as u32).collect();
            order.sort_by_key(|&i| depth[i as usize]);
            let mut from = 0;
            while from < n {
                let d = depth[order[from] as usize];
                let to =
                    from + order[from..].iter().take_while(|&&i| depth[i as usize] == d).count();
                waves.push(from as u32..to as u32);
                widest = widest.max(to - from);
                from = to;
            }
        }
        let mut bodies = Vec::new();
        for (node, op) in plan.ops.iter().enumerate() {
            if let Op::Conditional(conditional) = op {
                bodies.push((node as u32, Self::new(conditional.body().clone())?));
            }
        }
        let inside: u64 = bodies.iter().map(|(_, body)| body.bytes).sum();
        let bytes = (order.len() * 4 + waves.len() * size_of::<Range<u32>>() + (widest + 1) * 8)
            as u64
            + plan.ops.bytes()
            + inside;
        let before = Vec::with_capacity(widest + 1);
        let state = RunState { plan, order, waves, before, launches: 0, bodies };
        Ok(Self { nodes: n, bytes: bytes + size_of::<Self>() as u64, state: Mutex::new(state) })
    }

    /// The number of nodes.
    pub(crate) fn nodes(&self) -> usize {
        self.nodes
    }

    /// Bytes of the plan and beside it.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Runs the plan.
    ///
    /// # Safety
    /// - The addresses of all its operations are valid for their accesses until the call returns.
    pub(crate) unsafe fn launch(&self, runner: &Runner<'_>) -> Result<(), Failure> {
        let mut state: MutexGuard<'_, RunState> = self.state.lock();
        let RunState { plan, order, waves, before, launches, bodies } = &mut *state;
        *launches += 1;
        let measure = *launches % MEASURE_EVERY == 1;
        let at = Cell::new(0u32);
        let outcome = caught(|| -> Result<(), Failure> {
            if waves.is_empty() || runner.pool.threads() == 1 || measure {
                for (i, op) in plan.ops.iter().enumerate() {
                    at.set(i as u32);
                    // SAFETY: an operation of the launch, for which the caller vouches.
                    unsafe { run_node(i as u32, &op, bodies, runner) }?;
                }
                return Ok(());
            }
            for wave in waves.iter() {
                let nodes = &order[wave.start as usize..wave.end as usize];
                // SAFETY: operations of the launch, for which the caller vouches.
                unsafe { run_wave((plan, bodies), nodes, before, runner, &at) }?;
            }
            Ok(())
        });
        let text = match outcome {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(Failure::Here(text))) => text,
            Ok(Err(other)) => return Err(other),
            Err(text) => {
                float::set();
                text
            }
        };
        let node = at.get();
        let name = plan.ops.get(node as usize).map_or_else(String::new, |op| op.name());
        Err(Failure::At(format!("graph node {node} ({name})"), text))
    }

    /// Changes nodes in place: all of them or, after an error, none.
    ///
    /// # Errors
    /// - `InvalidArgument` for a node that does not exist or is no dispatch, and for other numbers
    ///   of bindings or sizes of parameters.
    /// - `InvalidState` while a launch runs.
    pub(crate) fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        let mut state = self
            .state
            .try_lock()
            .ok_or_else(|| Error::state("a graph cannot be changed while a launch of it runs"))?;
        for p in patches {
            let index = p.node as usize;
            let Some(Op::Dispatch(d)) = state.plan.ops.get(index) else {
                return Err(Error::invalid(format!(
                    "node {index} is not a dispatch of this graph"
                )));
            };
            if p.bindings.is_some_and(|b| b.len() != d.bindings.len()) {
                return Err(Error::invalid(format!(
                    "node {index} has {} bindings",
                    d.bindings.len()
                )));
            }
            if p.params.is_some_and(|x| x.len() != d.params.len()) {
                return Err(Error::invalid(format!(
                    "node {index} has {} bytes of parameters",
                    d.params.len()
                )));
            }
        }
        for p in patches {
            state.plan.ops.patch(p.node as usize, p.bindings, p.params, p.grid)?;
        }
        Ok(())
    }
}

/// Runs one node: an operation, or the body of a loop or branch as often as its flag says.
///
/// # Safety
/// - The addresses of the operation, and of those in its body, are valid for their accesses.
unsafe fn run_node(
    node: u32,
    op: &Op<'_>,
    bodies: &[(u32, Program)],
    runner: &Runner<'_>,
) -> Result<(), Failure> {
    let Op::Conditional(conditional) = op else {
        // SAFETY: by the contract.
        return unsafe { runner.operation(op) };
    };
    let Some((_, body)) = bodies.iter().find(|(at, _)| *at == node) else { return Ok(()) };
    // SAFETY: the flag is one `u32` (the node's invariant) that may be read (the contract). What
    // wrote it is over: the nodes in front of this one, and the body's last run.
    let is_set = || unsafe { (conditional.flag().addr as *const u32).read_unaligned() } != 0;
    let mut go_on = is_set();
    while go_on {
        // SAFETY: by the contract.
        unsafe { body.launch(runner) }.map_err(|failure| match failure {
            Failure::At(name, text) => Failure::At(format!("{conditional}: {name}"), text),
            other => other,
        })?;
        go_on = conditional.kind() == ConditionalKind::While && is_set();
    }
    Ok(())
}

/// Runs nodes that do not wait for each other.
///
/// # Safety
/// - The addresses of their operations are valid for their accesses.
unsafe fn run_wave(
    (plan, bodies): (&Plan, &[(u32, Program)]),
    nodes: &[u32],
    before: &mut Vec<u64>,
    runner: &Runner<'_>,
    at: &Cell<u32>,
) -> Result<(), Failure> {
    let one_by_one = || {
        for &node in nodes {
            at.set(node);
            if let Some(op) = plan.ops.get(node as usize) {
                // SAFETY: an operation of the launch, for which the caller vouches.
                unsafe { run_node(node, &op, bodies, runner) }?;
            }
        }
        Ok(())
    };
    if nodes.len() == 1 {
        return one_by_one();
    }
    before.clear();
    let (mut tiles, mut nanos) = (0u64, 0u64);
    for &node in nodes {
        let Some(work) = plan.ops.get(node as usize).and_then(|op| {
            // SAFETY: the plan's pipelines are of the device that instantiated it.
            unsafe { Work::of(&op) }
        }) else {
            return one_by_one();
        };
        let cost = work.nanos(runner.pool);
        if cost == 0 {
            // The cost is not measured yet.
            return one_by_one();
        }
        before.push(tiles);
        tiles = tiles.saturating_add(work.tiles());
        nanos = nanos.saturating_add(cost);
    }
    let before = &*before;
    let failed = leasehold_core::sync::atomic::AtomicU32::new(nodes[0]);
    let body = |from: u64, to: u64| {
        let mut from = from;
        // The last node that begins at or before the tile. Nodes without tiles are skipped.
        let mut i = before.partition_point(|&b| b <= from) - 1;
        while from < to {
            let end = before.get(i + 1).copied().unwrap_or(tiles).min(to);
            if end > from
                && let Some(work) = plan.ops.get(nodes[i] as usize).and_then(|op| {
                    // SAFETY: the plan's pipelines are of the device that instantiated it.
                    unsafe { Work::of(&op) }
                })
            {
                let name = NameOnPanic { failed: &failed, node: nodes[i] };
                // SAFETY: the launch's caller vouches for addresses and accesses. Each tile is
                // claimed once.
                unsafe { work.run(from - before[i], end - before[i]) };
                std::mem::forget(name);
                from = end;
            }
            i += 1;
        }
    };
    match runner.pool.run(tiles, nanos, &body) {
        Ok(_) => Ok(()),
        Err(text) => {
            at.set(failed.load(leasehold_core::sync::atomic::Ordering::Relaxed));
            Err(Failure::Here(text))
        }
    }
}

/// Records the node whose tile panicked.
struct NameOnPanic<'a> {
    failed: &'a leasehold_core::sync::atomic::AtomicU32,
    node: u32,
}

impl Drop for NameOnPanic<'_> {
    fn drop(&mut self) {
        self.failed.store(self.node, leasehold_core::sync::atomic::Ordering::Relaxed);
    }
}
