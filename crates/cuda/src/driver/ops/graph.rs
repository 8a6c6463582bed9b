//! Calls for graphs.

use super::{
    Launch, NativeCondition, NativeCopy, NativeEvent, NativeFill, NativeGraph, NativeGraphExec,
    NativeNode, NativePartition, NativeStream,
};
use leasehold_core::Result;
use leasehold_hal::ConditionalKind;

/// The outcome of an update of an executable graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphExecUpdate {
    /// The node was changed in place.
    InPlace,
    /// The driver refuses this change. The executable must be instantiated again.
    Refused,
}

/// Calls for graphs. Two threads must not build one graph at the same time. The graph manager owns
/// each graph alone.
pub trait GraphOps {
    /// Creates an empty graph: `cuGraphCreate`. Does not block.
    fn graph_create(&self) -> Result<NativeGraph>;

    /// Destroys a graph: `cuGraphDestroy`. Executables made from it stay valid. Does not block.
    ///
    /// # Safety
    /// - `graph` is this driver's and was not destroyed. No other thread uses the graph at the same
    ///   time.
    unsafe fn graph_destroy(&self, graph: NativeGraph) -> Result<()>;

    /// Adds a kernel node: `cuGraphAddKernelNode`, and for each of its attributes
    /// `cuGraphKernelNodeSetAttribute`. The kernel runs on the partition `on`, or on the
    /// whole device if `on` is null.
    ///
    /// # Safety
    /// - As [`StreamOps::launch`](super::StreamOps::launch), whenever the graph runs.
    /// - `on` is null, or this driver's and outlives the graph and its executables.
    unsafe fn graph_add_kernel(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        launch: &Launch<'_>,
        on: NativePartition,
    ) -> Result<NativeNode>;

    /// Adds a kernel node whose blocks may begin while the kernel node `after` still runs:
    /// `cuGraphAddKernelNode`, `cuGraphAddDependencies_v2` with a programmatic edge. Drivers
    /// without such edges (before 12.3) run one after the other.
    ///
    /// # Safety
    /// - As [`graph_add_kernel`](Self::graph_add_kernel).
    /// - Every block of the kernel executes `griddepcontrol.wait`, and its threads access memory
    ///   only after this. The same holds for the kernel of `after`, if it has such an edge.
    /// - Before the wait, threads may read memory that nobody writes while the graph runs.
    unsafe fn graph_add_dependent_kernel(
        &self,
        graph: NativeGraph,
        after: NativeNode,
        launch: &Launch<'_>,
        on: NativePartition,
    ) -> Result<NativeNode>;

    /// Adds a copy node: `cuGraphAddMemcpyNode`.
    ///
    /// # Safety
    /// - As [`StreamOps::copy`](super::StreamOps::copy), whenever the graph runs.
    unsafe fn graph_add_copy(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        copy: &NativeCopy,
    ) -> Result<NativeNode>;

    /// Adds a fill node: `cuGraphAddMemsetNode`.
    ///
    /// # Safety
    /// - As [`StreamOps::fill`](super::StreamOps::fill), whenever the graph runs.
    unsafe fn graph_add_fill(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        fill: &NativeFill,
    ) -> Result<NativeNode>;

    /// Adds a copy of another graph as a node: `cuGraphAddChildGraphNode`.
    ///
    /// # Safety
    /// - `graph`, `child` and the nodes are this driver's and were not destroyed.
    unsafe fn graph_add_child(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        child: NativeGraph,
    ) -> Result<NativeNode>;

    /// Adds a node that records an event: `cuGraphAddEventRecordNode`.
    ///
    /// # Safety
    /// - `graph`, `event` and the nodes are this driver's. The event is not destroyed while the
    ///   graph, or an executable made from it, may run.
    unsafe fn graph_add_event(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        event: NativeEvent,
    ) -> Result<NativeNode>;

    /// Adds a node with a host function that may run many times: `cuGraphAddHostNode`. The function
    /// must not call the driver and must not wait.
    ///
    /// # Safety
    /// - `graph` and the nodes are this driver's and were not destroyed. No other thread uses them
    ///   at the same time.
    unsafe fn graph_add_host(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        call: std::sync::Arc<dyn Fn() + Send + Sync>,
    ) -> Result<NativeNode>;

    /// Adds an empty node, which joins its predecessors: `cuGraphAddEmptyNode`.
    ///
    /// # Safety
    /// - `graph` and the nodes are this driver's and were not destroyed. No other thread uses them
    ///   at the same time.
    unsafe fn graph_add_empty(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
    ) -> Result<NativeNode>;

    /// Makes a condition: `cuGraphConditionalHandleCreate`. Kernels of the graph set its value with
    /// `cudaGraphSetConditional`. Before that the value is undefined. One node of `graph`, or of a
    /// body in it, is under the condition.
    ///
    /// # Errors
    /// `Unsupported` for a driver without conditional nodes
    /// ([`conditional_nodes`](super::DeviceProperties::conditional_nodes)).
    ///
    /// # Safety
    /// - `graph` is this driver's and was not destroyed. No other thread uses the graph at the same
    ///   time.
    unsafe fn condition_create(&self, graph: NativeGraph) -> Result<NativeCondition>;

    /// Adds a node that runs a body under a condition: `cuGraphAddNode`. Returns the node and its
    /// body: an empty graph, which ends with `graph`. The value is read before each run of the
    /// body.
    ///
    /// A body has kernels, copies, fills, empty nodes, children of such nodes, and conditional
    /// nodes. A graph with such nodes has one executable at a time, and cannot be a child.
    ///
    /// # Errors
    /// As [`condition_create`](Self::condition_create); a driver error for a condition of another
    /// graph, or of another node.
    ///
    /// # Safety
    /// - `graph`, `condition` and the nodes are this driver's and were not destroyed. No other
    ///   thread uses the graph at the same time.
    /// - In each launch a kernel before the node sets the condition. The kernels of the body end
    ///   the loop.
    unsafe fn graph_add_conditional(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        condition: NativeCondition,
        kind: ConditionalKind,
    ) -> Result<(NativeNode, NativeGraph)>;

    /// The number of nodes: `cuGraphGetNodes`.
    ///
    /// # Safety
    /// - `graph` is this driver's and was not destroyed. No other thread uses the graph at the same
    ///   time.
    unsafe fn graph_nodes(&self, graph: NativeGraph) -> Result<usize>;

    /// Instantiates a graph: `cuGraphInstantiate`. May allocate; may block.
    ///
    /// # Safety
    /// - `graph` is this driver's and was not destroyed. No other thread uses the graph at the same
    ///   time.
    unsafe fn graph_instantiate(&self, graph: NativeGraph) -> Result<NativeGraphExec>;

    /// Destroys an executable: `cuGraphExecDestroy`. Launches in flight run to the end. Does not
    /// block.
    ///
    /// # Safety
    /// - `exec` came from [`graph_instantiate`](Self::graph_instantiate), is destroyed once, and is
    ///   not used any more.
    unsafe fn exec_destroy(&self, exec: NativeGraphExec) -> Result<()>;

    /// Uploads an executable's resources to the device, so that launches allocate nothing:
    /// `cuGraphUpload`. Does not block.
    ///
    /// # Safety
    /// - `exec` and `stream` are this driver's and were not destroyed.
    unsafe fn exec_upload(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()>;

    /// Launches an executable: `cuGraphLaunch`. Launches of one executable run one after another.
    /// Does not block.
    ///
    /// # Safety
    /// - All memory that its nodes touch lives until the launch is over.
    unsafe fn exec_launch(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()>;

    /// Replaces the launch of a kernel node, for later launches of the graph:
    /// `cuGraphExecKernelNodeSetParams`. Does not block.
    ///
    /// # Safety
    /// - As [`graph_add_kernel`](Self::graph_add_kernel).
    unsafe fn exec_set_kernel(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        launch: &Launch<'_>,
        on: NativePartition,
    ) -> Result<GraphExecUpdate>;

    /// Replaces the copy of a copy node: `cuGraphExecMemcpyNodeSetParams`. Does not block.
    ///
    /// # Safety
    /// - As [`graph_add_copy`](Self::graph_add_copy).
    unsafe fn exec_set_copy(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        copy: &NativeCopy,
    ) -> Result<GraphExecUpdate>;

    /// Replaces the fill of a fill node: `cuGraphExecMemsetNodeSetParams`. Does not block.
    ///
    /// # Safety
    /// - As [`graph_add_fill`](Self::graph_add_fill).
    unsafe fn exec_set_fill(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        fill: &NativeFill,
    ) -> Result<GraphExecUpdate>;

    /// Begins to capture this stream's work into a graph: `cuStreamBeginCapture` with THREAD_LOCAL.
    /// For calls of foreign libraries only.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not destroyed.
    unsafe fn capture_begin(&self, stream: NativeStream) -> Result<()>;

    /// Ends the capture, also after a failure: `cuStreamEndCapture`.
    ///
    /// # Errors
    /// The driver's codes 900–908. The stream is usable again after them.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not destroyed.
    unsafe fn capture_end(&self, stream: NativeStream) -> Result<NativeGraph>;

    /// Whether the stream is being captured: `cuStreamIsCapturing`. Does not block.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not destroyed.
    unsafe fn is_capturing(&self, stream: NativeStream) -> Result<bool>;
}
