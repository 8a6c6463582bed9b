//! Instantiated plans: executable graphs of explicitly added nodes.
//!
//! Every operation is one node, with the plan's edges. The device cannot run a host call that may
//! call the driver, nor wait for work that the host holds back. So a plan is split at such
//! operations. The nodes between two of them are a *segment*, an executable graph of its own, and
//! the stream goes from step to step. Host calls and waits are barriers of a plan, so the split
//! loses no parallelism. A plan without them is one segment and one launch.
//!
//! Bytes for pageable memory land in pinned memory that the graph owns. The host copies them on
//! when the launch is over. Calls of foreign libraries are captured, each into a child graph.
//!
//! This module must not know streams.

use super::core::Core;
use super::driver_context::DriverContext;
use super::host::{HostAddress, land};
use crate::driver::ops::{
    CopyKind, CudaSlowOps, GraphExecUpdate, NativeCopy, NativeEvent, NativeGraph, NativeGraphExec,
    NativeNode, NativeStream,
};
use crate::encoder::{self, Arguments, Route};
use leasehold_alloc::Buffer;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Result, Timepoint, UniqueLease};
use leasehold_engine::driver::{GraphSteps, Step};
use leasehold_engine::panics::panic_text;
use leasehold_hal::{Copy2d, Dispatch, Download, GraphExec, HostCall, NodePatch, Op, Plan};
use std::fmt;

enum ProgramPart {
    Run(u32),
    Call(HostCall),
    Wait(Timepoint),
    Copy(Copy2d),
}

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
    /// Nodes of the plan that are timestamps.
    timestamps: Vec<u32>,
    children: Vec<Lease<dyn GraphExec>>,
}

/// A dispatch that has a node of the driver.
#[derive(Clone, Copy)]
struct Kernel {
    segment: u32,
    node: NativeNode,
}

/// An instantiated plan.
pub struct Program {
    context: Arc<DriverContext>,
    plan: Mutex<Plan>,
    parts: Vec<ProgramPart>,
    segments: Vec<Segment>,
    /// The kernel nodes, by node of the plan.
    kernels: Vec<Option<Kernel>>,
    nodes: usize,
    #[cfg(feature = "planted-defects")]
    stale: bool,
}

/// Segments under construction. Unless they are finished, the drop gives them back.
struct Building<'a> {
    core: &'a Core,
    segments: Vec<Segment>,
}

impl Drop for Building<'_> {
    fn drop(&mut self) {
        give_back(&self.core.context, &mut self.segments);
    }
}

fn give_back(context: &DriverContext, segments: &mut Vec<Segment>) {
    for segment in segments.drain(..) {
        if !segment.exec.is_null() {
            // SAFETY: the executable is this segment's, and nothing uses the segment any more.
            context.leave_behind(|ops| unsafe { ops.exec_destroy(segment.exec) });
        }
        if !segment.graph.is_null() {
            // SAFETY: the graph was made here and is destroyed once.
            context.leave_behind(|ops| unsafe { ops.graph_destroy(segment.graph) });
        }
    }
}

impl Program {
    /// The program of an exec of this device.
    ///
    /// # Safety
    /// - The exec was instantiated on a device of this backend.
    pub unsafe fn of(exec: &Lease<dyn GraphExec>) -> &Program {
        // SAFETY: the native value of this backend's execs is the address of their program, which
        // lives as long as the lease.
        unsafe { &*(exec.native() as *const Program) }
    }

    /// Makes the nodes of a plan, instantiates and uploads them. May block on the driver.
    ///
    /// # Errors
    /// - `InvalidArgument` for a plan whose nodes do not come after their predecessors.
    /// - `Unsupported` for a graph with host calls inside a graph, and for copies between devices
    ///   that cannot reach each other.
    /// - A driver error.
    ///
    /// After an error all made objects are given back.
    pub fn new(core: &Core, plan: Plan) -> Result<Self> {
        let n = plan.len();
        if n != 0 && plan.pred_at.len() != n + 1
            || (0..n).any(|i| plan.predecessors(i).iter().any(|&p| p as usize >= i))
        {
            return Err(Error::invalid("a plan whose nodes do not come after what they wait for"));
        }
        let mut building = Building { core, segments: Vec::new() };
        let mut parts = Vec::new();
        let mut kernels = vec![None; n];
        let mut from = 0;
        while from < n {
            match plan.ops.get(from) {
                Some(Op::Host(call)) => parts.push(ProgramPart::Call(call.clone())),
                Some(Op::Wait(point)) => parts.push(ProgramPart::Wait(point)),
                Some(Op::Copy(copy)) if splits(core, &Op::Copy(copy)) => {
                    parts.push(ProgramPart::Copy(copy))
                }
                _ => {
                    let holds = |i: &usize| plan.ops.get(*i).is_some_and(|op| splits(core, &op));
                    let to = (from..n).find(holds).unwrap_or(n);
                    parts.push(ProgramPart::Run(building.segments.len() as u32));
                    building.segment(&plan, from, to, &mut kernels)?;
                    from = to;
                    continue;
                }
            }
            from += 1;
        }
        let segments = std::mem::take(&mut building.segments);
        Ok(Self {
            context: core.context.clone(),
            #[cfg(feature = "planted-defects")]
            stale: core.shared.config.has(crate::defects::Defect::StaleGraphAddress),
            plan: Mutex::new(plan),
            parts,
            segments,
            kernels,
            nodes: n,
        })
    }

    /// The number of the plan's nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Bytes of host and pinned memory that this program knows of. The driver does not report the
    /// memory of an executable.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let pinned: u64 =
            self.segments.iter().flat_map(|s| &s.staging_copies).map(|l| l.staging.len()).sum();
        let tables = self.kernels.len() * size_of::<Option<Kernel>>()
            + self.parts.len() * size_of::<ProgramPart>()
            + self.segments.len() * size_of::<Segment>()
            + size_of::<Self>();
        pinned + tables as u64 + self.plan.lock().ops.bytes()
    }

    /// Whether a launch does nothing.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
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
    pub(crate) fn landed(&self, segment: u32, ops: &dyn CudaSlowOps) {
        let Some(segment) = self.segments.get(segment as usize) else { return };
        for staging_copy in &segment.staging_copies {
            // SAFETY: the segment ran, so its bytes are in the staging memory. The plan's maker
            // vouches for the destination whenever the graph runs. One thread runs a stream's
            // actions.
            unsafe { land(&staging_copy.staging, staging_copy.dst, staging_copy.bytes, ops) };
        }
        if !segment.timestamps.is_empty() {
            let plan = self.plan.lock();
            for &node in &segment.timestamps {
                if let Some(Op::WriteTimestamp(timestamp)) = plan.ops.get(node as usize) {
                    timestamp.set(1);
                }
            }
        }
        for child in &segment.children {
            // SAFETY: the child was checked to be of this device when it became a child.
            unsafe { Program::of(child) }.landed(0, ops);
        }
    }

    /// Changes nodes in place: all of them or, after an error, none.
    ///
    /// # Errors
    /// See `hal::GraphExec::update`.
    pub fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        let mut plan = self.plan.lock();
        for p in patches {
            let index = p.node as usize;
            let Some(Op::Dispatch(d)) = plan.ops.get(index) else {
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
        // If a node is patched twice, the last patch counts.
        let mut new = plan.ops.clone();
        for p in patches {
            new.patch(p.node as usize, p.bindings, p.params, p.grid)?;
        }
        for (done, p) in patches.iter().enumerate() {
            let outcome = self.set(&new, p.node);
            if matches!(outcome, Ok(GraphExecUpdate::InPlace)) {
                continue;
            }
            for back in &patches[..done] {
                if !matches!(self.set(&plan.ops, back.node), Ok(GraphExecUpdate::InPlace)) {
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

    /// Sets a kernel node to the parameters of a list.
    fn set(&self, ops: &leasehold_hal::OpList, node: u32) -> Result<GraphExecUpdate> {
        let (Some(kernel), Some(Op::Dispatch(d))) =
            (self.kernels[node as usize], ops.get(node as usize))
        else {
            // The launch has no blocks before and after, so nothing is to be set.
            return Ok(GraphExecUpdate::InPlace);
        };
        #[cfg(feature = "planted-defects")]
        if self.stale {
            return Ok(GraphExecUpdate::InPlace);
        }
        let mut arguments = Arguments::new();
        let args = arguments.fill(&d)?;
        let exec = self.segments[kernel.segment as usize].exec;
        self.context.within(|driver| {
            // SAFETY: the graph's launcher keeps the memory alive. Numbers and sizes are those of
            // the node.
            unsafe { driver.exec_set_kernel(exec, kernel.node, &encoder::launch(&d, args)) }
        })
    }
}

/// Whether an operation cannot be a node. A cut at any place keeps the order of a plan: later nodes
/// run later.
fn splits(core: &Core, op: &Op<'_>) -> bool {
    match op {
        Op::Host(_) | Op::Wait(_) => true,
        Op::Copy(c) => {
            c.width != 0
                && c.rows != 0
                && !matches!(encoder::route(core, c), Ok(Route::Direct(_)) | Err(_))
        }
        _ => false,
    }
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
        });
        let mut nodes: Vec<NativeNode> = Vec::with_capacity(to - from);
        let mut after = Vec::new();
        for (i, kernel) in kernels.iter_mut().enumerate().take(to).skip(from) {
            let Some(op) = plan.ops.get(i) else { break };
            after.clear();
            // Nodes of an earlier segment are over when this segment starts.
            let inside = plan.predecessors(i).iter().filter(|&&p| p as usize >= from);
            after.extend(inside.map(|&p| nodes[p as usize - from]));
            #[cfg(feature = "planted-defects")]
            if core.shared.config.has(crate::defects::Defect::MissingEdge) {
                after.pop();
            }
            let node = self.node(graph, &after, i as u32, &op)?;
            if matches!(&op, Op::Dispatch(d) if !d.grid.contains(&0)) {
                *kernel = Some(Kernel { segment: number, node });
            }
            nodes.push(node);
        }
        // SAFETY: the graph was made here and has no other user.
        let exec = core.context.within(|ops| unsafe { ops.graph_instantiate(graph) })?;
        if let Some(segment) = self.segments.last_mut() {
            segment.exec = exec;
        }
        core.upload(exec)
    }

    /// Adds one node.
    fn node(
        &mut self,
        graph: NativeGraph,
        after: &[NativeNode],
        index: u32,
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
            Op::Dispatch(d) => kernel(context, graph, after, d),
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
                let dst = if encoder::lands_directly(core, d) {
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
                segment.timestamps.push(index);
                // SAFETY: the graph was made here; the plan keeps the timestamp as long as the
                // graph may run.
                context.within(|ops| unsafe {
                    ops.graph_add_event(graph, after, NativeEvent(timestamp.native()))
                })
            }
            Op::Graph(child) => {
                // SAFETY: graphs of a plan belong to this device (the caller's promise).
                let program = unsafe { Program::of(child) };
                match &program.parts[..] {
                    [] => empty(),
                    [ProgramPart::Run(run)] => {
                        let native = program.segments[*run as usize].graph;
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
                let captured = capture(core, call)?;
                // SAFETY: both graphs were made here and have no other user.
                let node =
                    context.within(|ops| unsafe { ops.graph_add_child(graph, after, captured) });
                // SAFETY: the graph was made here and is destroyed once.
                context.leave_behind(|ops| unsafe { ops.graph_destroy(captured) });
                node
            }
            other => Err(Error::Unsupported(format!("a {} in a graph", other.kind()).into())),
        }
    }
}

fn kernel(
    context: &DriverContext,
    graph: NativeGraph,
    after: &[NativeNode],
    d: &Dispatch<'_>,
) -> Result<NativeNode> {
    let mut arguments = Arguments::new();
    let args = arguments.fill(d)?;
    context.within(|ops| {
        // SAFETY: the graph's launcher keeps the memory alive. Numbers and sizes were checked
        // against the pipeline when the launch was recorded (the caller's promise). The pipeline's
        // own were checked against the function.
        unsafe { ops.graph_add_kernel(graph, after, &encoder::launch(d, args)) }
    })
}

/// Allocates pinned memory for a download. The segment owns the memory.
fn staged(core: &Core, segment: &mut Segment, d: &Download<'_>) -> Result<u64> {
    let staging = core.staging(d.bytes)?;
    let addr = staging.addr();
    segment.staging_copies.push(StagingCopy { staging, dst: HostAddress(d.dst), bytes: d.bytes });
    Ok(addr)
}

/// Captures a library's call as a graph.
fn capture(core: &Core, call: &leasehold_hal::ForeignCall) -> Result<NativeGraph> {
    core.on_utility(|ops, stream| {
        // SAFETY: no other thread has the utility stream meanwhile.
        unsafe { ops.capture_begin(stream) }?;
        let called = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call.run(stream.0)));
        // The capture always ends here: a stream under capture is of no further use.
        // SAFETY: no other thread has the utility stream meanwhile.
        let graph = unsafe { ops.capture_end(stream) };
        let named = |e: &Error| {
            Error::recording(format!("foreign call {} cannot be captured: {e}", call.name))
        };
        match (called, graph) {
            (Ok(Ok(())), Ok(graph)) => Ok(graph),
            (Ok(Ok(())), Err(e @ Error::DeviceLost { .. })) => Err(e),
            (Ok(Ok(())), Err(e)) => Err(named(&e)),
            (outcome, graph) => {
                if let Ok(graph) = graph {
                    // SAFETY: the graph was made here and is destroyed once.
                    let _ = unsafe { ops.graph_destroy(graph) };
                }
                match outcome {
                    Ok(Err(e)) => Err(named(&e)),
                    Err(panic) => Err(named(&Error::state(panic_text(panic)))),
                    Ok(Ok(())) => Err(Error::state("a capture without an outcome")),
                }
            }
        }
    })
}

impl GraphSteps for Program {
    #[inline]
    fn is_plain(&self) -> bool {
        matches!(&self.parts[..], [] | [ProgramPart::Run(_)])
    }

    fn step(&self, i: usize) -> Option<Step> {
        Some(match self.parts.get(i)? {
            ProgramPart::Run(segment) => Step::Run(*segment),
            ProgramPart::Call(call) => Step::Call(call.clone()),
            ProgramPart::Wait(point) => Step::Wait(*point),
            ProgramPart::Copy(copy) => Step::Copy(*copy),
        })
    }

    fn for_each_wait(&self, mut f: impl FnMut(Timepoint)) {
        for part in &self.parts {
            if let ProgramPart::Wait(point) = part {
                f(*point);
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        give_back(&self.context, &mut self.segments);
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({} nodes, {} segments)", self.nodes, self.segments.len())
    }
}
