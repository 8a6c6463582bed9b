//! Executable graphs: plans as graphs of the machine.
//!
//! A timestamp is a node that records an event. A foreign call is captured into a child graph. A
//! host call is a node; its failure fails the queue.
//!
//! This module must not know how plans are made.

use super::device::Common;
use crate::machine::{
    Condition, ExecId, GraphId, KernelCall, Machine, Node, NodeId, NodeUpdate, PartitionId, QueueId,
};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result, Tagged,
    tags,
};
use leasehold_hal::{ForeignCall, NodePatch, Op, OpList, Partition, Plan};
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomPinned;

/// A dispatch of a plan.
type Call = (NodeId, KernelCall);

/// An instantiated plan.
#[doc(alias = "Graph")]
pub struct GraphState {
    machine: Machine,
    pub(crate) exec: ExecId,
    /// The leases of the nodes; kept as long as the graph.
    ops: OpList,
    /// The partitions of the nodes.
    _partitions: Vec<(u32, Lease<Partition>)>,
    /// The node and the kernel call of each dispatch of the plan.
    calls: Mutex<Vec<Option<Call>>>,
    /// The state must not be moved out of its manager's pool.
    _place: PhantomPinned,
}

impl GraphState {
    /// The number of nodes of the plan.
    pub fn nodes(&self) -> usize {
        self.ops.len()
    }

    /// Bytes of device memory, and roughly those of host memory.
    pub fn bytes(&self) -> u64 {
        let host = self.ops.bytes() * 2 + self.ops.len() as u64 * size_of::<KernelCall>() as u64;
        // The executable exists as long as this state.
        host + self.machine.exec_bytes(self.exec).unwrap_or(0)
    }

    /// Updates nodes for later launches, all of them or none.
    pub(crate) fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        let mut calls = self.calls.lock();
        let mut new = Vec::with_capacity(patches.len());
        for p in patches {
            let index = p.node as usize;
            let Some(Some((node, call))) = calls.get(index) else {
                return Err(Error::invalid(format!(
                    "node {index} is not a dispatch of this graph"
                )));
            };
            let mut call = call.clone();
            if let Some(bindings) = p.bindings {
                call.bindings = bindings.to_vec();
            }
            if let Some(params) = p.params {
                call.params = params.to_vec();
            }
            call.grid = p.grid.unwrap_or(call.grid);
            new.push((index, *node, call));
        }
        let updates: Vec<_> =
            new.iter().map(|(_, node, call)| (*node, NodeUpdate::Kernel(call.clone()))).collect();
        self.machine.exec_update(self.exec, &updates)?;
        new.into_iter().for_each(|(index, node, call)| calls[index] = Some((node, call)));
        Ok(())
    }
}

impl Tagged for GraphState {
    type Tag = tags::Graph;
}

impl fmt::Debug for GraphState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GraphState({} nodes)", self.nodes())
    }
}

/// A template that is destroyed with this value.
struct Template<'a>(&'a Machine, GraphId);

impl Template<'_> {
    /// Leaves the template to the caller.
    fn keep(self) -> GraphId {
        let id = self.1;
        std::mem::forget(self);
        id
    }
}

impl Drop for Template<'_> {
    fn drop(&mut self) {
        // The template exists, because the maker of this value made it.
        let _ = self.0.graph_destroy(self.1);
    }
}

struct Graphs(Arc<Common>);

impl Graphs {
    /// Captures a foreign call into a graph of its own.
    fn capture(&self, call: &ForeignCall, on: Option<PartitionId>) -> Result<GraphId> {
        let machine = &self.0.machine;
        let queue = machine.queue_create_on(self.0.device, on)?;
        let captured = machine.capture_begin(queue).and_then(|()| {
            let called = call.run(queue.0);
            let graph = machine.capture_end(queue)?;
            called.map(|()| graph).inspect_err(|_| drop(Template(machine, graph)))
        });
        machine.queue_destroy(queue)?;
        captured
    }

    /// A plan as a template, and its dispatches.
    ///
    /// # Safety
    /// - As [`node`](Self::node), for each operation.
    unsafe fn template(&self, plan: &Plan) -> Result<(Template<'_>, Vec<Option<Call>>)> {
        let machine = &self.0.machine;
        let template = Template(machine, machine.graph_create()?);
        let mut calls = Vec::with_capacity(plan.len());
        for (i, op) in plan.ops.iter().enumerate() {
            // SAFETY: the caller vouches for the operation.
            let node = unsafe { self.node(&op, plan.partition(i)) }?;
            let deps: Vec<NodeId> = plan.predecessors(i).iter().map(|&p| NodeId(p)).collect();
            let call = if let Node::Kernel(call) = &node { Some(call.clone()) } else { None };
            let (child, body) = match node {
                Node::Child(graph) => (Some(Template(machine, graph)), None),
                Node::Conditional { body, .. } => (None, Some(Template(machine, body))),
                _ => (None, None),
            };
            let id = machine.graph_add(template.1, node, &deps)?;
            drop(child);
            // The body belongs to the template now.
            body.map(Template::keep);
            calls.push(call.map(|c| (id, c)));
        }
        Ok((template, calls))
    }

    /// An operation as a node. The caller owns the graph that it names, if it does.
    ///
    /// # Safety
    /// - The host memory that it names may be used at each run of the graph.
    unsafe fn node(&self, op: &Op<'_>, partition: Option<&Lease<Partition>>) -> Result<Node> {
        let partition = partition.map(|partition| PartitionId(partition.native()));
        Ok(match *op {
            Op::Dispatch(d) => Node::Kernel(KernelCall { partition, ..self.0.call(&d)? }),
            Op::Copy(_) | Op::Upload(_) | Op::Download(_) => {
                // SAFETY: the caller vouches for the plan's host memory.
                Node::Copy(unsafe { super::stream::transfer(op) }?)
            }
            Op::Fill(f) => Node::Fill(super::stream::fill(&f)),
            Op::WriteTimestamp(t) => Node::Record(crate::machine::EventId(t.native())),
            Op::Host(call) => {
                let (common, call, name) = (self.0.clone(), call.clone(), op.name());
                let what = name.clone();
                let run = move |queue: QueueId| {
                    common.host_call(&call, &what, queue, common.running(queue))
                };
                Node::Host { name: name.into(), call: Arc::new(run) }
            }
            Op::Foreign(call) => Node::Child(self.capture(call, partition)?),
            Op::Conditional(c) => {
                // SAFETY: the caller vouches for the body's host memory.
                let (body, _) = unsafe { self.template(c.body()) }?;
                let (name, condition) = (c.to_string().into(), Condition::Flag(c.flag().addr));
                Node::Conditional { kind: c.kind(), name, condition, body: body.keep() }
            }
            Op::Wait(_) | Op::Graph(_) => {
                return Err(Error::Unsupported(format!("a {} in a graph", op.kind()).into()));
            }
            ref other => {
                return Err(Error::Unsupported(
                    format!("a {} is not known here", other.kind()).into(),
                ));
            }
        })
    }
}

impl Resource for Graphs {
    type Payload = GraphState;
    type Request<'a> = Cell<Option<Plan>>;
    const NAME: &'static str = "graph";

    fn create(&self, _: Handle<tags::Graph>, plan: &Cell<Option<Plan>>) -> Result<GraphState> {
        let plan = plan.take().ok_or_else(|| Error::state("a plan is instantiated once"))?;
        let machine = &self.0.machine;
        plan.check()?;
        // SAFETY: plans come through `instantiate` alone, whose caller vouches for them.
        let (template, calls) = unsafe { self.template(&plan) }?;
        let exec = machine.instantiate(self.0.device, template.1)?;
        Ok(GraphState {
            machine: machine.clone(),
            exec,
            ops: plan.ops,
            _partitions: plan.partitions,
            calls: Mutex::new(calls),
            _place: PhantomPinned,
        })
    }

    fn recycle(&self, _: &mut GraphState) -> Recycle {
        Recycle::Destroy
    }

    fn destroy(&self, graph: GraphState) {
        // The graph exists; pending launches keep what they need.
        let _ = self.0.machine.exec_destroy(graph.exec);
    }
}

/// Owns the graphs of a device.
pub struct GraphManager {
    manager: PoolManager<Graphs>,
}

impl GraphManager {
    pub(crate) fn new(common: Arc<Common>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Graphs(common), PoolConfig::default())?;
        Ok(Self { manager })
    }

    /// Makes an executable graph from a plan.
    ///
    /// # Errors
    /// `InvalidArgument` for a plan that is not in topological order; `Unsupported` for waits and
    /// graphs in it; an error of the machine.
    ///
    /// # Safety
    /// - As `hal::Device::instantiate`.
    pub(crate) unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<GraphState>> {
        self.manager.acquire(&Cell::new(Some(plan)))
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }
}

impl fmt::Debug for GraphManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GraphManager").field(&self.stats()).finish()
    }
}
