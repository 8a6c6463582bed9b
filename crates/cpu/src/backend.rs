//! The implementation of `hal`: leases of the managers' states as objects of the traits.
//!
//! This module must hold no state beside the execution manager.

use crate::allocator;
use crate::config::CpuConfig;
use crate::manager::device::DeviceState;
use crate::manager::execution::CpuExecutionManager;
use crate::manager::graph::GraphState;
use crate::manager::stream::StreamState;
use leasehold_alloc::{Allocator, Backing};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, PoolStats, Result, Timeline, TimelineSource, Timepoint};
use leasehold_hal::engine::partitions;
use leasehold_hal::engine::waits::{self, Awaited, synchronize};
use leasehold_hal::{
    Backend, BackendKind, Description, Device, DeviceId, DeviceInfo, GraphExec, HostTimeline,
    KernelDesc, MemoryInfo, MemoryKind, NodePatch, Op, Pipeline, Plan, Sharing, Stream, StreamDesc,
    TimestampQuery,
};
use std::any::Any;
use std::time::Duration;

/// The host's processors as a backend with one device, `cpu:0`.
///
/// Dropping the backend ends idle threads. Leases may outlive the backend.
#[derive(Debug)]
pub struct CpuBackend {
    manager: CpuExecutionManager,
}

impl Default for CpuBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl CpuBackend {
    /// A backend with the default configuration. The call reads the machine's properties, and
    /// starts no thread.
    #[must_use]
    pub fn new() -> Self {
        let manager = CpuExecutionManager::new();
        if let Err(error) = manager.configure(CpuConfig::default()) {
            // This fails only without host memory. Later calls report that the manager is not
            // configured.
            tracing::error!(%error, "the CPU backend could not be configured");
        }
        Self { manager }
    }

    /// A backend with this configuration.
    ///
    /// # Errors
    /// As [`CpuConfig::validate`].
    pub fn with_config(config: CpuConfig) -> Result<Self> {
        let manager = CpuExecutionManager::new();
        manager.configure(config)?;
        Ok(Self { manager })
    }

    /// The managers.
    pub fn manager(&self) -> &CpuExecutionManager {
        &self.manager
    }
}

// SAFETY: a store gives each ordinal one device, made with that ordinal.
unsafe impl Backend for CpuBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Cpu
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        self.manager.devices().describe()
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        let lease = self.manager.devices().open(device)?;
        Ok(Lease::map(lease, |d| d as &dyn Device))
    }

    fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("device", self.manager.devices().stats());
    }
}

// SAFETY: memory is the process's own, committed before it is lent. The device made all resources
// that it lends.
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
        Ok(leasehold_hal::engine::host_memory::info())
    }

    fn make_current(&self) -> Result<()> {
        Ok(())
    }

    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        match kind {
            MemoryKind::Device => allocator::device::of(self),
            MemoryKind::Pinned => allocator::pinned_host::of(self),
            other => Err(Error::Unsupported(format!("{}: no {other:?} memory", self.id()).into())),
        }
    }

    fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        match kind {
            MemoryKind::Device | MemoryKind::Pinned => {
                Ok(Box::new(allocator::device::backing(self)))
            }
            other => Err(Error::Unsupported(format!("{}: no {other:?} memory", self.id()).into())),
        }
    }

    fn sharing(&self) -> Result<Arc<dyn Sharing>> {
        allocator::shareable::of(self)
    }

    /// The device has one priority, so every request gets it.
    fn stream(&self, desc: &StreamDesc) -> Result<Lease<dyn Stream>> {
        partitions::refuse(self.info().id, desc)?;
        Ok(Lease::map(self.streams.acquire(())?, |s| s as &dyn Stream))
    }

    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        self.pipelines.get_or_create(desc, &())
    }

    fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        self.events.acquire()
    }

    unsafe fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration> {
        end.since(start)
    }

    unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<dyn GraphExec>> {
        Ok(Lease::map(self.graphs.instantiate(plan)?, |g| g as &dyn GraphExec))
    }

    fn host_timeline(&self) -> Result<Lease<dyn HostTimeline>> {
        Ok(Lease::map(self.host_timelines.acquire()?, |g| g as &dyn HostTimeline))
    }

    /// The device can access its own memory. The backend has no other device.
    fn peer_access(&self, peer: DeviceId) -> Result<bool> {
        if peer == self.id() {
            return Ok(true);
        }
        Err(Error::NotFound(format!("{peer}: {} has no such peer", self.id()).into()))
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        self.pool.check_process()?;
        let streams = self.streams.timelines().into_iter().map(AwaitedTimeline);
        synchronize(&self.streams, streams, timeout)
    }
}

/// A timeline that its stream's worker advances by itself.
struct AwaitedTimeline(&'static Timeline);

impl Awaited for AwaitedTimeline {
    fn timeline(&self) -> &'static Timeline {
        self.0
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.0.wait(value, timeout)
    }

    fn refresh(&self) -> Result<u64> {
        Ok(self.0.completed())
    }
}

// SAFETY: the queue's worker runs the submissions one after the other, and publishes a value after
// it ran the submission.
unsafe impl TimelineSource for StreamState {
    fn timeline(&self) -> &'static Timeline {
        StreamState::timeline(self)
    }

    fn signal(&self) -> Result<u64> {
        waits::healthy(StreamState::timeline(self))?;
        Ok(StreamState::timeline(self).submitted())
    }

    fn refresh(&self) -> Result<u64> {
        Ok(StreamState::timeline(self).completed())
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        waits::wait(self, on)
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.queue.wait_host(value, timeout)
    }
}

// SAFETY: the queue copies the operations and runs them in order on its worker. Waits have their
// place in the queue.
unsafe impl Stream for StreamState {
    #[inline]
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        // SAFETY: the caller vouches for the operations, by the trait's contract.
        unsafe { self.queue.submit(ops) }
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn native(&self) -> u64 {
        0
    }
}

// SAFETY: a launch runs the plan's nodes by their dependencies. The native value is the program's
// address, which this state keeps.
unsafe impl GraphExec for GraphState {
    fn nodes(&self) -> usize {
        self.program.nodes()
    }

    fn bytes(&self) -> u64 {
        self.program.bytes()
    }

    unsafe fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        self.program.update(patches)
    }

    fn native(&self) -> u64 {
        std::ptr::from_ref(&*self.program) as u64
    }
}
