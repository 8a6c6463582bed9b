//! The traits that a backend implements.
//!
//! Rules for all of them: any thread may call; nothing panics on a caller's mistake; no manager, pool or allocator lock is held
//! across a driver call; a stream's own submission lock is a leaf.

use crate::id::{BackendKind, DeviceId};
use crate::info::{Caps, DeviceInfo, Limits, MemoryInfo, MemoryKind};
use crate::kernel::{Binding, KernelDesc, Pipeline};
use crate::op::{Op, Timestamp};
use crate::plan::Plan;
use leasehold_alloc::Allocator;
use leasehold_core::{Error, Lease, PoolStats, Result, Tagged, Timeline, tags};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A kind of device and its driver.
pub trait Backend: Send + Sync {
    /// Which one.
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

    /// Ends the backend's managers; a second call is `Ok`.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then.
    fn shutdown(&self) -> Result<()>;

    /// The statistics of the backend's own pools.
    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        let _ = report;
    }
}

impl<B: Backend + ?Sized> Backend for Arc<B> {
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

/// A device that was opened.
pub trait Device: Any + Send + Sync {
    /// What it is. Found out once, when it was opened.
    fn info(&self) -> &DeviceInfo;

    /// What it can do.
    fn caps(&self) -> Caps;

    /// How much of everything.
    fn limits(&self) -> &Limits;

    /// Its memory now. May ask the driver.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// Makes the device the driver's current one on this thread, where the driver has such a notion. Cheap when it is already.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    fn make_current(&self) -> Result<()>;

    /// The allocator of a kind of memory. Fetched once; calls on it are direct.
    ///
    /// # Errors
    /// `Unsupported` for a kind that the device has not got; what making its backing says, the first time.
    fn memory(&self, kind: MemoryKind) -> Result<&Allocator>;

    /// A stream. May block on the driver when none is idle.
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

    /// A time stamp to be written by [`Op::Stamp`].
    ///
    /// # Errors
    /// `Unsupported`; the driver's own.
    fn timestamp(&self) -> Result<Lease<Timestamp>>;

    /// The time between two stamps that were written. Does not block: both must be complete.
    ///
    /// # Errors
    /// `InvalidState` for a stamp that was not written.
    fn elapsed(&self, start: &Timestamp, end: &Timestamp) -> Result<Duration>;

    /// Makes a plan ready to be launched. Everything that launching needs is allocated here.
    ///
    /// # Errors
    /// `Unsupported` for operations that graphs cannot hold; `OutOfMemory`; the driver's own.
    fn instantiate(&self, plan: Plan) -> Result<Lease<dyn GraphExec>>;

    /// A timeline that the host signals.
    ///
    /// # Errors
    /// `Unsupported` unless [`Caps::gates`].
    fn gate(&self) -> Result<Lease<dyn Gate>> {
        Err(Error::Unsupported("this device has no host-signalled timelines".into()))
    }

    /// Whether this device can reach the memory of `peer`, after trying to enable it. Enabling twice is fine.
    ///
    /// # Errors
    /// `NotFound` for a device of another backend; the driver's own.
    fn peer_access(&self, peer: DeviceId) -> Result<bool>;

    /// Blocks until all work of all streams is over. `None` waits for ever.
    ///
    /// # Errors
    /// `Timeout`; the first stream's cause.
    fn synchronize(&self, timeout: Option<Duration>) -> Result<()>;

    /// The statistics of the device's pools.
    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats));
}

impl Tagged for dyn Device {
    type Tag = tags::Device;
}

/// An ordered queue of work on a device.
pub trait Stream: Timeline + Any {
    /// Hands over operations as one submission and returns its value on the stream's line. Never waits for completion; may wait
    /// for room in a full queue. Concurrent calls are serialised by the stream's own lock; a submission is never torn apart.
    ///
    /// An error means that nothing was submitted and no value was taken, except where the driver accepted a part: then the
    /// stream is poisoned.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `Unsupported` for an operation that this device cannot do; `DeviceLost`; the driver's own.
    ///
    /// # Safety
    /// - Pipelines, time stamps and graphs belong to this stream's device.
    /// - Bindings and addresses lie in memory that this device reaches, and stay valid until the value completes.
    /// - Host memory without a [`Keep`](crate::Keep) stays valid until then, and is not written meanwhile (uploads) or touched at all (downloads).
    /// - `access` of each binding is true.
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64>;

    /// Makes sure that all that was submitted is on its way to the device. Does not block.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    fn flush(&self) -> Result<()>;

    /// The driver's stream, for libraries that take one; 0 where there is none.
    fn native(&self) -> u64;

    /// The priority that the stream got.
    fn priority(&self) -> i32 {
        0
    }

    /// Whether this stream records instead of running.
    fn is_recording(&self) -> bool {
        false
    }
}

impl Tagged for dyn Stream {
    type Tag = tags::Stream;
}

/// A timeline that the host signals; streams may wait for values that nobody has signalled yet.
pub trait Gate: Timeline {
    /// Raises the value. Wakes who waits for it or less.
    ///
    /// # Errors
    /// `InvalidArgument` unless the value grows; the cause after [`fail`](Self::fail).
    fn signal_host(&self, value: u64) -> Result<()>;

    /// Fails the gate: whoever waits for a value that was not signalled gets the error. The first cause stays.
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
pub trait GraphExec: Any + Send + Sync {
    /// How many nodes.
    fn nodes(&self) -> usize;

    /// Bytes that the exec holds beside the plan, as far as known.
    fn bytes(&self) -> u64;

    /// Changes nodes in place. The caller makes sure that no launch is in flight and that the plan's dependencies stay right.
    ///
    /// # Errors
    /// `TopologyChanged` when the driver cannot do it in place (the caller instantiates anew); `InvalidArgument` for a node that
    /// does not exist or is no dispatch.
    fn update(&self, patches: &[NodePatch<'_>]) -> Result<()>;

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
