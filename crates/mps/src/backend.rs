//! The implementation of `hal`: leases of the managers' states as objects of the traits.
//!
//! This module must hold no state beside the execution manager and the access to the driver.

use crate::config::MpsConfig;
use crate::driver::ops::{MpsSlowOps, Storage};
use crate::manager::device::{DeviceState, ordinal_of};
use crate::manager::execution::MpsExecutionManager;
use leasehold_alloc::{Allocator, Backing};
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use leasehold_core::{Error, Lease, PoolStats, Result};
use leasehold_engine::driver::DriverDevice;
use leasehold_engine::forward_device;
use leasehold_engine::waits::synchronize;
use leasehold_hal::{
    Backend, BackendKind, Device, DeviceId, DeviceInfo, GraphExec, HostTimeline, KernelDesc,
    MemoryInfo, MemoryKind, Pipeline, Plan, Stream, StreamDesc, TimestampQuery,
};
use std::fmt;
use std::time::Duration;

/// Finds the driver.
type Source = Box<dyn Fn() -> Result<Arc<dyn MpsSlowOps>> + Send + Sync>;

/// The backend for Metal's devices.
///
/// The backend asks the system for its devices when they are first requested. On systems other than
/// Apple's every call fails with the reason.
///
/// Leases may outlive the backend.
pub struct MpsBackend {
    manager: MpsExecutionManager,
    source: Source,
    config: MpsConfig,
    started: OnceLock<Result<()>>,
    starting: Mutex<()>,
}

impl Default for MpsBackend {
    fn default() -> Self {
        Self::new()
    }
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

    /// A backend over a simulated driver.
    ///
    /// # Errors
    /// As [`with_ops`](Self::with_ops), or an error of the simulated machine.
    #[cfg(feature = "sim")]
    pub fn simulated(
        machine: crate::driver::sim::SimDriverConfig,
        config: MpsConfig,
    ) -> Result<Self> {
        Self::with_ops(Arc::new(crate::driver::sim::SimDriver::new(machine)?), config)
    }

    /// A backend over a driver.
    ///
    /// # Errors
    /// As [`MpsExecutionManager::configure`].
    pub fn with_ops(ops: Arc<dyn MpsSlowOps>, config: MpsConfig) -> Result<Self> {
        let backend = Self::over(Box::new(move || Ok(ops.clone())), config);
        backend.start()?;
        Ok(backend)
    }

    fn over(source: Source, config: MpsConfig) -> Self {
        Self {
            manager: MpsExecutionManager::new(),
            source,
            config,
            started: OnceLock::new(),
            starting: Mutex::new(()),
        }
    }

    /// Enumerates the devices once. A failure is kept, and later calls return it.
    fn start(&self) -> Result<()> {
        if let Some(outcome) = self.started.get() {
            return outcome.clone();
        }
        let _turn = self.starting.lock();
        if let Some(outcome) = self.started.get() {
            return outcome.clone();
        }
        let outcome =
            (self.source)().and_then(|ops| self.manager.configure(ops, self.config.clone()));
        self.started.get_or_init(|| outcome).clone()
    }

    /// The managers.
    pub fn manager(&self) -> &MpsExecutionManager {
        &self.manager
    }
}

impl fmt::Debug for MpsBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpsBackend")
            .field("manager", &self.manager)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

// SAFETY: the execution manager gives each ordinal one device, made with that ordinal.
unsafe impl Backend for MpsBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Mps
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        self.start()?;
        self.manager.devices().describe()
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        ordinal_of(device)?;
        let named = |error| match error {
            Error::Unavailable(why) => Error::Unavailable(format!("{device}: {why}").into()),
            Error::NotFound(why) => Error::NotFound(format!("{device}: {why}").into()),
            other => other,
        };
        self.start().map_err(named)?;
        let lease = self.manager.devices().open(device).map_err(named)?;
        Ok(Lease::map(lease, |d| d as &dyn Device))
    }

    fn shutdown(&self) -> Result<()> {
        // Managers do not wait. The driver's work and host calls end by themselves. Work that a
        // host timeline or another backend holds back is not waited for, and makes the shutdown
        // fail.
        for stream in self.manager.devices().left_behind() {
            stream.run_down();
        }
        self.manager.shutdown()
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("device", self.manager.devices().stats());
    }
}

impl DeviceState {
    /// Returns the loss of the device as an error.
    fn sound(&self) -> Result<()> {
        self.engine().loss().map_or(Ok(()), Err)
    }
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
        self.sound()?;
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
