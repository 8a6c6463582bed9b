//! The kinds of objects that the runtime's functions name by handle, and their tables.
//!
//! This module must not know the C ABI.

use crate::device::{Device, Opened};
use crate::objects::{Kind, Objects};
use crate::registry::{FIRST_KIND, KINDS};
use leasehold::graph::GraphRecording;
use leasehold::{
    Buffer, Event, Graph, HostTimeline, KernelBase, Lease, Result, Runtime, Stream, Trace,
    TraceEvents,
};
use leasehold_collective::{Comm, World};
use leasehold_core::sync::{Arc, Mutex};

/// A runtime of an open device.
pub(crate) struct OpenRuntime {
    pub(crate) runtime: Runtime,
    pub(crate) tracing: Mutex<Tracing>,
    /// Keeps the device open. `None` for a runtime that Rust lends.
    _opened: Option<Opened>,
}

impl OpenRuntime {
    /// # Errors
    /// `InvalidArgument` for a device that was closed meanwhile.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        let opened = Device::opened(device)?;
        let (runtime, tracing) = (device.runtime.clone(), Mutex::default());
        Ok(Self { runtime, tracing, _opened: Some(opened) })
    }

    /// A runtime of Rust's, whose device nobody closes by handle.
    pub(crate) fn lent(runtime: Runtime) -> Self {
        Self { runtime, tracing: Mutex::default(), _opened: None }
    }
}

/// A trace that a runtime's handle started.
#[derive(Default)]
pub(crate) enum Tracing {
    #[default]
    Off,
    On(Trace),
    /// The events of a trace whose file could not be written.
    Unwritten(TraceEvents),
    /// A thread starts or stops a trace.
    Busy,
}

/// A buffer that a caller holds.
pub(crate) struct HeldBuffer(pub(crate) Lease<Buffer>);

/// A stream, live or of a recording.
pub(crate) struct HeldStream {
    /// The runtime with this stream as its own.
    pub(crate) runtime: Runtime,
    /// The recording that goes on, if the stream is of one.
    pub(crate) recording: Mutex<Option<GraphRecording>>,
}

impl HeldStream {
    pub(crate) fn live(stream: &Stream) -> Self {
        Self { runtime: stream.runtime(), recording: Mutex::new(None) }
    }

    pub(crate) fn recorded(recording: GraphRecording) -> Self {
        Self { runtime: recording.runtime().clone(), recording: Mutex::new(Some(recording)) }
    }

    #[inline]
    pub(crate) fn stream(&self) -> &Stream {
        self.runtime.stream()
    }
}

/// An event that a caller holds.
pub(crate) struct HeldEvent {
    pub(crate) event: Lease<Event>,
    /// An event asks its runtime's streams.
    pub(crate) _runtime: Runtime,
}

macro_rules! kinds {
    ($($table:ident: $kind:ty = $number:literal;)*) => {$(
        impl Kind for $kind {
            const NAME: &'static str = KINDS[$number - FIRST_KIND as usize];
            const NUMBER: u8 = $number;
        }
        pub(crate) static $table: Objects<$kind> = Objects::new();
    )*};
}

kinds! {
    RUNTIMES: OpenRuntime = 0xa1;
    BUFFERS: HeldBuffer = 0xa2;
    STREAMS: HeldStream = 0xa3;
    EVENTS: HeldEvent = 0xa4;
    KERNELS: KernelBase = 0xa5;
    GRAPHS: Graph = 0xa6;
    HOST_TIMELINES: HostTimeline = 0xa7;
    WORLDS: World = 0xa8;
    COMMS: Comm = 0xa9;
}
