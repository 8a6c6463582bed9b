//! Graphs of explicit nodes, their updates, and capture for foreign libraries.
//!
//! The driver copies a node's arguments when the node is made or changed. A host node's closure
//! belongs to a user object of the graph. Executables made from the graph hold the user object too.
//! The driver drops it with its last holder, on a thread of the driver.
//!
//! This module must not know plans.

use super::stream::{Extra, attributes};
use super::{RealDriver, drive, plausible};
use crate::conv;
use crate::driver::codes::{self, code};
use crate::driver::ops::{
    GraphExecUpdate, GraphOps, Launch, NativeCondition, NativeCopy, NativeEvent, NativeFill,
    NativeGraph, NativeGraphExec, NativeNode, NativePartition, NativeStream,
};
use cudarc::driver::sys::{
    self, CUDA_CONDITIONAL_NODE_PARAMS, CUDA_HOST_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS,
    CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUevent, CUfunction, CUgraph,
    CUgraphConditionalNodeType_enum as ConditionalType, CUgraphExec, CUgraphNode,
    CUgraphNodeParams, CUgraphNodeParams_st__bindgen_ty_1 as NodeContent,
    CUgraphNodeType_enum as NodeType, CUstream, CUstreamCaptureMode_enum as CaptureMode,
    CUstreamCaptureStatus_enum as CaptureStatus, CUuserObject,
};
use leasehold_core::panics::quietly;
use leasehold_core::{Error, Result};
use leasehold_hal::ConditionalKind;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

/// Adds a node by a function of the driver, whose first arguments are the places of the node and of
/// the nodes before it.
macro_rules! add_node {
    ($driver:expr, $graph:expr, $after:expr, $name:ident($($arg:expr),*)) => {{
        let (graph, after): (NativeGraph, &[NativeNode]) = ($graph, $after);
        let (graph, (first, count)) = (graph.0 as CUgraph, (dependencies(after), after.len()));
        let mut node: CUgraphNode = ptr::null_mut();
        let made = drive!($driver, $name(&raw mut node, graph, first, count $(, $arg)*));
        added(made, node)
    }};
}

/// Changes a node of an executable by a function of the driver.
macro_rules! set_node {
    ($driver:expr, $exec:expr, $node:expr, $name:ident($($arg:expr),*)) => {{
        let (exec, node) = ($exec.0 as CUgraphExec, $node.0 as CUgraphNode);
        // SAFETY: the caller vouches for executable and node. The driver copies the parameters
        // before it returns.
        let code = $driver.code(|f| unsafe { (f.$name)(exec, node $(, $arg)*) })?;
        $driver.updated(stringify!($name), code)
    }};
}

/// The function of a host node.
type HostNode = Arc<dyn Fn() + Send + Sync>;

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which the driver demands.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`: the graph takes over the caller's reference.
const MOVE: u32 = 1;

/// `CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC`: the edge is ready when all blocks of the first kernel
/// have executed `griddepcontrol.launch_dependents` or are over.
const PROGRAMMATIC_PORT: u8 = 1;
/// `CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC`.
const PROGRAMMATIC_EDGE: u8 = 1;

/// The parameters of a conditional node with one body, which the driver makes.
fn conditional_node(
    condition: NativeCondition,
    type_: ConditionalType,
    context: CUcontext,
) -> CUgraphNodeParams {
    let mut params = CUgraphNodeParams {
        type_: NodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL,
        reserved0: [0; 3],
        __bindgen_anon_1: NodeContent { reserved1: [0; 29] },
        reserved2: 0,
    };
    params.__bindgen_anon_1.conditional = CUDA_CONDITIONAL_NODE_PARAMS {
        handle: condition.0,
        type_,
        size: 1,
        phGraph_out: ptr::null_mut(),
        ctx: context,
    };
    params
}

/// The error for a driver without conditional nodes.
#[cold]
fn no_conditions() -> Error {
    Error::Unsupported(
        "conditional nodes in graphs, which this CUDA driver does not have (12.4 and newer)".into(),
    )
}

/// Runs a host node.
unsafe extern "C" fn run_many(data: *mut c_void) {
    // SAFETY: `data` points to the boxed closure, which lives as long as the graph and its
    // executables.
    let call = unsafe { &*data.cast::<HostNode>() };
    if quietly(|| call()).is_none() {
        tracing::error!("a host node of a CUDA graph panicked");
    }
}

/// Drops a host node's closure.
unsafe extern "C" fn drop_node(data: *mut c_void) {
    // SAFETY: `data` came from `Box::into_raw`, and the driver calls this once.
    let call = unsafe { Box::from_raw(data.cast::<HostNode>()) };
    let _ = quietly(move || drop(call));
}

/// Dependencies in the driver's form: a handle is the driver's pointer.
fn dependencies(after: &[NativeNode]) -> *const CUgraphNode {
    const _: () = assert!(size_of::<NativeNode>() == size_of::<CUgraphNode>());
    after.as_ptr().cast()
}

/// A kernel as a node.
fn kernel(
    launch: &Launch<'_>,
    extra: &mut Extra,
    listed: &mut [*mut c_void],
) -> CUDA_KERNEL_NODE_PARAMS {
    let (listed, extra) = match listed {
        [] => (ptr::null_mut(), extra.pointer()),
        listed => (listed.as_mut_ptr(), ptr::null_mut()),
    };
    CUDA_KERNEL_NODE_PARAMS {
        func: launch.function.0 as CUfunction,
        gridDimX: launch.grid[0],
        gridDimY: launch.grid[1],
        gridDimZ: launch.grid[2],
        blockDimX: launch.block[0],
        blockDimY: launch.block[1],
        blockDimZ: launch.block[2],
        sharedMemBytes: launch.shared,
        kernelParams: listed,
        extra,
        kern: ptr::null_mut(),
        ctx: ptr::null_mut(),
    }
}

/// A copy as a node. One row has no pitch, but the driver demands a pitch of at least the row's
/// width.
fn copy_node(copy: &NativeCopy) -> CUDA_MEMCPY3D {
    let (source, target) = conv::memory_types(copy.kind);
    let (src_pitch, dst_pitch) =
        if copy.rows == 1 { (copy.width, copy.width) } else { (copy.src_pitch, copy.dst_pitch) };
    CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: source,
        srcHost: copy.src as *const c_void,
        srcDevice: copy.src,
        srcArray: ptr::null_mut(),
        reserved0: ptr::null_mut(),
        srcPitch: src_pitch as usize,
        srcHeight: copy.rows as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: target,
        dstHost: copy.dst as *mut c_void,
        dstDevice: copy.dst,
        dstArray: ptr::null_mut(),
        reserved1: ptr::null_mut(),
        dstPitch: dst_pitch as usize,
        dstHeight: copy.rows as usize,
        WidthInBytes: copy.width as usize,
        Height: copy.rows as usize,
        Depth: 1,
    }
}

/// A fill as a node.
fn fill_node(fill: &NativeFill) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS {
        dst: fill.dst,
        pitch: 0,
        value: fill.value,
        elementSize: u32::from(fill.width),
        width: fill.count as usize,
        height: 1,
    }
}

/// Converts the result of a `cuGraphAdd…` call.
fn added(made: Result<()>, node: CUgraphNode) -> Result<NativeNode> {
    made.and_then(|()| plausible::object("cuGraphAddNode", node)).map(NativeNode)
}

impl RealDriver {
    fn updated(&self, api: &'static str, code: i32) -> Result<GraphExecUpdate> {
        match code {
            0 => Ok(GraphExecUpdate::InPlace),
            code if codes::is_refused_update(code) => Ok(GraphExecUpdate::Refused),
            code => Err(self.failed(api, code, 0)),
        }
    }
}

impl RealDriver {
    /// The places of a cooperative kernel's arguments, in the order of its parameters. A node of
    /// such a kernel takes its arguments by this list alone, and any other by their buffer.
    fn listed(&self, launch: &Launch<'_>) -> Result<Vec<*mut c_void>> {
        if !launch.attributes.is_some_and(|a| a.cooperative) {
            return Ok(Vec::new());
        }
        let parameters = self.parameters(launch.function)?.ok_or_else(|| {
            Error::Unsupported(
                "a cooperative kernel in a graph: the driver does not report parameters; launch the kernel outside of graphs, or take a driver of CUDA 12.4 or \
                 later"
                    .into(),
            )
        })?;
        let place = |(offset, size): (u32, u32)| {
            let argument = launch.args.get(offset as usize..)?.get(..size as usize)?;
            Some(argument.as_ptr().cast_mut().cast())
        };
        let listed: Option<_> = parameters.into_iter().map(place).collect();
        listed.ok_or_else(|| Error::invalid("a parameter is behind the launch's arguments"))
    }
}

impl GraphOps for RealDriver {
    fn graph_create(&self) -> Result<NativeGraph> {
        let mut graph: CUgraph = ptr::null_mut();
        drive!(self, cuGraphCreate(&raw mut graph, 0))?;
        plausible::object("cuGraphCreate", graph).map(NativeGraph)
    }

    unsafe fn graph_destroy(&self, graph: NativeGraph) -> Result<()> {
        drive!(self, cuGraphDestroy(graph.0 as CUgraph))
    }

    unsafe fn graph_add_kernel(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        launch: &Launch<'_>,
        on: NativePartition,
    ) -> Result<NativeNode> {
        let mut extra = Extra::new(launch.args);
        let mut listed = self.listed(launch)?;
        let params = kernel(launch, &mut extra, &mut listed);
        let node = self.on_partition(on, || {
            add_node!(self, graph, after, cuGraphAddKernelNode_v2(&raw const params))
        })?;
        for attribute in attributes(launch) {
            let (id, value) = (attribute.id, &raw const attribute.value);
            drive!(self, cuGraphKernelNodeSetAttribute(node.0 as CUgraphNode, id, value))?;
        }
        Ok(node)
    }

    unsafe fn graph_add_dependent_kernel(
        &self,
        graph: NativeGraph,
        after: NativeNode,
        launch: &Launch<'_>,
        on: NativePartition,
    ) -> Result<NativeNode> {
        let Some(add) = self.loaded()?.functions.cuGraphAddDependencies_v2 else {
            // SAFETY: by the caller's contract.
            return unsafe { self.graph_add_kernel(graph, &[after], launch, on) };
        };
        // SAFETY: by the caller's contract. The edge follows before the graph can run.
        let node = unsafe { self.graph_add_kernel(graph, &[], launch, on) }?;
        let edge = sys::CUgraphEdgeData {
            from_port: PROGRAMMATIC_PORT,
            to_port: 0,
            type_: PROGRAMMATIC_EDGE,
            reserved: [0; 5],
        };
        let (from, to) = ([after], [node]);
        // SAFETY: the graph and both nodes are the caller's. The arrays have one element each.
        self.call("cuGraphAddDependencies", 0, |_| unsafe {
            add(graph.0 as CUgraph, dependencies(&from), dependencies(&to), &raw const edge, 1)
        })?;
        Ok(node)
    }

    unsafe fn graph_add_copy(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        copy: &NativeCopy,
    ) -> Result<NativeNode> {
        let (params, context) = (copy_node(copy), self.current_raw());
        add_node!(self, graph, after, cuGraphAddMemcpyNode(&raw const params, context))
    }

    unsafe fn graph_add_fill(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        fill: &NativeFill,
    ) -> Result<NativeNode> {
        let (params, context) = (fill_node(fill), self.current_raw());
        add_node!(self, graph, after, cuGraphAddMemsetNode(&raw const params, context))
    }

    unsafe fn graph_add_child(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        child: NativeGraph,
    ) -> Result<NativeNode> {
        if graph == child {
            // The driver (580.159) recurses here until its stack overflows.
            let name = codes::name_or_number(code::INVALID_VALUE);
            return Err(codes::error("cuGraphAddChildGraphNode", code::INVALID_VALUE, name, 0));
        }
        add_node!(self, graph, after, cuGraphAddChildGraphNode(child.0 as CUgraph))
    }

    unsafe fn graph_add_event(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        event: NativeEvent,
    ) -> Result<NativeNode> {
        add_node!(self, graph, after, cuGraphAddEventRecordNode(event.0 as CUevent))
    }

    unsafe fn graph_add_host(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        call: HostNode,
    ) -> Result<NativeNode> {
        let data = Box::into_raw(Box::new(call)).cast::<c_void>();
        let mut object: CUuserObject = ptr::null_mut();
        let owned = drive!(
            self,
            cuUserObjectCreate(&raw mut object, data, Some(drop_node), 1, NO_DESTRUCTOR_SYNC)
        );
        if let Err(error) = owned {
            // SAFETY: the driver refused the pointer, so this call owns the box.
            drop(unsafe { Box::from_raw(data.cast::<HostNode>()) });
            return Err(error);
        }
        if let Err(error) =
            drive!(self, cuGraphRetainUserObject(graph.0 as CUgraph, object, 1, MOVE))
        {
            // This reference is the last one, so the release drops the closure.
            let _ = drive!(self, cuUserObjectRelease(object, 1));
            return Err(error);
        }
        let params = CUDA_HOST_NODE_PARAMS { fn_: Some(run_many), userData: data };
        // After a failure the graph keeps the closure, and drops it at its end.
        add_node!(self, graph, after, cuGraphAddHostNode(&raw const params))
    }

    unsafe fn graph_add_empty(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
    ) -> Result<NativeNode> {
        add_node!(self, graph, after, cuGraphAddEmptyNode())
    }

    unsafe fn condition_create(&self, graph: NativeGraph) -> Result<NativeCondition> {
        let functions = &self.loaded()?.functions;
        let create = functions.cuGraphConditionalHandleCreate.ok_or_else(no_conditions)?;
        let (context, graph) = (self.current_raw(), graph.0 as CUgraph);
        let mut condition = 0;
        // SAFETY: the graph is the caller's, and the pointer is to a local. Without a flag the
        // value is left as it is when a launch begins.
        self.call("cuGraphConditionalHandleCreate", 0, |_| unsafe {
            create(&raw mut condition, graph, context, 0, 0)
        })?;
        Ok(NativeCondition(condition))
    }

    unsafe fn graph_add_conditional(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        condition: NativeCondition,
        kind: ConditionalKind,
    ) -> Result<(NativeNode, NativeGraph)> {
        const API: &str = "cuGraphAddNode";
        let add = self.loaded()?.functions.cuGraphAddNode_v2.ok_or_else(no_conditions)?;
        let mut params = conditional_node(condition, conv::conditional(kind)?, self.current_raw());
        let mut node: CUgraphNode = ptr::null_mut();
        // SAFETY: graph, condition and nodes are the caller's, and the pointers are to locals. The
        // driver reads the parameters, writes the place of the body to them, and keeps neither.
        let made = self.call(API, 0, |_| unsafe {
            add(
                &raw mut node,
                graph.0 as CUgraph,
                dependencies(after),
                ptr::null(),
                after.len(),
                &raw mut params,
            )
        });
        let node = added(made, node)?;
        // SAFETY: the parameters are those of a conditional node, of which each value is valid.
        let bodies = unsafe { params.__bindgen_anon_1.conditional.phGraph_out };
        plausible::address(API, bodies as u64, size_of::<CUgraph>() as u64, 8)?;
        // SAFETY: the driver has written the place of one graph, which lives as long as the node.
        let body = plausible::object(API, unsafe { *bodies })?;
        Ok((node, NativeGraph(body)))
    }

    unsafe fn graph_nodes(&self, graph: NativeGraph) -> Result<usize> {
        let mut nodes = 0_usize;
        drive!(self, cuGraphGetNodes(graph.0 as CUgraph, ptr::null_mut(), &raw mut nodes))?;
        Ok(nodes)
    }

    unsafe fn graph_instantiate(&self, graph: NativeGraph) -> Result<NativeGraphExec> {
        let mut exec: CUgraphExec = ptr::null_mut();
        drive!(self, cuGraphInstantiateWithFlags(&raw mut exec, graph.0 as CUgraph, 0))?;
        plausible::object("cuGraphInstantiate", exec).map(NativeGraphExec)
    }

    unsafe fn exec_destroy(&self, exec: NativeGraphExec) -> Result<()> {
        drive!(self, cuGraphExecDestroy(exec.0 as CUgraphExec))
    }

    unsafe fn exec_upload(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()> {
        drive!(self, cuGraphUpload(exec.0 as CUgraphExec, stream.0 as CUstream))
    }

    #[inline]
    unsafe fn exec_launch(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()> {
        drive!(self, cuGraphLaunch(exec.0 as CUgraphExec, stream.0 as CUstream))
    }

    unsafe fn exec_set_kernel(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        launch: &Launch<'_>,
        on: NativePartition,
    ) -> Result<GraphExecUpdate> {
        let mut extra = Extra::new(launch.args);
        let mut listed = self.listed(launch)?;
        let params = kernel(launch, &mut extra, &mut listed);
        self.on_partition(on, || {
            set_node!(self, exec, node, cuGraphExecKernelNodeSetParams_v2(&raw const params))
        })
    }

    unsafe fn exec_set_copy(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        copy: &NativeCopy,
    ) -> Result<GraphExecUpdate> {
        let (params, context) = (copy_node(copy), self.current_raw());
        set_node!(self, exec, node, cuGraphExecMemcpyNodeSetParams(&raw const params, context))
    }

    unsafe fn exec_set_fill(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        fill: &NativeFill,
    ) -> Result<GraphExecUpdate> {
        let (params, context) = (fill_node(fill), self.current_raw());
        set_node!(self, exec, node, cuGraphExecMemsetNodeSetParams(&raw const params, context))
    }

    unsafe fn capture_begin(&self, stream: NativeStream) -> Result<()> {
        let mode = CaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        drive!(self, cuStreamBeginCapture_v2(stream.0 as CUstream, mode))
    }

    unsafe fn capture_end(&self, stream: NativeStream) -> Result<NativeGraph> {
        let mut graph: CUgraph = ptr::null_mut();
        drive!(self, cuStreamEndCapture(stream.0 as CUstream, &raw mut graph))?;
        plausible::object("cuStreamEndCapture", graph).map(NativeGraph)
    }

    unsafe fn is_capturing(&self, stream: NativeStream) -> Result<bool> {
        // The status is a plain integer, because the enum must not hold a value that the bindings
        // do not know.
        let mut status = 0_u32;
        drive!(self, cuStreamIsCapturing(stream.0 as CUstream, (&raw mut status).cast()))?;
        Ok(status != CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32)
    }
}

const _: () = assert!(size_of::<CUgraphNodeParams>() == 256);
const _: () = assert!(
    NO_DESTRUCTOR_SYNC == sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32
);
const _: () = assert!(
    PROGRAMMATIC_EDGE == sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8
);
const _: () = assert!(MOVE == sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32);
