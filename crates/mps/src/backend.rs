//! The implementation of `hal`: leases of the managers' states as objects of the traits.
//!
//! This module must hold no state.

use crate::driver::ops::Storage;
use crate::manager::device::{DeviceState, Devices};
use leasehold_alloc::{Allocator, Backing};
use leasehold_core::{Error, Lease, PoolStats, Result, Timepoint};
use leasehold_hal::engine::backend::DriverBackend;
use leasehold_hal::engine::driver::DriverDevice;
use leasehold_hal::engine::partitions;
use leasehold_hal::engine::waits::synchronize;
use leasehold_hal::{
    BackendKind, Description, Device, DeviceId, GraphExec, HostTimeline, KernelDesc, MemoryInfo,
    MemoryKind, Pipeline, Plan, Stream, StreamDesc, TimestampQuery,
};
use std::any::Any;
use std::time::Duration;

/// The backend for Metal's devices. On systems other than Apple's every call fails with the reason.
///
/// ```
/// use leasehold_hal::Backend;
/// use leasehold_mps::MpsBackend;
/// match MpsBackend::new().devices() {
///     Ok(devices) => println!("{} devices", devices.len()),
///     Err(why) => println!("{why}"),
/// }
/// ```
pub type MpsBackend = DriverBackend<Devices>;

// SAFETY: memory is the driver's, and each block lies in one segment. All resources that the device
// lends are its own. With `host_visible` the memory is in shared storage, at the host's addresses.
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
        let opened = self.opened();
        // SAFETY: the device is open.
        let used = unsafe { opened.ops.allocated_size(opened.native)? };
        let total = opened.properties.recommended_working_set;
        Ok(MemoryInfo { total, free: total.saturating_sub(used) })
    }

    fn make_current(&self) -> Result<()> {
        Ok(())
    }

    fn fail(&self, point: Timepoint, cause: Error) -> bool {
        self.engine().fail(point, &cause)
    }

    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        DeviceState::memory(self).of(kind)
    }

    fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        DeviceState::memory(self).backing(kind)
    }

    /// Streams of all priorities are equal: command queues have no priority.
    fn stream(&self, desc: &StreamDesc) -> Result<Lease<dyn Stream>> {
        partitions::refuse(self.info().id, desc)?;
        self.engine().sound()?;
        Ok(Lease::map(self.streams().acquire()?, |s| s as &dyn Stream))
    }

    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        let kernel = self.kernels().get_or_create(desc, self.libraries());
        kernel.map_err(|e| self.engine().settle(e))
    }

    fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        self.timestamps().acquire()
    }

    unsafe fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration> {
        end.since(start)
    }

    unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<dyn GraphExec>> {
        // SAFETY: the caller vouches for the plan, by the trait's contract.
        let graph = unsafe { self.graphs().instantiate(plan) }?;
        Ok(Lease::map(graph, |g| g as &dyn GraphExec))
    }

    fn host_timeline(&self) -> Result<Lease<dyn HostTimeline>> {
        Ok(Lease::map(self.host_timelines().acquire()?, |g| g as &dyn HostTimeline))
    }

    fn peer_access(&self, peer: DeviceId) -> Result<bool> {
        let id = self.id();
        if peer == id {
            return Ok(true);
        }
        if peer.backend != BackendKind::Mps || peer.ordinal >= self.devices() {
            return Err(Error::NotFound(format!("{peer}: {id} has no such peer").into()));
        }
        if DeviceState::memory(self).storage() == Storage::Private {
            return Err(Error::Unsupported(
                format!("{id} does not reach private storage of {peer}").into(),
            ));
        }
        // Each segment gets an alias at its first use.
        Ok(true)
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        synchronize(self.streams(), self.engine().streams(), timeout)
    }
}
