//! Parts for a crate that adds functions to the C ABI, as `leasehold-capi-sim` does, or that calls
//! the C ABI with objects of Rust's, as `leasehold-workbench stress --through c` does.
//!
//! This module must not know who adds or calls them.

use crate::kinds::{
    BUFFERS, EVENTS, GRAPHS, HOST_TIMELINES, HeldBuffer, HeldEvent, HeldStream, KERNELS,
    OpenRuntime, RUNTIMES, STREAMS,
};
use crate::objects::{Kind, Objects};
pub use crate::status::{INVALID_ARGUMENT, INVALID_STATE, OUT_OF_MEMORY, TIMEOUT, ffi_guard};
use leasehold::{
    Buffer, Context, Error, Event, Graph, HostTimeline, KernelBase, Lease, Result, Runtime, Stream,
};
use leasehold_collective::driver::CollectiveOps;
use leasehold_core::sync::{Arc, OnceLock};
use std::ffi::c_char;

static SIMULATED: OnceLock<fn() -> Result<&'static Context>> = OnceLock::new();

/// Sets where devices whose names begin with `sim-` come from. The first call counts.
pub fn simulate(context: fn() -> Result<&'static Context>) {
    SIMULATED.get_or_init(|| context);
}

/// The context of the simulated devices.
pub(crate) fn simulated() -> Result<&'static Context> {
    let Some(context) = SIMULATED.get() else {
        return Err(Error::Unavailable(
            "this library has no simulated devices: libleasehold_capi_sim has them".into(),
        ));
    };
    context()
}

type Collectives = fn(&Runtime) -> Result<Option<Arc<dyn CollectiveOps>>>;

static COLLECTIVES: OnceLock<Collectives> = OnceLock::new();

/// Sets which library of collectives a runtime's device has, if it is not its own. The first call
/// counts.
pub fn simulate_collectives(of: Collectives) {
    COLLECTIVES.get_or_init(|| of);
}

/// The library of collectives of a simulated device.
pub(crate) fn collectives(runtime: &Runtime) -> Result<Option<Arc<dyn CollectiveOps>>> {
    COLLECTIVES.get().map_or(Ok(None), |of| of(runtime))
}

/// The runtime of an open device.
///
/// # Errors
/// `InvalidArgument` for a handle that names no open device.
pub fn runtime(device: u64) -> Result<Runtime> {
    Ok(crate::device::DEVICES.get(device)?.runtime.clone())
}

/// A text for the caller, freed by [`leasehold_text_free`](crate::ffi::leasehold_text_free).
///
/// # Errors
/// `InvalidState` for a text with a zero byte.
pub fn owned(text: String) -> Result<*mut c_char> {
    crate::ffi::convert::owned(text)
}

/// A handle of an object that Rust lends to C. The handle is released when this is dropped.
#[derive(Debug)]
pub struct Lent {
    handle: u64,
    release: fn(u64) -> Result<()>,
}

impl Lent {
    /// The handle.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.handle
    }

    fn of<T: Kind>(objects: &Objects<T>, value: T, release: fn(u64) -> Result<()>) -> Result<Self> {
        Ok(Self { handle: objects.add(value)?, release })
    }

    /// A runtime. Its device need not be one that C has opened.
    ///
    /// # Errors
    /// `OutOfMemory` for host memory; `InvalidState` if there are too many objects. The same of
    /// the other functions.
    pub fn runtime(runtime: &Runtime) -> Result<Self> {
        Self::of(&RUNTIMES, OpenRuntime::lent(runtime.clone()), |h| RUNTIMES.release(h))
    }

    /// A stream, also one of a recording.
    ///
    /// # Errors
    /// As [`runtime`](Self::runtime).
    pub fn stream(stream: &Stream) -> Result<Self> {
        Self::of(&STREAMS, HeldStream::live(stream), |h| STREAMS.release(h))
    }

    /// A buffer.
    ///
    /// # Errors
    /// As [`runtime`](Self::runtime).
    pub fn buffer(buffer: &Lease<Buffer>) -> Result<Self> {
        Self::of(&BUFFERS, HeldBuffer(buffer.clone()), |h| BUFFERS.release(h))
    }

    /// An event of a runtime.
    ///
    /// # Errors
    /// As [`runtime`](Self::runtime).
    pub fn event(event: &Lease<Event>, runtime: &Runtime) -> Result<Self> {
        let held = HeldEvent { event: event.clone(), _runtime: runtime.clone() };
        Self::of(&EVENTS, held, |h| EVENTS.release(h))
    }

    /// A kernel.
    ///
    /// # Errors
    /// As [`runtime`](Self::runtime).
    pub fn kernel(kernel: &KernelBase) -> Result<Self> {
        Self::of(&KERNELS, kernel.clone(), |h| KERNELS.release(h))
    }

    /// A graph.
    ///
    /// # Errors
    /// As [`runtime`](Self::runtime).
    pub fn graph(graph: &Graph) -> Result<Self> {
        Self::of(&GRAPHS, graph.clone(), |h| GRAPHS.release(h))
    }

    /// A host timeline.
    ///
    /// # Errors
    /// As [`runtime`](Self::runtime).
    pub fn host_timeline(timeline: &HostTimeline) -> Result<Self> {
        Self::of(&HOST_TIMELINES, timeline.clone(), |h| HOST_TIMELINES.release(h))
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // A handle that the caller released too often is gone already, and the caller was told.
        let _ = (self.release)(self.handle);
    }
}

/// The stream of a handle.
///
/// # Errors
/// `InvalidArgument` for a handle that names no stream. The same of the other kinds.
pub fn stream(handle: u64) -> Result<Stream> {
    Ok(STREAMS.get(handle)?.stream().clone())
}

/// The buffer of a handle.
///
/// # Errors
/// As [`stream`].
pub fn buffer(handle: u64) -> Result<Lease<Buffer>> {
    Ok(BUFFERS.get(handle)?.0.clone())
}

/// The event of a handle.
///
/// # Errors
/// As [`stream`].
pub fn event(handle: u64) -> Result<Lease<Event>> {
    Ok(EVENTS.get(handle)?.event.clone())
}

/// The graph of a handle.
///
/// # Errors
/// As [`stream`].
pub fn graph(handle: u64) -> Result<Graph> {
    Ok((*GRAPHS.get(handle)?).clone())
}

/// The host timeline of a handle.
///
/// # Errors
/// As [`stream`].
pub fn host_timeline(handle: u64) -> Result<HostTimeline> {
    Ok((*HOST_TIMELINES.get(handle)?).clone())
}
