//! Scenarios: null handles, and calls that the vendor calls undefined. An undefined scenario runs
//! in a process of its own, because a crash is an answer too.

use super::{Scenario, Trace};
use leasehold_core::Result;
use leasehold_core::sync::Mutex;
use leasehold_cuda::driver::ops::{
    NativeContext, NativeEvent, NativeFunction, NativeGraph, NativeGraphExec, NativeModule,
    NativeStream,
};
use std::sync::Arc;

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("null_event", null_event),
    Scenario::new("null_module", null_module),
    Scenario::new("null_function", null_function).undefined(),
    Scenario::new("null_graph", null_graph),
    Scenario::new("null_executable", null_executable),
    Scenario::new("null_context", null_context),
    Scenario::new("garbage_context", garbage_context).undefined(),
    Scenario::new("context_destroyed_twice", context_destroyed_twice).undefined(),
    Scenario::new("stream_after_its_end", stream_after_its_end).undefined(),
    Scenario::new("event_after_its_end", event_after_its_end).undefined(),
    Scenario::new("module_after_its_end", module_after_its_end).undefined(),
    Scenario::new("graph_after_its_end", graph_after_its_end).undefined(),
    Scenario::new("executable_after_its_end", executable_after_its_end).undefined(),
    Scenario::new("memory_released_twice", memory_released_twice).undefined(),
    Scenario::new("call_in_a_host_function", call_in_a_host_function).undefined(),
];

fn null_event(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (stream, null) = (t.stream()?, NativeEvent::NULL);
    t.tell("query", ops.event_query(null));
    t.tell("wait", ops.event_synchronize(null));
    t.tell("record", ops.event_record(null, stream));
    t.tell("let a stream wait", ops.stream_wait_event(stream, null));
    t.tell("elapsed", ops.event_elapsed(null, null).map(drop));
    t.tell("destroy", ops.event_destroy(null));
    ops.stream_destroy(stream)
}

fn null_module(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    t.tell("a function", ops.module_function(NativeModule::NULL, "f"));
    t.tell("unload", ops.module_unload(NativeModule::NULL));
    Ok(())
}

fn null_function(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    t.tell("info", ops.function_info(NativeFunction::NULL));
    t.tell("allow shared memory", ops.function_allow_shared(NativeFunction::NULL, 1024));
    Ok(())
}

fn null_graph(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    t.tell("a node", ops.graph_add_empty(NativeGraph::NULL, &[]));
    t.tell("how many nodes", ops.graph_nodes(NativeGraph::NULL));
    t.tell("instantiate", ops.graph_instantiate(NativeGraph::NULL));
    let graph = ops.graph_create()?;
    t.tell("as a child", ops.graph_add_child(graph, &[], NativeGraph::NULL));
    t.tell("destroy", ops.graph_destroy(NativeGraph::NULL));
    ops.graph_destroy(graph)
}

fn null_executable(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    t.tell("upload", ops.exec_upload(NativeGraphExec::NULL, stream));
    t.tell("launch", t.run_graph(NativeGraphExec::NULL, stream));
    t.tell("destroy", ops.exec_destroy(NativeGraphExec::NULL));
    ops.stream_destroy(stream)
}

fn null_context(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    t.tell("destroy", ops.context_destroy(NativeContext::NULL));
    t.tell("disable as a peer", ops.disable_peer(NativeContext::NULL));
    Ok(())
}

fn garbage_context(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    t.tell("make it current", ops.set_current(NativeContext(0x10)));
    Ok(())
}

fn context_destroyed_twice(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let own = ops.context_create(0)?;
    t.tell("destroy", ops.context_destroy(own));
    t.tell("destroy again", ops.context_destroy(own));
    t.tell("make it current", ops.set_current(own));
    Ok(())
}

fn stream_after_its_end(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream: NativeStream = t.stream()?;
    let event = t.event()?;
    t.tell("destroy", ops.stream_destroy(stream));
    t.tell("query", ops.stream_query(stream));
    t.tell("record an event", ops.event_record(event, stream));
    t.tell("wait", ops.stream_synchronize(stream));
    t.tell("destroy again", ops.stream_destroy(stream));
    ops.event_destroy(event)
}

fn event_after_its_end(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (stream, event) = (t.stream()?, t.event()?);
    t.tell("destroy", ops.event_destroy(event));
    t.tell("query", ops.event_query(event));
    t.tell("record", ops.event_record(event, stream));
    t.tell("destroy again", ops.event_destroy(event));
    ops.stream_destroy(stream)
}

fn module_after_its_end(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let function = ops.module_function(module, "trace_nothing")?;
    t.tell("unload", ops.module_unload(module));
    t.tell("a function", ops.module_function(module, "trace_add"));
    t.tell("info of a function", ops.function_info(function).map(drop));
    let memories = [(t.word_at(8), 8, leasehold_hal::Access::ReadWrite); 3];
    let arguments = super::kernels::Arguments::new(&memories, &[]);
    t.tell("launch a function", t.launch(stream, &arguments.launch(function, 1, 1)));
    t.tell("unload again", ops.module_unload(module));
    ops.stream_destroy(stream)
}

fn graph_after_its_end(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let graph = ops.graph_create()?;
    t.tell("destroy", ops.graph_destroy(graph));
    t.tell("a node", ops.graph_add_empty(graph, &[]));
    t.tell("instantiate", ops.graph_instantiate(graph));
    t.tell("destroy again", ops.graph_destroy(graph));
    Ok(())
}

fn executable_after_its_end(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let graph = ops.graph_create()?;
    let exec = ops.graph_instantiate(graph)?;
    t.tell("destroy", ops.exec_destroy(exec));
    t.tell("launch", t.run_graph(exec, stream));
    t.tell("destroy again", ops.exec_destroy(exec));
    ops.graph_destroy(graph)?;
    ops.stream_destroy(stream)
}

fn memory_released_twice(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let bytes = ops.granularity(0)?;
    let memory = ops.memory_create(0, bytes)?;
    t.tell("release", ops.memory_release(memory));
    t.tell("release again", ops.memory_release(memory));
    Ok(())
}

/// The calls with their results.
type Answers = Vec<(&'static str, Result<()>)>;

fn call_in_a_host_function(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let answers: Arc<Mutex<Answers>> = Arc::default();
    let (inside, driver, context) = (answers.clone(), t.shared.clone(), t.context);
    ops.host_function(
        stream,
        Box::new(move || {
            let mut answers = inside.lock();
            answers.push(("ask for the version", driver.driver_version().map(drop)));
            // SAFETY: the scenario's context, which lives until the scenario is over.
            answers.push(("make a context current", unsafe { driver.set_current(context) }));
            // SAFETY: the scenario's stream, which lives until the scenario is over.
            answers.push(("query the stream", unsafe { driver.stream_query(stream) }.map(drop)));
            answers.push(("alloc", driver.alloc(256).map(drop)));
        }),
    )?;
    t.tell("wait", t.sync(stream));
    let answers = std::mem::take(&mut *answers.lock());
    for (call, answer) in answers {
        t.tell(call, answer);
    }
    ops.stream_destroy(stream)
}
