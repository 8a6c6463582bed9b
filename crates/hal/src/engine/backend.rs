//! A backend over a driver, which starts at its first use.
//!
//! This module must hold no state beside the execution manager and the start of the driver.

use crate::engine::devices::DeviceSource;
use crate::engine::execution::ExecutionManager;
use crate::{Backend, BackendKind, Device, DeviceId, DeviceInfo};
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use leasehold_core::{Error, Lease, PoolStats, Result};
use std::fmt;

/// The backend for a driver's devices.
///
/// The backend loads the system's driver when devices are first requested. Without a driver, every
/// call fails with the reason.
///
/// Dropping the backend ends idle threads. Leases may outlive the backend.
pub struct DriverBackend<D: DeviceSource> {
    manager: ExecutionManager<D>,
    /// The driver that the caller has found. `None`: the system's driver.
    found: Option<Arc<D::Driver>>,
    config: D::Config,
    /// The outcome of the driver's start, which is kept.
    started: OnceLock<Result<()>>,
    starting: Mutex<()>,
}

impl<D: DeviceSource> Default for DriverBackend<D> {
    fn default() -> Self {
        Self::new()
    }
}

impl<D: DeviceSource> DriverBackend<D> {
    /// A backend over the system's driver, with the default configuration. The call does not load
    /// the driver, and cannot fail.
    #[must_use]
    pub fn new() -> Self {
        Self::with_config(D::Config::default())
    }

    /// A backend over the system's driver. An error of the configuration is reported when devices
    /// are requested.
    #[must_use]
    pub fn with_config(config: D::Config) -> Self {
        Self::over(None, config)
    }

    /// A backend over a driver that was found.
    ///
    /// # Errors
    /// As [`ExecutionManager::configure`].
    pub fn with_ops(driver: Arc<D::Driver>, config: D::Config) -> Result<Self> {
        let backend = Self::over(Some(driver), config);
        backend.start()?;
        Ok(backend)
    }

    fn over(found: Option<Arc<D::Driver>>, config: D::Config) -> Self {
        let manager = ExecutionManager::new();
        Self { manager, found, config, started: OnceLock::new(), starting: Mutex::new(()) }
    }

    /// Starts the driver once. Threads that call meanwhile wait. A failure is kept, and later calls
    /// return it.
    fn start(&self) -> Result<()> {
        if let Some(outcome) = self.started.get() {
            return outcome.clone();
        }
        let _turn = self.starting.lock();
        if let Some(outcome) = self.started.get() {
            return outcome.clone();
        }
        let driver = self.found.clone().map_or_else(D::load, Ok);
        let outcome = driver.and_then(|d| self.manager.configure(d, self.config.clone()));
        self.started.get_or_init(|| outcome).clone()
    }

    /// The managers.
    pub fn manager(&self) -> &ExecutionManager<D> {
        &self.manager
    }
}

/// Names the device in an error that says why the device cannot be opened.
fn open_error(device: DeviceId, error: Error) -> Error {
    match error {
        Error::Unavailable(why) => Error::Unavailable(format!("{device}: {why}").into()),
        Error::NotFound(why) => Error::NotFound(format!("{device}: {why}").into()),
        other => other,
    }
}

// SAFETY: the device manager keeps one device for each ordinal, and `open` checks the device's
// name.
unsafe impl<D: DeviceSource> Backend for DriverBackend<D>
where
    D::Payload: Device,
{
    fn kind(&self) -> BackendKind {
        D::KIND
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        self.start()?;
        self.manager.devices().describe()
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        device.ordinal_on(D::KIND)?;
        let opened = self.start().and_then(|()| self.manager.devices().open(device));
        let lease = opened.map_err(|error| open_error(device, error))?;
        if lease.info().id != device {
            return Err(Error::state(format!("{} was made for {device}", lease.info().id)));
        }
        Ok(Lease::map(lease, |d| d as &dyn Device))
    }

    fn shutdown(&self) -> Result<()> {
        // Managers do not wait. The driver's work and host calls end by themselves. Work that a
        // host timeline or another backend holds back is not waited for, and makes the shutdown
        // fail.
        self.manager.devices().run_down();
        self.manager.shutdown()
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("device", self.manager.devices().stats());
    }
}

impl<D: DeviceSource> fmt::Debug for DriverBackend<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverBackend")
            .field("manager", &self.manager)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
