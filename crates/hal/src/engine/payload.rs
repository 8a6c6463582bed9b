//! Streams and graphs as payloads of pools, and their implementation of `hal`.
//!
//! This module must not know what streams run.

use crate::engine::driver::{DriverStream, Instantiate};
use crate::engine::partitions::StreamKey;
use crate::engine::state::{Engine, StreamCore};
use crate::engine::stream_pool::{PooledStream, StreamPool};
use crate::engine::waits;
use crate::{GraphExec, NodePatch, Op, Partition, Plan, Stream};
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result, Tagged,
    Timeline, TimelineSource, Timepoint, tags,
};
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomPinned;
use std::time::Duration;

/// A stream. The execution state is private: a driver's signal that another caller gives would
/// publish values whose work still runs.
pub struct StreamState<N: DriverStream> {
    core: Arc<StreamCore<N>>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl<N: DriverStream> StreamState<N> {
    /// Makes a stream, for a pool. May block on the driver.
    ///
    /// # Errors
    /// As [`Engine::stream`].
    pub fn new(engine: &Arc<Engine<N>>, key: &StreamKey) -> Result<Self> {
        Ok(Self { core: engine.stream(key)?, _place: PhantomPinned })
    }

    /// The stream's timeline.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.core.timeline()
    }
}

impl<N: DriverStream> Tagged for StreamState<N> {
    type Tag = tags::Stream;
}

impl<N: DriverStream> fmt::Debug for StreamState<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.fmt(f)
    }
}

impl<N: DriverStream> PooledStream for StreamState<N> {
    type Key = StreamKey;

    fn key(&self) -> StreamKey {
        let partition = self.core.partition().cloned();
        StreamKey { priority: self.core.priority(), partition }
    }

    fn timeline(&self) -> &'static Timeline {
        Self::timeline(self)
    }

    fn is_sound(&self) -> bool {
        self.core.is_sound()
    }

    fn let_go(&self) -> bool {
        self.core.let_go()
    }
}

// SAFETY: a value is published after the driver's signal behind the submission and the host's part
// of it, or after the loss of the device.
unsafe impl<N: DriverStream> TimelineSource for StreamState<N> {
    fn timeline(&self) -> &'static Timeline {
        Self::timeline(self)
    }

    fn signal(&self) -> Result<u64> {
        self.core.signal()
    }

    fn refresh(&self) -> Result<u64> {
        self.core.refresh()
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        waits::wait(self, on)
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.core.wait_host(value, timeout)
    }
}

// SAFETY: operations go to one stream of the driver in order, or are held back in order. A value is
// taken after the driver accepted the operations.
unsafe impl<N: DriverStream> Stream for StreamState<N> {
    #[inline]
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        // SAFETY: the caller vouches for the operations, by the trait's contract.
        unsafe { self.core.submit(ops) }
    }

    fn flush(&self) -> Result<()> {
        self.core.flush()
    }

    fn native(&self) -> u64 {
        self.core.native().handle()
    }

    fn priority(&self) -> i32 {
        N::priority_of(self.core.priority())
    }

    fn partition(&self) -> Option<&Lease<Partition>> {
        self.core.partition()
    }
}

impl<N: DriverStream> Engine<N> {
    /// The streams that exist, if no stream of their pool has a holder. Their work is the work that
    /// dropped streams left behind.
    pub fn left_behind(&self, pool: &StreamPool<StreamState<N>>) -> Vec<Arc<StreamCore<N>>> {
        if pool.in_use() == 0 { self.streams() } else { Vec::new() }
    }
}

/// An instantiated plan.
pub struct GraphState<N: DriverStream> {
    graph: Box<N::Graph>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl<N: DriverStream> Tagged for GraphState<N> {
    type Tag = tags::Graph;
}

impl<N: DriverStream> fmt::Debug for GraphState<N>
where
    N::Graph: fmt::Debug,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.graph.fmt(f)
    }
}

/// The instantiated plan of an exec of this backend.
///
/// # Safety
/// - The exec was instantiated by a [`GraphManager<N>`].
#[must_use]
pub unsafe fn graph_of<N: DriverStream>(exec: &Lease<dyn GraphExec>) -> &N::Graph {
    // SAFETY: the native value of these execs is the address of their instantiated plan, which
    // lives as long as the lease.
    unsafe { &*(exec.native() as *const N::Graph) }
}

// SAFETY: a launch runs the plan's segments by their dependencies. The native value is the address
// of the instantiated plan, which this state keeps.
unsafe impl<N: DriverStream> GraphExec for GraphState<N>
where
    N::Graph: Instantiate<Device = N::Device>,
{
    fn nodes(&self) -> usize {
        self.graph.nodes()
    }

    fn bytes(&self) -> u64 {
        self.graph.bytes()
    }

    unsafe fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        self.graph.update(patches)
    }

    fn native(&self) -> u64 {
        std::ptr::from_ref(&*self.graph) as u64
    }
}

struct Graphs<N: DriverStream>(Arc<Engine<N>>);

impl<N: DriverStream> Resource for Graphs<N>
where
    N::Graph: Instantiate<Device = N::Device>,
{
    type Payload = GraphState<N>;
    type Request<'a> = Cell<Option<Plan>>;
    const NAME: &'static str = "graph";

    fn create(&self, _: Handle<tags::Graph>, plan: &Cell<Option<Plan>>) -> Result<GraphState<N>> {
        let plan = plan.take().ok_or_else(|| Error::state("a plan is instantiated once"))?;
        let graph = Box::new(N::Graph::instantiate(self.0.device(), plan)?);
        Ok(GraphState { graph, _place: PhantomPinned })
    }

    fn recycle(&self, _: &mut GraphState<N>) -> Recycle {
        Recycle::Destroy
    }
}

/// Owns the graphs of a device or context.
pub struct GraphManager<N: DriverStream>
where
    N::Graph: Instantiate<Device = N::Device>,
{
    manager: PoolManager<Graphs<N>>,
    engine: Arc<Engine<N>>,
}

impl<N: DriverStream> GraphManager<N>
where
    N::Graph: Instantiate<Device = N::Device>,
{
    /// A manager without graphs.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(engine: &Arc<Engine<N>>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Graphs(engine.clone()), PoolConfig::default())?;
        Ok(Self { manager, engine: engine.clone() })
    }

    /// Instantiates a plan. May block on the driver.
    ///
    /// # Errors
    /// As [`Instantiate::instantiate`].
    ///
    /// # Safety
    /// - As `hal::Device::instantiate`.
    pub unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<GraphState<N>>> {
        self.manager.acquire(&Cell::new(Some(plan))).map_err(|e| self.engine.settle(e))
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the manager down.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}

impl<N: DriverStream> fmt::Debug for GraphManager<N>
where
    N::Graph: Instantiate<Device = N::Device>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GraphManager").field(&self.manager.stats()).finish()
    }
}
