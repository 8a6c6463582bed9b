//! The calls of steps, by the safe API of Rust or by the C ABI.
//!
//! This module must not know the model.

use crate::options::Border;
use crate::prelude::{Call, Completions, bytes, launch, look};
use crate::step::Work;
use crate::target::Kernels;
use crate::{through, work};
use leasehold::backend::StreamDesc;
use leasehold::graph::NodeId;
use leasehold::{
    Buffer, BufferView, Event, EventFlags, Graph, GraphUpdate, HostTimeline, Lease, Result,
    Runtime, Stream, Timepoint, View,
};

/// A recording that goes on. Its drop gives it up, unless it has ended.
pub(crate) enum Recording {
    Rust(OfThread),
    C(through::Recording),
}

/// A recording of the thread's.
pub(crate) struct OfThread {
    runtime: Runtime,
    goes_on: bool,
}

impl Drop for OfThread {
    fn drop(&mut self) {
        if self.goes_on {
            self.runtime.abandon_graph_recording();
        }
    }
}

impl Recording {
    pub(crate) fn stream(&self) -> &Stream {
        match self {
            Recording::Rust(recording) => recording.runtime.stream(),
            Recording::C(recording) => &recording.stream,
        }
    }

    /// The node that is recorded next.
    pub(crate) fn next_node(&self) -> Result<Option<NodeId>> {
        match self {
            Recording::Rust(recording) => Ok(recording.runtime.stream().next_node()),
            Recording::C(recording) => recording.next_node().map(Some),
        }
    }

    pub(crate) fn end(self) -> Result<Graph> {
        match self {
            Recording::Rust(mut recording) => {
                recording.goes_on = false;
                recording.runtime.stop_graph_recording()
            }
            Recording::C(recording) => recording.end(),
        }
    }
}

impl Border {
    pub(crate) fn record(self, runtime: &Runtime) -> Result<Recording> {
        match self {
            Border::Rust => {
                let runtime = runtime.start_graph_recording()?;
                Ok(Recording::Rust(OfThread { runtime, goes_on: true }))
            }
            Border::C => through::Recording::begin(runtime).map(Recording::C),
        }
    }

    pub(crate) fn create_stream(self, runtime: &Runtime, priority: i32) -> Result<Stream> {
        match self {
            Border::Rust => runtime.create_stream_with(&StreamDesc::priority(priority)),
            Border::C => through::create_stream(runtime, priority),
        }
    }

    pub(crate) fn alloc(self, stream: &Stream, bytes: u64) -> Result<Lease<Buffer>> {
        match self {
            Border::Rust => stream.runtime().alloc(bytes),
            Border::C => through::alloc(stream, bytes, false),
        }
    }

    /// A new buffer with the bytes of a seed.
    pub(crate) fn create(self, runtime: &Runtime, seed: u32, len: u32) -> Result<Lease<Buffer>> {
        let bytes = bytes(seed, len as usize);
        match self {
            Border::Rust => Ok(runtime.upload(&bytes)?.into_buffer()),
            Border::C => {
                let buffer = through::alloc(runtime.stream(), len.into(), false)?;
                through::upload(runtime.stream(), buffer.view(), &bytes, false)?;
                Ok(buffer)
            }
        }
    }

    pub(crate) fn alloc_pinned(self, runtime: &Runtime, bytes: u64) -> Result<Lease<Buffer>> {
        match self {
            Border::Rust => runtime.alloc_pinned(bytes),
            Border::C => through::alloc(runtime.stream(), bytes, true),
        }
    }

    /// The same buffer, with a holder more.
    pub(crate) fn keep(self, buffer: Lease<Buffer>) -> Result<Lease<Buffer>> {
        match self {
            Border::Rust => Ok(buffer),
            Border::C => through::kept(&buffer),
        }
    }

    pub(crate) fn work(
        self,
        stream: &Stream,
        kernels: &Kernels,
        work: &Work,
        to: &Lease<Buffer>,
        from: &[Lease<Buffer>],
    ) -> Result<()> {
        match self {
            Border::Rust => work::run(stream, kernels, work, to, from),
            Border::C => through::run(stream, kernels, work, to, from),
        }
    }

    pub(crate) fn launch(self, stream: &Stream, calls: &[Call<'_>]) -> Result<()> {
        match self {
            Border::Rust => launch(stream, calls),
            Border::C => through::launch(stream, calls),
        }
    }

    pub(crate) fn download(
        self,
        stream: &Stream,
        to: &mut [u8],
        from: BufferView<'_>,
    ) -> Result<()> {
        match self {
            Border::Rust => stream.download(to, from),
            Border::C => through::download(stream, to, from),
        }
    }

    pub(crate) fn look(self, stream: &Stream, from: BufferView<'_>) -> Result<Vec<u8>> {
        match self {
            Border::Rust => look(stream, from),
            // The C interface has no checks.
            Border::C => {
                let mut to = vec![0; from.len() as usize];
                through::download(stream, &mut to, from)?;
                Ok(to)
            }
        }
    }

    pub(crate) fn synchronize(self, stream: &Stream) -> Result<()> {
        match self {
            Border::Rust => stream.synchronize(),
            Border::C => through::synchronize(stream),
        }
    }

    pub(crate) fn query(self, stream: &Stream) -> Result<bool> {
        match self {
            Border::Rust => stream.query(),
            Border::C => through::query(stream),
        }
    }

    pub(crate) fn flush(self, stream: &Stream) -> Result<()> {
        match self {
            Border::Rust => stream.flush(),
            Border::C => through::flush(stream),
        }
    }

    pub(crate) fn synchronize_device(self, runtime: &Runtime) -> Result<()> {
        match self {
            Border::Rust => runtime.synchronize(),
            Border::C => through::synchronize_device(runtime),
        }
    }

    pub(crate) fn wait_stream(self, stream: &Stream, on: &Stream) -> Result<()> {
        match self {
            Border::Rust => stream.wait(on.now()),
            Border::C => through::wait_stream(stream, on),
        }
    }

    /// A function that runs once, or at each launch of a graph. C has the second alone.
    pub(crate) fn host_call(
        self,
        stream: &Stream,
        once: bool,
        function: impl Fn() -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        match self {
            Border::Rust if once => stream.host_call_once("once", function),
            Border::Rust => stream.host_call("count", function),
            Border::C => through::host_call(stream, function),
        }
    }

    pub(crate) fn complete(self, stream: &Stream, completions: &Completions) -> Result<()> {
        match self {
            Border::Rust => completions.ask(stream),
            Border::C => completions.ask_by(
                |before| through::host_call(stream, before),
                |told| through::on_complete(stream, told),
            ),
        }
    }

    pub(crate) fn create_event(self, runtime: &Runtime, timing: bool) -> Result<Lease<Event>> {
        match self {
            Border::Rust if timing => runtime.create_event_with(EventFlags::TIMING),
            Border::Rust => runtime.create_event_with(EventFlags::DISABLE_TIMING),
            Border::C => through::create_event(runtime, timing),
        }
    }

    pub(crate) fn record_event(self, stream: &Stream, event: &Lease<Event>) -> Result<()> {
        match self {
            Border::Rust => stream.record(event),
            Border::C => through::record(stream, event),
        }
    }

    pub(crate) fn wait_event(self, stream: &Stream, event: &Lease<Event>) -> Result<()> {
        match self {
            Border::Rust => stream.wait_event(event),
            Border::C => through::wait_event(stream, event),
        }
    }

    pub(crate) fn query_event(self, runtime: &Runtime, event: &Lease<Event>) -> Result<bool> {
        match self {
            Border::Rust => event.query(),
            Border::C => through::query_event(runtime, event),
        }
    }

    pub(crate) fn synchronize_event(self, runtime: &Runtime, event: &Lease<Event>) -> Result<()> {
        match self {
            Border::Rust => event.synchronize(),
            Border::C => through::synchronize_event(runtime, event),
        }
    }

    pub(crate) fn elapsed(
        self,
        runtime: &Runtime,
        from: &Lease<Event>,
        to: &Lease<Event>,
    ) -> Result<()> {
        match self {
            Border::Rust => to.elapsed_since(from).map(drop),
            Border::C => through::elapsed(runtime, from, to),
        }
    }

    pub(crate) fn create_host_timeline(self, runtime: &Runtime) -> Result<HostTimeline> {
        match self {
            Border::Rust => runtime.create_host_timeline(),
            Border::C => through::create_host_timeline(runtime),
        }
    }

    pub(crate) fn wait_for(
        self,
        stream: &Stream,
        timeline: &HostTimeline,
        point: Timepoint,
    ) -> Result<()> {
        match self {
            Border::Rust => stream.wait(point),
            Border::C => through::wait_for(stream, timeline, point),
        }
    }

    pub(crate) fn signal(self, timeline: &HostTimeline, value: u64) -> Result<()> {
        match self {
            Border::Rust => timeline.signal(value),
            Border::C => through::signal(timeline, value),
        }
    }

    pub(crate) fn launch_graph(self, graph: &Graph, stream: &Stream) -> Result<()> {
        match self {
            Border::Rust => graph.launch_on(stream).map(drop),
            Border::C => through::launch_graph(graph, stream),
        }
    }

    pub(crate) fn update_params(
        self,
        graph: &Graph,
        node: NodeId,
        params: &[u32; 3],
    ) -> Result<()> {
        match self {
            Border::Rust => graph.update(&GraphUpdate::new().params(node, params)).map(drop),
            Border::C => through::update_params(graph, node, params),
        }
    }

    pub(crate) fn update_grid(self, graph: &Graph, node: NodeId, blocks: u32) -> Result<()> {
        match self {
            Border::Rust => graph.update(&GraphUpdate::new().grid(node, [blocks, 1, 1])).map(drop),
            Border::C => through::update_grid(graph, node, blocks),
        }
    }

    pub(crate) fn swap(
        self,
        graph: &Graph,
        old: &Lease<Buffer>,
        new: &Lease<Buffer>,
    ) -> Result<()> {
        match self {
            Border::Rust => graph.update(&GraphUpdate::new().buffer(old, new)).map(drop),
            Border::C => through::swap(graph, old, new),
        }
    }
}
