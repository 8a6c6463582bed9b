//! Scenarios: capture and the calls that it forbids.

use super::{HostFlags, Scenario, Trace};
use leasehold_core::{Error, Result};
use leasehold_cuda::driver::ops::{NativeCopy, NativeFill, NativeStream};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("capture", capture),
    Scenario::new("capture_of_two_streams", capture_of_two_streams),
    Scenario::new("capture_ends", capture_ends),
    Scenario::new("capture_violations", capture_violations),
    Scenario::new("capture_allows", capture_allows),
    Scenario::new("capture_and_other_threads", capture_and_other_threads),
    Scenario::new("capture_destroyed", capture_destroyed),
];

impl Trace<'_> {
    fn fill_word(&self, stream: NativeStream, dst: u64, value: u32) -> Result<()> {
        // SAFETY: scenarios keep the memory until their streams were waited for.
        unsafe { self.ops.fill(stream, &NativeFill { dst, value, width: 4, count: 1 }) }
    }
}

fn capture(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let add = ops.module_function(module, "trace_add")?;
    let at = t.filled(stream, 4, 1)?;
    t.tell("begin", ops.capture_begin(stream));
    t.tell("is it captured", ops.is_capturing(stream));
    t.tell("a fill", t.fill_word(stream, at, 5));
    let arguments = super::kernels::Arguments::add(at, at, at + 8, 2);
    t.tell("a kernel", t.launch(stream, &arguments.launch(add, 1, 2)));
    let down = NativeCopy::linear(super::CopyKind::DeviceToHost, t.word_at(8), at, 16);
    // SAFETY: both ranges live until the stream was waited for.
    t.tell("a copy", unsafe { ops.copy(stream, &down) });
    let Some(graph) = t.tell("end", ops.capture_end(stream)) else { return Ok(()) };
    t.tell("is it captured", ops.is_capturing(stream));
    t.tell("how many nodes", ops.graph_nodes(graph));
    t.say_data("nothing ran", stream, at, 4)?;
    let exec = ops.graph_instantiate(graph)?;
    t.tell("launch", t.run_graph(exec, stream));
    t.tell("wait", t.sync(stream));
    t.say_data("it ran", stream, at, 4)?;
    t.say(format!("{:#x} {:#x}", t.word(8), t.word(9)));
    let outer = ops.graph_create()?;
    t.tell("as a child", ops.graph_add_child(outer, &[], graph));
    ops.graph_destroy(outer)?;
    ops.exec_destroy(exec)?;
    ops.graph_destroy(graph)?;
    ops.free(at)?;
    ops.stream_destroy(stream)?;
    ops.module_unload(module)
}

fn capture_of_two_streams(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b, fork, join) = (t.stream()?, t.stream()?, t.event()?, t.event()?);
    let at = t.filled(a, 4, 0)?;
    ops.capture_begin(a)?;
    t.fill_word(a, at, 1)?;
    t.tell("record the fork", ops.event_record(fork, a));
    t.tell("another stream joins", ops.stream_wait_event(b, fork));
    t.tell("is it captured", ops.is_capturing(b));
    t.tell("its work", t.fill_word(b, at + 4, 2));
    t.tell("record the join", ops.event_record(join, b));
    t.tell("wait for the join", ops.stream_wait_event(a, join));
    t.fill_word(a, at + 8, 3)?;
    let Some(graph) = t.tell("end", ops.capture_end(a)) else { return Ok(()) };
    t.tell("is the other captured", ops.is_capturing(b));
    t.tell("how many nodes", ops.graph_nodes(graph));
    t.tell("query the other", ops.stream_query(b));
    t.tell("query the event of the join", ops.event_query(join));
    t.tell("let a stream wait for it", ops.stream_wait_event(b, join));
    t.tell("wait for that stream", t.sync(b));
    t.tell("record it anew", ops.event_record(join, b));
    t.tell("wait for it", ops.event_synchronize(join));
    let exec = ops.graph_instantiate(graph)?;
    t.run_graph(exec, a)?;
    t.say_data("data", a, at, 4)?;
    ops.exec_destroy(exec)?;
    ops.graph_destroy(graph)?;
    ops.free(at)?;
    [fork, join].into_iter().try_for_each(|event| ops.event_destroy(event))?;
    ops.stream_destroy(a)?;
    ops.stream_destroy(b)
}

fn capture_ends(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b, event) = (t.stream()?, t.stream()?, t.event()?);
    let at = t.filled(a, 4, 0)?;
    t.tell("end without a beginning", ops.capture_end(a));
    ops.capture_begin(a)?;
    let nothing = t.tell("end of nothing", ops.capture_end(a));
    if let Some(graph) = nothing {
        t.tell("how many nodes", ops.graph_nodes(graph));
        ops.graph_destroy(graph)?;
    }
    ops.capture_begin(a)?;
    ops.event_record(event, a)?;
    ops.stream_wait_event(b, event)?;
    t.fill_word(b, at, 1)?;
    t.tell("end with a fork that is not joined", ops.capture_end(a));
    t.tell("is it captured", ops.is_capturing(a));
    t.tell("is the fork captured", ops.is_capturing(b));
    t.tell("both streams go on", t.sync(a).and(t.sync(b)));
    ops.capture_begin(a)?;
    ops.event_record(event, a)?;
    ops.stream_wait_event(b, event)?;
    t.tell("end on the fork", ops.capture_end(b));
    t.tell("end on the origin", ops.capture_end(a));
    t.tell("both streams go on", t.sync(a).and(t.sync(b)));
    ops.free(at)?;
    ops.event_destroy(event)?;
    ops.stream_destroy(a)?;
    ops.stream_destroy(b)
}

/// An action while a stream is captured.
type Deed = fn(&mut Trace<'_>, NativeStream, &Around) -> Result<()>;

/// The objects of an action, made before the capture.
struct Around {
    other: NativeStream,
    event: leasehold_cuda::driver::ops::NativeEvent,
    at: u64,
}

impl Trace<'_> {
    /// Performs an action during a capture, and writes the results of the action and of the
    /// capture.
    fn in_capture(&mut self, name: &str, around: &Around, deed: Deed) -> Result<()> {
        let ops = self.ops;
        let stream = self.stream()?;
        ops.capture_begin(stream)?;
        self.fill_word(stream, around.at, 1)?;
        let done = deed(self, stream, around);
        self.tell(name, done);
        self.tell("  is it captured", ops.is_capturing(stream));
        let more = self.fill_word(stream, around.at, 2);
        self.tell("  more work", more);
        let graph = self.tell("  end", ops.capture_end(stream));
        if let Some(graph) = graph {
            self.tell("  how many nodes", ops.graph_nodes(graph));
            ops.graph_destroy(graph)?;
        }
        self.tell("  the stream goes on", self.sync(stream));
        ops.stream_destroy(stream)
    }

    fn around(&self) -> Result<Around> {
        let (other, event) = (self.stream()?, self.event()?);
        let at = self.filled(other, 4, 0)?;
        self.ops.event_record(event, other)?;
        self.sync(other)?;
        Ok(Around { other, event, at })
    }

    fn end_around(&self, around: &Around) -> Result<()> {
        self.ops.free(around.at)?;
        self.ops.event_destroy(around.event)?;
        self.ops.stream_destroy(around.other)
    }
}

fn capture_violations(t: &mut Trace<'_>) -> Result<()> {
    t.open()?;
    let around = t.around()?;
    let deeds: [(&str, Deed); 13] = [
        ("begin again", |t, s, _| t.ops.capture_begin(s)),
        ("query the stream", |t, s, _| t.ops.stream_query(s).map(drop)),
        ("wait for the stream", |t, s, _| t.ops.stream_synchronize(s)),
        ("wait for the context", |t, _, _| t.ops.context_synchronize()),
        ("alloc", |t, _, _| t.ops.alloc(256).and_then(|at| t.ops.free(at))),
        ("free null", |t, _, _| t.ops.free(0)),
        ("pinned memory", |t, _, _| {
            t.ops.host_alloc(256, HostFlags::default()).and_then(|at| t.ops.host_free(at))
        }),
        ("query an event of before", |t, _, a| t.ops.event_query(a.event).map(drop)),
        ("wait for an event of before", |t, _, a| t.ops.event_synchronize(a.event)),
        ("let the stream wait for an event of before", |t, s, a| {
            t.ops.stream_wait_event(s, a.event)
        }),
        ("record an event and query it", |t, s, _| {
            let event = t.event()?;
            t.ops.event_record(event, s)?;
            let queried = t.ops.event_query(event).map(drop);
            t.ops.event_destroy(event)?;
            queried
        }),
        ("record an event and wait for it", |t, s, _| {
            let event = t.event()?;
            t.ops.event_record(event, s)?;
            let waited = t.ops.event_synchronize(event);
            t.ops.event_destroy(event)?;
            waited
        }),
        ("merge with another capture", |t, s, a| {
            let event = t.event()?;
            t.ops.capture_begin(a.other)?;
            t.ops.event_record(event, a.other)?;
            let merged = t.ops.stream_wait_event(s, event);
            let other = t.ops.capture_end(a.other);
            t.tell("  the other's end", other.map(|graph| drop(t.ops.graph_destroy(graph))));
            t.ops.event_destroy(event)?;
            merged
        }),
    ];
    for (name, deed) in deeds {
        t.in_capture(name, &around, deed)?;
    }
    t.end_around(&around)
}

fn capture_allows(t: &mut Trace<'_>) -> Result<()> {
    t.open()?;
    let around = t.around()?;
    let deeds: [(&str, Deed); 12] = [
        ("query another stream", |t, _, a| t.ops.stream_query(a.other).map(drop)),
        ("wait for another stream", |t, _, a| t.ops.stream_synchronize(a.other)),
        ("work on another stream", |t, _, a| t.fill_word(a.other, a.at + 8, 1)),
        ("a stream", |t, _, _| t.stream().and_then(|s| t.ops.stream_destroy(s))),
        ("an event", |t, _, _| t.event().and_then(|e| t.ops.event_destroy(e))),
        ("memory info", |t, _, _| t.ops.memory_info().map(drop)),
        ("a module", |t, _, _| t.module().and_then(|m| t.ops.module_unload(m))),
        ("a graph", |t, _, _| t.ops.graph_create().and_then(|g| t.ops.graph_destroy(g))),
        ("an executable", |t, _, _| {
            let graph = t.ops.graph_create()?;
            let exec = t.ops.graph_instantiate(graph)?;
            t.ops.exec_destroy(exec)?;
            t.ops.graph_destroy(graph)
        }),
        ("physical memory", |t, _, _| {
            let bytes = t.ops.granularity(0)?;
            t.ops.memory_create(0, bytes).and_then(|memory| t.ops.memory_release(memory))
        }),
        ("memory in stream order on another stream", |t, _, a| {
            let at = t.ops.alloc_async(256, a.other)?;
            t.ops.free_async(at, a.other)
        }),
        ("write a word", |t, s, _| t.ops.stream_write_word(s, t.word_at(8), 1)),
    ];
    for (name, deed) in deeds {
        t.in_capture(name, &around, deed)?;
    }
    t.sync(around.other)?;
    t.end_around(&around)
}

fn capture_and_other_threads(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let around = t.around()?;
    let context = t.context;
    let stream = t.stream()?;
    ops.capture_begin(stream)?;
    let at = around.at;
    let there = std::thread::scope(|scope| {
        let there = scope.spawn(move || -> Result<_> {
            ops.set_current(context)?;
            let alloc = ops.alloc(256).and_then(|at| ops.free(at));
            // SAFETY: the memory lives until the end.
            let work =
                unsafe { ops.fill(stream, &NativeFill { dst: at, value: 3, width: 4, count: 1 }) };
            Ok((alloc, work, ops.capture_end(stream)))
        });
        there.join().map_err(|_| Error::state("the thread panicked"))?
    });
    let (alloc, work, end) = there?;
    t.tell("another thread allocates", alloc);
    t.tell("another thread gives it work", work);
    t.tell("another thread ends it", end);
    t.tell("is it captured", ops.is_capturing(stream));
    let graph = t.tell("this thread ends it", ops.capture_end(stream));
    if let Some(graph) = graph {
        t.tell("how many nodes", ops.graph_nodes(graph));
        ops.graph_destroy(graph)?;
    }
    ops.stream_destroy(stream)?;
    t.end_around(&around)
}

fn capture_destroyed(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b, event) = (t.stream()?, t.stream()?, t.event()?);
    ops.capture_begin(a)?;
    ops.event_record(event, a)?;
    ops.stream_wait_event(b, event)?;
    t.tell("destroy a fork", ops.stream_destroy(b));
    t.tell("end", ops.capture_end(a).and_then(|graph| ops.graph_destroy(graph)));
    ops.capture_begin(a)?;
    t.tell("destroy the origin", ops.stream_destroy(a));
    t.tell("alloc afterwards", ops.alloc(256).and_then(|at| ops.free(at)));
    ops.event_destroy(event)
}
