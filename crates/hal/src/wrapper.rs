//! The common part of the wrappers: a backend around a backend. Its devices, streams and graphs
//! forward every call after a [`Layer`] has seen it.
//!
//! # Ownership
//! A wrapper keeps pools of its own payloads, so that it can lend `Lease<dyn Device>`, `Lease<dyn
//! Stream>` and `Lease<dyn GraphExec>`. A payload holds the inner lease and an [`Open`] (the inner
//! device and the layer's record of it), never a pool. So no pool lies inside a payload that the
//! pool's own entries keep alive. A payload ends with its last lease. The inner backend alone
//! decides whether a shutdown is allowed; for it the wrapper's leases are like any others.
//!
//! Pipelines, timestamps and host timelines are lent as the inner backend lends them.
//!
//! This module must not know what a layer checks.

use crate::backend::{Backend, Device, Former, HostTimeline, Stream, StreamDesc};
use crate::graph::{GraphExec, NodePatch};
use crate::id::{BackendKind, DeviceId};
use crate::info::{Description, DeviceInfo, MemoryInfo, MemoryKind};
use crate::kernel::{KernelDesc, Pipeline};
use crate::op::{Op, TimestampQuery};
use crate::partition::{Partition, PartitionSize};
use crate::plan::Plan;
use crate::sharing::Sharing;
use leasehold_alloc::{Allocator, Backing};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    DeviceHandle, Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource,
    Result, SlotPool, Tagged, Timeline, TimelineSource, Timepoint, tags,
};
use std::any::Any;
use std::fmt;
use std::time::Duration;

/// Hooks around the calls of a wrapper. The default of each hook does nothing.
pub(crate) trait Layer: Send + Sync + Sized + 'static {
    /// The layer's record of a device. The record outlives the device; a device that is opened
    /// again finds it.
    type Device: Send + Sync + 'static;
    /// The layer's record of a graph.
    type Graph: Send + Sync + 'static;
    /// The names of the wrapper's pools in reports: devices, streams, graphs.
    const POOLS: [&'static str; 3];

    /// Called after a device was opened.
    fn opened(&self, inner: &Lease<dyn Device>) -> Arc<Self::Device>;

    /// Called before an opened device is lent.
    fn ready(open: &Arc<Open<Self>>) {
        let _ = open;
    }

    /// Wraps every call except a submission.
    fn around<R>(
        what: &'static str,
        on: fmt::Arguments<'_>,
        call: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let _ = (what, on);
        call()
    }

    /// Makes a submission to `inner`.
    ///
    /// # Safety
    /// - As [`Stream::submit`].
    unsafe fn submit(open: &Open<Self>, inner: &dyn Stream, ops: &[Op<'_>]) -> Result<u64>;

    /// Called before a wait on the timeline of a stream.
    fn check_wait(open: &Open<Self>, timeline: &'static Timeline, on: Timepoint) -> Result<()> {
        let _ = (open, timeline, on);
        Ok(())
    }

    /// Called before a pipeline is made.
    fn check_kernel(open: &Open<Self>, desc: &KernelDesc<'_>) -> Result<()> {
        let _ = (open, desc);
        Ok(())
    }

    /// Called before two timepoints are compared.
    fn check_elapsed(
        open: &Open<Self>,
        start: &TimestampQuery,
        end: &TimestampQuery,
    ) -> Result<()> {
        let _ = (open, start, end);
        Ok(())
    }

    /// Called before a plan is instantiated.
    fn check_plan(open: &Open<Self>, plan: &Plan) -> Result<Self::Graph>;

    /// Called before a graph is updated.
    fn check_update(
        open: &Open<Self>,
        graph: &Self::Graph,
        patches: &[NodePatch<'_>],
    ) -> Result<()> {
        let _ = (open, graph, patches);
        Ok(())
    }

    /// Called after a graph was made, with the inner native word.
    fn graph_made(open: &Open<Self>, native: u64, graph: &Self::Graph) {
        let _ = (open, native, graph);
    }

    /// Called after a graph's last lease was dropped.
    fn graph_ended(open: &Open<Self>, native: u64) {
        let _ = (open, native);
    }

    /// Called after a graph was updated.
    fn updated(graph: &Self::Graph, patches: &[NodePatch<'_>]) {
        let _ = (graph, patches);
    }

    /// Called after an object was lent.
    fn lent(open: &Open<Self>, what: Lent<'_>) {
        let _ = (open, what);
    }

    /// Called after a stream's last lease was dropped.
    fn stream_ended(open: &Open<Self>, timeline: &'static Timeline) {
        let _ = (open, timeline);
    }
}

/// An object that a device lent.
pub(crate) enum Lent<'a> {
    Memory(MemoryKind),
    Stream(&'static Timeline),
    HostTimeline(&'static Timeline),
    Pipeline(&'a Lease<Pipeline>),
    TimestampQuery(&'a Lease<TimestampQuery>),
}

/// An opened device: the inner one, and the layer's record.
pub(crate) struct Open<L: Layer> {
    pub(crate) inner: Lease<dyn Device>,
    pub(crate) known: Arc<L::Device>,
}

/// The pools. Lent objects do not hold them, except devices.
struct Pools<L: Layer> {
    streams: SlotPool<Streams<L>>,
    graphs: SlotPool<Graphs<L>>,
}

/// A backend around `B`.
pub(crate) struct Wrapper<B, L: Layer> {
    pub(crate) inner: B,
    devices: PoolManager<Devices<L>, DeviceId>,
    /// The devices whose manager's lease must be dropped before the inner backend can shut down.
    handles: Mutex<Vec<DeviceHandle>>,
    pools: Arc<Pools<L>>,
}

impl<B: Backend, L: Layer> Wrapper<B, L> {
    pub(crate) fn new(inner: B, layer: L) -> Result<Self> {
        let pools = Arc::new(Pools {
            streams: SlotPool::new(Streams(PhantomLayer::new()), PoolConfig::default())?,
            graphs: SlotPool::new(Graphs(PhantomLayer::new()), PoolConfig::default())?,
        });
        let devices = PoolManager::new();
        devices.configure(Devices { layer, pools: pools.clone() }, PoolConfig::default())?;
        Ok(Self { inner, devices, handles: Mutex::new(Vec::new()), pools })
    }
}

// SAFETY: a device is the inner backend's device of that name, wrapped. Its handle is kept, so one
// name stays one resource.
unsafe impl<B: Backend, L: Layer> Backend for Wrapper<B, L> {
    fn kind(&self) -> BackendKind {
        self.inner.kind()
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        L::around("devices", format_args!("{}", self.inner.kind()), || self.inner.devices())
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        L::around("open", format_args!("{device}"), || {
            let backend: &dyn Backend = &self.inner;
            let lease = self.devices.get_or_create(&device, &(backend, device))?;
            let mut handles = self.handles.lock();
            if !handles.contains(&lease.handle()) {
                handles.push(lease.handle());
            }
            drop(handles);
            Ok(Lease::map(lease, |d| d as &dyn Device))
        })
    }

    fn shutdown(&self) -> Result<()> {
        L::around("shutdown", format_args!("{}", self.inner.kind()), || {
            let handles = std::mem::take(&mut *self.handles.lock());
            for handle in handles {
                // A device with other holders keeps its slot and its key; a device without them
                // ends here. A stale handle means that the device has ended already.
                let _ = self.devices.release(handle);
            }
            self.inner.shutdown()?;
            self.devices.shutdown()?;
            self.pools.streams.shutdown()?;
            self.pools.graphs.shutdown()
        })
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.inner.pools(report);
        report(L::POOLS[0], self.devices.stats());
        report(L::POOLS[1], self.pools.streams.stats());
        report(L::POOLS[2], self.pools.graphs.stats());
    }
}

/// Marks a type of the layer without holding one.
struct PhantomLayer<L>(std::marker::PhantomData<fn() -> L>);

impl<L> PhantomLayer<L> {
    fn new() -> Self {
        Self(std::marker::PhantomData)
    }
}

struct Devices<L: Layer> {
    layer: L,
    pools: Arc<Pools<L>>,
}

impl<L: Layer> Resource for Devices<L> {
    type Payload = WrappedDevice<L>;
    type Request<'a> = (&'a dyn Backend, DeviceId);
    const NAME: &'static str = "wrapped device";

    fn create(&self, _: DeviceHandle, (backend, id): &Self::Request<'_>) -> Result<Self::Payload> {
        let inner = backend.open(*id)?;
        let known = self.layer.opened(&inner);
        let open = Arc::new(Open { inner, known });
        L::ready(&open);
        Ok(WrappedDevice { open, pools: self.pools.clone() })
    }

    fn recycle(&self, _: &mut Self::Payload) -> Recycle {
        Recycle::Destroy
    }
}

struct Streams<L: Layer>(PhantomLayer<L>);

impl<L: Layer> Resource for Streams<L> {
    type Payload = WrappedStream<L>;
    type Request<'a> = (&'a Arc<Open<L>>, &'a StreamDesc);
    const NAME: &'static str = "wrapped stream";

    fn create(
        &self,
        _: Handle<tags::Stream>,
        (open, desc): &Self::Request<'_>,
    ) -> Result<Self::Payload> {
        let inner = open.inner.stream(desc)?;
        let timeline = inner.timeline();
        L::lent(open, Lent::Stream(timeline));
        Ok(WrappedStream { inner, timeline, open: (*open).clone() })
    }

    fn recycle(&self, _: &mut Self::Payload) -> Recycle {
        Recycle::Destroy
    }

    fn destroy(&self, payload: Self::Payload) {
        // The layer's mark first: after the drop of the inner lease another stream may get the
        // timeline.
        L::stream_ended(&payload.open, payload.timeline);
        drop(payload);
    }
}

struct Graphs<L: Layer>(PhantomLayer<L>);

impl<L: Layer> Resource for Graphs<L> {
    type Payload = WrappedGraph<L>;
    type Request<'a> = &'a Mutex<Option<WrappedGraph<L>>>;
    const NAME: &'static str = "wrapped graph";

    fn create(&self, _: Handle<tags::Graph>, made: &Self::Request<'_>) -> Result<Self::Payload> {
        made.lock().take().ok_or_else(|| leasehold_core::Error::state("a graph was wrapped twice"))
    }

    fn recycle(&self, _: &mut Self::Payload) -> Recycle {
        Recycle::Destroy
    }

    fn destroy(&self, payload: Self::Payload) {
        L::graph_ended(&payload.open, payload.inner.native());
        drop(payload);
    }
}

struct WrappedDevice<L: Layer> {
    open: Arc<Open<L>>,
    pools: Arc<Pools<L>>,
}

impl<L: Layer> Tagged for WrappedDevice<L> {
    type Tag = tags::Device;
}

impl<L: Layer> WrappedDevice<L> {
    fn inner(&self) -> &dyn Device {
        &*self.open.inner
    }

    fn around<R>(
        &self,
        what: &'static str,
        call: impl FnOnce(&dyn Device) -> Result<R>,
    ) -> Result<R> {
        L::around(what, format_args!("{}", self.inner().info().id), || call(self.inner()))
    }
}

// SAFETY: every answer is the inner device's. A layer may refuse a call but not change it.
unsafe impl<L: Layer> Device for WrappedDevice<L> {
    fn description(&self) -> &Description {
        self.inner().description()
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.around("memory_info", |d| d.memory_info())
    }

    fn make_current(&self) -> Result<()> {
        self.around("make_current", |d| d.make_current())
    }

    fn current(&self) -> Result<Former> {
        self.around("current", |d| d.current())
    }

    fn fail(&self, point: Timepoint, cause: Error) -> bool {
        self.inner().fail(point, cause)
    }

    fn state(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.inner().state()
    }

    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        let allocator = self.inner().memory(kind)?;
        L::lent(&self.open, Lent::Memory(kind));
        Ok(allocator)
    }

    fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        self.around("backing", |d| d.backing(kind))
    }

    fn sharing(&self) -> Result<Arc<dyn Sharing>> {
        self.around("sharing", |d| d.sharing())
    }

    fn stream(&self, desc: &StreamDesc) -> Result<Lease<dyn Stream>> {
        self.around("stream", |_| {
            let lease = self.pools.streams.acquire(&(&self.open, desc))?;
            Ok(Lease::map(lease, |s| s as &dyn Stream))
        })
    }

    fn partition(&self, sizes: &[PartitionSize]) -> Result<Vec<Lease<Partition>>> {
        self.around("partition", |d| d.partition(sizes))
    }

    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        self.around("pipeline", |d| {
            L::check_kernel(&self.open, desc)?;
            let lease = d.pipeline(desc)?;
            L::lent(&self.open, Lent::Pipeline(&lease));
            Ok(lease)
        })
    }

    fn resident_blocks(&self, pipeline: &Pipeline, threads: u32, shared: u32) -> Result<u64> {
        self.around("resident_blocks", |d| d.resident_blocks(pipeline, threads, shared))
    }

    fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        self.around("timestamp", |d| {
            let lease = d.timestamp()?;
            L::lent(&self.open, Lent::TimestampQuery(&lease));
            Ok(lease)
        })
    }

    unsafe fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration> {
        self.around("elapsed", |d| {
            L::check_elapsed(&self.open, start, end)?;
            // SAFETY: timepoints are lent as the inner device made them, and the caller vouches for
            // their origin.
            unsafe { d.elapsed(start, end) }
        })
    }

    unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<dyn GraphExec>> {
        self.around("instantiate", |d| {
            let known = L::check_plan(&self.open, &plan)?;
            // SAFETY: the plan is the caller's, unchanged. Its pipelines and timepoints are the
            // inner device's, as this wrapper lends them.
            let inner = unsafe { d.instantiate(plan) }?;
            L::graph_made(&self.open, inner.native(), &known);
            let made = Mutex::new(Some(WrappedGraph { inner, known, open: self.open.clone() }));
            Ok(Lease::map(self.pools.graphs.acquire(&&made)?, |g| g as &dyn GraphExec))
        })
    }

    fn host_timeline(&self) -> Result<Lease<dyn HostTimeline>> {
        self.around("host timeline", |d| {
            let lease = d.host_timeline()?;
            L::lent(&self.open, Lent::HostTimeline(lease.timeline()));
            Ok(lease)
        })
    }

    fn peer_access(&self, peer: DeviceId) -> Result<bool> {
        self.around("peer_access", |d| d.peer_access(peer))
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        self.around("synchronize", |d| d.synchronize(timeout))
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.inner().pools(report);
    }
}

struct WrappedStream<L: Layer> {
    inner: Lease<dyn Stream>,
    timeline: &'static Timeline,
    open: Arc<Open<L>>,
}

impl<L: Layer> Tagged for WrappedStream<L> {
    type Tag = tags::Stream;
}

impl<L: Layer> WrappedStream<L> {
    fn around<R>(
        &self,
        what: &'static str,
        call: impl FnOnce(&dyn Stream) -> Result<R>,
    ) -> Result<R> {
        L::around(what, format_args!("{:?}", self.timeline), || call(&*self.inner))
    }
}

// SAFETY: the timeline and all statements about it are the inner stream's.
unsafe impl<L: Layer> TimelineSource for WrappedStream<L> {
    fn timeline(&self) -> &'static Timeline {
        self.timeline
    }

    fn signal(&self) -> Result<u64> {
        self.around("signal", |s| s.signal())
    }

    fn refresh(&self) -> Result<u64> {
        self.around("refresh", |s| s.refresh())
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        self.around("wait", |s| {
            L::check_wait(&self.open, self.timeline, on)?;
            s.wait(on)
        })
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.around("wait_host", |s| s.wait_host(value, timeout))
    }
}

// SAFETY: a layer passes the caller's operations to the inner stream unchanged, or refuses them
// all.
unsafe impl<L: Layer> Stream for WrappedStream<L> {
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        // SAFETY: the caller's promises are those of the inner stream. A graph that this wrapper
        // lent returns the inner native word.
        unsafe { L::submit(&self.open, &*self.inner, ops) }
    }

    fn flush(&self) -> Result<()> {
        self.around("flush", |s| s.flush())
    }

    fn cancel(&self, cause: Error) -> bool {
        self.inner.cancel(cause)
    }

    fn native(&self) -> u64 {
        self.inner.native()
    }

    fn priority(&self) -> i32 {
        self.inner.priority()
    }

    fn partition(&self) -> Option<&Lease<Partition>> {
        self.inner.partition()
    }

    fn is_recording(&self) -> bool {
        self.inner.is_recording()
    }
}

/// A graph, and the layer's record of it.
struct WrappedGraph<L: Layer> {
    inner: Lease<dyn GraphExec>,
    known: L::Graph,
    open: Arc<Open<L>>,
}

impl<L: Layer> Tagged for WrappedGraph<L> {
    type Tag = tags::Graph;
}

// SAFETY: the graph, its word and the operations of a launch are the inner graph's.
unsafe impl<L: Layer> GraphExec for WrappedGraph<L> {
    fn nodes(&self) -> usize {
        self.inner.nodes()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    unsafe fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        L::around(
            "update",
            format_args!("{} of {} nodes", patches.len(), self.inner.nodes()),
            || {
                L::check_update(&self.open, &self.known, patches)?;
                // SAFETY: the patches are the caller's, unchanged, for the one graph that this
                // object wraps.
                unsafe { self.inner.update(patches) }?;
                L::updated(&self.known, patches);
                Ok(())
            },
        )
    }

    fn native(&self) -> u64 {
        self.inner.native()
    }
}
