//! Instantiated plans: executable graphs of explicitly added nodes.
//!
//! Every operation is one node, with the plan's edges. A segment of the plan's
//! [`Steps`] is an executable graph of its own. A plan without host calls and waits is one segment
//! and one launch.
//!
//! A conditional node has a body, to which its plan's nodes are added in the same way. A graph with
//! such nodes cannot be a node of another one, so its nodes are added there one by one.
//!
//! Bytes for pageable memory land in pinned memory that the graph owns. The host copies them on
//! when the launch is over. Calls of foreign libraries are captured, each into a child graph.
//!
//! This module must not know streams.

use super::condition::{After, ConditionSetter};
use super::core::Core;
use super::driver_context::DriverContext;
use super::host::copy_out;
use super::stream::CudaStream;
use crate::driver::ops::{
    CopyKind, CudaSlowOps, GraphExecUpdate, NativeCopy, NativeEvent, NativeGraph, NativeGraphExec,
    NativeNode, NativePartition, NativeStream,
};
use crate::encoder::{self, Arguments, Route};
use leasehold_alloc::Buffer;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Result, UniqueLease};
use leasehold_hal::engine::driver::{GraphSteps, Instantiate};
use leasehold_hal::engine::payload::graph_of;
use leasehold_hal::engine::staging::HostAddress;
use leasehold_hal::engine::steps::Steps;
use leasehold_hal::partition::is_same;
use leasehold_hal::{
    Conditional, ConditionalKind, Dispatch, Download, GraphExec, NodePatch, Op, Partition, Plan,
    TimestampQuery,
};
use std::fmt;
use std::ops::Range;

/// Bytes of device memory that the driver takes for a node, and for each branch of a graph: a chain
/// of nodes that it may run beside others. The driver reports neither. (Measured: decision 0045.)
const NODE_BYTES: u64 = 5 << 9;
const BRANCH_BYTES: u64 = 112 << 10;
/// Bytes for a conditional node with a body of one branch. (Measured on an H100: 53 KiB.)
const CONDITIONAL_BYTES: u64 = 56 << 10;

struct StagingCopy {
    staging: UniqueLease<Buffer>,
    dst: HostAddress,
    bytes: u64,
}

/// A part of a plan that is one launch.
struct Segment {
    graph: NativeGraph,
    exec: NativeGraphExec,
    staging_copies: Vec<StagingCopy>,
    timestamps: Vec<Lease<TimestampQuery>>,
    children: Vec<Lease<dyn GraphExec>>,
    /// The kernel that sets the graph's conditions, if it has any. Such a graph cannot be a child.
    condition_setter: Option<Arc<ConditionSetter>>,
}

/// A dispatch that has a node of the driver.
#[derive(Clone, Copy)]
struct Kernel {
    segment: u32,
    node: NativeNode,
    /// Its partition, which the plan keeps; null without one.
    on: NativePartition,
}

/// An instantiated plan.
pub struct Program {
    context: Arc<DriverContext>,
    plan: Mutex<Plan>,
    steps: Steps,
    segments: Vec<Segment>,
    /// The kernel nodes, by node of the plan.
    kernels: Vec<Option<Kernel>>,
    nodes: usize,
    /// Bytes of device memory that the driver takes for the executables, about.
    device_bytes: u64,
}

/// Segments under construction. Unless they are finished, the drop gives them back.
struct Building<'a> {
    core: &'a Core,
    segments: Vec<Segment>,
}

impl Drop for Building<'_> {
    fn drop(&mut self) {
        release(&self.core.context, &mut self.segments);
    }
}

fn release(context: &DriverContext, segments: &mut Vec<Segment>) {
    for segment in segments.drain(..) {
        if !segment.exec.is_null() {
            // SAFETY: the executable is this segment's, and nothing uses the segment any more.
            context.release_or_log(|ops| unsafe { ops.exec_destroy(segment.exec) });
        }
        if !segment.graph.is_null() {
            // SAFETY: the graph was made here and is destroyed once.
            context.release_or_log(|ops| unsafe { ops.graph_destroy(segment.graph) });
        }
    }
}

impl Program {
    /// The program of an exec of this device.
    ///
    /// # Safety
    /// - The exec was instantiated on a device of this backend.
    pub unsafe fn of(exec: &Lease<dyn GraphExec>) -> &Program {
        // SAFETY: the caller vouches for the exec.
        unsafe { graph_of::<CudaStream>(exec) }
    }

    /// Whether a launch does nothing.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Launches a segment. The context is current.
    ///
    /// # Safety
    /// - The graph, and the memory that its nodes touch, live until the launch is over.
    pub(crate) unsafe fn launch(
        &self,
        segment: u32,
        ops: &dyn CudaSlowOps,
        stream: NativeStream,
    ) -> Result<()> {
        // SAFETY: the caller keeps the graph, and so this executable, and vouches for the memory of
        // its nodes.
        unsafe { ops.exec_launch(self.segments[segment as usize].exec, stream) }
    }

    /// Does the host's part of a segment's launch that is over.
    pub(crate) fn finish_host_part(&self, segment: u32, ops: &dyn CudaSlowOps) {
        let Some(segment) = self.segments.get(segment as usize) else { return };
        for staging_copy in &segment.staging_copies {
            // SAFETY: the segment ran, so its bytes are in the staging memory. The plan's maker
            // vouches for the destination whenever the graph runs. One thread runs a stream's
            // actions.
            unsafe { copy_out(&staging_copy.staging, staging_copy.dst, staging_copy.bytes, ops) };
        }
        segment.timestamps.iter().for_each(|timestamp| timestamp.set(1));
        for child in &segment.children {
            // SAFETY: the child was checked to be of this device when it became a child.
            unsafe { Program::of(child) }.finish_host_part(0, ops);
        }
    }

    /// Sets a kernel node to the parameters of a list.
    fn set(&self, ops: &leasehold_hal::OpList, node: u32, early: u32) -> Result<GraphExecUpdate> {
        let (Some(kernel), Some(Op::Dispatch(d))) =
            (self.kernels[node as usize], ops.get(node as usize))
        else {
            // The launch has no blocks before and after, so nothing is to be set.
            return Ok(GraphExecUpdate::InPlace);
        };
        let mut arguments = Arguments::new();
        let exec = self.segments[kernel.segment as usize].exec;
        let on = kernel.on;
        self.context.within(|driver| {
            let args = arguments.fill(&d, early, driver)?;
            // SAFETY: the graph's launcher keeps the memory alive. Numbers and sizes are those of
            // the node.
            unsafe {
                driver.exec_set_kernel(exec, kernel.node, &encoder::launch(&d, args, early), on)
            }
        })
    }
}

/// Whether a copy cannot be a node.
fn is_apart(core: &Core, op: &Op<'_>) -> bool {
    let Op::Copy(c) = op else { return false };
    c.width != 0 && c.rows != 0 && !matches!(encoder::route(core, c), Ok(Route::Direct(_)) | Err(_))
}

impl Building<'_> {
    /// Builds one segment from the nodes `from..to` of the plan.
    fn segment(
        &mut self,
        plan: &Plan,
        from: usize,
        to: usize,
        kernels: &mut [Option<Kernel>],
    ) -> Result<()> {
        let core = self.core;
        let number = self.segments.len() as u32;
        let graph = core.context.within(|ops| ops.graph_create())?;
        self.segments.push(Segment {
            graph,
            exec: NativeGraphExec::NULL,
            staging_copies: Vec::new(),
            timestamps: Vec::new(),
            children: Vec::new(),
            condition_setter: None,
        });
        let nodes = self.nodes(graph, &[], plan, from..to)?;
        for (i, &node) in (from..to).zip(&nodes) {
            if has_blocks(plan, i) {
                let on = native(plan.partition(i));
                kernels[i] = Some(Kernel { segment: number, node, on });
            }
        }
        // SAFETY: the graph was made here and has no other user.
        let exec = core.context.within(|ops| unsafe { ops.graph_instantiate(graph) })?;
        if let Some(segment) = self.segments.last_mut() {
            segment.exec = exec;
        }
        core.upload(exec)
    }

    /// Adds the nodes of a range of a plan to a graph. Those that wait for none of the range wait
    /// for `before`.
    fn nodes(
        &mut self,
        graph: NativeGraph,
        before: &[NativeNode],
        plan: &Plan,
        range: Range<usize>,
    ) -> Result<Vec<NativeNode>> {
        let core = self.core;
        let from = range.start;
        let mut nodes: Vec<NativeNode> = Vec::with_capacity(range.len());
        let mut after = Vec::new();
        for i in range {
            let Some(op) = plan.ops.get(i) else { break };
            after.clear();
            // Nodes of an earlier segment are over when this segment starts.
            let inside = plan.predecessors(i).iter().filter(|&&p| p as usize >= from);
            after.extend(inside.map(|&p| nodes[p as usize - from]));
            if after.is_empty() {
                after.extend(before);
            }
            let node = match (&op, &after[..]) {
                (Op::Dispatch(d), &[before]) if is_dependent(plan, i) => add_kernel(
                    &core.context,
                    graph,
                    After::Dependent(before),
                    d,
                    (plan.early_reads(i), native(plan.partition(i))),
                )?,
                _ => self.node(graph, &after, plan, i, &op)?,
            };
            nodes.push(node);
        }
        Ok(nodes)
    }

    /// Adds a node that runs a body under a condition.
    fn conditional(
        &mut self,
        graph: NativeGraph,
        after: &[NativeNode],
        conditional: &Conditional,
    ) -> Result<NativeNode> {
        let core = self.core;
        let (flag, body) = (conditional.flag(), conditional.body());
        if let Some(op) = body.ops.iter().find(|op| is_apart(core, op)) {
            return Err(Error::Unsupported(
                format!(
                    "a {} in the body of a {conditional}: the driver takes it in several calls; record it outside the body",
                    op.name()
                )
                .into(),
            ));
        }
        let setter = core.condition_setter()?;
        if let Some(segment) = self.segments.last_mut() {
            segment.condition_setter = Some(setter.clone());
        }
        // SAFETY: the graph was made here and has no other user.
        let condition = core.context.within(|ops| unsafe { ops.condition_create(graph) })?;
        // SAFETY: as above. The flag is memory of the node, and the segment keeps the setter.
        let set = unsafe { setter.add(graph, After::All(after), condition, flag) }?;
        let (node, native) = core.context.within(|ops| {
            // SAFETY: as above. The node in front sets the condition, and so does the last one of a
            // loop's body.
            unsafe { ops.graph_add_conditional(graph, &[set], condition, conditional.kind()) }
        })?;
        let nodes = self.nodes(native, &[], body, 0..body.len())?;
        if conditional.kind() == ConditionalKind::While {
            let ends = ends(body, &nodes);
            let after = match ends[..] {
                [(end, node)] if has_blocks(body, end) => After::Dependent(node),
                _ => After::All(&ends.iter().map(|end| end.1).collect::<Vec<_>>()),
            };
            // SAFETY: as for the node in front.
            unsafe { setter.add(native, after, condition, flag) }?;
        }
        Ok(node)
    }

    /// Adds node `i` of the plan.
    fn node(
        &mut self,
        graph: NativeGraph,
        after: &[NativeNode],
        plan: &Plan,
        i: usize,
        op: &Op<'_>,
    ) -> Result<NativeNode> {
        let core = self.core;
        let Some(segment) = self.segments.last_mut() else {
            return Err(Error::state("no segment is being built"));
        };
        let context = &core.context;
        // SAFETY: the graph and its nodes were made here and have no other user.
        let empty = || context.within(|ops| unsafe { ops.graph_add_empty(graph, after) });
        // SAFETY (all of the calls below): the graph's launcher keeps its memory alive (the
        // submitter's promise). The plan and the segment keep the host memory of the uploads and
        // staging copies.
        match op {
            Op::Dispatch(d) if d.grid.contains(&0) => empty(),
            Op::Dispatch(d) => {
                let how = (plan.early_reads(i), native(plan.partition(i)));
                add_kernel(context, graph, After::All(after), d, how)
            }
            Op::Copy(c) if c.width == 0 || c.rows == 0 => empty(),
            Op::Copy(c) => match encoder::route(core, c)? {
                Route::Direct(copy) => context.within(|ops| {
                    // SAFETY: the plan's maker vouches for the node's memory whenever the graph
                    // runs.
                    unsafe { ops.graph_add_copy(graph, after, &copy) }
                }),
                // Such copies were split off before. This arm is reached only if peer access was
                // revoked meanwhile.
                Route::Peer(..) | Route::Rows(_) => {
                    Err(Error::state("two devices ceased to reach each other"))
                }
            },
            Op::Fill(f) if f.bytes == 0 => empty(),
            Op::Fill(f) => context.within(|ops| {
                // SAFETY: the plan's maker vouches for the node's memory whenever the graph runs.
                unsafe { ops.graph_add_fill(graph, after, &encoder::native_fill(f)) }
            }),
            Op::Upload(u) if u.bytes == 0 => empty(),
            Op::Upload(u) => {
                let copy = NativeCopy::linear(CopyKind::HostToDevice, u.dst, u.src as u64, u.bytes);
                context.within(|ops| {
                    // SAFETY: the plan's maker vouches for the node's memory whenever the graph
                    // runs.
                    unsafe { ops.graph_add_copy(graph, after, &copy) }
                })
            }
            Op::Download(d) if d.bytes == 0 => empty(),
            Op::Download(d) => {
                let dst = if encoder::copies_directly(core, d) {
                    d.dst as u64
                } else {
                    staged(core, segment, d)?
                };
                let copy = NativeCopy::linear(CopyKind::DeviceToHost, dst, d.src, d.bytes);
                context.within(|ops| {
                    // SAFETY: the plan's maker vouches for the node's memory whenever the graph
                    // runs.
                    unsafe { ops.graph_add_copy(graph, after, &copy) }
                })
            }
            Op::WriteTimestamp(timestamp) => {
                segment.timestamps.push((*timestamp).clone());
                // SAFETY: the graph was made here; the plan keeps the timestamp as long as the
                // graph may run.
                context.within(|ops| unsafe {
                    ops.graph_add_event(graph, after, NativeEvent(timestamp.native()))
                })
            }
            Op::Graph(child) => {
                // SAFETY: graphs of a plan belong to this device (the caller's promise).
                let program = unsafe { Program::of(child) };
                match &program.segments[..] {
                    _ if program.steps.is_empty() => empty(),
                    [only] if program.steps.is_plain() && only.condition_setter.is_some() => {
                        let plan = program.plan.lock().clone();
                        let nodes = self.nodes(graph, after, &plan, 0..plan.len())?;
                        let ends: Vec<_> =
                            ends(&plan, &nodes).into_iter().map(|end| end.1).collect();
                        // SAFETY: the graph and its nodes were made here and have no other user.
                        context.within(|ops| unsafe { ops.graph_add_empty(graph, &ends) })
                    }
                    [only] if program.steps.is_plain() => {
                        let native = only.graph;
                        // SAFETY: both graphs were made here and have no other user.
                        let node = context
                            .within(|ops| unsafe { ops.graph_add_child(graph, after, native) })?;
                        segment.children.push((*child).clone());
                        Ok(node)
                    }
                    _ => Err(Error::Unsupported(
                        "a graph with host calls or waits inside a graph".into(),
                    )),
                }
            }
            Op::Foreign(call) => {
                let captured = capture(core, call, plan.partition(i))?;
                // SAFETY: both graphs were made here and have no other user.
                let node =
                    context.within(|ops| unsafe { ops.graph_add_child(graph, after, captured) });
                // SAFETY: the graph was made here and is destroyed once.
                context.release_or_log(|ops| unsafe { ops.graph_destroy(captured) });
                node
            }
            Op::Conditional(conditional) => self.conditional(graph, after, conditional),
            other => Err(Error::Unsupported(format!("a {} in a graph", other.kind()).into())),
        }
    }
}

/// The nodes of a plan for which no other one waits.
fn ends(plan: &Plan, nodes: &[NativeNode]) -> Vec<(usize, NativeNode)> {
    let mut ends: Vec<bool> = vec![true; nodes.len()];
    plan.pred.iter().for_each(|&p| ends[p as usize] = false);
    nodes.iter().copied().enumerate().filter(|&(i, _)| ends[i]).collect()
}

/// Whether node `i` of a plan is a kernel that the driver runs.
fn has_blocks(plan: &Plan, i: usize) -> bool {
    matches!(plan.ops.get(i), Some(Op::Dispatch(d)) if !d.grid.contains(&0))
}

/// Whether node `i` is a kernel that waits itself for the only node in front of it, which is a
/// kernel of the same partition that does so too. Then the node waits for all that its predecessors
/// have waited for: each of them is over only when the one before it is.
fn is_dependent(plan: &Plan, i: usize) -> bool {
    let waits = |i: usize| match plan.ops.get(i) {
        Some(Op::Dispatch(d)) => d.pipeline.dependent_launch && !d.grid.contains(&0),
        _ => false,
    };
    let same = |before: usize| is_same(plan.partition(before), plan.partition(i));
    matches!(plan.predecessors(i), &[b] if waits(b as usize) && same(b as usize)) && waits(i)
}

fn add_kernel(
    context: &DriverContext,
    graph: NativeGraph,
    after: After<'_>,
    d: &Dispatch<'_>,
    (early, on): (u32, NativePartition),
) -> Result<NativeNode> {
    let mut arguments = Arguments::new();
    context.within(|ops| {
        let args = arguments.fill(d, early, ops)?;
        // SAFETY: the graph's launcher keeps the memory alive. Numbers and sizes were checked
        // against the pipeline when the launch was recorded (the caller's promise). The pipeline's
        // own were checked against the function.
        // A dependent kernel keeps the rule of the edge, by the contract of its description. It
        // begins after the graph does, so nobody writes what the plan lets it read early.
        unsafe {
            match after {
                After::All(after) => {
                    ops.graph_add_kernel(graph, after, &encoder::launch(d, args, early), on)
                }
                After::Dependent(before) => {
                    let launch = encoder::launch(d, args, early);
                    ops.graph_add_dependent_kernel(graph, before, &launch, on)
                }
            }
        }
    })
}

/// Allocates pinned memory for a download. The segment owns the memory.
fn staged(core: &Core, segment: &mut Segment, d: &Download<'_>) -> Result<u64> {
    let staging = core.staging.take(d.bytes)?;
    let addr = staging.addr();
    segment.staging_copies.push(StagingCopy { staging, dst: HostAddress(d.dst), bytes: d.bytes });
    Ok(addr)
}

/// The driver's partition of a node, or null.
fn native(partition: Option<&Lease<Partition>>) -> NativePartition {
    partition.map_or(NativePartition::NULL, |partition| NativePartition(partition.native()))
}

/// Captures a library's call as a graph, on a stream of the node's partition.
fn capture(
    core: &Core,
    call: &leasehold_hal::ForeignCall,
    on: Option<&Lease<Partition>>,
) -> Result<NativeGraph> {
    core.on_stream_of(on, |ops, stream| {
        // SAFETY: no other thread has the utility stream meanwhile.
        unsafe { ops.capture_begin(stream) }?;
        let called = call.run(stream.0);
        // The capture always ends here: a stream under capture is of no further use.
        // SAFETY: no other thread has the utility stream meanwhile.
        let graph = unsafe { ops.capture_end(stream) };
        let named = |e: &Error| {
            Error::recording(format!("foreign call {} cannot be captured: {e}", call.name))
        };
        match (called, graph) {
            (Ok(()), Ok(graph)) => Ok(graph),
            (Ok(()), Err(e @ Error::DeviceLost { .. })) => Err(e),
            (Ok(()), Err(e)) => Err(named(&e)),
            (outcome, graph) => {
                if let Ok(graph) = graph {
                    // SAFETY: the graph was made here and is destroyed once.
                    let _ = unsafe { ops.graph_destroy(graph) };
                }
                match outcome {
                    Err(e) => Err(named(&e)),
                    Ok(()) => Err(Error::state("a capture without an outcome")),
                }
            }
        }
    })
}

/// Bytes of device memory that the driver takes for a plan's executables, about.
fn device_bytes(plan: &Plan) -> u64 {
    // A body takes its nodes with the kernels that set its condition, and its branches but one.
    let body = |op: Op<'_>| match op {
        Op::Conditional(c) => {
            CONDITIONAL_BYTES + 2 * NODE_BYTES + device_bytes(c.body()).saturating_sub(BRANCH_BYTES)
        }
        _ => 0,
    };
    let bodies: u64 = plan.ops.iter().map(body).sum();
    let nodes = plan.len();
    let mut continued = vec![false; nodes];
    // A node goes on with the branch of one of its predecessors, or begins another one.
    let begins = |i: &usize| {
        let mut before = plan.predecessors(*i).iter().map(|&p| p as usize);
        before.find(|&p| !std::mem::replace(&mut continued[p], true)).is_none()
    };
    let branches = (0..nodes).filter(begins).count();
    bodies + nodes as u64 * NODE_BYTES + branches as u64 * BRANCH_BYTES
}

impl Instantiate for Program {
    type Device = Core;

    /// After an error all made objects are given back.
    fn instantiate(core: &Arc<Core>, plan: Plan) -> Result<Self> {
        let n = plan.len();
        let device_bytes = device_bytes(&plan);
        let (steps, segments) = Steps::of(&plan, |op| is_apart(core, op))?;
        let mut building = Building { core, segments: Vec::new() };
        let mut kernels = vec![None; n];
        for nodes in segments {
            building.segment(&plan, nodes.start, nodes.end, &mut kernels)?;
        }
        let segments = std::mem::take(&mut building.segments);
        Ok(Self {
            context: core.context.clone(),
            plan: Mutex::new(plan),
            steps,
            segments,
            kernels,
            nodes: n,
            device_bytes,
        })
    }

    fn nodes(&self) -> usize {
        self.nodes
    }

    /// The driver does not report the memory of an executable, so that part is an estimate.
    fn bytes(&self) -> u64 {
        let pinned: u64 =
            self.segments.iter().flat_map(|s| &s.staging_copies).map(|l| l.staging.len()).sum();
        let tables = self.kernels.len() * size_of::<Option<Kernel>>()
            + self.segments.len() * size_of::<Segment>()
            + size_of::<Self>();
        pinned
            + tables as u64
            + self.device_bytes
            + self.steps.bytes()
            + self.plan.lock().ops.bytes()
    }

    fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        let mut plan = self.plan.lock();
        // If a node is patched twice, the last patch counts.
        let mut new = plan.ops.clone();
        for p in patches {
            new.patch(p.node as usize, p.bindings, p.params, p.grid)?;
        }
        for p in patches {
            let index = p.node as usize;
            let Some(Op::Dispatch(d)) = plan.ops.get(index) else { continue };
            let empty = |grid: [u32; 3]| grid.contains(&0);
            if self.kernels[index].is_none() != empty(p.grid.unwrap_or(d.grid)) {
                return Err(Error::TopologyChanged(
                    format!("node {index}: the driver has no node for a launch of no blocks")
                        .into(),
                ));
            }
        }
        for (done, p) in patches.iter().enumerate() {
            let outcome = self.set(&new, p.node, plan.early_reads(p.node as usize));
            if matches!(outcome, Ok(GraphExecUpdate::InPlace)) {
                continue;
            }
            for back in &patches[..done] {
                let early = plan.early_reads(back.node as usize);
                if !matches!(self.set(&plan.ops, back.node, early), Ok(GraphExecUpdate::InPlace)) {
                    tracing::error!(
                        node = back.node,
                        "a node of a graph could not be put back to what it was"
                    );
                }
            }
            outcome?;
            return Err(Error::TopologyChanged(
                format!("node {}: the driver cannot change it in place", p.node).into(),
            ));
        }
        plan.ops = new;
        Ok(())
    }
}

impl GraphSteps for Program {
    #[inline]
    fn steps(&self) -> &Steps {
        &self.steps
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        release(&self.context, &mut self.segments);
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({} nodes, {} segments)", self.nodes, self.segments.len())
    }
}
