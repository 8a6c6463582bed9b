//! The part of a timeline that needs its backend.
//!
//! This module must not know a backend.

use super::{Timeline, Timepoint};
use crate::error::Result;
use std::time::Duration;

/// The part of a timeline that needs the backend. Reads on hot paths use its [`Timeline`] only.
///
/// A stream that runs closures on a worker of its own:
///
/// ```
/// use leasehold_core::{Error, Timeline, TimelineOwner, Timepoint, Result, TimelineSource};
/// use std::sync::{Arc, Mutex, mpsc};
/// use std::time::Duration;
///
/// type Job = Box<dyn FnOnce() -> Result<()> + Send>;
/// struct WorkerStream {
///     timeline: Arc<TimelineOwner>,
///     /// The turn: values are taken in the order in which the worker gets them.
///     jobs: Mutex<mpsc::Sender<(u64, Job)>>,
/// }
///
/// impl WorkerStream {
///     fn new() -> Result<Self> {
///         let timeline = Arc::new(TimelineOwner::take()?);
///         let (jobs, todo) = mpsc::channel::<(u64, Job)>();
///         let worker = timeline.clone();
///         std::thread::spawn(move || {
///             for (value, job) in todo {
///                 // After a failure nothing runs, and everything completes all the same.
///                 if !worker.timeline().failed(value)
///                     && let Err(cause) = job()
///                 {
///                     worker.poison(value, cause);
///                 }
///                 worker.complete(value);
///             }
///         });
///         Ok(Self { timeline, jobs: Mutex::new(jobs) })
///     }
///
///     fn submit(&self, job: Job) -> Result<Timepoint> {
///         let jobs = self.jobs.lock().unwrap();
///         let value = self.timeline().submitted() + 1;
///         jobs.send((value, job)).map_err(|_| Error::state("the worker is gone"))?;
///         Ok(self.timeline().at(self.timeline.advance()?))
///     }
/// }
///
/// // SAFETY: the worker completes a value after its job returned. Jobs run one after the
/// // other, and a wait is a job.
/// unsafe impl TimelineSource for WorkerStream {
///     fn timeline(&self) -> &'static Timeline {
///         self.timeline.timeline()
///     }
///     fn signal(&self) -> Result<u64> {
///         Ok(self.timeline().submitted())
///     }
///     fn refresh(&self) -> Result<u64> {
///         Ok(self.timeline().completed())
///     }
///     fn wait(&self, on: Timepoint) -> Result<()> {
///         self.submit(Box::new(move || on.timeline().wait(on.value(), None)))?;
///         self.timeline.learn(on);
///         Ok(())
///     }
///     fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
///         self.timeline().wait(value, timeout)
///     }
/// }
///
/// let stream = WorkerStream::new()?;
/// let done = stream.submit(Box::new(|| Ok(())))?;
/// stream.wait_host(done.value(), None)?;
/// assert!(done.is_settled());
/// let broken = stream.submit(Box::new(|| Err(Error::invalid("no such thing"))))?;
/// assert!(stream.wait_host(broken.value(), None).is_err());
/// # Ok::<(), Error>(())
/// ```
///
/// # Safety
/// Allocators reuse memory, and runtimes start later work on it, because of a timeline's values.
/// The implementer vouches:
/// - `timeline` returns the same timeline on every call, its owner belongs to this object, and no
///   other object submits to it.
/// - `completed` reaches a value only when all work submitted up to it is over: no device and no
///   thread accesses memory for this work any more. This holds for failed work too, even though
///   failed work need not wait for its dependencies. The timeline
///   [has passed](Timeline::has_passed) the value once those dependencies are over as well.
/// - Later submitted work starts once earlier work is over, or behaves as if it did.
/// - After `wait(on)` returned `Ok`, all work submitted later starts after `on` is over, or does
///   not run. Only then the owner [`learn`](super::TimelineOwner::learn)s a timepoint.
pub unsafe trait TimelineSource: Send + Sync {
    /// The timeline that this object advances.
    fn timeline(&self) -> &'static Timeline;

    /// Makes the completion of all submitted work observable without further calls, and returns its
    /// value. Does not block.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `DeviceLost`.
    fn signal(&self) -> Result<u64>;

    /// Asks the driver for the timeline's progress, updates the timeline and returns the completed
    /// value. Does not block.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's error.
    fn refresh(&self) -> Result<u64>;

    /// Makes later submissions of this timeline start after `on`, on the device, and learns `on`.
    /// Does not block the host.
    ///
    /// # Errors
    /// `Unsupported` if the device cannot wait for that timeline; the stream's cause if the stream
    /// is poisoned. A wait for a failed timepoint poisons this timeline.
    fn wait(&self, on: Timepoint) -> Result<()>;

    /// Blocks the calling thread until `value` is over. `None` waits without a limit; zero polls.
    ///
    /// # Errors
    /// `Timeout`; the cause if `value` failed; `Recording` on a recorder.
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()>;

    /// How long an allocation for this timeline may wait in all, on the host, for work that still
    /// uses free memory. That work may wait for the very thread that allocates.
    fn timeout(&self) -> Duration {
        Duration::from_secs(30)
    }
}
