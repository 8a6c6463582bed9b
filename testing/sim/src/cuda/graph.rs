//! Graphs of the simulated driver.
//!
//! This module must not know plans.

use super::stream::Work;
use super::tables::{Condition, Exec, Graph, GraphNode, NodeKind, Tables};
use super::{SimDriver, call_back, refuse};
use crate::{Command, Condition as Word, Node, NodeId, NodeUpdate};
use leasehold_core::{Error, Result};
use leasehold_cuda::driver::codes::code;
use leasehold_cuda::driver::ops::{
    CaptureMode, CopyKind, GraphExecUpdate, GraphOps, Launch, NativeCondition, NativeCopy,
    NativeEvent, NativeFill, NativeGraph, NativeGraphExec, NativeNode, NativePartition,
    NativeStream,
};
use leasehold_hal::ConditionalKind;
use std::sync::Arc;

impl Tables {
    fn graph(&self, api: &'static str, graph: NativeGraph) -> Result<&Graph> {
        self.graphs.get(&graph.0).ok_or_else(|| refuse(api, code::INVALID_VALUE))
    }

    /// Dependencies in the machine's form: nodes of this graph, each once.
    fn dependencies(
        &self,
        api: &'static str,
        graph: NativeGraph,
        after: &[NativeNode],
    ) -> Result<Vec<NodeId>> {
        let graph = self.graph(api, graph)?;
        let mut ids = Vec::with_capacity(after.len());
        for node in after {
            let id = graph.nodes.get(&node.0).ok_or_else(|| refuse(api, code::INVALID_VALUE))?.id;
            if ids.contains(&id) {
                return Err(refuse(api, code::INVALID_VALUE));
            }
            ids.push(id);
        }
        Ok(ids)
    }

    /// Checks the rules of graphs with conditional nodes.
    fn check_conditions(&self, api: &'static str, graph: NativeGraph) -> Result<()> {
        let found = self.graph(api, graph)?;
        let taken = || self.execs.values().any(|exec| exec.graph == graph.0);
        if found.is_body || !found.bodies.is_empty() && taken() {
            return Err(refuse(api, code::NOT_SUPPORTED));
        }
        let mut inside = vec![found];
        while let Some(graph) = inside.pop() {
            if graph.is_body && graph.calls || graph.conditions.values().any(|c| !c.used) {
                return Err(refuse(api, code::INVALID_VALUE));
            }
            inside.extend(graph.bodies.iter().filter_map(|body| self.graphs.get(body)));
        }
        Ok(())
    }

    fn exec_node(
        &self,
        api: &'static str,
        exec: NativeGraphExec,
        node: NativeNode,
    ) -> Result<(&Exec, GraphNode)> {
        let exec = self.execs.get(&exec.0).ok_or_else(|| refuse(api, code::INVALID_VALUE))?;
        let node =
            exec.nodes.get(&node.0).copied().ok_or_else(|| refuse(api, code::INVALID_VALUE))?;
        Ok((exec, node))
    }
}

/// The outcome of an update. The driver's code 1 for a refusal is no error to the caller.
fn refused(told: Result<()>) -> Result<GraphExecUpdate> {
    match told {
        Ok(()) => Ok(GraphExecUpdate::InPlace),
        Err(Error::Driver { code, .. })
            if leasehold_cuda::driver::codes::is_refused_update(code) =>
        {
            Ok(GraphExecUpdate::Refused)
        }
        Err(e) => Err(e),
    }
}

impl SimDriver {
    /// Begins a capture of a stream, in a mode: [`CaptureMode::Global`] forbids calls to all
    /// threads.
    ///
    /// # Errors
    /// The driver's.
    pub fn capture_begin_in(&self, stream: NativeStream, mode: CaptureMode) -> Result<()> {
        const API: &str = "cuStreamBeginCapture";
        let scope = self.enter(API)?;
        self.ensure_default(scope, stream)?;
        let mut tables = self.lock();
        let (handle, _) = tables.stream(API, scope, stream)?;
        let begun = tables.capture_begin(&self.machine, API, handle, mode);
        drop(tables);
        begun.map_err(|e| self.told(API, scope.device, 0, e))
    }

    /// Adds a node.
    fn add(
        &self,
        api: &'static str,
        graph: NativeGraph,
        after: &[NativeNode],
        node: Node,
        kind: NodeKind,
    ) -> Result<NativeNode> {
        let mut tables = self.lock();
        let after = tables.dependencies(api, graph, after)?;
        let added = tables.graph_node(&self.machine, graph.0, node, kind, &after);
        drop(tables);
        added.map(|(_, handle)| NativeNode(handle)).map_err(|e| self.told(api, 0, 0, e))
    }

    /// Notes that a graph has nodes that no body can have, if it has.
    fn calls(&self, graph: NativeGraph, calls: bool) {
        if let Some(graph) = self.lock().graphs.get_mut(&graph.0) {
            graph.calls |= calls;
        }
    }

    /// Refuses what a driver without conditional nodes does not have.
    fn has_conditional_nodes(&self) -> Result<()> {
        if self.config.conditional_nodes {
            return Ok(());
        }
        Err(Error::Unsupported("conditional nodes in graphs of this simulated driver".into()))
    }

    /// Changes a node of an executable.
    fn change(
        &self,
        api: &'static str,
        exec: NativeGraphExec,
        node: NativeNode,
        may: impl FnOnce(&Exec, NodeKind) -> bool,
        update: NodeUpdate,
    ) -> Result<GraphExecUpdate> {
        let told = {
            let tables = self.lock();
            let (exec, node) = match tables.exec_node(api, exec, node) {
                Ok(found) => found,
                Err(e) => return refused(Err(e)),
            };
            if !may(exec, node.kind) {
                return Ok(GraphExecUpdate::Refused);
            }
            self.machine.exec_update(exec.id, &[(node.id, update)])
        };
        refused(told.map_err(|e| self.told(api, 0, 0, e)))
    }
}

impl GraphOps for SimDriver {
    fn graph_create(&self) -> Result<NativeGraph> {
        const API: &str = "cuGraphCreate";
        let (scope, told) = self.enter_despite_loss(API)?;
        told?;
        let id = self.machine.graph_create().map_err(|e| self.told(API, scope.device, 0, e))?;
        let mut tables = self.lock();
        let handle = tables.handle();
        tables.graphs.insert(handle, Graph::new(id));
        Ok(NativeGraph(handle))
    }

    unsafe fn graph_destroy(&self, graph: NativeGraph) -> Result<()> {
        const API: &str = "cuGraphDestroy";
        let (scope, told) = self.enter_despite_loss(API)?;
        let mut tables = self.lock();
        let Graph { id, is_body, .. } = *tables.graph(API, graph)?;
        if is_body {
            return Err(refuse(API, code::INVALID_VALUE));
        }
        tables.remove_graph(graph.0);
        drop(tables);
        told.and(self.machine.graph_destroy(id).map_err(|e| self.told(API, scope.device, 0, e)))
    }

    unsafe fn graph_add_kernel(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        launch: &Launch<'_>,
        on: NativePartition,
    ) -> Result<NativeNode> {
        const API: &str = "cuGraphAddKernelNode";
        let scope = self.enter(API)?;
        self.check_attributes("cuGraphKernelNodeSetAttribute", launch)?;
        let (node, kind) = self.lock().kernel_call_on(API, scope, launch, on)?.node();
        self.add(API, graph, after, node, kind)
    }

    /// The simulated device runs a kernel at one moment, so the second kernel simply follows. Only
    /// the race detector takes its early reads for earlier.
    unsafe fn graph_add_dependent_kernel(
        &self,
        graph: NativeGraph,
        after: NativeNode,
        launch: &Launch<'_>,
        on: NativePartition,
    ) -> Result<NativeNode> {
        const API: &str = "cuGraphAddDependencies";
        let scope = self.enter("cuGraphAddKernelNode")?;
        self.check_attributes("cuGraphKernelNodeSetAttribute", launch)?;
        let (mut node, kind) = self.lock().kernel_call_on(API, scope, launch, on)?.node();
        if let Node::Kernel(call) = &mut node {
            call.dependent = true;
        }
        let node = self.add("cuGraphAddKernelNode", graph, &[after], node, kind)?;
        self.enter(API)?;
        let kind = self.lock().graph(API, graph)?.nodes.get(&after.0).map(|n| n.kind);
        match kind {
            Some(NodeKind::Kernel { .. }) => Ok(node),
            _ => Err(refuse(API, code::INVALID_VALUE)),
        }
    }

    unsafe fn graph_add_copy(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        copy: &NativeCopy,
    ) -> Result<NativeNode> {
        const API: &str = "cuGraphAddMemcpyNode";
        self.enter(API)?;
        if copy.width == 0 || copy.rows == 0 {
            return Err(refuse(API, code::INVALID_VALUE));
        }
        // SAFETY: the caller vouches for both ranges whenever the graph runs.
        let (node, kind) = unsafe { self.checked_copy(API, copy) }?.node();
        self.add(API, graph, after, node, kind)
    }

    unsafe fn graph_add_fill(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        fill: &NativeFill,
    ) -> Result<NativeNode> {
        const API: &str = "cuGraphAddMemsetNode";
        self.enter(API)?;
        if fill.count == 0 {
            return Err(refuse(API, code::INVALID_VALUE));
        }
        let (node, kind) = self.checked_fill(API, fill)?.node();
        self.add(API, graph, after, node, kind)
    }

    unsafe fn graph_add_child(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        child: NativeGraph,
    ) -> Result<NativeNode> {
        const API: &str = "cuGraphAddChildGraphNode";
        self.enter(API)?;
        if graph == child {
            return Err(refuse(API, code::INVALID_VALUE));
        }
        let (id, calls) = {
            let tables = self.lock();
            let child = tables.graph(API, child)?;
            if child.is_conditional() {
                return Err(refuse(API, code::NOT_SUPPORTED));
            }
            (child.id, child.calls)
        };
        let node = self.add(API, graph, after, Node::Child(id), NodeKind::Other)?;
        self.calls(graph, calls);
        Ok(node)
    }

    unsafe fn graph_add_event(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        event: NativeEvent,
    ) -> Result<NativeNode> {
        const API: &str = "cuGraphAddEventRecordNode";
        self.enter(API)?;
        let event = self.lock().events.get(&event.0).map(|e| e.id);
        let event = event.ok_or_else(|| refuse(API, code::INVALID_VALUE))?;
        let node = self.add(API, graph, after, Node::Record(event), NodeKind::Other)?;
        self.calls(graph, true);
        Ok(node)
    }

    unsafe fn graph_add_host(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        call: Arc<dyn Fn() + Send + Sync>,
    ) -> Result<NativeNode> {
        const API: &str = "cuGraphAddHostNode";
        self.enter(API)?;
        let call: Arc<crate::NodeFn> = Arc::new(move |_| call_back(|| call()));
        let node = Node::Host { name: "host node".into(), call };
        let node = self.add(API, graph, after, node, NodeKind::Other)?;
        self.calls(graph, true);
        Ok(node)
    }

    unsafe fn graph_add_empty(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
    ) -> Result<NativeNode> {
        const API: &str = "cuGraphAddEmptyNode";
        self.enter(API)?;
        self.add(API, graph, after, Node::Empty, NodeKind::Other)
    }

    unsafe fn condition_create(&self, graph: NativeGraph) -> Result<NativeCondition> {
        const API: &str = "cuGraphConditionalHandleCreate";
        let scope = self.enter(API)?;
        self.has_conditional_nodes()?;
        let mut tables = self.lock();
        let handle = tables.handle();
        let found = tables.graphs.get_mut(&graph.0);
        let found = found.ok_or_else(|| refuse(API, code::INVALID_VALUE))?;
        let word = self.conditions.create(handle);
        let condition = Condition { context: scope.context, word, used: false };
        found.conditions.insert(handle, condition);
        Ok(NativeCondition(handle))
    }

    unsafe fn graph_add_conditional(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        condition: NativeCondition,
        kind: ConditionalKind,
    ) -> Result<(NativeNode, NativeGraph)> {
        const API: &str = "cuGraphAddNode";
        let scope = self.enter(API)?;
        self.has_conditional_nodes()?;
        let invalid = || refuse(API, code::INVALID_VALUE);
        let body = self.machine.graph_create().map_err(|e| self.told(API, scope.device, 0, e))?;
        let add = || {
            let mut tables = self.lock();
            let found = tables.graph(API, graph)?.conditions.get(&condition.0);
            let found = found.filter(|c| !c.used && c.context == scope.context);
            let word = Word::Cell(found.ok_or_else(invalid)?.word.clone());
            let after = tables.dependencies(API, graph, after)?;
            let name = kind.name().into();
            let node = Node::Conditional { kind, name, condition: word, body };
            let node = tables.graph_node(&self.machine, graph.0, node, NodeKind::Other, &after)?.1;
            let handle = tables.handle();
            tables.graphs.insert(handle, Graph { is_body: true, ..Graph::new(body) });
            let found = tables.graphs.get_mut(&graph.0).ok_or_else(invalid)?;
            found.bodies.push(handle);
            if let Some(condition) = found.conditions.get_mut(&condition.0) {
                condition.used = true;
            }
            Ok((NativeNode(node), NativeGraph(handle)))
        };
        add().map_err(|e| {
            // The body is no graph's, and was made just now, so this call cannot fail.
            let _ = self.machine.graph_destroy(body);
            self.told(API, scope.device, 0, e)
        })
    }

    unsafe fn graph_nodes(&self, graph: NativeGraph) -> Result<usize> {
        const API: &str = "cuGraphGetNodes";
        self.enter(API)?;
        Ok(self.lock().graph(API, graph)?.nodes.len())
    }

    unsafe fn graph_instantiate(&self, graph: NativeGraph) -> Result<NativeGraphExec> {
        const API: &str = "cuGraphInstantiate";
        let scope = self.enter(API)?;
        let (id, nodes) = {
            let mut tables = self.lock();
            tables.forbidden_in_capture(API)?;
            tables.check_conditions(API, graph)?;
            let graph = tables.graph(API, graph)?;
            (graph.id, graph.nodes.clone())
        };
        let told = |e| self.told(API, scope.device, 0, e);
        let last = self.machine.event_create(scope.device, false).map_err(told)?;
        let exec = self.machine.instantiate(scope.device, id).map_err(|e| {
            // The event was made just now, so this call cannot fail.
            let _ = self.machine.event_destroy(last);
            told(e)
        })?;
        let mut tables = self.lock();
        let handle = tables.handle();
        let exec = Exec {
            graph: graph.0,
            context: scope.context,
            device: scope.device,
            id: exec,
            nodes,
            last,
        };
        tables.execs.insert(handle, exec);
        Ok(NativeGraphExec(handle))
    }

    unsafe fn exec_destroy(&self, exec: NativeGraphExec) -> Result<()> {
        const API: &str = "cuGraphExecDestroy";
        let (scope, told) = self.enter_despite_loss(API)?;
        let gone =
            self.lock().execs.remove(&exec.0).ok_or_else(|| refuse(API, code::INVALID_VALUE))?;
        let ended = self.machine.exec_destroy(gone.id);
        // The events of a lost device are gone.
        let event = match self.machine.event_destroy(gone.last) {
            Err(Error::DeviceLost { .. }) => Ok(()),
            gone => gone,
        };
        told.and(ended.and(event).map_err(|e| self.told(API, scope.device, 0, e)))
    }

    unsafe fn exec_upload(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()> {
        const API: &str = "cuGraphUpload";
        let scope = self.enter(API)?;
        self.ensure_default(scope, stream)?;
        let mut tables = self.lock();
        let stream = tables.stream(API, scope, stream)?;
        tables.forbidden_on_captured(API, stream.0)?;
        if tables.execs.contains_key(&exec.0) {
            Ok(())
        } else {
            Err(refuse(API, code::INVALID_VALUE))
        }
    }

    unsafe fn exec_launch(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()> {
        const API: &str = "cuGraphLaunch";
        let scope = self.enter(API)?;
        self.ensure_default(scope, stream)?;
        let mut tables = self.lock();
        let (handle, stream) = tables.stream(API, scope, stream)?;
        tables.forbidden_on_captured(API, handle)?;
        let exec = tables.execs.get(&exec.0).ok_or_else(|| refuse(API, code::INVALID_VALUE))?;
        if exec.device != scope.device {
            return Err(refuse(API, code::INVALID_CONTEXT));
        }
        // Launches of one executable run one after another.
        let commands = vec![
            Command::WaitEvent(exec.last),
            Command::Launch(exec.id),
            Command::Record(exec.last),
        ];
        let given = self.machine.submit(stream.queue, commands);
        drop(tables);
        given.map_err(|e| self.told(API, scope.device, 0, e))
    }

    unsafe fn exec_set_kernel(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        launch: &Launch<'_>,
        on: NativePartition,
    ) -> Result<GraphExecUpdate> {
        const API: &str = "cuGraphExecKernelNodeSetParams";
        let scope = self.enter(API)?;
        self.check_attributes(API, launch)?;
        let call = match self.lock().kernel_call_on(API, scope, launch, on) {
            Ok(Work::Kernel(call, _)) => call,
            Ok(_) => return Ok(GraphExecUpdate::Refused),
            Err(e) => return refused(Err(e)),
        };
        // The context of a node's function may not change.
        let may = |_: &Exec, kind| kind == NodeKind::Kernel { context: scope.context };
        self.change(API, exec, node, may, NodeUpdate::Kernel(call))
    }

    unsafe fn exec_set_copy(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        copy: &NativeCopy,
    ) -> Result<GraphExecUpdate> {
        const API: &str = "cuGraphExecMemcpyNodeSetParams";
        self.enter(API)?;
        // SAFETY: the caller vouches for both ranges whenever the graph runs.
        let transfer = match unsafe { self.checked_copy(API, copy) } {
            Ok(Work::Copy(transfer, _)) if transfer.bytes() != 0 => transfer,
            Ok(_) => return Ok(GraphExecUpdate::Refused),
            Err(e) => return refused(Err(e)),
        };
        // The kinds of memory may not change, and only 1-D copies can be changed.
        let new: (CopyKind, u64) = (copy.kind, copy.rows);
        let may = |_: &Exec, kind| new.1 == 1 && kind == NodeKind::Copy { kind: new.0, rows: 1 };
        self.change(API, exec, node, may, NodeUpdate::Copy(transfer))
    }

    unsafe fn exec_set_fill(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        fill: &NativeFill,
    ) -> Result<GraphExecUpdate> {
        const API: &str = "cuGraphExecMemsetNodeSetParams";
        self.enter(API)?;
        let fill = match self.checked_fill(API, fill) {
            Ok(Work::Fill(fill)) if fill.width != 0 => fill,
            Ok(_) => return Ok(GraphExecUpdate::Refused),
            Err(e) => return refused(Err(e)),
        };
        self.change(API, exec, node, |_, kind| kind == NodeKind::Fill, NodeUpdate::Fill(fill))
    }

    unsafe fn capture_begin(&self, stream: NativeStream) -> Result<()> {
        self.capture_begin_in(stream, CaptureMode::ThreadLocal)
    }

    unsafe fn capture_end(&self, stream: NativeStream) -> Result<NativeGraph> {
        const API: &str = "cuStreamEndCapture";
        let (scope, told) = self.enter_teardown(API)?;
        self.ensure_default(scope, stream)?;
        let mut tables = self.lock();
        let (handle, _) = tables.stream(API, scope, stream)?;
        let graph = tables.capture_end(&self.machine, API, handle)?;
        match told {
            Ok(()) => Ok(NativeGraph(graph)),
            Err(e) => {
                if let Some(graph) = tables.graphs.remove(&graph) {
                    // The graph reaches no caller.
                    let _ = self.machine.graph_destroy(graph.id);
                }
                Err(e)
            }
        }
    }

    unsafe fn is_capturing(&self, stream: NativeStream) -> Result<bool> {
        const API: &str = "cuStreamIsCapturing";
        let scope = self.enter(API)?;
        self.ensure_default(scope, stream)?;
        let tables = self.lock();
        let (handle, _) = tables.stream(API, scope, stream)?;
        Ok(tables.capture_of(handle).is_some())
    }
}
