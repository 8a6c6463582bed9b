//! The implementation of `hal`: leases of the managers' states as objects of the traits.
//!
//! This module must hold no state beside the execution manager and the access to the driver.

use crate::config::MpsConfig;
use crate::driver::ops::{MpsSlowOps, Storage};
use crate::manager::device::{DeviceState, ordinal_of};
use crate::manager::execution::MpsExecutionManager;
use leasehold_alloc::{Allocator, Backing};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result};
use leasehold_engine::driver::DriverDevice;
use leasehold_engine::start::DriverStart;
use leasehold_engine::waits::synchronize;
use leasehold_engine::{backend_methods, forward_backend, forward_device};
use leasehold_hal::{
    Backend, BackendKind, Device, DeviceId, GraphExec, HostTimeline, KernelDesc, MemoryInfo,
    MemoryKind, Pipeline, Plan, Stream, StreamDesc, TimestampQuery,
};
use std::time::Duration;

/// The backend for Metal's devices.
///
/// The backend asks the system for its devices when they are first requested. On systems other than
/// Apple's every call fails with the reason.
///
/// Leases may outlive the backend.
pub struct MpsBackend {
    manager: MpsExecutionManager,
    driver: DriverStart<dyn MpsSlowOps, MpsConfig>,
}

/// Metal itself.
#[cfg(target_vendor = "apple")]
fn real() -> Result<Arc<dyn MpsSlowOps>> {
    Ok(Arc::new(crate::driver::real::RealDriver::new()))
}

/// The error of a system without Metal.
#[cfg(not(target_vendor = "apple"))]
fn real() -> Result<Arc<dyn MpsSlowOps>> {
    Err(Error::Unavailable("Metal exists on Apple's systems only".into()))
}

impl MpsBackend {
    /// A backend over the system's Metal, with the default configuration. The call asks the system
    /// for nothing, and cannot fail.
    ///
    /// ```
    /// use leasehold_hal::Backend;
    /// use leasehold_mps::MpsBackend;
    /// match MpsBackend::new().devices() {
    ///     Ok(devices) => println!("{} devices", devices.len()),
    ///     Err(why) => println!("{why}"),
    /// }
    /// ```
    #[must_use]
    pub fn new() -> Self {
        Self::with_config(MpsConfig::default())
    }

    /// A backend over the system's Metal. An error of the configuration is reported when devices
    /// are requested.
    #[must_use]
    pub fn with_config(config: MpsConfig) -> Self {
        Self::over(Box::new(real), config)
    }
}

backend_methods!(MpsBackend of MpsExecutionManager over MpsSlowOps with MpsConfig);

// SAFETY: the execution manager gives each ordinal one device, made with that ordinal.
unsafe impl Backend for MpsBackend {
    forward_backend!(Mps, ordinal_of);
}

// SAFETY: memory is the driver's, and each block lies in one segment. All resources that the device
// lends are its own. With `host_visible` the memory is in shared storage, at the host's addresses.
unsafe impl Device for DeviceState {
    forward_device!();

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

    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        DeviceState::memory(self).of(kind)
    }

    fn backing(&self, kind: MemoryKind) -> Result<Box<dyn Backing>> {
        DeviceState::memory(self).backing(kind)
    }

    /// Streams of all priorities are equal: command queues have no priority.
    fn stream(&self, _: &StreamDesc) -> Result<Lease<dyn Stream>> {
        self.engine().sound()?;
        Ok(Lease::map(self.streams().acquire()?, |s| s as &dyn Stream))
    }

    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        let kernel = self.kernels().get_or_create(self.libraries(), desc);
        kernel.map_err(|e| self.engine().settle(e))
    }

    fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        self.timestamps().acquire()
    }

    unsafe fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration> {
        self.timestamps().elapsed(start, end)
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
        let id = DeviceState::info(self).id;
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
