//! The traits that a backend implements.
//!
//! # Rules for all methods
//! * **Threads.** Any thread may call any method at any time, also from a host call of a stream. No
//!   method needs a current context, and only [`Device::make_current`] leaves one current.
//! * **Blocking.** A method blocks on the driver or on other threads only if its documentation says
//!   so. Only `wait_host` and [`Device::synchronize`] wait for submitted work.
//! * **Errors.** An error changes nothing, unless the documentation says otherwise. No method
//!   panics on a caller's mistake. `DeviceLost` may come from every method that asks the driver;
//!   afterwards all of them return it.
//! * **Locks.** No manager, pool or allocator lock is held across a driver call. A stream's own
//!   submission lock is a leaf: no call under this lock may take another stream's lock.
//! * **Lifetime.** A lent object keeps alive all objects that it needs; the order of drops does not
//!   matter.
//! * **Safety.** The traits are unsafe to implement: safe code above lends and reuses memory
//!   because of their answers. Methods that run or look up raw words are unsafe to call:
//!   [`Stream::submit`], [`Device::instantiate`], [`Device::elapsed`] and [`GraphExec::update`].
//!   [`Validated`](crate::Validated) checks the checkable part of these contracts.

use crate::graph::GraphExec;
use crate::id::{BackendKind, DeviceId};
use crate::info::{Caps, Description, DeviceInfo, Limits, MemoryInfo, MemoryKind};
use crate::kernel::{KernelDesc, Pipeline};
use crate::op::{Op, TimestampQuery};
use crate::partition::{Partition, PartitionSize};
use crate::plan::Plan;
use crate::sharing::Sharing;
use leasehold_alloc::{Allocator, Backing};
use leasehold_core::{Error, Lease, PoolStats, Result, Tagged, TimelineSource, Timepoint, tags};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A kind of device and its driver.
///
/// # Safety
/// - [`open`](Self::open) returns the device that its argument names, and for one name always the
///   same resource. A runtime identifies devices, and the owner of an address, by this name.
#[doc(alias = "infiniRT")]
pub unsafe trait Backend: Send + Sync {
    /// The kind of this backend. Constant; does not block.
    fn kind(&self) -> BackendKind;

    /// The available devices, in the driver's order; the same list on every call. Empty if there
    /// are no devices. May block on the driver's start.
    ///
    /// # Errors
    /// `Unavailable`, with the reason, if the driver itself is missing.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;

    /// Opens a device. A second open of a device returns the same resource. May block on the
    /// driver.
    ///
    /// # Errors
    /// `NotFound` for a number that does not exist, with the number of devices; `Unavailable`
    /// without a driver; the driver's error.
    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>>;

    /// Shuts the backend's managers down; a second call returns `Ok`.
    ///
    /// The decision comes before any destruction, so the caller may retry once the counted leases
    /// are dropped. The call finishes the work of dropped streams, and may block on it. It does not
    /// wait for work behind a host timeline or another backend's timeline. Such work counts as a
    /// lease on its stream.
    ///
    /// # Errors
    /// `LeasesOutstanding`, with the kind and number of resources; then nothing has changed.
    fn shutdown(&self) -> Result<()>;

    /// Calls `report` with the name and the statistics of each of the backend's own pools. A
    /// snapshot; does not block.
    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        let _ = report;
    }
}

// SAFETY: every method calls the inner backend's.
unsafe impl<B: Backend + ?Sized> Backend for Arc<B> {
    fn kind(&self) -> BackendKind {
        (**self).kind()
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        (**self).devices()
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        (**self).open(device)
    }

    fn shutdown(&self) -> Result<()> {
        (**self).shutdown()
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        (**self).pools(report);
    }
}

/// A caller's requirements for a stream.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct StreamDesc {
    /// The priority: a greater number is more urgent; 0 is the default. Clamped to the device's
    /// range.
    pub priority: i32,
    /// The multiprocessors that run the stream's kernels; by default `None`, all of the device.
    pub partition: Option<Lease<Partition>>,
}

impl StreamDesc {
    /// A stream of this priority.
    #[must_use]
    pub fn priority(priority: i32) -> Self {
        Self { priority, ..Self::default() }
    }

    /// A stream on a partition, of the default priority. Its kernels run there alone. Copies and
    /// fills may use what the driver has for them.
    #[must_use]
    pub fn on(partition: &Lease<Partition>) -> Self {
        Self { partition: Some(partition.clone()), ..Self::default() }
    }
}

/// The state that a driver had current on a thread. The value belongs to that thread. A drop
/// without [`restore`](Self::restore) changes nothing.
#[derive(Default)]
pub struct Former(Option<Box<dyn FnOnce()>>);

impl Former {
    /// A state that `restore` makes current again.
    #[must_use]
    pub fn new(restore: impl FnOnce() + 'static) -> Self {
        Self(Some(Box::new(restore)))
    }

    /// Makes the former state current again. The next driver call reports errors of this one.
    pub fn restore(self) {
        if let Some(restore) = self.0 {
            restore();
        }
    }
}

impl fmt::Debug for Former {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Former" } else { "Former(nothing)" })
    }
}

/// A device that was opened.
///
/// # Safety
/// A runtime relies on the safe methods to keep the contracts of the unsafe ones. The implementer
/// vouches:
/// - The [`description`](Self::description) is true and constant. If [`Caps::host_visible`] is set,
///   the host may read and write the memory at its address. [`info`](Self::info),
///   [`caps`](Self::caps) and [`limits`](Self::limits) are parts of the description.
/// - [`memory`](Self::memory) gives allocators over memory that this device can access. A block's
///   bytes are at the block's address and native word. They belong to the block alone, from its
///   allocation until its recorded uses are over.
/// - The device's streams, pipelines, timestamps, graphs and host timelines are its own, and sound
///   for the unsafe methods.
pub unsafe trait Device: Any + Send + Sync {
    /// The device's identity, capabilities and limits, read once when the device was opened. Does
    /// not block.
    fn description(&self) -> &Description;

    /// The device's identity, and its memory when the device was opened. Does not block.
    fn info(&self) -> &DeviceInfo {
        &self.description().info
    }

    /// The device's capabilities. Constant; does not block. A capability that is `false` here is
    /// `Unsupported` in every method.
    fn caps(&self) -> Caps {
        self.description().caps
    }

    /// The device's limits. Constant; does not block.
    fn limits(&self) -> &Limits {
        &self.description().limits
    }

    /// The device's memory at present. May ask the driver.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's error.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// Makes the device the driver's current one on this thread, if the driver has a current
    /// device. Cheap if the device is current already.
    ///
    /// For foreign code on this thread. The backend's own methods make the device current
    /// themselves and restore the former one.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's error.
    fn make_current(&self) -> Result<()>;

    /// The driver's current state on this thread, to be restored later. Empty if the driver has no
    /// such state. Does not block.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's error.
    fn current(&self) -> Result<Former> {
        Ok(Former::default())
    }

    /// Fails a submission that the driver works on: its value, the later ones of its stream, and
    /// the values of the backend's other streams that are ordered after it. The first cause of a
    /// stream stays. Does not block. Returns whether the value has failed by this call.
    ///
    /// For a caller who knows that the work will end without its result, while the driver will
    /// report no error. The work goes on; the values complete once the driver is done with it.
    ///
    /// `false`: the value is over or has failed, the driver has not got it yet, or the backend
    /// cannot do this.
    fn fail(&self, point: Timepoint, cause: Error) -> bool {
        let _ = (point, cause);
        false
    }

    /// The backend's own state of the device, for a caller that knows its type: the device itself,
    /// or the device inside a wrapper.
    fn state(&self) -> Option<&(dyn Any + Send + Sync)> {
        None
    }

    /// The allocator of a kind of memory; the same on every call. A runtime fetches it once and
    /// calls it directly. The first call may block on the driver.
    ///
    /// Operations name a block by its address. If [`Caps::host_visible`] is set, the address is a
    /// host address too. The block's native word goes unchanged into
    /// [`Binding::native`](crate::Binding::native) and similar fields.
    ///
    /// Every device has [`MemoryKind::Device`] and [`MemoryKind::Pinned`]. Without
    /// [`Caps::pinned`], pinned memory is ordinary host memory, and its allocator has the
    /// [`HostKind::Pageable`](leasehold_alloc::HostKind).
    ///
    /// # Errors
    /// `Unsupported` for another kind that the device does not have; at the first call the error of
    /// making the backing.
    fn memory(&self, kind: MemoryKind) -> Result<&Allocator>;

    /// Another source of memory of this kind, beside the one of [`memory`](Self::memory), for an
    /// allocator of the caller: a replay of a trace, or a pool with other rules. The backing's
    /// functions that take or free addresses are unsafe to call.
    ///
    /// # Errors
    /// `Unsupported` for a kind that the device does not have, or if the device can have one source
    /// only; the driver's error.
    fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        Err(Error::Unsupported(
            format!("{}: no second source of {kind:?} memory", self.info().id).into(),
        ))
    }

    /// The source of memory that other processes may map. May block on the driver.
    ///
    /// # Errors
    /// `Unsupported` unless [`Caps::shareable`]; the driver's error.
    fn sharing(&self) -> Result<Arc<dyn Sharing>> {
        Err(Error::Unsupported(
            format!("{}: its memory cannot be shared with other processes", self.info().id).into(),
        ))
    }

    /// A stream: an idle one or a new one, whose timeline continues from its last value. May block
    /// on the driver if no stream is idle. A priority outside the range is clamped;
    /// [`Stream::priority`] returns the result.
    ///
    /// # Errors
    /// `InvalidArgument` for a partition that this device did not make, or that was closed;
    /// `OverBudget` beyond the limit of streams; the driver's error.
    fn stream(&self, desc: &StreamDesc) -> Result<Lease<dyn Stream>>;

    /// Divides the device's multiprocessors among partitions, in the order of the sizes. They have
    /// no multiprocessor in common. Streams without a partition go on using all of the device. A
    /// device is divided once at a time: its former partitions have ended before. May block on the
    /// driver.
    ///
    /// # Errors
    /// `Unsupported` unless [`Caps::partitions`]; what [`PartitionSize::check`] refuses;
    /// `InvalidArgument` for sizes that the device has not once the driver has rounded them up;
    /// `InvalidState` while a former partition has a holder, a stream or a graph; the driver's
    /// error.
    fn partition(&self, sizes: &[PartitionSize]) -> Result<Vec<Lease<Partition>>> {
        let _ = sizes;
        Err(no_partitions(self.info().id))
    }

    /// A pipeline for a kernel. While a key (name, entry, source) has a pipeline with a holder, the
    /// key gives the same pipeline. Concurrent calls compile it once. Blocks during compilation.
    ///
    /// The holders own the pipeline: it ends after the last lease and the last submission that uses
    /// it. A submission keeps what it needs, so its caller may drop the lease at once.
    ///
    /// # Errors
    /// `InvalidArgument` for what [`KernelDesc::validate`] refuses: a backend calls it first. The
    /// same for a declaration that differs from the one of the same key. `Unsupported` for another
    /// backend's source; `Compile` with the log; `NotFound` for an entry that the source does not
    /// have.
    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>>;

    /// The blocks of a kernel that the whole device runs at the same time while nothing else runs,
    /// each with so many threads and so many bytes of shared memory beside the kernel's own. The
    /// pipeline is one of this device. Does not block.
    ///
    /// # Errors
    /// `Unsupported` where blocks do not run at the same time, which is the default; the driver's.
    fn resident_blocks(&self, pipeline: &Pipeline, threads: u32, shared: u32) -> Result<u64> {
        let _ = (threads, shared);
        Err(Error::Unsupported(
            format!(
                "kernel {}: {} does not tell how many blocks run at the same time; CUDA devices do",
                pipeline.name,
                self.info().id
            )
            .into(),
        ))
    }

    /// A timestamp for [`Op::WriteTimestamp`] to write. Recycled ones come back unwritten. May
    /// block on the driver if none is idle.
    ///
    /// # Errors
    /// `Unsupported`; the driver's error.
    fn timestamp(&self) -> Result<Lease<TimestampQuery>>;

    /// The time between two written timepoints, zero if `end` is the earlier one. Does not block:
    /// both must be complete. The resolution is the device's own. If a timepoint forces a boundary
    /// between encoders, the time includes this boundary.
    ///
    /// # Errors
    /// `InvalidState` for a timepoint that is not written yet; `InvalidArgument` for timepoints of
    /// two devices, if the backend can detect this.
    ///
    /// # Safety
    /// - Both timepoints came from [`timestamp`](Self::timestamp) of a device of this backend.
    unsafe fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration>;

    /// Makes an executable graph from a plan. The graph can be launched any number of times, on any
    /// stream of this device. All allocation happens here; a launch allocates nothing. May block on
    /// the driver. An empty plan gives a valid graph that does nothing.
    ///
    /// The graph holds the objects that its operations lease (pipelines, timepoints, keeps), but no
    /// buffer. The caller of a launch keeps the graph's memory alive.
    ///
    /// # Errors
    /// `Unsupported` for operations that graphs cannot hold; `OutOfMemory`; the driver's error.
    ///
    /// # Safety
    /// - Pipelines, timestamps and graphs of the plan belong to this device, and the plan's
    ///   dependencies are sufficient.
    /// - At each launch the operations meet the contract of [`Stream::submit`]. The graph accesses
    ///   no memory before a launch.
    unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<dyn GraphExec>>;

    /// A host timeline. May block on the driver if none is idle.
    ///
    /// # Errors
    /// `Unsupported` unless [`Caps::host_timelines`].
    fn host_timeline(&self) -> Result<Lease<dyn HostTimeline>> {
        Err(Error::Unsupported("this device has no host-signalled timelines".into()))
    }

    /// Tries to enable access to the memory of `peer`, and returns whether this device has access.
    /// A repeated call is allowed, and a device has access to itself. May block on the driver.
    /// Without access, copies between the two devices go through the host.
    ///
    /// # Errors
    /// `NotFound` for a device of another backend; the driver's error.
    fn peer_access(&self, peer: DeviceId) -> Result<bool>;

    /// Blocks until all work that was submitted before the call, to all streams of this device, is
    /// over. `None` waits without a limit; zero polls. Work behind an unsignalled host timeline is
    /// waited for like any other. Work of a failed stream is waited for at most one second.
    ///
    /// # Errors
    /// `Timeout`; the first failed stream's cause.
    fn synchronize(&self, timeout: Option<Duration>) -> Result<()>;

    /// Calls `report` with the name and the statistics of each of the device's pools. A snapshot;
    /// does not block.
    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats));
}

impl Tagged for dyn Device {
    type Tag = tags::Device;
}

/// An ordered queue of work on a device.
///
/// # Order
/// Operations behave as if they ran one after the other, within a submission and across
/// submissions. A device that overlaps them ([`Caps::unordered_streams`]) derives the necessary
/// waits from the declared accesses ([`hazard`](crate::hazard)). Between streams only waits create
/// an order.
///
/// # Values
/// A submission takes the next value of the stream's timeline once the driver accepted it. The
/// value is complete when the whole submission is over and the host can see its results. Bytes of
/// downloads have then arrived, timestamps are written, and keeps and leases are dropped.
///
/// `completed()` may lag behind. [`signal`](TimelineSource::signal),
/// [`refresh`](TimelineSource::refresh) and [`wait_host`](TimelineSource::wait_host) update it, and
/// so does at the latest every 64th submission. So `refresh` must not treat a device's signal as
/// completion while the host's part of the work is outstanding.
///
/// # Waits
/// [`Op::Wait`] and [`TimelineSource::wait`] bind to a value, not to a stream, which may be
/// destroyed already. The backend ensures that the value will complete without further calls. It
/// flushes another stream's batched work first, before it takes the waiting stream's lock. If
/// streams share a native queue, a wait for a host timeline delays its own stream and no other.
///
/// # Failure
/// A failed submission poisons the timeline from its value on. This submission and all later ones
/// fail with the first cause. They do not run, as far as the backend can prevent it, and complete
/// nevertheless, so that no thread waits for ever. A wait for a failed value poisons the waiting
/// stream. If the driver omits its signal after an error, the backend signals instead.
///
/// The cause of an operation's own failure is [`Error::Fault`]: the operation's
/// [name](Op::name), the stream as it prints, the value, and the text of the error or panic. The
/// cause of a failed wait is the cause of the awaited stream, unchanged. A call's error with an
/// [external](Error::is_external) cause is passed on unchanged too.
///
/// # Host calls
/// A host call may submit to every stream, also to its own, and may drop any object. So a backend
/// holds no lock of a stream while a host call runs. [`HostCall::run`](crate::HostCall::run)
/// contains panics.
///
/// # Drop
/// The drop of the last lease never waits. Submitted work runs to its end (an open encoder is ended
/// first), and timepoints of the stream stay valid.
///
/// # Safety
/// - [`TimelineSource`]'s contract holds for each submission: the value is complete only when the
///   device, the host's part and all dependencies of the submission are over.
/// - After the stream accepted an [`Op::Wait`], the timeline has learnt the timepoint, and later
///   work is ordered after it.
/// - An operation accesses only the memory that it names, and none after its value is complete.
pub unsafe trait Stream: TimelineSource + Any {
    /// Submits operations as one submission and returns its value on the stream's timeline. Never
    /// waits for completion; may wait for room in a full queue. The stream's own lock serialises
    /// concurrent calls; a submission is never split. An empty submission takes a value too.
    ///
    /// The call copies or leases everything that `ops` refers to, except memory, which stays the
    /// caller's concern. An upload may read its source at any time from the call to completion.
    ///
    /// An error means that nothing was submitted and no value was taken. Exception: if the driver
    /// accepted a part, the stream is poisoned.
    ///
    /// # Errors
    /// `InvalidArgument` for every operation that [`Op::check`] refuses, before anything is
    /// submitted: a backend calls it first, for each operation. The stream's cause if the stream is
    /// poisoned. `Unsupported` for an operation that this
    /// device cannot execute, or a timeline that it cannot wait for. `DeviceLost`; the driver's
    /// error. If an awaited value is known to have failed, a backend may return the cause (the
    /// stream is poisoned too), or accept the submission and let it fail.
    ///
    /// # Safety
    /// - Pipelines, timestamps and graphs belong to this stream's device.
    /// - Bindings and addresses lie in memory that this device can access, with the native word of
    ///   their buffer. The address of no bytes may be any number, also 0. They stay valid until the
    ///   value completes. So does the memory of a launched graph.
    /// - Grid and block are within the limits.
    /// - Copies of several rows do not overlap themselves; fills are aligned to their pattern. The
    ///   pieces of several copies are apart, also where [`OpList::rebind`](crate::OpList::rebind)
    ///   moved them.
    /// - Host memory without a [`KeepAlive`](crate::KeepAlive) stays valid until the value
    ///   completes. Meanwhile no code writes an upload's source or accesses a download's
    ///   destination.
    /// - `access` of each binding is true.
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64>;

    /// Sends all submitted work to the device, except work behind a host timeline. Does not block.
    /// Without pending work the call does nothing.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's error.
    fn flush(&self) -> Result<()>;

    /// Fails submitted work that has not begun, if the backend supports this. The work does not
    /// run, its values complete nevertheless, and `cause` poisons the stream. Returns whether the
    /// backend supports cancellation. Does not block.
    ///
    /// A caller needs this to regain host memory that pending work would access, after
    /// [`wait_host`](TimelineSource::wait_host) gave up on a stream that did not fail. A backend
    /// whose waits never give up need not support it.
    fn cancel(&self, cause: Error) -> bool {
        let _ = cause;
        false
    }

    /// The driver's stream (or the queue that it shares with others), for code that is not a
    /// [`ForeignCall`](crate::ForeignCall); 0 without one. Constant; does not block. Work that
    /// other code enqueues on it has no value.
    fn native(&self) -> u64;

    /// The stream's priority after clamping. Constant.
    fn priority(&self) -> i32 {
        0
    }

    /// The partition that runs the stream's kernels. Constant.
    fn partition(&self) -> Option<&Lease<Partition>> {
        None
    }

    /// Returns whether this stream records instead of running: it accepts operations, and its
    /// values never complete. Constant.
    fn is_recording(&self) -> bool {
        false
    }
}

/// The error of a device whose multiprocessors cannot be divided.
#[cold]
#[must_use]
pub fn no_partitions(device: DeviceId) -> Error {
    Error::Unsupported(
        format!("{device}: its multiprocessors cannot be divided (Caps::partitions); use streams of several priorities").into(),
    )
}

impl Tagged for dyn Stream {
    type Tag = tags::Stream;
}

/// A host timeline: a timeline that the host signals. Streams may wait for values before they are
/// signalled.
///
/// A host timeline accepts no submissions. Its [`signal`](TimelineSource::signal) and
/// [`refresh`](TimelineSource::refresh) only read, and [`wait`](TimelineSource::wait) is
/// `Unsupported`. Its timeline may have had another owner, so values continue from `submitted()`.
/// If it is dropped while streams wait for it, their waits fail, because no signal can come any
/// more. No memory depends on its answers beyond the contract of [`TimelineSource`], so
/// implementing this trait is safe.
pub trait HostTimeline: TimelineSource {
    /// Signals `value`. Wakes the threads that wait for this value or less, in any order. Does not
    /// block; may be called from a host call.
    ///
    /// # Errors
    /// `InvalidArgument` unless `value` grows; the cause after [`fail`](Self::fail).
    fn signal_host(&self, value: u64) -> Result<()>;

    /// Fails the host timeline. Present and later waits for an unsignalled value get the error.
    /// Streams that wait for such a value are poisoned and do not run their later work. The first
    /// cause stays. Does not block.
    fn fail(&self, cause: Error);
}

impl Tagged for dyn HostTimeline {
    type Tag = tags::HostTimeline;
}

impl fmt::Debug for dyn Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.info())
    }
}

impl fmt::Debug for dyn Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.timeline())
    }
}

impl fmt::Debug for dyn HostTimeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTimeline({:?})", self.timeline())
    }
}
