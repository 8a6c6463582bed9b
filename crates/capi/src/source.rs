//! The streams of a caller, as the allocator knows them.
//!
//! On a CUDA device a stream is a `CUstream`. On a CPU device memory is used by threads, which
//! order their work themselves: all streams are one, whose work is always over.
//!
//! This module must not know blocks.

use leasehold::cuda::{self, ExternalStream};
use leasehold::{BackendKind, Buffer, Error, Lease, Result, Runtime, Timepoint};
use leasehold_alloc::On;
use leasehold_core::sync::Arc;
use leasehold_core::{Timeline, TimelineId, TimelineOwner, TimelineSource};
use std::time::Duration;

/// The order of the host's threads: nothing is submitted, so nothing is pending.
pub(crate) struct HostOrder(TimelineOwner);

// SAFETY: nothing is ever submitted to this timeline.
unsafe impl TimelineSource for HostOrder {
    fn timeline(&self) -> &'static Timeline {
        self.0.timeline()
    }

    fn signal(&self) -> Result<u64> {
        Ok(self.timeline().submitted())
    }

    fn refresh(&self) -> Result<u64> {
        Ok(self.timeline().completed())
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        on.timeline().wait(on.value(), None)
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.timeline().wait(value, timeout)
    }
}

/// A stream of the caller.
#[derive(Clone)]
pub(crate) enum Source {
    Host(Arc<HostOrder>),
    Cuda(Arc<ExternalStream>),
}

impl Source {
    pub(crate) fn on(&self) -> On<'_> {
        match self {
            Source::Host(order) => On::new(&**order),
            Source::Cuda(stream) => On::new(&**stream),
        }
    }

    /// Whether both are the same stream.
    pub(crate) fn same(&self, other: &Source) -> bool {
        self.on().timeline.id() == other.on().timeline.id()
    }

    /// Marks that the work of this stream so far may use a block that was allocated on it. The
    /// caller alone has the block.
    pub(crate) fn end_use(&self, block: &Lease<Buffer>) {
        if let Source::Cuda(stream) = self {
            // SAFETY: the caller alone has the block, whose home timeline this is. The timepoint
            // stands for all work of the stream so far.
            unsafe { block.mark_read(stream.now()) };
        }
    }

    /// Marks that the work of this stream so far may use a block of another stream.
    pub(crate) fn end_other_use(&self, block: &Lease<Buffer>) {
        if let Source::Cuda(stream) = self {
            block.used_on(stream.now());
        }
    }
}

/// The streams of a device's callers.
pub(crate) struct Sources {
    /// The one stream of a CPU device.
    host: Option<Source>,
}

impl Sources {
    /// # Errors
    /// `Unsupported` for a backend whose streams cannot be given by handle.
    pub(crate) fn new(runtime: &Runtime) -> Result<Self> {
        let host = match runtime.device().backend {
            BackendKind::Cuda => None,
            BackendKind::Cpu => Some(Source::Host(Arc::new(HostOrder(TimelineOwner::take()?)))),
            other => {
                return Err(Error::Unsupported(
                    format!("the streams of {other:?} devices have no handles here").into(),
                ));
            }
        };
        Ok(Self { host })
    }

    /// The stream of a handle.
    ///
    /// # Safety
    /// - On a CUDA device `stream` is a `CUstream` of the primary context, or 0, 1 or 2, and is
    ///   ended here before it is destroyed.
    #[inline]
    pub(crate) unsafe fn get(&self, runtime: &Runtime, stream: u64) -> Result<Source> {
        match &self.host {
            Some(host) => Ok(host.clone()),
            // SAFETY: the caller vouches for the handle.
            None => unsafe { cuda::external_stream(runtime, stream) }.map(Source::Cuda),
        }
    }

    /// Ends a stream that its owner is about to destroy.
    pub(crate) fn end(&self, runtime: &Runtime, stream: u64) -> Result<()> {
        match &self.host {
            Some(_) => Ok(()),
            None => cuda::end_external_stream(runtime, stream),
        }
    }

    /// Blocks until all work of the device's streams is over. The limit is for a device whose
    /// streams are the runtime's alone: a driver's context has none.
    pub(crate) fn synchronize(&self, runtime: &Runtime, limit: Option<Duration>) -> Result<()> {
        match (&self.host, cuda::device_state(runtime)) {
            (None, Some(device)) => device.primary().externals().synchronize(),
            _ => limit.map_or_else(|| runtime.synchronize(), |t| runtime.synchronize_timeout(t)),
        }
    }

    /// The handle of the stream with this timeline number, for reports; `None` if it is unknown.
    pub(crate) fn handle_of(&self, runtime: &Runtime, timeline: u16) -> Option<u64> {
        let externals = cuda::device_state(runtime)?.primary().externals();
        externals.handle_of(TimelineId::from_number(timeline))
    }
}
