//! The names of the design documents, where they are not this library's own.
//!
//! Everything here is a thin synonym: one call of the API proper, which each documentation names.
//! Code that follows the documents brings them in with `use leasehold::infini::*`. All other names
//! of the documents are found by the documentation's search, which knows them as aliases, and in
//! the glossary of the project.
//!
//! ```
//! use leasehold::infini::*;
//! use leasehold::{DeviceId, Runtime, View};
//! # fn main() -> leasehold::Result<()> {
//! let runtime = Runtime::open(DeviceId::cpu(0))?;
//! let (start, end, x) = (runtime.create_event()?, runtime.create_event()?, runtime.alloc(12)?);
//! runtime.record_event(&start, None)?;
//! runtime.memcpy_h2d(x.view(), &[1.0f32, 2.0, 3.0], true)?;
//! runtime.record_event(&end, None)?;
//! runtime.sync_stream()?;
//! assert!(runtime.elapsed_time(&start, &end)? >= 0.0);
//! # Ok(())
//! # }
//! ```

use crate::context::ContextGuard;
use crate::event::{Event, EventFlags};
use crate::graph::Graph;
use crate::runtime::Runtime;
use crate::stream::Stream;
use crate::view::BufferView;
use bytemuck::{NoUninit, Pod};
use leasehold_core::{Lease, Result, Timepoint};

/// The second document's name of a buffer.
pub type Memory = leasehold_alloc::Buffer;

/// [`Registry`](crate::kernel::Registry) in full.
pub type KernelRegistry = crate::kernel::Registry;

/// Calls of a runtime by the second document's names. A stream that is left out is the default one.
pub trait InfiniRuntime {
    /// [`Stream::synchronize`] of the default stream.
    ///
    /// # Errors
    /// As there.
    fn sync_stream(&self) -> Result<()>;

    /// [`Runtime::synchronize`].
    ///
    /// # Errors
    /// As there.
    fn sync_device(&self) -> Result<()>;

    /// [`Stream::upload`], or [`Stream::upload_blocking`] where `asynchronous` is false.
    ///
    /// # Errors
    /// As there.
    fn memcpy_h2d<T: NoUninit>(
        &self,
        dst: BufferView<'_>,
        src: &[T],
        asynchronous: bool,
    ) -> Result<()>;

    /// [`Stream::download`].
    ///
    /// # Errors
    /// As there.
    fn memcpy_d2h<T: Pod>(&self, dst: &mut [T], src: BufferView<'_>) -> Result<()>;

    /// [`Stream::copy`], and [`Stream::synchronize`] where `asynchronous` is false.
    ///
    /// # Errors
    /// As there; `Recording` for a copy that is to be waited for in a recording: nothing is
    /// recorded.
    fn memcpy_d2d(
        &self,
        dst: BufferView<'_>,
        src: BufferView<'_>,
        asynchronous: bool,
    ) -> Result<()>;

    /// [`Runtime::create_event_with`].
    ///
    /// # Errors
    /// As there.
    fn create_event_with_flags(&self, flags: EventFlags) -> Result<Lease<Event>>;

    /// [`Stream::record`].
    ///
    /// # Errors
    /// As there.
    fn record_event(&self, event: &Lease<Event>, stream: Option<&Stream>) -> Result<()>;

    /// [`Event::query`].
    ///
    /// # Errors
    /// As there.
    fn query_event(&self, event: &Event) -> Result<bool>;

    /// [`Event::synchronize`].
    ///
    /// # Errors
    /// As there.
    fn synchronize_event(&self, event: &Event) -> Result<()>;

    /// The drop of an event's lease. Other holders of the event are untouched.
    #[doc(alias = "destroyEvent")]
    fn destroy_event(&self, event: Lease<Event>);

    /// [`Event::elapsed_since`] of `end`, in milliseconds.
    ///
    /// # Errors
    /// As there.
    fn elapsed_time(&self, start: &Event, end: &Event) -> Result<f32>;

    /// [`Stream::wait_event`].
    ///
    /// # Errors
    /// As there.
    fn stream_wait_event(&self, stream: Option<&Stream>, event: &Lease<Event>) -> Result<()>;
}

impl InfiniRuntime for Runtime {
    fn sync_stream(&self) -> Result<()> {
        self.stream().synchronize()
    }

    fn sync_device(&self) -> Result<()> {
        self.synchronize()
    }

    fn memcpy_h2d<T: NoUninit>(
        &self,
        dst: BufferView<'_>,
        src: &[T],
        asynchronous: bool,
    ) -> Result<()> {
        if asynchronous {
            self.stream().upload(dst, src)
        } else {
            self.stream().upload_blocking(dst, src)
        }
    }

    fn memcpy_d2h<T: Pod>(&self, dst: &mut [T], src: BufferView<'_>) -> Result<()> {
        self.stream().download(dst, src)
    }

    fn memcpy_d2d(
        &self,
        dst: BufferView<'_>,
        src: BufferView<'_>,
        asynchronous: bool,
    ) -> Result<()> {
        if asynchronous {
            return self.stream().copy(dst, src);
        }
        self.stream().live("a copy cannot be waited for while recording; make it asynchronous")?;
        self.stream().copy(dst, src)?;
        self.stream().synchronize()
    }

    fn create_event_with_flags(&self, flags: EventFlags) -> Result<Lease<Event>> {
        self.create_event_with(flags)
    }

    fn record_event(&self, event: &Lease<Event>, stream: Option<&Stream>) -> Result<()> {
        stream.unwrap_or(self.stream()).record(event)
    }

    fn query_event(&self, event: &Event) -> Result<bool> {
        event.query()
    }

    fn synchronize_event(&self, event: &Event) -> Result<()> {
        event.synchronize()
    }

    fn destroy_event(&self, event: Lease<Event>) {
        drop(event);
    }

    fn elapsed_time(&self, start: &Event, end: &Event) -> Result<f32> {
        Ok(end.elapsed_since(start)?.as_secs_f64() as f32 * 1e3)
    }

    fn stream_wait_event(&self, stream: Option<&Stream>, event: &Lease<Event>) -> Result<()> {
        stream.unwrap_or(self.stream()).wait_event(event)
    }
}

/// The launch of a graph by the second document's name.
pub trait InfiniGraph {
    /// [`Graph::launch`] without its timepoint.
    ///
    /// # Errors
    /// As there.
    fn execute(&self) -> Result<()>;
}

impl InfiniGraph for Graph {
    fn execute(&self) -> Result<()> {
        self.launch().map(drop)
    }
}

/// [`Stream::wait`], by the first document's name (`execution::stream::wait`).
///
/// # Errors
/// As there.
pub fn wait(stream: &Stream, point: Timepoint) -> Result<()> {
    stream.wait(point)
}

/// [`Stream::record`], by the first document's name (`execution::stream::signal`).
///
/// # Errors
/// As there.
pub fn signal(stream: &Stream, event: &Lease<Event>) -> Result<()> {
    stream.record(event)
}

/// [`Stream::enter`], or [`Runtime::enter`] without a stream, by the first document's name.
///
/// # Errors
/// As there; `InvalidArgument` for a stream of another runtime.
pub fn set_context(runtime: &Runtime, stream: Option<&Stream>) -> Result<ContextGuard> {
    match stream {
        None => runtime.enter(),
        Some(stream) if stream.runtime().same(runtime) => stream.enter(),
        Some(stream) => Err(leasehold_core::Error::invalid(format!(
            "{stream:?} is not a stream of {}; give one that this runtime created",
            runtime.device()
        ))),
    }
}
