//! Scenarios: kernels that fault and so lose their context, and a fork. Each scenario runs in a
//! process of its own.

use super::kernels::Arguments;
use super::{HostFlags, Order, Scenario, Trace};
use leasehold_core::Result;
use leasehold_cuda::driver::ops::{EventFlags, NativeContext, NativePartition};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("fault_illegal_address", |t| fault(t, "trace_illegal")),
    Scenario::new("fault_trap", |t| fault(t, "trace_trap")),
    Scenario::new("fault_misaligned", |t| fault(t, "trace_misaligned")),
    Scenario::new("fault_seen_by_others", fault_seen_by_others),
    Scenario::new("fault_in_a_graph", fault_in_a_graph),
    Scenario::new("context_after_a_fault", context_after_a_fault),
    Scenario::new("fork", fork),
];

/// Runs a kernel that faults, then writes the answer of each call.
fn fault(t: &mut Trace<'_>, kernel: &str) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream, event) =
        (t.module()?, t.stream()?, ops.event_create(EventFlags::default())?);
    let function = ops.module_function(module, kernel)?;
    let at = t.filled(stream, 4, 0)?;
    let pinned = ops.host_alloc(4096, HostFlags::default())?;
    let order = Order::default();
    let arguments = Arguments::one(at, 16);
    t.tell("launch", t.launch(stream, &arguments.launch(function, 1, 1)));
    t.tell("wait", t.sync(stream));
    t.tell("wait again", t.sync(stream));
    t.tell("query", ops.stream_query(stream));
    t.tell("query an event that was never recorded", ops.event_query(event));
    t.tell("record", ops.event_record(event, stream));
    t.tell("a host function", t.mark(stream, &order, "called"));
    t.tell("write a word", ops.stream_write_word(stream, t.word_at(8), 1));
    t.tell("launch", t.launch(stream, &arguments.launch(function, 1, 1)));
    t.tell("alloc", ops.alloc(256));
    t.tell("pinned memory", ops.host_alloc(4096, HostFlags::default()));
    t.tell("memory info", ops.memory_info().map(drop));
    t.tell("a stream", ops.stream_create(0));
    t.tell("an event", t.event());
    t.tell("a module", t.module());
    t.tell("a graph", ops.graph_create());
    t.tell("wait for the context", ops.context_synchronize());
    t.tell("current", ops.current());
    t.tell("make none current", ops.set_current(NativeContext::NULL));
    t.tell("make it current", ops.set_current(t.context));
    t.tell("how many devices", ops.device_count().map(|count| count > 0));
    t.tell("properties", ops.device_properties(0).map(drop));
    t.tell("free", ops.free(at));
    t.tell("free pinned memory", ops.host_free(pinned));
    t.tell("destroy the event", ops.event_destroy(event));
    t.tell("destroy the stream", ops.stream_destroy(stream));
    t.tell("unload", ops.module_unload(module));
    t.say_order(&order);
    Ok(())
}

fn fault_seen_by_others(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, a, b, event, order) =
        (t.module()?, t.stream()?, t.stream()?, t.event()?, Order::default());
    let function = ops.module_function(module, "trace_illegal")?;
    let at = t.filled(a, 4, 0)?;
    // A second stream holds a host function back. An event marks the work of the faulty stream.
    t.hold(b, 0)?;
    t.mark(b, &order, "other stream")?;
    let arguments = Arguments::one(at, 16);
    t.launch(a, &arguments.launch(function, 1, 1))?;
    ops.event_record(event, a)?;
    t.mark(a, &order, "same stream")?;
    t.tell("wait for the event", ops.event_synchronize(event));
    t.tell("query the event", ops.event_query(event));
    t.release(0);
    t.tell("wait for the other stream", t.sync(b));
    t.tell("wait for the faulty stream", t.sync(a));
    t.say_order(&order);
    Ok(())
}

fn fault_in_a_graph(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let function = ops.module_function(module, "trace_illegal")?;
    let at = t.filled(stream, 4, 0)?;
    let graph = ops.graph_create()?;
    let arguments = Arguments::one(at, 16);
    // SAFETY: the memory lives. The kernel's fault is the purpose of the scenario.
    unsafe {
        ops.graph_add_kernel(graph, &[], &arguments.launch(function, 1, 1), NativePartition::NULL)?
    };
    let exec = ops.graph_instantiate(graph)?;
    t.tell("launch", t.run_graph(exec, stream));
    t.tell("wait", t.sync(stream));
    t.tell("launch again", t.run_graph(exec, stream));
    t.tell("destroy the executable", ops.exec_destroy(exec));
    t.tell("destroy the graph", ops.graph_destroy(graph));
    Ok(())
}

fn context_after_a_fault(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    let context = ops.primary_retain(0)?;
    ops.set_current(context)?;
    let (module, stream) = (t.module()?, t.stream()?);
    let function = ops.module_function(module, "trace_illegal")?;
    let at = ops.alloc(16)?;
    let arguments = Arguments::one(at, 16);
    t.launch(stream, &arguments.launch(function, 1, 1))?;
    t.tell("wait", t.sync(stream));
    t.tell("an own context", ops.context_create(0));
    t.tell("make none current", ops.set_current(NativeContext::NULL));
    t.tell("release the primary context", ops.primary_release(0));
    let again = t.tell("retain it again", ops.primary_retain(0));
    if let Some(again) = again {
        t.tell("make it current", ops.set_current(again));
        t.tell("alloc", ops.alloc(256).map(drop));
        t.tell("make none current", ops.set_current(NativeContext::NULL));
        t.tell("release it", ops.primary_release(0));
    }
    Ok(())
}

#[cfg(unix)]
fn fork(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    // SAFETY: the child only queries the driver's object, which refuses without a call. The child
    // ends without running destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = [
            ops.driver_version().map(drop),
            ops.alloc(256).map(drop),
            ops.current().map(drop),
            ops.init(),
        ];
        let all = refused
            .iter()
            .all(|answer| matches!(answer, Err(leasehold_core::Error::InvalidState(_))));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if all { 7 } else { 8 }) };
    }
    let mut status = 0;
    // SAFETY: the call waits for the child made above.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) } == child;
    let refused = waited && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7;
    t.say(format!("the child is refused: {refused}"));
    t.tell("the parent goes on", ops.alloc(256).and_then(|at| ops.free(at)));
    Ok(())
}

#[cfg(not(unix))]
fn fork(t: &mut Trace<'_>) -> Result<()> {
    t.say("no fork on this system");
    Ok(())
}
