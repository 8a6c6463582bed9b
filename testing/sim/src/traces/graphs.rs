//! Scenarios: graphs of explicit nodes, their launches and their updates; loops and branches, and
//! the rules of their bodies.

use super::kernels::Arguments;
use super::{CopyKind, Order, Scenario, Trace};
use leasehold_core::Result;
use leasehold_cuda::driver::condition::{PTX, SET_CONDITION};
use leasehold_cuda::driver::ops::{
    GraphExecUpdate, Launch, NativeCondition, NativeCopy, NativeFill, NativeFunction, NativeGraph,
    NativeGraphExec, NativeModule, NativeNode, NativePartition, NativeStream,
};
use leasehold_hal::ConditionalKind::{self, If, While};
use std::sync::Arc;

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("graph_nodes", graph_nodes),
    Scenario::new("graph_dependencies", graph_dependencies),
    Scenario::new("graph_node_misuse", graph_node_misuse),
    Scenario::new("graph_arguments_are_copied", graph_arguments_are_copied),
    Scenario::new("graph_of_nothing", graph_of_nothing),
    Scenario::new("graph_runs_follow_one_another", graph_runs_follow_one_another),
    Scenario::new("graph_destroyed_in_flight", graph_destroyed_in_flight),
    Scenario::new("graph_updates", graph_updates),
    Scenario::new("graph_update_misuse", graph_update_misuse),
    Scenario::new("graph_children", graph_children),
    Scenario::new("graph_events", graph_events),
    Scenario::new("graph_host_nodes_are_dropped", graph_host_nodes_are_dropped),
    Scenario::new("condition_loop", condition_loop),
    Scenario::new("condition_branch", condition_branch),
    Scenario::new("condition_nesting", condition_nesting),
    Scenario::new("condition_bodies", condition_bodies),
    Scenario::new("condition_misuse", condition_misuse),
    Scenario::new("condition_graph_rules", condition_graph_rules),
    Scenario::new("condition_updates", condition_updates),
];

impl Trace<'_> {
    fn add_fill(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        dst: u64,
        value: u32,
        count: u64,
    ) -> Result<NativeNode> {
        // SAFETY: scenarios keep the memory until the graph's last run is over.
        unsafe {
            self.ops.graph_add_fill(graph, after, &NativeFill { dst, value, width: 4, count })
        }
    }

    fn add_copy(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        copy: NativeCopy,
    ) -> Result<NativeNode> {
        // SAFETY: scenarios keep the memory of their nodes until the last run of the graph was
        // waited for.
        unsafe { self.ops.graph_add_copy(graph, after, &copy) }
    }

    fn add_kernel(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        launch: &Launch<'_>,
    ) -> Result<NativeNode> {
        // SAFETY: scenarios keep the memory of their nodes until the last run of the graph was
        // waited for.
        unsafe { self.ops.graph_add_kernel(graph, after, launch, NativePartition::NULL) }
    }

    fn add_mark(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        order: &Order,
        name: &'static str,
    ) -> Result<NativeNode> {
        let order = order.clone();
        self.ops.graph_add_host(graph, after, Arc::new(move || order.lock().push(name)))
    }

    pub(super) fn run_graph(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()> {
        // SAFETY: scenarios keep the memory of their nodes until the last run of the graph was
        // waited for.
        unsafe { self.ops.exec_launch(exec, stream) }
    }

    fn set_fill(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        fill: &NativeFill,
    ) -> Result<GraphExecUpdate> {
        // SAFETY: scenarios keep the memory of their nodes until the last run of the graph was
        // waited for.
        unsafe { self.ops.exec_set_fill(exec, node, fill) }
    }

    fn set_copy(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        copy: &NativeCopy,
    ) -> Result<GraphExecUpdate> {
        // SAFETY: scenarios keep the memory of their nodes until the last run of the graph was
        // waited for.
        unsafe { self.ops.exec_set_copy(exec, node, copy) }
    }

    fn set_kernel(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        launch: &Launch<'_>,
    ) -> Result<GraphExecUpdate> {
        // SAFETY: scenarios keep the memory of their nodes until the last run of the graph was
        // waited for.
        unsafe { self.ops.exec_set_kernel(exec, node, launch, NativePartition::NULL) }
    }
}

fn on_device(dst: u64, src: u64, bytes: u64) -> NativeCopy {
    NativeCopy::linear(CopyKind::DeviceToDevice, dst, src, bytes)
}

fn graph_nodes(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream, order) = (t.module()?, t.stream()?, Order::default());
    let add = ops.module_function(module, "trace_add")?;
    let (a, b, out) = (t.filled(stream, 4, 0)?, t.filled(stream, 4, 0)?, t.filled(stream, 4, 0)?);
    let graph = t.tell("create", ops.graph_create());
    let Some(graph) = graph else { return Ok(()) };
    t.tell("how many nodes", ops.graph_nodes(graph));
    let fill = t.add_fill(graph, &[], a, 20, 4);
    let Some(fill) = t.tell("a fill", fill) else { return Ok(()) };
    let copy = t.add_copy(graph, &[fill], on_device(b, a, 16));
    let Some(copy) = t.tell("a copy", copy) else { return Ok(()) };
    let arguments = Arguments::add(a, b, out, 4);
    let kernel = t.add_kernel(graph, &[copy], &arguments.launch(add, 1, 4));
    let Some(kernel) = t.tell("a kernel", kernel) else { return Ok(()) };
    let host = t.add_mark(graph, &[kernel], &order, "host");
    let Some(host) = t.tell("a host node", host) else { return Ok(()) };
    let empty = t.tell("an empty node", ops.graph_add_empty(graph, &[host, kernel]));
    let Some(empty) = empty else { return Ok(()) };
    let down = NativeCopy::linear(CopyKind::DeviceToHost, t.word_at(8), out, 16);
    t.tell("a copy to pinned memory", t.add_copy(graph, &[empty], down));
    t.tell("how many nodes", ops.graph_nodes(graph));
    let Some(exec) = t.tell("instantiate", ops.graph_instantiate(graph)) else { return Ok(()) };
    t.tell("upload", ops.exec_upload(exec, stream));
    t.hold(stream, 0)?;
    t.tell("launch behind held work", t.run_graph(exec, stream));
    t.say(format!("before: {:#x}", t.word(8)));
    t.tell("destroy the graph", ops.graph_destroy(graph));
    t.release(0);
    t.tell("wait", t.sync(stream));
    t.say(format!("after: {:#x}", t.word(8)));
    t.tell("launch again", t.run_graph(exec, stream));
    t.tell("wait", t.sync(stream));
    t.say_order(&order);
    t.tell("destroy the executable", ops.exec_destroy(exec));
    [a, b, out].into_iter().try_for_each(|at| ops.free(at))?;
    ops.stream_destroy(stream)?;
    ops.module_unload(module)
}

fn graph_dependencies(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (stream, order) = (t.stream()?, Order::default());
    let graph = ops.graph_create()?;
    let one = t.add_mark(graph, &[], &order, "one")?;
    let two = t.add_mark(graph, &[one], &order, "two")?;
    let three = t.add_mark(graph, &[one, two], &order, "three")?;
    t.add_mark(graph, &[three], &order, "four")?;
    t.tell("the same dependency twice", ops.graph_add_empty(graph, &[one, one]));
    let other = ops.graph_create()?;
    t.tell("a dependency of another graph", ops.graph_add_empty(other, &[one]));
    t.tell("no node as a dependency", ops.graph_add_empty(graph, &[NativeNode::NULL]));
    t.tell("how many nodes", ops.graph_nodes(graph));
    let exec = ops.graph_instantiate(graph)?;
    for _ in 0..3 {
        t.run_graph(exec, stream)?;
    }
    t.tell("wait", t.sync(stream));
    t.say_order(&order);
    ops.exec_destroy(exec)?;
    ops.graph_destroy(other)?;
    ops.graph_destroy(graph)?;
    ops.stream_destroy(stream)
}

fn graph_node_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let nothing = ops.module_function(module, "trace_nothing")?;
    let at = t.filled(stream, 16, 0)?;
    let graph = ops.graph_create()?;
    t.tell("a fill of nothing", t.add_fill(graph, &[], at, 0, 0));
    t.tell("a fill at an odd address", t.add_fill(graph, &[], at + 1, 0, 1));
    t.tell("a fill of null", t.add_fill(graph, &[], 0, 0, 1));
    t.tell("a copy of nothing", t.add_copy(graph, &[], on_device(at, at + 32, 0)));
    t.tell("a copy to null", t.add_copy(graph, &[], on_device(0, at, 4)));
    t.tell("a copy from an address of nothing", t.add_copy(graph, &[], on_device(at, 0x1000, 4)));
    let narrow = NativeCopy { src_pitch: 4, rows: 2, ..on_device(at, at + 32, 8) };
    t.tell("a pitch that is smaller than a row", t.add_copy(graph, &[], narrow));
    let memories = [(at, 4, leasehold_hal::Access::ReadWrite); 3];
    let arguments = Arguments::new(&memories, &[]);
    let launch = arguments.launch(nothing, 1, 1);
    t.tell(
        "a kernel without blocks",
        t.add_kernel(graph, &[], &Launch { grid: [0, 1, 1], ..launch }),
    );
    t.tell(
        "a kernel with too many threads",
        t.add_kernel(graph, &[], &Launch { block: [2048, 1, 1], ..launch }),
    );
    t.tell("itself as a child", ops.graph_add_child(graph, &[], graph));
    t.tell("how many nodes", ops.graph_nodes(graph));
    t.tell("destroy", ops.graph_destroy(graph));
    ops.free(at)?;
    ops.stream_destroy(stream)?;
    ops.module_unload(module)
}

fn graph_arguments_are_copied(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let add = ops.module_function(module, "trace_add")?;
    let (a, b, out) = (t.filled(stream, 4, 3)?, t.filled(stream, 4, 4)?, t.filled(stream, 4, 0)?);
    let graph = ops.graph_create()?;
    let mut arguments = Arguments::add(a, b, out, 4);
    let node = t.add_kernel(graph, &[], &arguments.launch(add, 1, 4))?;
    arguments.clobber();
    drop(arguments);
    let exec = ops.graph_instantiate(graph)?;
    t.tell("launch", t.run_graph(exec, stream));
    t.say_data("after the buffer of the node was overwritten", stream, out, 4)?;
    let mut arguments = Arguments::add(a, a, out, 4);
    let updated = t.set_kernel(exec, node, &arguments.launch(add, 1, 4));
    t.tell("update", updated);
    arguments.clobber();
    drop(arguments);
    t.tell("launch", t.run_graph(exec, stream));
    t.say_data("after the buffer of the update was overwritten", stream, out, 4)?;
    ops.exec_destroy(exec)?;
    ops.graph_destroy(graph)?;
    [a, b, out].into_iter().try_for_each(|at| ops.free(at))?;
    ops.stream_destroy(stream)?;
    ops.module_unload(module)
}

fn graph_of_nothing(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let graph = ops.graph_create()?;
    let Some(exec) = t.tell("instantiate", ops.graph_instantiate(graph)) else { return Ok(()) };
    t.tell("upload", ops.exec_upload(exec, stream));
    t.tell("launch", t.run_graph(exec, stream));
    t.tell("wait", t.sync(stream));
    let outer = ops.graph_create()?;
    t.tell("as a child", ops.graph_add_child(outer, &[], graph));
    t.tell("how many nodes", ops.graph_nodes(outer));
    t.tell("destroy", ops.exec_destroy(exec));
    ops.graph_destroy(outer)?;
    ops.graph_destroy(graph)?;
    ops.stream_destroy(stream)
}

fn graph_runs_follow_one_another(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b, order) = (t.stream()?, t.stream()?, Order::default());
    let graph = ops.graph_create()?;
    let begin = t.add_mark(graph, &[], &order, "begin")?;
    let pause = ops.graph_add_host(
        graph,
        &[begin],
        Arc::new(|| std::thread::sleep(std::time::Duration::from_millis(5))),
    )?;
    t.add_mark(graph, &[pause], &order, "end")?;
    let exec = ops.graph_instantiate(graph)?;
    t.hold(a, 0)?;
    t.tell("launch on a stream that is held", t.run_graph(exec, a));
    t.tell("launch on another stream", t.run_graph(exec, b));
    t.tell("query the other stream", ops.stream_query(b));
    t.release(0);
    t.tell("wait", t.sync(a));
    t.tell("wait", t.sync(b));
    t.say_order(&order);
    ops.exec_destroy(exec)?;
    ops.graph_destroy(graph)?;
    ops.stream_destroy(a)?;
    ops.stream_destroy(b)
}

fn graph_destroyed_in_flight(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (stream, order) = (t.stream()?, Order::default());
    let graph = ops.graph_create()?;
    t.add_mark(graph, &[], &order, "ran")?;
    let exec = ops.graph_instantiate(graph)?;
    t.hold(stream, 0)?;
    t.run_graph(exec, stream)?;
    t.tell("destroy the executable in flight", ops.exec_destroy(exec));
    t.tell("destroy the graph", ops.graph_destroy(graph));
    t.tell("query", ops.stream_query(stream));
    t.release(0);
    t.tell("wait", t.sync(stream));
    t.say_order(&order);
    ops.stream_destroy(stream)
}

fn graph_updates(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let (add, store) =
        (ops.module_function(module, "trace_add")?, ops.module_function(module, "trace_store")?);
    let (a, b, out) = (t.filled(stream, 8, 0)?, t.filled(stream, 8, 0)?, t.filled(stream, 8, 0)?);
    let graph = ops.graph_create()?;
    let fill = t.add_fill(graph, &[], a, 1, 4)?;
    let copy = t.add_copy(graph, &[fill], on_device(b, a, 16))?;
    let arguments = Arguments::add(a, b, out, 4);
    let kernel = t.add_kernel(graph, &[copy], &arguments.launch(add, 1, 4))?;
    let exec = ops.graph_instantiate(graph)?;
    t.run_graph(exec, stream)?;
    t.say_data("as it was", stream, out, 8)?;
    t.tell(
        "another fill",
        t.set_fill(exec, fill, &NativeFill { dst: a, value: 7, width: 4, count: 8 }),
    );
    t.tell("a longer copy", t.set_copy(exec, copy, &on_device(b, a, 32)));
    let longer = Arguments::add(a, b, out, 8);
    t.tell("a larger grid", t.set_kernel(exec, kernel, &longer.launch(add, 2, 4)));
    t.run_graph(exec, stream)?;
    t.say_data("updated", stream, out, 8)?;
    let other = Arguments::store(out, 9, 2, 1);
    t.tell("another function", t.set_kernel(exec, kernel, &other.launch(store, 1, 1)));
    t.run_graph(exec, stream)?;
    t.say_data("with another function", stream, out, 8)?;
    t.tell(
        "a fill of another width",
        t.set_fill(exec, fill, &NativeFill { dst: a, value: 7, width: 1, count: 8 }),
    );
    let up = NativeCopy::linear(CopyKind::HostToDevice, b, t.word_at(8), 16);
    t.tell("a copy from pinned host memory instead", t.set_copy(exec, copy, &up));
    let rows = NativeCopy { src_pitch: 8, dst_pitch: 8, rows: 2, ..on_device(b, a, 8) };
    t.tell("a copy in rows instead", t.set_copy(exec, copy, &rows));
    t.tell("a copy of nothing instead", t.set_copy(exec, copy, &on_device(b, a, 0)));
    t.tell("launch", t.run_graph(exec, stream));
    t.tell("wait", t.sync(stream));
    // An update is for later launches: a launch that is held back keeps its values.
    t.tell("back to the sum", t.set_kernel(exec, kernel, &longer.launch(add, 2, 4)));
    t.hold(stream, 0)?;
    t.run_graph(exec, stream)?;
    t.tell("update while a run is held", t.set_kernel(exec, kernel, &other.launch(store, 1, 1)));
    t.release(0);
    t.say_data("the held run", stream, out, 8)?;
    ops.exec_destroy(exec)?;
    ops.graph_destroy(graph)?;
    [a, b, out].into_iter().try_for_each(|at| ops.free(at))?;
    ops.stream_destroy(stream)?;
    ops.module_unload(module)
}

fn graph_update_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let add = ops.module_function(module, "trace_add")?;
    let (a, b) = (t.filled(stream, 8, 0)?, t.filled(stream, 8, 0)?);
    let graph = ops.graph_create()?;
    let fill = t.add_fill(graph, &[], a, 1, 4)?;
    let copy = t.add_copy(graph, &[fill], on_device(b, a, 16))?;
    let empty = ops.graph_add_empty(graph, &[copy])?;
    let exec = ops.graph_instantiate(graph)?;
    let other = ops.graph_create()?;
    let foreign = t.add_fill(other, &[], a, 1, 4)?;
    let new = NativeFill { dst: a, value: 2, width: 4, count: 4 };
    t.tell("a fill for a copy node", t.set_fill(exec, copy, &new));
    t.tell("a copy for a fill node", t.set_copy(exec, fill, &on_device(b, a, 16)));
    let arguments = Arguments::add(a, b, a, 4);
    t.tell("a kernel for an empty node", t.set_kernel(exec, empty, &arguments.launch(add, 1, 4)));
    t.tell("a node of another graph", t.set_fill(exec, foreign, &new));
    t.tell("no node", t.set_fill(exec, NativeNode::NULL, &new));
    // The graph got this node after its instantiation.
    let late = t.add_fill(graph, &[empty], b, 1, 4)?;
    t.tell("a later node", t.set_fill(exec, late, &new));
    t.tell("launch", t.run_graph(exec, stream));
    t.say_data("what ran is what was", stream, b, 4)?;
    ops.exec_destroy(exec)?;
    ops.graph_destroy(other)?;
    ops.graph_destroy(graph)?;
    [a, b].into_iter().try_for_each(|at| ops.free(at))?;
    ops.stream_destroy(stream)?;
    ops.module_unload(module)
}

fn graph_children(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (stream, order) = (t.stream()?, Order::default());
    let (inner, outer) = (ops.graph_create()?, ops.graph_create()?);
    let one = t.add_mark(inner, &[], &order, "inner1")?;
    t.add_mark(inner, &[one], &order, "inner2")?;
    let before = t.add_mark(outer, &[], &order, "before")?;
    let child = t.tell("add the child", ops.graph_add_child(outer, &[before], inner));
    let Some(child) = child else { return Ok(()) };
    t.add_mark(outer, &[child], &order, "after")?;
    // The child was copied: later nodes of its graph are not in the copy.
    t.add_mark(inner, &[one], &order, "late")?;
    t.tell("destroy the child's graph", ops.graph_destroy(inner));
    t.tell("how many nodes", ops.graph_nodes(outer));
    let exec = ops.graph_instantiate(outer)?;
    t.run_graph(exec, stream)?;
    t.tell("wait", t.sync(stream));
    t.say_order(&order);
    ops.exec_destroy(exec)?;
    ops.graph_destroy(outer)?;
    ops.stream_destroy(stream)
}

fn graph_events(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b, event, order) = (t.stream()?, t.stream()?, t.event()?, Order::default());
    let graph = ops.graph_create()?;
    let first = t.add_mark(graph, &[], &order, "first")?;
    let record = ops.graph_add_event(graph, &[first], event);
    let Some(record) = t.tell("record an event", record) else { return Ok(()) };
    t.add_mark(graph, &[record], &order, "last")?;
    let exec = ops.graph_instantiate(graph)?;
    t.tell("query before a run", ops.event_query(event));
    t.hold(a, 0)?;
    t.run_graph(exec, a)?;
    t.tell("query with a held run", ops.event_query(event));
    ops.stream_wait_event(b, event)?;
    t.tell("query who waits for it", ops.stream_query(b));
    t.release(0);
    t.tell("wait for it", ops.event_synchronize(event));
    t.tell("wait for who waits", t.sync(b));
    t.tell("wait for the run", t.sync(a));
    t.say_order(&order);
    ops.exec_destroy(exec)?;
    ops.graph_destroy(graph)?;
    ops.event_destroy(event)?;
    ops.stream_destroy(a)?;
    ops.stream_destroy(b)
}

fn graph_host_nodes_are_dropped(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let held = Arc::new(());
    let graph = ops.graph_create()?;
    let inside = held.clone();
    ops.graph_add_host(graph, &[], Arc::new(move || drop(inside.clone())))?;
    let exec = ops.graph_instantiate(graph)?;
    t.run_graph(exec, stream)?;
    t.tell("wait", t.sync(stream));
    t.tell("destroy the graph", ops.graph_destroy(graph));
    t.say(format!("the executable holds it: {}", Arc::strong_count(&held) > 1));
    t.run_graph(exec, stream)?;
    t.tell("wait", t.sync(stream));
    t.tell("destroy the executable", ops.exec_destroy(exec));
    ops.stream_destroy(stream)?;
    // The driver drops the closure on a thread of its own.
    let mut rounds = 0;
    while Arc::strong_count(&held) > 1 && rounds < 500 {
        std::thread::sleep(std::time::Duration::from_millis(10));
        rounds += 1;
    }
    t.say(format!("dropped in the end: {}", Arc::strong_count(&held) == 1));
    Ok(())
}

/// The objects of a scenario: kernels, a stream and words of device memory.
struct Parts {
    modules: [NativeModule; 2],
    add: NativeFunction,
    set: NativeFunction,
    stream: NativeStream,
    /// A flag, a total, another flag, one, and minus one.
    words: [u64; 5],
}

impl Parts {
    /// The first object of a scenario.
    fn new(t: &mut Trace<'_>) -> Result<Self> {
        t.open()?;
        let (module, setter) = (t.module()?, t.ops.module_load(PTX.as_bytes())?);
        let stream = t.stream()?;
        let word = |value| t.filled(stream, 1, value);
        Ok(Self {
            modules: [module, setter],
            add: t.ops.module_function(module, "trace_add")?,
            set: t.ops.module_function(setter, SET_CONDITION)?,
            stream,
            words: [word(0)?, word(0)?, word(0)?, word(1)?, word(u32::MAX)?],
        })
    }

    /// Adds a kernel that counts a word up (with 3) or down (with 4).
    fn count(
        &self,
        t: &Trace<'_>,
        graph: NativeGraph,
        after: &[NativeNode],
        (word, step): (usize, usize),
    ) -> Result<NativeNode> {
        let arguments = Arguments::add(self.words[word], self.words[step], self.words[word], 1);
        t.add_kernel(graph, after, &arguments.launch(self.add, 1, 1))
    }

    /// Adds a kernel that sets a condition to a word.
    fn set(
        &self,
        t: &Trace<'_>,
        graph: NativeGraph,
        after: &[NativeNode],
        condition: NativeCondition,
        word: usize,
    ) -> Result<NativeNode> {
        let flag = (self.words[word], 4, leasehold_hal::Access::Read);
        let arguments = Arguments::new(&[flag], &condition.0.to_le_bytes());
        t.add_kernel(graph, after, &arguments.launch(self.set, 1, 1))
    }

    /// Adds a loop or a branch over word 0, with an empty body.
    fn conditional(
        &self,
        t: &Trace<'_>,
        graph: NativeGraph,
        after: &[NativeNode],
        kind: ConditionalKind,
    ) -> Result<(NativeCondition, NativeNode, NativeGraph)> {
        let condition = t.ops.condition_create(graph)?;
        let first = self.set(t, graph, after, condition, 0)?;
        let (node, body) = t.ops.graph_add_conditional(graph, &[first], condition, kind)?;
        Ok((condition, node, body))
    }

    /// Adds kernels to a body that count one word down and word 1 up. Returns the last one.
    fn rounds(&self, t: &Trace<'_>, body: NativeGraph, down: usize) -> Result<NativeNode> {
        let down = self.count(t, body, &[], (down, 4))?;
        self.count(t, body, &[down], (1, 3))
    }

    /// Adds a loop over word 0 that counts word 1 up, behind some nodes. Returns the loop, its
    /// body, and the kernel that counts up.
    fn a_loop(
        &self,
        t: &Trace<'_>,
        graph: NativeGraph,
        after: &[NativeNode],
    ) -> Result<(NativeNode, NativeGraph, NativeNode)> {
        let (condition, node, body) = self.conditional(t, graph, after, While)?;
        let up = self.rounds(t, body, 0)?;
        self.set(t, body, &[up], condition, 0)?;
        Ok((node, body, up))
    }

    /// Sets the first words, runs an executable and writes the words.
    fn run(&self, t: &mut Trace<'_>, exec: NativeGraphExec, values: [u32; 3]) -> Result<()> {
        for (&dst, value) in self.words.iter().zip(values) {
            let fill = NativeFill { dst, value, width: 4, count: 1 };
            // SAFETY: the words live until the stream was waited for.
            unsafe { t.ops.fill(self.stream, &fill)? };
        }
        t.tell(format!("run with {values:?}"), t.run_graph(exec, self.stream));
        let mut now = Vec::new();
        for &word in &self.words[..3] {
            now.extend(t.read(self.stream, word, 1)?);
        }
        t.say(format!("then {now:?}"));
        Ok(())
    }

    /// Instantiates a graph, runs it with each of the values, and ends the scenario.
    fn run_all(self, t: &mut Trace<'_>, graph: NativeGraph, all: &[[u32; 3]]) -> Result<()> {
        let exec = t.ops.graph_instantiate(graph)?;
        all.iter().try_for_each(|&values| self.run(t, exec, values))?;
        t.ops.exec_destroy(exec)?;
        self.end(t, &[graph])
    }

    fn end(self, t: &Trace<'_>, graphs: &[NativeGraph]) -> Result<()> {
        graphs.iter().try_for_each(|&graph| t.ops.graph_destroy(graph))?;
        self.words.into_iter().try_for_each(|at| t.ops.free(at))?;
        t.ops.stream_destroy(self.stream)?;
        self.modules.into_iter().try_for_each(|module| t.ops.module_unload(module))
    }
}

fn condition_loop(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    let parts = Parts::new(t)?;
    let graph = ops.graph_create()?;
    let Some(condition) = t.tell("a condition", ops.condition_create(graph)) else { return Ok(()) };
    let first = parts.set(t, graph, &[], condition, 0)?;
    let made = ops.graph_add_conditional(graph, &[first], condition, While);
    let Some((node, body)) = t.tell("a loop", made) else { return Ok(()) };
    t.tell("nodes of its body", ops.graph_nodes(body));
    let up = parts.rounds(t, body, 0)?;
    t.tell("set at the end", parts.set(t, body, &[up], condition, 0));
    t.tell("nodes of its body", ops.graph_nodes(body));
    t.tell("a kernel behind it", parts.count(t, graph, &[node], (2, 3)));
    t.tell("nodes of the graph", ops.graph_nodes(graph));
    let Some(exec) = t.tell("instantiate", ops.graph_instantiate(graph)) else { return Ok(()) };
    t.tell("upload", ops.exec_upload(exec, parts.stream));
    parts.run(t, exec, [5, 0, 0])?;
    parts.run(t, exec, [0, 0, 0])?;
    parts.run(t, exec, [1000, 7, 9])?;
    t.tell("destroy the graph", ops.graph_destroy(graph));
    parts.run(t, exec, [3, 0, 0])?;
    t.tell("destroy the executable", ops.exec_destroy(exec));
    parts.end(t, &[])
}

fn condition_branch(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    let parts = Parts::new(t)?;
    let graph = ops.graph_create()?;
    let condition = ops.condition_create(graph)?;
    let first = parts.set(t, graph, &[], condition, 0)?;
    let made = ops.graph_add_conditional(graph, &[first], condition, If);
    let Some((node, body)) = t.tell("a branch", made) else { return Ok(()) };
    parts.count(t, body, &[], (1, 3))?;
    parts.count(t, graph, &[node], (2, 3))?;
    parts.run_all(t, graph, &[[0, 0, 0], [1, 0, 0], [0x8000_0000, 0, 0], [0, 0, 0]])
}

fn condition_nesting(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    let parts = Parts::new(t)?;
    let graph = ops.graph_create()?;
    let (condition, _, outer) = parts.conditional(t, graph, &[], While)?;
    let inner = t.tell("a condition of the body", ops.condition_create(outer));
    let Some(inner) = inner else { return Ok(()) };
    let down = parts.count(t, outer, &[], (0, 4))?;
    let three = t.add_fill(outer, &[down], parts.words[2], 3, 1)?;
    let set = parts.set(t, outer, &[three], inner, 2)?;
    let made = ops.graph_add_conditional(outer, &[set], inner, While);
    let Some((node, body)) = t.tell("a loop in the body", made) else { return Ok(()) };
    let more = parts.rounds(t, body, 2)?;
    parts.set(t, body, &[more], inner, 2)?;
    parts.set(t, outer, &[node], condition, 0)?;
    parts.run_all(t, graph, &[[4, 0, 0], [0, 0, 0]])
}

/// Adds one kind of node to a body, and instantiates the graph.
fn condition_bodies(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    let parts = Parts::new(t)?;
    let event = t.event()?;
    let order = Order::default();
    let [flag, total, ..] = parts.words;
    let child = ops.graph_create()?;
    parts.count(t, child, &[], (1, 3))?;
    let calling = ops.graph_create()?;
    t.add_mark(calling, &[], &order, "called")?;
    let recording = ops.graph_create()?;
    ops.graph_add_event(recording, &[], event)?;
    let looping = ops.graph_create()?;
    parts.a_loop(t, looping, &[])?;
    let down = NativeCopy::linear(CopyKind::DeviceToHost, t.word_at(8), flag, 4);
    let up = NativeCopy::linear(CopyKind::HostToDevice, flag, t.word_at(8), 4);
    for what in 0..11 {
        let graph = ops.graph_create()?;
        let (_, _, body) = parts.conditional(t, graph, &[], If)?;
        let added = match what {
            0 => t.tell("nothing", Ok(())).is_some(),
            1 => t.tell("an empty node", ops.graph_add_empty(body, &[])).is_some(),
            2 => t.tell("a kernel", parts.count(t, body, &[], (1, 3))).is_some(),
            3 => t.tell("a fill", t.add_fill(body, &[], total, 1, 1)).is_some(),
            4 => t.tell("a copy", t.add_copy(body, &[], on_device(total, flag, 4))).is_some(),
            5 => t.tell("a copy to pinned memory", t.add_copy(body, &[], down)).is_some(),
            6 => t.tell("a copy from pinned memory", t.add_copy(body, &[], up)).is_some(),
            7 => t.tell("a child", ops.graph_add_child(body, &[], child)).is_some(),
            8 => t.tell("a host node", t.add_mark(body, &[], &order, "called")).is_some(),
            9 => t.tell("an event", ops.graph_add_event(body, &[], event)).is_some(),
            _ => {
                t.tell("a child with a host node", ops.graph_add_child(body, &[], calling));
                t.tell("a child with an event", ops.graph_add_child(body, &[], recording));
                t.tell("a child with a loop", ops.graph_add_child(body, &[], looping));
                true
            }
        };
        let exec = ops.graph_instantiate(graph);
        if added && let Some(exec) = t.tell("instantiate", exec) {
            t.tell("run", t.run_graph(exec, parts.stream));
            t.tell("wait", t.sync(parts.stream));
            ops.exec_destroy(exec)?;
        }
        ops.graph_destroy(graph)?;
    }
    parts.end(t, &[child, calling, recording, looping])?;
    ops.event_destroy(event)
}

fn condition_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    let parts = Parts::new(t)?;
    let (graph, other) = (ops.graph_create()?, ops.graph_create()?);
    let condition = ops.condition_create(graph)?;
    let add = |graph, condition| ops.graph_add_conditional(graph, &[], condition, If);
    t.tell("instantiate with an unused condition", ops.graph_instantiate(graph));
    t.tell("a condition of another graph", add(other, condition));
    t.tell("no condition", add(graph, NativeCondition::NULL));
    t.tell("the right one", add(graph, condition));
    t.tell("the same one again", add(graph, condition));
    t.tell("nodes of the graph", ops.graph_nodes(graph));
    let later = ops.condition_create(graph)?;
    t.tell("instantiate with one that is unused", ops.graph_instantiate(graph));
    t.tell("its node", add(graph, later));
    let exec = t.tell("instantiate", ops.graph_instantiate(graph));
    if let Some(exec) = exec {
        ops.exec_destroy(exec)?;
    }
    parts.end(t, &[other, graph])
}

fn condition_graph_rules(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    let parts = Parts::new(t)?;
    let (graph, outer) = (ops.graph_create()?, ops.graph_create()?);
    let (_, body, _) = parts.a_loop(t, graph, &[])?;
    t.tell("as a child", ops.graph_add_child(outer, &[], graph));
    t.tell("its body as a child", ops.graph_add_child(outer, &[], body));
    t.tell("nodes of the outer graph", ops.graph_nodes(outer));
    t.tell("destroy the body", ops.graph_destroy(body));
    t.tell("instantiate the body", ops.graph_instantiate(body));
    let Some(exec) = t.tell("instantiate", ops.graph_instantiate(graph)) else { return Ok(()) };
    t.tell("instantiate again", ops.graph_instantiate(graph));
    parts.run(t, exec, [2, 0, 0])?;
    t.tell("destroy the executable", ops.exec_destroy(exec));
    let Some(exec) = t.tell("instantiate again", ops.graph_instantiate(graph)) else {
        return Ok(());
    };
    // Several launches in a row, of which the later ones find the flag at zero.
    t.hold(parts.stream, 0)?;
    for _ in 0..3 {
        t.tell("launch", t.run_graph(exec, parts.stream));
    }
    t.release(0);
    t.tell("wait", t.sync(parts.stream));
    ops.exec_destroy(exec)?;
    parts.end(t, &[outer, graph])
}

fn condition_updates(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    let parts = Parts::new(t)?;
    let graph = ops.graph_create()?;
    let before = parts.count(t, graph, &[], (2, 3))?;
    let (node, _, up) = parts.a_loop(t, graph, &[before])?;
    let exec = ops.graph_instantiate(graph)?;
    parts.run(t, exec, [3, 0, 0])?;
    let [_, total, other, one, _] = parts.words;
    let twice = Arguments::add(other, other, other, 1);
    t.tell("a kernel beside it", t.set_kernel(exec, before, &twice.launch(parts.add, 1, 1)));
    parts.run(t, exec, [3, 0, 5])?;
    let back = Arguments::add(one, one, total, 1);
    t.tell("a kernel of the body", t.set_kernel(exec, up, &back.launch(parts.add, 1, 1)));
    parts.run(t, exec, [3, 0, 5])?;
    t.tell("the node itself", t.set_kernel(exec, node, &twice.launch(parts.add, 1, 1)));
    ops.exec_destroy(exec)?;
    parts.end(t, &[graph])
}
