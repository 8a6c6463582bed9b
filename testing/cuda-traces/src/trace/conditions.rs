//! Scenarios: loops and branches in graphs, and the rules of their bodies.

use super::graphs::on_device;
use super::kernels::Arguments;
use super::{CopyKind, Order, Scenario, Trace};
use leasehold_core::Result;
use leasehold_cuda::driver::condition::{PTX, SET_CONDITION};
use leasehold_cuda::driver::ops::{
    NativeCondition, NativeCopy, NativeFunction, NativeGraph, NativeModule, NativeNode,
    NativeStream,
};
use leasehold_hal::ConditionalKind::{If, While};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("condition_loop", condition_loop),
    Scenario::new("condition_branch", condition_branch),
    Scenario::new("condition_nesting", condition_nesting),
    Scenario::new("condition_bodies", condition_bodies),
    Scenario::new("condition_misuse", condition_misuse),
    Scenario::new("condition_graph_rules", condition_graph_rules),
    Scenario::new("condition_updates", condition_updates),
];

/// What the scenarios have: kernels, a stream and words of device memory.
struct Parts {
    modules: [NativeModule; 2],
    add: NativeFunction,
    set: NativeFunction,
    stream: NativeStream,
    /// A flag, a total, another flag, one, and minus one.
    words: [u64; 5],
}

impl Parts {
    fn new(t: &Trace<'_>) -> Result<Self> {
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

    /// Adds a loop over word 0 that counts word 1 up.
    fn a_loop(&self, t: &Trace<'_>, graph: NativeGraph) -> Result<(NativeNode, NativeGraph)> {
        let condition = t.ops.condition_create(graph)?;
        let first = self.set(t, graph, &[], condition, 0)?;
        let (node, body) = t.ops.graph_add_conditional(graph, &[first], condition, While)?;
        let down = self.count(t, body, &[], (0, 4))?;
        let up = self.count(t, body, &[down], (1, 3))?;
        self.set(t, body, &[up], condition, 0)?;
        Ok((node, body))
    }

    /// Sets the first words, runs an executable and writes the words.
    fn run(
        &self,
        t: &mut Trace<'_>,
        exec: leasehold_cuda::driver::ops::NativeGraphExec,
        values: [u32; 3],
    ) -> Result<()> {
        for (&dst, value) in self.words.iter().zip(values) {
            let fill = leasehold_cuda::driver::ops::NativeFill { dst, value, width: 4, count: 1 };
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

    fn end(self, t: &Trace<'_>) -> Result<()> {
        self.words.into_iter().try_for_each(|at| t.ops.free(at))?;
        t.ops.stream_destroy(self.stream)?;
        self.modules.into_iter().try_for_each(|module| t.ops.module_unload(module))
    }
}

fn condition_loop(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let parts = Parts::new(t)?;
    let graph = ops.graph_create()?;
    let Some(condition) = t.tell("a condition", ops.condition_create(graph)) else { return Ok(()) };
    let first = parts.set(t, graph, &[], condition, 0)?;
    let made = ops.graph_add_conditional(graph, &[first], condition, While);
    let Some((node, body)) = t.tell("a loop", made) else { return Ok(()) };
    t.tell("nodes of its body", ops.graph_nodes(body));
    let down = parts.count(t, body, &[], (0, 4))?;
    let up = parts.count(t, body, &[down], (1, 3))?;
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
    parts.end(t)
}

fn condition_branch(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let parts = Parts::new(t)?;
    let graph = ops.graph_create()?;
    let condition = ops.condition_create(graph)?;
    let first = parts.set(t, graph, &[], condition, 0)?;
    let made = ops.graph_add_conditional(graph, &[first], condition, If);
    let Some((node, body)) = t.tell("a branch", made) else { return Ok(()) };
    parts.count(t, body, &[], (1, 3))?;
    parts.count(t, graph, &[node], (2, 3))?;
    let exec = ops.graph_instantiate(graph)?;
    parts.run(t, exec, [0, 0, 0])?;
    parts.run(t, exec, [1, 0, 0])?;
    parts.run(t, exec, [0x8000_0000, 0, 0])?;
    parts.run(t, exec, [0, 0, 0])?;
    ops.exec_destroy(exec)?;
    ops.graph_destroy(graph)?;
    parts.end(t)
}

fn condition_nesting(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let parts = Parts::new(t)?;
    let graph = ops.graph_create()?;
    let condition = ops.condition_create(graph)?;
    let first = parts.set(t, graph, &[], condition, 0)?;
    let (_, outer) = ops.graph_add_conditional(graph, &[first], condition, While)?;
    let inner = t.tell("a condition of the body", ops.condition_create(outer));
    let Some(inner) = inner else { return Ok(()) };
    let down = parts.count(t, outer, &[], (0, 4))?;
    let three = t.add_fill(outer, &[down], parts.words[2], 3, 1)?;
    let set = parts.set(t, outer, &[three], inner, 2)?;
    let made = ops.graph_add_conditional(outer, &[set], inner, While);
    let Some((node, body)) = t.tell("a loop in the body", made) else { return Ok(()) };
    let less = parts.count(t, body, &[], (2, 4))?;
    let more = parts.count(t, body, &[less], (1, 3))?;
    parts.set(t, body, &[more], inner, 2)?;
    parts.set(t, outer, &[node], condition, 0)?;
    let exec = ops.graph_instantiate(graph)?;
    parts.run(t, exec, [4, 0, 0])?;
    parts.run(t, exec, [0, 0, 0])?;
    ops.exec_destroy(exec)?;
    ops.graph_destroy(graph)?;
    parts.end(t)
}

/// Adds one kind of node to a body, and instantiates the graph.
fn condition_bodies(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
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
    parts.a_loop(t, looping)?;
    let down = NativeCopy::linear(CopyKind::DeviceToHost, t.word_at(8), flag, 4);
    let up = NativeCopy::linear(CopyKind::HostToDevice, flag, t.word_at(8), 4);
    for what in 0..11 {
        let graph = ops.graph_create()?;
        let condition = ops.condition_create(graph)?;
        let first = parts.set(t, graph, &[], condition, 0)?;
        let (_, body) = ops.graph_add_conditional(graph, &[first], condition, If)?;
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
    for graph in [child, calling, recording, looping] {
        ops.graph_destroy(graph)?;
    }
    ops.event_destroy(event)?;
    parts.end(t)
}

fn condition_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
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
    ops.graph_destroy(other)?;
    ops.graph_destroy(graph)?;
    parts.end(t)
}

fn condition_graph_rules(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let parts = Parts::new(t)?;
    let (graph, outer) = (ops.graph_create()?, ops.graph_create()?);
    let (_, body) = parts.a_loop(t, graph)?;
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
    ops.graph_destroy(outer)?;
    ops.graph_destroy(graph)?;
    parts.end(t)
}

fn condition_updates(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let parts = Parts::new(t)?;
    let graph = ops.graph_create()?;
    let condition = ops.condition_create(graph)?;
    let before = parts.count(t, graph, &[], (2, 3))?;
    let first = parts.set(t, graph, &[before], condition, 0)?;
    let (node, body) = ops.graph_add_conditional(graph, &[first], condition, While)?;
    let down = parts.count(t, body, &[], (0, 4))?;
    let up = parts.count(t, body, &[down], (1, 3))?;
    parts.set(t, body, &[up], condition, 0)?;
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
    ops.graph_destroy(graph)?;
    parts.end(t)
}
