//! Graphs that can be launched and updated.
//!
//! # Rules
//! Launches of one graph are serialised on its last launch; an update waits for it likewise. A graph keeps alive everything that
//! it uses: outside buffers, kernels, host calls, its arena. Dropping it while a launch runs loses nothing: memory is given back
//! when its points have passed.

use crate::event::Event;
use crate::graph::recorder::Recording;
use crate::pod::{Pod, bytes};
use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::{Stream, add_wait, mark};
use crate::view::{Operand, View};
use leasehold_alloc::{Buffer, GraphArena};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Point, Result, Stamp};
use leasehold_hal::{Access, GraphExec, NodePatch, Op, OpList, Plan};
use std::collections::HashMap;
use std::fmt;

/// A buffer that was there before the recording.
pub(crate) struct Outside {
    pub(crate) lease: Lease<Buffer>,
    pub(crate) writes: bool,
}

impl Outside {
    fn operand(&self) -> Operand<'_> {
        Operand { slice: self.lease.view(), access: if self.writes { Access::ReadWrite } else { Access::Read } }
    }
}

/// Names an operation of a graph, by its place in the recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(crate) u32);

impl NodeId {
    /// Node `index` of the recording, counted from 0.
    #[must_use]
    pub fn new(index: u32) -> Self {
        Self(index)
    }

    /// The index.
    #[must_use]
    pub fn index(self) -> u32 {
        self.0
    }
}

/// What an update did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Updated {
    /// The graph was changed in place.
    InPlace,
    /// The dependencies (or what the driver can change) did not allow that: the graph was instantiated anew.
    Reinstantiated,
}

struct State {
    exec: Lease<dyn GraphExec>,
    /// The plan as it was instantiated, to derive updates from.
    plan: Plan,
    outside: Vec<Outside>,
    last: Stamp,
    launches: u64,
}

struct Inner {
    runtime: Arc<RuntimeInner>,
    arena: GraphArena,
    events: Vec<Lease<Event>>,
    waits: Vec<Lease<Event>>,
    points: Vec<Point>,
    /// Where each recorded operation went in the plan; `None` for those that were redundant.
    places: Vec<Option<u32>>,
    recorded: usize,
    state: Mutex<State>,
}

/// A recorded graph. Clones are the same graph; any thread may launch it.
#[doc(alias = "graph::Graph")]
#[derive(Clone)]
pub struct Graph(Arc<Inner>);

/// Which recorded operations do nothing: empty ones, copies onto themselves, and copies or fills that repeat what still stands.
fn redundant(ops: &OpList) -> Vec<bool> {
    let mut standing: Vec<Op<'_>> = Vec::new();
    let overlaps = |a: (u64, u64), b: (u64, u64)| a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1);
    ops.iter()
        .map(|op| {
            let useless = match &op {
                Op::Copy(c) => c.width == 0 || c.rows == 0 || (c.src == c.dst && c.src_pitch == c.dst_pitch),
                Op::Fill(f) => f.bytes == 0,
                Op::Upload(u) => u.bytes == 0,
                Op::Download(d) => d.bytes == 0,
                Op::Dispatch(d) => d.grid.contains(&0),
                _ => false,
            };
            let repeats = |s: &Op<'_>| match (s, &op) {
                (Op::Copy(a), Op::Copy(b)) => a == b,
                (Op::Fill(a), Op::Fill(b)) => a == b,
                _ => false,
            };
            if useless || standing.iter().any(repeats) {
                return true;
            }
            if op.is_barrier() {
                // A host call may write anything.
                standing.clear();
            }
            op.for_each_access(|addr, len, access| {
                if access.writes() {
                    standing.retain(|s| {
                        let mut hit = false;
                        s.for_each_access(|a, l, _| hit |= overlaps((a, l), (addr, len)));
                        !hit
                    });
                }
            });
            if matches!(op, Op::Copy(_) | Op::Fill(_)) {
                standing.push(op);
            }
            false
        })
        .collect()
}

impl Graph {
    pub(crate) fn build(runtime: &Runtime, recording: Recording) -> Result<Self> {
        let Recording { runtime: inner, mut ops, arena, outside, events, waits, points, .. } = recording;
        let recorded = ops.len();
        let redundant = redundant(&ops);
        let mut next = 0;
        let places = redundant
            .iter()
            .map(|&r| {
                (!r).then(|| {
                    next += 1;
                    next - 1
                })
            })
            .collect();
        ops.retain(|i| !redundant[i]);
        let plan = Plan::new(ops);
        let exec = runtime.inner.device.instantiate(plan.clone())?;
        let mut outside: Vec<_> = outside.into_values().collect();
        outside.sort_by_key(|o| o.lease.handle());
        let state = State { exec, plan, outside, last: Stamp::NEVER, launches: 0 };
        Ok(Self(Arc::new(Inner {
            runtime: inner,
            arena,
            events,
            waits,
            points,
            places,
            recorded,
            state: Mutex::new(state),
        })))
    }

    /// Launches the graph on the default stream: one submission. Allocates nothing. Does not block.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `Suspended`; `Recording` on a thread that records on this device (graphs are not
    /// nested); the driver's own.
    #[doc(alias = "execute")]
    pub fn launch(&self) -> Result<Point> {
        let stream = Stream { core: self.0.runtime.default.clone(), runtime: self.0.runtime.clone() };
        self.launch_on(&stream)
    }

    /// Launches the graph on a stream of its device.
    ///
    /// # Errors
    /// As [`launch`](Self::launch); `InvalidArgument` for a stream of another device.
    pub fn launch_on(&self, stream: &Stream) -> Result<Point> {
        let inner = &*self.0;
        if !Arc::ptr_eq(&stream.runtime, &inner.runtime) {
            return Err(Error::invalid(format!("{stream:?} is not a stream of {}", inner.runtime.id())));
        }
        crate::graph::recorder::refuse(&inner.runtime, "a graph cannot be launched while recording on its device")?;
        let guard = inner.arena.launch()?;
        let mut state = inner.state.lock();
        let line = stream.core.line;
        let turn = stream.core.seat.turn()?;
        let waits = &mut turn.frame().waits;
        waits.clear();
        for o in &state.outside {
            crate::stream::gather(line, &o.operand(), waits);
        }
        let mut need = |p: Point| {
            if !line.knows(p.into()) && !p.is_settled() {
                add_wait(waits, p);
            }
        };
        if let Some(p) = state.last.point() {
            need(p);
        }
        inner.points.iter().for_each(|&p| need(p));
        for event in &inner.waits {
            need(event.point()?);
        }
        let op = Op::Graph(&state.exec);
        // SAFETY: the exec is of this device; it and the graph's buffers are kept alive by their owners until their points have
        // passed: outside buffers and the arena are marked below, the backend holds the exec while it runs.
        let value = unsafe {
            if waits.is_empty() {
                stream.core.raw.submit(std::slice::from_ref(&op))?
            } else {
                stream.submit_after(waits, &op)?
            }
        };
        let point = line.at(value);
        state.outside.iter().for_each(|o| mark(&o.operand(), point));
        guard.launched(point);
        state.last = point.into();
        state.launches += 1;
        drop(turn);
        inner.events.iter().for_each(|e| e.set(point));
        Ok(point)
    }

    /// How many operations were recorded.
    #[must_use]
    pub fn recorded(&self) -> usize {
        self.0.recorded
    }

    /// How many operations a launch runs.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.0.state.lock().plan.len()
    }

    /// The operations that a launch runs, in order, with the operations that each waits for.
    #[must_use]
    pub fn describe(&self) -> Vec<(String, Vec<u32>)> {
        let state = self.0.state.lock();
        state.plan.ops.iter().enumerate().map(|(i, op)| (op.name(), state.plan.predecessors(i).to_vec())).collect()
    }

    /// Bytes of the graph's own memory: its packed temporaries.
    #[must_use]
    pub fn arena_bytes(&self) -> u64 {
        self.0.arena.bytes()
    }

    /// Bytes that the instantiated graph holds beside its memory, as far as the backend knows.
    #[must_use]
    pub fn exec_bytes(&self) -> u64 {
        self.0.state.lock().exec.bytes()
    }

    /// How often it was launched.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.0.state.lock().launches
    }

    /// The graph's memory, to suspend and resume it.
    #[must_use]
    pub fn arena(&self) -> &GraphArena {
        &self.0.arena
    }

    /// Changes parameters, grids and buffers. Blocks until the last launch is over. All-or-nothing.
    ///
    /// A change that alters which operations depend on which (a buffer that now meets another) instantiates the graph anew, and says so.
    ///
    /// # Errors
    /// `InvalidArgument` for a node that is no launch, another size, a buffer that the graph does not use, or one that is too
    /// small; the cause when the last launch failed.
    pub fn update(&self, update: &Update<'_>) -> Result<Updated> {
        let inner = &*self.0;
        crate::graph::recorder::refuse(&inner.runtime, "a graph cannot be updated while recording on its device")?;
        let mut state = inner.state.lock();
        if let Some(last) = state.last.point() {
            Runtime::from_inner(inner.runtime.clone()).wait_point(last, None)?;
        }
        let mut ops = state.plan.ops.clone();
        let mut changed: Vec<u32> = Vec::new();
        let mut swaps: HashMap<u64, &Lease<Buffer>> = HashMap::new();
        for (old, new) in &update.buffers {
            let Some(at) = state.outside.iter().position(|o| o.lease.same(old)) else {
                return Err(Error::invalid("the graph does not use the buffer that is to be replaced"));
            };
            if !inner.runtime.memory.owns(new) {
                inner.runtime.check_operands(&[new.read()])?;
            }
            inner.runtime.refuse_symbolic(&[new.read()])?;
            if new.len() < old.len() {
                return Err(Error::invalid(format!(
                    "a buffer of {} bytes cannot stand in for one of {}",
                    new.len(),
                    old.len()
                )));
            }
            swaps.insert(at as u64, new);
        }
        if !swaps.is_empty() {
            let ranges: Vec<_> = swaps
                .iter()
                .map(|(&at, new)| {
                    let old = &state.outside[at as usize].lease;
                    (old.addr(), old.len(), new.addr(), new.native())
                })
                .collect();
            for (i, op) in state.plan.ops.iter().enumerate() {
                let mut hit = false;
                op.for_each_access(|addr, _, _| hit |= ranges.iter().any(|r| addr >= r.0 && addr < r.0 + r.1));
                if hit {
                    changed.push(i as u32);
                }
            }
            ops.rebind(|addr| ranges.iter().find(|r| addr >= r.0 && addr < r.0 + r.1).map(|r| (addr - r.0 + r.2, r.3)));
        }
        for (node, params, grid) in &update.nodes {
            let place = inner.places.get(node.0 as usize).copied().flatten();
            let Some(place) = place else {
                return Err(Error::invalid(format!("node {} is not a launch of this graph", node.0)));
            };
            ops.patch(place as usize, None, params.as_deref(), *grid)?;
            changed.push(place);
        }
        changed.sort_unstable();
        changed.dedup();
        let plan = Plan::new(ops);
        let same = plan.pred == state.plan.pred && plan.pred_at == state.plan.pred_at;
        let mut outcome = Updated::Reinstantiated;
        if same {
            let mut only_launches = true;
            let mut patches = Vec::with_capacity(changed.len());
            for &i in &changed {
                match plan.ops.get(i as usize) {
                    Some(Op::Dispatch(d)) => patches.push(NodePatch {
                        node: i,
                        bindings: Some(d.bindings),
                        params: Some(d.params),
                        grid: Some(d.grid),
                    }),
                    _ => only_launches = false,
                }
            }
            if only_launches {
                match state.exec.update(&patches) {
                    Ok(()) => outcome = Updated::InPlace,
                    Err(Error::TopologyChanged(_)) => {}
                    Err(e) => return Err(e),
                }
            }
        }
        if outcome == Updated::Reinstantiated {
            state.exec = inner.runtime.device.instantiate(plan.clone())?;
        }
        state.plan = plan;
        let mut old = Vec::new();
        for (at, new) in swaps {
            old.push(std::mem::replace(&mut state.outside[at as usize].lease, new.clone()));
        }
        drop(state);
        drop(old);
        Ok(outcome)
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({}, {} nodes)", self.0.runtime.id(), self.nodes())
    }
}

/// New parameters, a new grid, or both.
type NodeChange = (NodeId, Option<Vec<u8>>, Option<[u32; 3]>);

/// Changes to a graph.
#[derive(Debug, Default)]
#[must_use = "an update does nothing until it is given to Graph::update"]
pub struct Update<'a> {
    nodes: Vec<NodeChange>,
    buffers: Vec<(&'a Lease<Buffer>, &'a Lease<Buffer>)>,
}

impl<'a> Update<'a> {
    /// No changes yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// New parameters of a launch.
    pub fn params<T: Pod>(mut self, node: NodeId, params: &T) -> Self {
        self.nodes.push((node, Some(bytes(std::slice::from_ref(params)).to_vec()), None));
        self
    }

    /// A new grid of a launch.
    pub fn grid(mut self, node: NodeId, grid: [u32; 3]) -> Self {
        self.nodes.push((node, None, Some(grid)));
        self
    }

    /// Another buffer in the place of one that the graph uses, wherever it uses it. At least as long.
    pub fn buffer(mut self, old: &'a Lease<Buffer>, new: &'a Lease<Buffer>) -> Self {
        self.buffers.push((old, new));
        self
    }
}
