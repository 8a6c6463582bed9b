//! A stream of the runtime that CubeCL names by a copy, and a point of it.
//!
//! CubeCL's streams live as long as the process, so a lane is never freed. A stream that failed
//! takes no more work; the lane goes on with a new one. The failure stays with the buffers.

use crate::errors;
use cubecl_server::memory_management::drop_queue;
use cubecl_server::server::ServerError;
use leasehold::backend::sync::Mutex;
use leasehold::{Result, Runtime, Stream, Timepoint};

/// A stream, or its successor after a failure.
#[derive(Debug)]
pub struct Lane {
    /// The runtime whose stream the lane's work goes to.
    runtime: Mutex<Runtime>,
}

impl Lane {
    /// A lane with a stream of its own, for the rest of the process.
    pub(crate) fn new(runtime: &Runtime) -> Result<&'static Self> {
        let runtime = Mutex::new(runtime.create_stream()?.runtime());
        Ok(Box::leak(Box::new(Self { runtime })))
    }

    /// The runtime with the lane's stream, which has not failed as far as is known.
    pub(crate) fn runtime(&self) -> Result<Runtime> {
        let mut runtime = self.runtime.lock();
        if runtime.stream().failure().is_some() {
            // Buffers that the failed work wrote can be overwritten only once it is over.
            let _ = runtime.stream().synchronize();
            *runtime = runtime.create_stream()?.runtime();
        }
        Ok(runtime.clone())
    }

    /// Gives the stream work. If the stream turns out to have failed before, the work goes to its
    /// successor.
    pub(crate) fn run<T>(&self, mut work: impl FnMut(&Stream) -> Result<T>) -> Result<T> {
        let runtime = self.runtime()?;
        match work(runtime.stream()) {
            Err(_) if runtime.stream().failure().is_some() => work(self.runtime()?.stream()),
            done => done,
        }
    }
}

/// A point that a lane has reached once all earlier work is over.
#[derive(Debug)]
pub struct Fence(Option<(Runtime, Timepoint)>);

impl Fence {
    /// The lane's present end.
    pub(crate) fn new(lane: &Lane) -> Self {
        // Without a stream there is no work to wait for.
        Self(lane.runtime().ok().map(|runtime| {
            let point = runtime.stream().now();
            (runtime, point)
        }))
    }
}

impl drop_queue::Fence for Fence {
    fn wait(self) -> std::result::Result<(), ServerError> {
        let Some((runtime, point)) = self.0 else { return Ok(()) };
        runtime.wait_for(point).map_err(|error| errors::server(&error))
    }

    fn sync(self) -> bool {
        // Uploads take their bytes during the call, so no work uses what the queue holds.
        true
    }
}
