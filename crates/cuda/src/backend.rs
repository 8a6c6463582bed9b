//! The implementation of `hal`: leases of the managers' states as objects of the traits.
//!
//! This module must hold no state.

use crate::allocator::shareable::DeviceSharing;
use crate::driver::ops::{Launch, NativeFunction, no_partitions};
use crate::manager::device::{DeviceState, Devices};
use leasehold_alloc::{Allocator, Backing};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, PoolStats, Result, Timepoint};
use leasehold_hal::engine::backend::DriverBackend;
use leasehold_hal::engine::driver::DriverDevice;
use leasehold_hal::engine::waits::synchronize;
use leasehold_hal::{
    BackendKind, Description, Device, DeviceId, Former, GraphExec, HostTimeline, KernelDesc,
    MemoryInfo, MemoryKind, Partition, PartitionSize, Pipeline, Plan, Sharing, Stream, StreamDesc,
    TimestampQuery,
};
use std::any::Any;
use std::time::Duration;

/// The backend for NVIDIA's devices.
///
/// ```
/// use leasehold_cuda::CudaBackend;
/// use leasehold_hal::Backend;
/// match CudaBackend::new().devices() {
///     Ok(devices) => println!("{} devices", devices.len()),
///     Err(why) => println!("{why}"), // no driver, for example
/// }
/// ```
pub type CudaBackend = DriverBackend<Devices>;

impl DeviceState {
    /// Gives this device access to the memory of another device.
    fn open_peer(&self, peer: u32) -> Result<bool> {
        let own = self.ordinal();
        let shared = self.shared();
        if !shared.ops.can_access_peer(own, peer)? {
            return Ok(false);
        }
        let core = self.primary().core();
        if let Some(other) = shared.primary(peer) {
            // SAFETY: the other driver context holds its context, and `other` holds the driver
            // context.
            core.context.within(|ops| unsafe { ops.enable_peer(other.context.native()) })?;
        } else {
            return Err(Error::state(format!("{}: open it first", DeviceId::cuda(peer))));
        }
        let Some(mapped) = shared.grant_access(peer, own) else { return Ok(true) };
        let opened = mapped.iter().try_for_each(|&(addr, bytes)| {
            // SAFETY: the owner's table says that the piece is mapped. The driver refuses a piece
            // that was unmapped meanwhile.
            match unsafe { shared.open_to_peers(&core.context, peer, addr, bytes) } {
                // The piece was given back meanwhile.
                Err(Error::Driver { .. }) if !shared.has_piece(peer, addr) => Ok(()),
                other => other,
            }
        });
        opened.inspect_err(|_| shared.revoke_access(peer, own)).map(|()| true)
    }
}

// SAFETY: memory is the driver's, mapped for this device before it is lent. All resources that the
// device lends are of its own context.
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
        let core = self.primary().core();
        let info = core.context.within(|ops| ops.memory_info()).map_err(|e| core.settle(e))?;
        Ok(MemoryInfo { total: info.total, free: info.free })
    }

    fn make_current(&self) -> Result<()> {
        self.primary().core().context.make_current()
    }

    fn current(&self) -> Result<Former> {
        let ops = self.shared().ops.clone();
        let former = ops.current()?;
        Ok(Former::new(move || {
            // SAFETY: the former context was current on this thread, and its owner keeps it. The
            // driver refuses a context that is gone.
            if let Err(error) = unsafe { ops.set_current(former) } {
                tracing::debug!(%error, "the former context could not be restored");
            }
        }))
    }

    fn fail(&self, point: Timepoint, cause: Error) -> bool {
        self.primary().core().fail(point, &cause)
    }

    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        self.primary().buffers(kind)?.allocator()
    }

    fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        self.memory().backing(kind)
    }

    fn sharing(&self) -> Result<Arc<dyn Sharing>> {
        Ok(Arc::new(DeviceSharing::new(self.memory())?))
    }

    fn stream(&self, desc: &StreamDesc) -> Result<Lease<dyn Stream>> {
        let context = self.primary();
        context.core().sound()?;
        context.partitions.check(desc)?;
        let stream = context.streams().acquire_on(desc.priority, desc.partition.clone())?;
        Ok(Lease::map(stream, |s| s as &dyn Stream))
    }

    fn partition(&self, sizes: &[PartitionSize]) -> Result<Vec<Lease<Partition>>> {
        let context = self.primary();
        context.core().sound()?;
        if !self.caps().partitions {
            return Err(no_partitions(self.shared().ops.driver_version()?));
        }
        context
            .divide(sizes, self.properties().multiprocessors)
            .map_err(|e| context.core().settle(e))
    }

    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        let context = self.primary();
        context
            .functions()
            .get_or_create(desc, context.modules())
            .map_err(|e| context.core().settle(e))
    }

    fn resident_blocks(&self, pipeline: &Pipeline, threads: u32, shared: u32) -> Result<u64> {
        let core = self.primary().core();
        let in_clusters = pipeline.cluster != [1; 3];
        let launch = Launch {
            function: NativeFunction(pipeline.native),
            grid: pipeline.cluster,
            block: [threads, 1, 1],
            shared,
            args: &[],
            bindings: &[],
            early: None,
            attributes: in_clusters.then_some(pipeline),
        };
        // SAFETY: the pipeline is one of this device, whose module it keeps.
        let count = core.context.within(|ops| unsafe { ops.occupancy(&launch) });
        let of = match in_clusters {
            true => pipeline.cluster.iter().product(),
            false => core.properties().multiprocessors,
        };
        Ok(u64::from(count.map_err(|e| core.settle(e))?) * u64::from(of))
    }

    fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        self.primary().events().timestamp()
    }

    unsafe fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration> {
        // SAFETY: the caller vouches that both timepoints are leased from this device, by the
        // trait's contract.
        unsafe { self.primary().events().elapsed(start, end) }
    }

    unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<dyn GraphExec>> {
        // SAFETY: the caller vouches for the plan, by the trait's contract.
        let graph = unsafe { self.primary().graphs().instantiate(plan) }?;
        Ok(Lease::map(graph, |g| g as &dyn GraphExec))
    }

    fn host_timeline(&self) -> Result<Lease<dyn HostTimeline>> {
        Ok(Lease::map(self.primary().host_timelines().acquire()?, |g| g as &dyn HostTimeline))
    }

    fn peer_access(&self, peer: DeviceId) -> Result<bool> {
        let id = self.id();
        if peer == id {
            return Ok(true);
        }
        let count = self.shared().ops.device_count()?;
        if peer.backend != BackendKind::Cuda || peer.ordinal >= count {
            return Err(Error::NotFound(format!("{peer}: {id} has no such peer").into()));
        }
        self.open_peer(peer.ordinal)
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        let context = self.primary();
        let outcome = synchronize(context.streams(), context.core().streams(), timeout);
        context.functions().collect();
        outcome
    }
}
