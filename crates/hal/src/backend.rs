//! The traits that a backend implements.
//!
//! # Rules for all methods
//! * **Threads.** Any thread may call any method at any time, also from a host call of a stream. No method needs a current context, and
//!   only [`Device::make_current`] leaves one behind.
//! * **Blocking.** A method blocks on the driver or on other threads only where its documentation says so. None waits for submitted work,
//!   but `wait_host` and [`Device::synchronize`].
//! * **Errors.** An error changes nothing, unless the documentation says otherwise. Nothing panics on a caller's mistake. `DeviceLost` may
//!   come from every method that asks the driver, and from then on does.
//! * **Locks.** No manager, pool or allocator lock is held across a driver call; a stream's own submission lock is a leaf: nothing is called
//!   under it that could take another stream's.
//! * **Life.** What is lent keeps alive all that it needs; the order of drops does not matter.
//! * **Safety.** The traits are unsafe to implement: safe code above lends memory, and reuses it, by what they answer. Unsafe to call is what
//!   runs or looks up raw words: [`Stream::submit`], [`Device::instantiate`], [`Device::elapsed`] and [`GraphExec::update`].
//!   [`Validated`](crate::Validated) checks what can be checked of these contracts.

use crate::id::{BackendKind, DeviceId};
use crate::info::{Caps, DeviceInfo, Limits, MemoryInfo, MemoryKind};
use crate::kernel::{Binding, KernelDesc, Pipeline};
use crate::op::{Op, Timestamp};
use crate::plan::Plan;
use leasehold_alloc::{Allocator, Backing};
use leasehold_core::{Error, Lease, PoolStats, Result, Tagged, Timeline, tags};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A kind of device and its driver.
///
/// # Safety
/// - [`open`](Self::open) gives the device that its argument names, and for one name always the same resource: a runtime
///   tells devices, and whose memory an address is, by that name.
#[doc(alias = "infiniRT")]
pub unsafe trait Backend: Send + Sync {
    /// Which one. Constant; does not block.
    fn kind(&self) -> BackendKind;

    /// The devices that are there, in the driver's order; the same list every time. Empty when there are none. May block on the
    /// driver's start.
    ///
    /// # Errors
    /// `Unavailable`, with the reason, when the driver itself is not there.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;

    /// Opens a device. The same device opened twice is one and the same resource. May block on the driver.
    ///
    /// # Errors
    /// `NotFound` for a number that does not exist (saying how many there are), `Unavailable` without a driver, the driver's own.
    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>>;

    /// Ends the backend's managers; a second call is `Ok`. Decides first and ends afterwards, so it may be called again once the leases
    /// that it counted are dropped. Work that dropped streams left behind is finished, and it may block on that. Work that a gate or
    /// another backend's line holds back is not waited for: it counts as a lease on its stream.
    ///
    /// # Errors
    /// `LeasesOutstanding`, with the kind of resource and how many; nothing has changed then.
    fn shutdown(&self) -> Result<()>;

    /// Calls `report` with the name and the statistics of each of the backend's own pools. A snapshot; does not block.
    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        let _ = report;
    }
}

// SAFETY: every method is the inner backend's.
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

/// What a caller wants of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamDesc {
    /// More urgent is greater; 0 is the default. Clamped to what the device has.
    pub priority: i32,
}

impl StreamDesc {
    /// A stream of this priority.
    #[must_use]
    pub fn priority(priority: i32) -> Self {
        Self { priority }
    }
}

/// What a driver had current on a thread. It belongs to that thread; dropped without [`restore`](Self::restore) it changes nothing.
#[derive(Default)]
pub struct Former(Option<Box<dyn FnOnce()>>);

impl Former {
    /// Puts back by this call.
    #[must_use]
    pub fn new(restore: impl FnOnce() + 'static) -> Self {
        Self(Some(Box::new(restore)))
    }

    /// Puts it back. What goes wrong shows with the next call on the driver.
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
/// A runtime keeps the contracts of the unsafe methods by what the safe ones say. The author vouches:
/// - [`info`](Self::info), [`caps`](Self::caps) and [`limits`](Self::limits) are true and constant. Where
///   [`Caps::host_visible`] says so, the host may read and write the memory at its address.
/// - [`memory`](Self::memory) gives allocators over memory that this device reaches. Its bytes are the block's alone, at
///   the block's address and native word, from the lending of a block until its recorded uses are over.
/// - Streams, pipelines, time stamps, graphs and gates that it gives are its own, and sound for the unsafe methods.
pub unsafe trait Device: Any + Send + Sync {
    /// What it is. Found out once, when it was opened; does not block.
    fn info(&self) -> &DeviceInfo;

    /// What it can do. Constant; does not block. What is `false` here is `Unsupported` everywhere.
    fn caps(&self) -> Caps;

    /// How much of everything. Constant; does not block.
    fn limits(&self) -> &Limits;

    /// Its memory now. May ask the driver.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// Makes the device the driver's current one on this thread, where the driver has such a notion. Cheap when it is already. For foreign
    /// code on this thread: the backend's own methods see to it themselves, and put back what was current.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    fn make_current(&self) -> Result<()>;

    /// What the driver has current on this thread now, to be put back later. Nothing where the driver has no such notion. Does not block.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    fn current(&self) -> Result<Former> {
        Ok(Former::default())
    }

    /// The backend's own state of the device, for a caller that knows its type: the device itself, or what a wrapper wraps.
    fn state(&self) -> Option<&(dyn Any + Send + Sync)> {
        None
    }

    /// The allocator of a kind of memory: the same one every time. Fetched once; calls on it are direct. The first call may block on the
    /// driver.
    ///
    /// A block's address is what operations name; it is an address of the host too where [`Caps::host_visible`]. Its native word goes into
    /// [`Binding::native`] and the like unchanged.
    ///
    /// # Errors
    /// `Unsupported` for a kind that the device has not got; what making its backing says, the first time.
    fn memory(&self, kind: MemoryKind) -> Result<&Allocator>;

    /// A source of memory of this kind beside the one of [`memory`](Self::memory), for an allocator of the caller's own: a replay of a trace,
    /// a pool with other rules. What takes or frees an address of it is unsafe to call.
    ///
    /// # Errors
    /// `Unsupported` for a kind that the device has not got, or when it can have one source only; the driver's own.
    fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        Err(Error::Unsupported(format!("{}: no second source of {kind:?} memory", self.info().id).into()))
    }

    /// A stream: an idle one or a new one, whose line goes on from where it stood. May block on the driver when none is idle. A priority
    /// outside the range is clamped; [`Stream::priority`] says what it got.
    ///
    /// # Errors
    /// `OverBudget` beyond the limit of streams; the driver's own.
    fn stream(&self, desc: &StreamDesc) -> Result<Lease<dyn Stream>>;

    /// A kernel, made ready. The same key (name, entry, source) gives the same pipeline; it is compiled once, even by many threads
    /// at once. Blocks while it compiles.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the limits, `Unsupported` for a source of another backend, `Compile` with the log, `NotFound` for
    /// an entry that the source has not got.
    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>>;

    /// A time stamp to be written by [`Op::Stamp`]. Recycled ones come back unwritten. May block on the driver when none is idle.
    ///
    /// # Errors
    /// `Unsupported`; the driver's own.
    fn timestamp(&self) -> Result<Lease<Timestamp>>;

    /// The time between two stamps that were written, zero if `end` is the earlier. Does not block: both must be complete. The resolution is
    /// the device's own; where a stamp forces a boundary between encoders, the time includes it.
    ///
    /// # Errors
    /// `InvalidState` for a stamp that was not written, or not yet; `InvalidArgument` for stamps of two devices, where that shows.
    ///
    /// # Safety
    /// - Both stamps came from [`timestamp`](Self::timestamp) of a device of this backend.
    unsafe fn elapsed(&self, start: &Timestamp, end: &Timestamp) -> Result<Duration>;

    /// Makes a plan ready to be launched, any number of times, on any stream of this device. Everything that launching needs is allocated
    /// here; a launch allocates nothing. May block on the driver. An empty plan gives a valid graph that does nothing.
    ///
    /// The graph holds what its operations lease (pipelines, stamps, keeps), and no buffer: who launches it keeps its memory alive.
    ///
    /// # Errors
    /// `Unsupported` for operations that graphs cannot hold; `OutOfMemory`; the driver's own.
    ///
    /// # Safety
    /// - Pipelines, time stamps and graphs of the plan belong to this device, and the plan's dependencies are enough.
    /// - Operations are as [`Stream::submit`] wants them, when the graph is launched; it touches no memory before.
    unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<dyn GraphExec>>;

    /// A timeline that the host signals. May block on the driver when none is idle.
    ///
    /// # Errors
    /// `Unsupported` unless [`Caps::gates`].
    fn gate(&self) -> Result<Lease<dyn Gate>> {
        Err(Error::Unsupported("this device has no host-signalled timelines".into()))
    }

    /// Whether this device can reach the memory of `peer`, after trying to enable it. Enabling twice is fine, and a device reaches itself.
    /// May block on the driver. Where it is `false`, copies between the two go through the host.
    ///
    /// # Errors
    /// `NotFound` for a device of another backend; the driver's own.
    fn peer_access(&self, peer: DeviceId) -> Result<bool>;

    /// Blocks until all work that was submitted before the call, to all streams of this device, is over. `None` waits for ever; zero polls.
    /// Work behind a gate that nobody signals is waited for like any other, and work of a failed stream for a second at most.
    ///
    /// # Errors
    /// `Timeout`; the first stream's cause.
    fn synchronize(&self, timeout: Option<Duration>) -> Result<()>;

    /// Calls `report` with the name and the statistics of each of the device's pools. A snapshot; does not block.
    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats));
}

impl Tagged for dyn Device {
    type Tag = tags::Device;
}

/// An ordered queue of work on a device.
///
/// # Order
/// Operations behave as if they ran one after the other, within a submission and from one to the next. A device that overlaps them
/// ([`Caps::unordered_streams`]) derives what must wait from the declared accesses ([`hazard`](crate::hazard)). Between streams there is no
/// order but that of waits.
///
/// # Values
/// A submission takes the next value of the stream's line once the driver accepted it. The value is complete when all of the submission
/// is over and the host may see it: bytes of downloads have arrived, time stamps are written, keeps and leases are given up. `completed()`
/// may lag; it is brought up by [`signal`](Timeline::signal), [`refresh`](Timeline::refresh) and
/// [`wait_host`](Timeline::wait_host), and at the latest every 64 submissions. So `refresh` must not take a device's signal for completion
/// while the host's part of it is outstanding.
///
/// # Waits
/// [`Op::Wait`] and [`Timeline::wait`] bind to a value, not to a stream, which may be gone. The backend sees to it that the value will
/// happen without further calls: what another stream of its own still batches is flushed first, before the waiter's own lock is taken.
/// Where streams share a native queue, a wait for a gate holds back its own stream and no other.
///
/// # Failure
/// A failed submission poisons the line from its value on: that one and all later ones fail with the first cause, do not run where that
/// can be helped, and complete all the same, so that nobody hangs. A stream that waits for a failed value is poisoned by it. Where the
/// driver leaves its signal out after an error, the backend makes up for it.
///
/// # Drop
/// The last lease never waits. What was submitted runs to its end (an open encoder is ended first), and points on the line stay good.
///
/// # Safety
/// - What [`Timeline`] wants holds for each submission: the value is complete only when the device, the host's part of it
///   and all that it was made to wait for are over.
/// - After [`Op::Wait`] was accepted, the line has learnt of the point, and what comes later is ordered after it.
/// - An operation touches no memory but what it names, and nothing after its value is complete.
pub unsafe trait Stream: Timeline + Any {
    /// Hands over operations as one submission and returns its value on the stream's line. Never waits for completion; may wait
    /// for room in a full queue. Concurrent calls are serialised by the stream's own lock; a submission is never torn apart. An empty
    /// one is a submission too.
    ///
    /// What `ops` refers to is copied or leased before the call returns; only memory stays the caller's concern. An upload may read its
    /// source at any time from the call to completion.
    ///
    /// An error means that nothing was submitted and no value was taken, except where the driver accepted a part: then the
    /// stream is poisoned.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; a backend that knows at the call that an awaited value has failed may answer with that cause
    /// (the stream is poisoned all the same), or take the submission and let it fail; `Unsupported` for an operation that this device cannot do, or a line that it cannot wait for; `DeviceLost`; the driver's own.
    ///
    /// # Safety
    /// - Pipelines, time stamps and graphs belong to this stream's device.
    /// - Bindings and addresses lie in memory that this device reaches, with the native word of their buffer, and stay valid until the
    ///   value completes. So does the memory of a graph that is launched.
    /// - Numbers and sizes of bindings and parameters are what the pipeline declares; grid, block and shared memory are within the limits.
    /// - Copies do not overlap themselves; fills are aligned to their pattern.
    /// - Host memory without a [`Keep`](crate::Keep) stays valid until then, and is not written meanwhile (uploads) or touched at all (downloads).
    /// - `access` of each binding is true.
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64>;

    /// Makes sure that all that was submitted is on its way to the device, except what a gate holds back. Does not block. With nothing
    /// pending it does nothing.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    fn flush(&self) -> Result<()>;

    /// Fails what was submitted and has not begun, if the backend can: it does not run any more, its values complete nevertheless, and
    /// `cause` poisons the stream. Says whether it can. Does not block.
    ///
    /// For callers who must have host memory back that pending work would touch, when [`wait_host`](Timeline::wait_host) gave up on a
    /// stream that did not fail. A backend whose waits never give up need not.
    fn cancel(&self, cause: Error) -> bool {
        let _ = cause;
        false
    }

    /// The driver's stream (or the queue that it shares with others), for code that is not a [`ForeignCall`](crate::ForeignCall); 0 where
    /// there is none. Constant; does not block. Work that is enqueued on it by hand has no value.
    fn native(&self) -> u64;

    /// The priority that the stream got, after clamping. Constant.
    fn priority(&self) -> i32 {
        0
    }

    /// Whether this stream records instead of running: it takes operations and gives no values that come to pass. Constant.
    fn is_recording(&self) -> bool {
        false
    }
}

impl Tagged for dyn Stream {
    type Tag = tags::Stream;
}

/// A timeline that the host signals; streams may wait for values that nobody has signalled yet.
///
/// Nothing is submitted to a gate: its [`signal`](Timeline::signal) and [`refresh`](Timeline::refresh) only read, and
/// [`wait`](Timeline::wait) is `Unsupported`. Its line was another's before: values go on from `submitted()`. Dropping it while streams
/// wait for it fails them, since nobody can signal it any more. Nobody's memory depends on what a gate says beyond what
/// [`Timeline`] vouches for, so implementing it is safe.
pub trait Gate: Timeline {
    /// Raises the value. Wakes who waits for it or less, in any order. Does not block; also from a host call.
    ///
    /// # Errors
    /// `InvalidArgument` unless the value grows; the cause after [`fail`](Self::fail).
    fn signal_host(&self, value: u64) -> Result<()>;

    /// Fails the gate: whoever waits for a value that was not signalled gets the error, now or later; streams that wait for one are poisoned
    /// and do not run what comes after. The first cause stays. Does not block.
    fn fail(&self, cause: Error);
}

impl Tagged for dyn Gate {
    type Tag = tags::Gate;
}

/// What changes in one node of a graph.
#[derive(Debug, Clone, Copy)]
pub struct NodePatch<'a> {
    /// The node's index in the plan.
    pub node: u32,
    /// New bindings of a dispatch, as many as before.
    pub bindings: Option<&'a [Binding]>,
    /// New parameters of a dispatch, of the same size.
    pub params: Option<&'a [u8]>,
    /// A new grid of a dispatch.
    pub grid: Option<[u32; 3]>,
}

/// A graph, ready to be launched by [`Op::Graph`].
///
/// # Safety
/// - A launch runs the operations of the plan, in an order that its dependencies allow, and touches no memory but theirs.
/// - [`native`](Self::native) is the word of this very exec, constant, and good as long as the exec is held.
pub unsafe trait GraphExec: Any + Send + Sync {
    /// How many nodes. Constant; does not block.
    fn nodes(&self) -> usize;

    /// Bytes of host and device memory that the exec holds beside its buffers, as far as known. Does not block.
    fn bytes(&self) -> u64;

    /// Changes nodes in place, for launches from then on. All patches are taken or none. May block on the driver.
    ///
    /// # Errors
    /// `TopologyChanged` when the driver cannot do it in place (the caller instantiates anew); `InvalidArgument` for a node that
    /// does not exist or is no dispatch.
    ///
    /// # Safety
    /// - No launch is in flight, and no other thread launches or updates meanwhile.
    /// - The plan's dependencies stay right, and the changed operations are as [`Stream::submit`] wants them at a launch.
    unsafe fn update(&self, patches: &[NodePatch<'_>]) -> Result<()>;

    /// The backend's object: the word by which its stream finds what an [`Op::Graph`] launches. A wrapper answers with the inner
    /// exec's word and is itself what the operation leases, so a stream must go by this word and never by a downcast of the lease.
    fn native(&self) -> u64;
}

impl Tagged for dyn GraphExec {
    type Tag = tags::Graph;
}

impl fmt::Debug for dyn GraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GraphExec({} nodes)", self.nodes())
    }
}

impl fmt::Debug for dyn Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.info())
    }
}

impl fmt::Debug for dyn Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.line())
    }
}

impl fmt::Debug for dyn Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gate({:?})", self.line())
    }
}
