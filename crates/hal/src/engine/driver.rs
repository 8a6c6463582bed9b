//! The parts of a driver that the engine needs: a stream, the state that a device's streams share,
//! and an instantiated plan.
//!
//! This module must not know a driver.

use crate::engine::host_part::HostPart;
use crate::engine::partitions::StreamKey;
use crate::engine::steps::Steps;
use crate::op::KeepAlive;
use crate::{DeviceId, ForeignCall, GraphExec, NodePatch, Op, Plan};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result, Timeline, Timepoint};
use std::fmt;
use std::time::Duration;

/// The state that all streams of a device (or of a context of it) share.
pub trait DriverDevice: Send + Sync + 'static {
    /// The device's name.
    fn id(&self) -> DeviceId;

    /// The cause of the device's loss, if it is lost. Once lost, it stays lost.
    fn loss(&self) -> Option<Error>;

    /// Returns the loss of the device as an error.
    ///
    /// # Errors
    /// The cause of the loss.
    #[inline]
    fn sound(&self) -> Result<()> {
        self.loss().map_or(Ok(()), Err)
    }

    /// Takes note of an error of a driver call. Returns the error to report: for a loss, the first
    /// one.
    fn note(&self, error: Error) -> Error {
        error
    }

    /// The time between queries of the device by a waiting thread. Zero for a device that advances
    /// only when it is queried.
    fn poll_interval(&self) -> Duration;

    /// The name of the kernel of a pipeline's native word, for reports.
    fn kernel_name(&self, native: u64) -> Option<String>;
}

/// An instantiated plan.
pub trait GraphSteps {
    /// The steps of a launch. A plan whose launch needs neither the host nor another stream goes to
    /// the driver like any operation.
    fn steps(&self) -> &Steps;
}

/// The life of an instantiated plan.
pub trait Instantiate: GraphSteps + Send + Sync + Sized + 'static {
    /// The state that the device's streams share.
    type Device;

    /// Instantiates a plan. May block on the driver.
    ///
    /// # Errors
    /// - `InvalidArgument` for a plan whose nodes do not come after their predecessors.
    /// - `Unsupported` for a node that the device cannot run in a graph.
    /// - A driver error.
    fn instantiate(device: &Arc<Self::Device>, plan: Plan) -> Result<Self>;

    /// The number of the plan's nodes.
    fn nodes(&self) -> usize;

    /// Bytes of memory beside the buffers, as far as known.
    fn bytes(&self) -> u64;

    /// Changes nodes in place: all of them or, after an error, none.
    ///
    /// # Errors
    /// See `hal::GraphExec::update`.
    fn update(&self, patches: &[NodePatch<'_>]) -> Result<()>;
}

/// A stream of a driver.
///
/// The engine calls the methods that give work to the driver under the stream's lock, one at a
/// time. Such a method must not block on the device, call the engine, or take another stream's
/// lock. Completion may be queried by any thread.
///
/// Dropping the value destroys the driver's stream. The engine drops it once the driver is done
/// with all work, or after [`abandon`](Self::abandon).
///
/// # Safety
/// - Work that was given to the driver runs in order. An operation accesses only the memory that it
///   names.
/// - [`reached`](Self::reached) returns a value only after the driver is done with all work that it
///   was given before the [signal](Self::signal) of this value, or after the stream's device is
///   lost and runs nothing. [`query`](Self::query) returns `true` only if the driver is done with
///   all work that it was given before the call.
/// - Work behind a [wait](Self::encode_wait) starts after all work before the mark's last record.
/// - [`graph`](Self::graph) returns the graph of the lease.
pub unsafe trait DriverStream: Sized + Send + Sync + 'static {
    /// The state that the device's streams share.
    type Device: DriverDevice;
    /// A position on a stream, for which other streams of the backend can wait natively: a recorded
    /// event, or an event with a value.
    type Mark: Clone + Send + Sync + 'static;
    /// Resources that an operation needs beside its own, such as staging memory.
    type Preparation: Send;
    /// The host's part of an operation, after the device is done with it: bytes to copy on,
    /// timestamps to mark as written.
    type Action: Send + 'static;
    /// An instantiated plan.
    type Graph: GraphSteps;
    /// The access to the driver for the length of a submission: a current context, or an open
    /// command buffer.
    type Entry<'a>
    where
        Self: 'a;

    /// Makes a stream, of which nothing is signalled beyond `start`. May block on the driver. The
    /// engine drops the stream before it lets the partition of the key go.
    ///
    /// # Errors
    /// `OutOfMemory`, or the driver's.
    fn create(device: &Arc<Self::Device>, key: &StreamKey, start: u64) -> Result<Self>;

    /// The driver's word for the stream; see `hal::Stream::native`.
    fn handle(&self) -> u64;

    /// A priority of [`create`](Self::create) in the numbers of `hal`.
    #[must_use]
    fn priority_of(priority: i32) -> i32 {
        priority
    }

    /// Checks an operation, before anything of its submission is given to the driver.
    ///
    /// # Errors
    /// `InvalidArgument`, `Unsupported`.
    fn check(&self, op: &Op<'_>, timeline: &Timeline) -> Result<()>;

    /// Whether the driver takes an operation without preparation. The engine does not ask for
    /// waits, graphs, host calls and foreign calls.
    fn is_plain(&self, op: &Op<'_>) -> bool;

    /// Prepares an operation that is not plain. The caller holds no lock; may block on the driver.
    /// `None` if there is nothing to prepare. The call is made as the operation is submitted, also
    /// if the operation is held back then: a thread that resumes work waits for no resources.
    ///
    /// # Errors
    /// `OutOfMemory`, or the driver's.
    fn prepare(&self, op: &Op<'_>) -> Result<Option<Self::Preparation>>;

    /// Takes the room that the driver needs for a submission, such as a command buffer in a queue
    /// of bounded length. Returns `false` if no room is free. Must not block. The engine calls this
    /// method under the stream's lock. The next [`leave`](Self::leave) gives unused room back.
    #[inline]
    fn reserve(&self) -> bool {
        true
    }

    /// Waits until [`reserve`](Self::reserve) may succeed. The caller holds no lock. A thread that
    /// resumes work never calls this method: it leaves the work, and the completion thread tries
    /// again.
    ///
    /// # Errors
    /// `DeviceLost`, or the driver's. `Occupied` if others keep what the stream needs; the
    /// submission is refused then.
    fn wait_room(&self) -> Result<()> {
        Ok(())
    }

    /// Begins to give work to the driver.
    ///
    /// # Errors
    /// `DeviceLost`, or the driver's. Nothing was given.
    fn enter(&self) -> Result<Self::Entry<'_>>;

    /// Gives an operation to the driver. Host calls, foreign calls and waits never come here.
    ///
    /// # Errors
    /// The driver's. [`Sink::took`] says whether the driver accepted a part.
    ///
    /// # Safety
    /// - The memory that the operation names may be used until its submission is over; see
    ///   `hal::Stream::submit`.
    unsafe fn encode(
        &self,
        entry: &mut Self::Entry<'_>,
        op: &Op<'_>,
        prepared: Option<Self::Preparation>,
        sink: &mut Sink<'_, Self>,
    ) -> Result<()>;

    /// Makes the driver wait, behind all work given so far, for a mark.
    ///
    /// # Errors
    /// The driver's.
    fn encode_wait(&self, entry: &mut Self::Entry<'_>, mark: &Self::Mark) -> Result<()>;

    /// Launches a segment of a graph, and leaves its host part.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// - The graph is of this device. The memory of its nodes may be used until the submission is
    ///   over.
    unsafe fn launch(
        &self,
        entry: &mut Self::Entry<'_>,
        exec: &Lease<dyn GraphExec>,
        segment: u32,
        sink: &mut Sink<'_, Self>,
    ) -> Result<()>;

    /// Ends a submission, or a part of one: the driver may run what it was given, now or with later
    /// work.
    ///
    /// # Errors
    /// The driver's.
    fn leave(&self, entry: Self::Entry<'_>) -> Result<()> {
        drop(entry);
        Ok(())
    }

    /// Runs a library's call, in order with the work given so far, as a part of the submission with
    /// this value. The caller holds no lock.
    ///
    /// # Errors
    /// The call's, or the driver's.
    fn run_foreign(&self, call: &ForeignCall, value: u64) -> Result<()>;

    /// The graph of an exec.
    ///
    /// # Safety
    /// - The exec was instantiated on a device of this backend.
    unsafe fn graph(exec: &Lease<dyn GraphExec>) -> &Self::Graph;

    /// Tells the driver to signal `value` behind all work given so far.
    ///
    /// # Errors
    /// The driver's. The signal may be tried again.
    fn signal(&self, value: u64) -> Result<()>;

    /// Whether the stream may signal of its own accord: no bounded resource is short. A waiter's
    /// signal is made regardless.
    fn may_signal(&self) -> bool {
        true
    }

    /// The last value that the driver signalled. A stream whose signals were skipped after an error
    /// signals on the driver's behalf, and reports the error by [`failure`](Self::failure).
    fn reached(&self) -> u64;

    /// The first value whose work failed on the device, and the cause. `None` for a driver that
    /// reports such errors by its calls. Once [`reached`](Self::reached) or [`query`](Self::query)
    /// has told that work is over, this method reports the failures of this work.
    #[inline]
    fn failure(&self) -> Option<(u64, Error)> {
        None
    }

    /// Whether the driver is done with all work of the stream. Does not block.
    ///
    /// # Errors
    /// `DeviceLost`, or the driver's.
    fn query(&self) -> Result<bool>;

    /// Makes a mark, for [`record`](Self::record). The caller holds no lock.
    ///
    /// # Errors
    /// `OutOfMemory`, or the driver's.
    fn mark(&self) -> Result<Self::Mark>;

    /// Records a mark behind all work given so far, which `value` is the last value of.
    ///
    /// # Errors
    /// The driver's.
    fn record(&self, mark: &mut Self::Mark, value: u64) -> Result<()>;

    /// A recorded mark behind a timepoint of a stream that another library owns, and the last value
    /// that it covers. `None` for timelines that the driver knows nothing of, and for work that is
    /// over.
    ///
    /// # Errors
    /// Those of recording the mark. The work may never be known to be over.
    fn mark_outside(&self, point: Timepoint) -> Result<Option<(Self::Mark, u64)>> {
        let _ = point;
        Ok(None)
    }

    /// The stream has no holder, and all its work is over. Objects of pending signals may serve
    /// other streams, because nobody asks for the signals. Must not block.
    fn rest(&self) {}

    /// Makes the driver call a function behind all work given so far. The function wakes a thread,
    /// and may run on a thread of the driver's.
    ///
    /// # Errors
    /// The driver's. `Occupied`, after which the completion thread asks
    /// [`is_done_at_call`](Self::is_done_at_call) until it is `true`.
    fn host_function(&self, call: Box<dyn FnOnce() + Send>) -> Result<()>;

    /// Whether the driver is done with all work before a [host
    /// function](Self::host_function) that it has called.
    ///
    /// # Errors
    /// As [`query`](Self::query).
    #[inline]
    fn is_done_at_call(&self) -> Result<bool> {
        Ok(true)
    }

    /// Blocks until the driver is done with all work of the stream. `Ok` on a lost device.
    ///
    /// # Errors
    /// The driver's. The work may still run.
    fn synchronize(&self) -> Result<()>;

    /// Leaks the memory that the driver may still write for this stream.
    fn abandon(&mut self);

    /// Runs an action. `sound`: the stream has not failed. Otherwise only resources are given back.
    fn run_action(device: &Self::Device, action: Self::Action, sound: bool);
}

/// An action before the publication of a value.
pub(crate) enum CompletionAction<N: DriverStream> {
    /// An object that was kept alive.
    KeepAlive(KeepAlive),
    /// A wait for another stream.
    Passed(Passed),
    /// The driver's.
    Driver(N::Action),
}

/// The proof of a wait for another stream of the backend, once the wait is over: the other stream
/// is done up to a value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Passed {
    /// The timepoint that is waited for.
    pub(crate) point: Timepoint,
    /// The last value that the mark covers, at or after the timepoint's.
    pub(crate) value: u64,
    /// Whether the other stream is of another device, whose loss does not stop this one.
    pub(crate) abroad: bool,
}

/// The engine's side of a submission that is given to the driver.
pub struct Sink<'a, N: DriverStream> {
    pub(crate) value: u64,
    pub(crate) host: &'a HostPart<CompletionAction<N>>,
    pub(crate) accepted: bool,
}

impl<N: DriverStream> Sink<'_, N> {
    /// The submission's value.
    #[inline]
    #[must_use]
    pub fn value(&self) -> u64 {
        self.value
    }

    /// Passes the result of a driver call on. After an `Ok`, the driver has a part of the
    /// submission, so a later error fails the stream.
    #[inline]
    pub fn took(&mut self, result: Result<()>) -> Result<()> {
        self.accepted |= result.is_ok();
        result
    }

    /// Leaves a host part for the time when the device is done.
    pub fn leave(&self, action: N::Action) {
        self.host.leave(self.value, CompletionAction::Driver(action));
    }

    /// Keeps an object alive until the device is done.
    pub fn keep(&self, keep: KeepAlive) {
        self.host.leave(self.value, CompletionAction::KeepAlive(keep));
    }
}

impl<N: DriverStream> fmt::Debug for Sink<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sink({}, accepted: {})", self.value, self.accepted)
    }
}
