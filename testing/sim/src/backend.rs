//! The backend: implements `hal`'s traits with leases of the managers' states.
//!
//! This module must hold no state beside the device manager.

use crate::allocator;
use crate::machine::{FaultScope, Machine, MachineConfig, Monitor};
use crate::manager::device::{Common, DeviceManager, DeviceState};
use crate::manager::graph::GraphState;
use crate::manager::stream::StreamState;
use leasehold_alloc::{Allocator, Backing};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, PoolStats, Result, Timeline, TimelineSource, Timepoint};
use leasehold_hal::backend::no_partitions;
use leasehold_hal::engine::partitions::StreamKey;
use leasehold_hal::engine::waits::{self, Awaited, synchronize};
use leasehold_hal::{
    Backend, BackendKind, Caps, Description, Device, DeviceId, DeviceInfo, GraphExec, HostTimeline,
    KernelDesc, Limits, MemoryInfo, MemoryKind, NodePatch, Op, Partition, PartitionSize, Pipeline,
    Plan, Sharing, Stream, StreamDesc, TimestampQuery,
};
use std::any::Any;
use std::time::Duration;

/// The maximum number of streams of a device.
const STREAMS: u32 = 256;

/// The devices of a [`Machine`] as a backend: `sim:0`, `sim:1`, ….
///
/// The backend has no thread. Work makes progress while a thread waits or queries, when a host
/// timeline is signalled, and when a stream is dropped. An operation runs on the thread that does
/// so.
///
/// ```
/// use leasehold_hal::{Backend, DeviceId, StreamDesc};
/// use leasehold_sim::{MachineConfig, SimBackend};
/// let backend = SimBackend::new(MachineConfig::seed(7))?;
/// let device = backend.open("sim:0".parse()?)?;
/// let stream = device.stream(&StreamDesc::default())?;
/// // SAFETY: nothing is submitted.
/// let value = unsafe { stream.submit(&[]) }?;
/// stream.wait_host(value, None)?;
/// # drop((stream, device));
/// assert!(backend.machine().take_reports().is_empty());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug)]
pub struct SimBackend {
    machine: Machine,
    devices: DeviceManager,
}

impl SimBackend {
    /// A backend over its own machine, on which a kernel's fault ends only the kernel's stream.
    ///
    /// # Errors
    /// As [`Machine::new`]; `OutOfMemory` for the pools.
    pub fn new(config: MachineConfig) -> Result<Self> {
        // SAFETY: nothing is changed.
        unsafe { Self::with_description(config, |_, _| {}) }
    }

    /// As [`new`](Self::new), with devices whose capabilities and limits `describe` changes. Code
    /// above then sees a lesser device. The machine does what it always does.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// # Safety
    /// - `describe` adds no capability, and makes no limit looser.
    pub unsafe fn with_description(
        config: MachineConfig,
        describe: fn(&mut Caps, &mut Limits),
    ) -> Result<Self> {
        let machine = Machine::new(config.fault_scope(FaultScope::Queue))?;
        Ok(Self { devices: DeviceManager::new(machine.clone(), STREAMS, describe)?, machine })
    }

    /// The monitor of the machine: reports, steps and failures on demand.
    pub fn machine(&self) -> &Monitor {
        &self.machine
    }

    /// The devices.
    pub fn devices(&self) -> &DeviceManager {
        &self.devices
    }
}

// SAFETY: the store has one device for each ordinal, made with that ordinal.
unsafe impl Backend for SimBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Sim
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(self.devices.describe())
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        let lease = self.devices.open(device)?;
        Ok(Lease::map(lease, |d| d as &dyn Device))
    }

    fn shutdown(&self) -> Result<()> {
        self.devices.shutdown()
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("device", self.devices.stats());
    }
}

// SAFETY: the machine's memory is its own mapping. Streams, pipelines, timepoints and graphs are
// made in this machine for this device.
unsafe impl Device for DeviceState {
    fn description(&self) -> &Description {
        &self.description
    }

    fn state(&self) -> Option<&(dyn Any + Send + Sync)> {
        Some(self)
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        Self::pools(self, report);
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let (used, total) = self.machine().device_memory(self.id().ordinal)?;
        Ok(MemoryInfo { total, free: total - used })
    }

    fn make_current(&self) -> Result<()> {
        self.machine().device_status(self.id().ordinal)
    }

    fn fail(&self, point: Timepoint, cause: Error) -> bool {
        self.common.fail(point, cause)
    }

    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        allocator::of(self, kind)
    }

    fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        allocator::backing(self, kind)
    }

    fn sharing(&self) -> Result<Arc<dyn Sharing>> {
        Ok(allocator::shareable::of(self))
    }

    /// The device has one priority, to which every priority is clamped.
    fn stream(&self, desc: &StreamDesc) -> Result<Lease<dyn Stream>> {
        self.partitions.check(desc)?;
        let key = StreamKey { priority: 0, partition: desc.partition.clone() };
        Ok(Lease::map(self.streams.acquire(key)?, |s| s as &dyn Stream))
    }

    fn partition(&self, sizes: &[PartitionSize]) -> Result<Vec<Lease<Partition>>> {
        if !self.caps().partitions {
            return Err(no_partitions(self.id()));
        }
        self.streams.collect();
        let units = self.description.info.units;
        self.partitions.divide(sizes, units, || self.common.divide(self.id(), sizes, units))
    }

    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        self.pipelines.get_or_create(desc, &())
    }

    fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        self.events.acquire()
    }

    unsafe fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration> {
        self.events.elapsed(start, end)
    }

    unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<dyn GraphExec>> {
        // SAFETY: the caller vouches for the plan, by the trait's contract.
        let graph = unsafe { self.graphs.instantiate(plan) }?;
        Ok(Lease::map(graph, |g| g as &dyn GraphExec))
    }

    fn host_timeline(&self) -> Result<Lease<dyn HostTimeline>> {
        Ok(Lease::map(self.host_timelines.acquire()?, |g| g as &dyn HostTimeline))
    }

    fn peer_access(&self, peer: DeviceId) -> Result<bool> {
        if peer.backend != BackendKind::Sim {
            return Err(Error::NotFound(format!("{peer}: {} has no such peer", self.id()).into()));
        }
        self.common.machine.enable_peer(self.id().ordinal, peer.ordinal)?;
        Ok(true)
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        let timelines = self.streams.timelines().into_iter();
        let streams = timelines.map(|timeline| AwaitedTimeline { common: &self.common, timeline });
        synchronize(&self.streams, streams, timeout)
    }
}

/// A timeline that a waiting thread's steps advance.
struct AwaitedTimeline<'a> {
    common: &'a Common,
    timeline: &'static Timeline,
}

impl Awaited for AwaitedTimeline<'_> {
    fn timeline(&self) -> &'static Timeline {
        self.timeline
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.common.await_timeline(self.timeline, value, timeout)
    }

    fn refresh(&self) -> Result<u64> {
        let over = || self.timeline.is_idle();
        // The timeline shows the outcome.
        let _ = self.common.step_until(Some(Duration::ZERO), &over);
        Ok(self.timeline.completed())
    }
}

// SAFETY: the queue's own command after the submission publishes a value, or the loss of the
// device, which then runs nothing.
unsafe impl TimelineSource for StreamState {
    fn timeline(&self) -> &'static Timeline {
        StreamState::timeline(self)
    }

    /// Runs all work that can run, because a later query is not certain.
    fn signal(&self) -> Result<u64> {
        self.common().notice_loss();
        waits::healthy(StreamState::timeline(self))?;
        let value = StreamState::timeline(self).submitted();
        self.common().go_on();
        Ok(value)
    }

    /// Runs a few steps.
    fn refresh(&self) -> Result<u64> {
        self.common().machine.poll();
        self.common().notice_loss();
        Ok(StreamState::timeline(self).completed())
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        waits::wait(self, on)
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        let timeline = StreamState::timeline(self);
        if timeline.check(value)? {
            return Ok(());
        }
        timeline.check_caller(value)?;
        self.common().await_timeline(timeline, value, timeout)
    }
}

// SAFETY: a submission becomes commands of one queue in order, followed by the completion. Waits
// are commands too.
unsafe impl Stream for StreamState {
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        // SAFETY: the caller vouches for the operations, by the trait's contract.
        unsafe { StreamState::submit(self, ops) }
    }

    /// All submitted work has reached the machine already.
    fn flush(&self) -> Result<()> {
        self.common().machine.device_status(self.common().device)
    }

    /// A wait gives up if nothing can run any more. The call removes the remaining work from the
    /// queue.
    fn cancel(&self, cause: Error) -> bool {
        self.common().machine.queue_fail(self.queue, cause).is_ok()
    }

    fn partition(&self) -> Option<&Lease<Partition>> {
        StreamState::partition(self)
    }

    /// The number of the machine's queue.
    fn native(&self) -> u64 {
        self.queue.0
    }
}

// SAFETY: the machine's graph runs the plan's nodes by their dependencies. The word is the graph's
// id, which this state keeps.
unsafe impl GraphExec for GraphState {
    fn nodes(&self) -> usize {
        GraphState::nodes(self)
    }

    fn bytes(&self) -> u64 {
        GraphState::bytes(self)
    }

    unsafe fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        GraphState::update(self, patches)
    }

    fn native(&self) -> u64 {
        self.exec.0
    }
}
