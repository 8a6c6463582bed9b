//! The execution manager: the driver, and the life cycle of all managers of a backend.
//!
//! This module must not know streams, memory or kernels.

use crate::engine::devices::{DeviceManager, DeviceSource};
use leasehold_core::sync::Arc;
#[cfg(feature = "test-hooks")]
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{LifeCycle, Result};
use std::fmt;

/// Owns the driver and the managers of a backend. The execution manager is made first and ends
/// last.
pub struct ExecutionManager<D: DeviceSource> {
    devices: DeviceManager<D>,
    life: LifeCycle,
    #[cfg(feature = "test-hooks")]
    for_test: AtomicBool,
}

impl<D: DeviceSource> Default for ExecutionManager<D> {
    fn default() -> Self {
        Self::new()
    }
}

impl<D: DeviceSource> ExecutionManager<D> {
    /// Makes a manager that is not configured.
    #[must_use]
    pub fn new() -> Self {
        Self {
            devices: DeviceManager::new(),
            life: LifeCycle::new(),
            #[cfg(feature = "test-hooks")]
            for_test: AtomicBool::new(false),
        }
    }

    /// Starts the driver and enumerates the devices, all or nothing. Blocks on the driver, without
    /// a lock.
    ///
    /// # Errors
    /// - `InvalidArgument` for a configuration that its `validate` refuses.
    /// - `Unavailable` without a driver, and for a driver whose answers are not plausible.
    /// - `InvalidState` if the manager is configured already, and after a
    ///   [`shutdown`](Self::shutdown). A new start needs a new manager, so that no handle of the
    ///   old one names a resource of the new one.
    /// - A driver error.
    pub fn configure(&self, driver: Arc<D::Driver>, config: D::Config) -> Result<()> {
        let what = format!("execution manager of the backend {}", D::KIND);
        self.life.configure(&what, || self.devices.initialize_devices(driver, config))
    }

    /// As [`configure`](Self::configure), over a driver that a test supplies.
    ///
    /// # Errors
    /// As [`configure`](Self::configure).
    #[cfg(feature = "test-hooks")]
    #[doc(alias("configureForTest", "ORTEAF_ENABLE_TEST"))]
    pub fn configure_for_test(&self, driver: Arc<D::Driver>) -> Result<()> {
        self.configure(driver, D::Config::default())?;
        self.for_test.store(true, Ordering::Release);
        Ok(())
    }

    /// Whether the manager was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.is_configured() && self.for_test.load(Ordering::Acquire)
    }

    /// Whether [`configure`](Self::configure) has succeeded and [`shutdown`](Self::shutdown) has
    /// not.
    pub fn is_configured(&self) -> bool {
        self.life.is_configured()
    }

    /// The devices.
    pub fn devices(&self) -> &DeviceManager<D> {
        &self.devices
    }

    /// Ends all managers. A second call is `Ok`. The call waits for no work, and blocks on the
    /// driver without a lock.
    ///
    /// # Errors
    /// `LeasesOutstanding`, as [`DeviceManager::shutdown`]. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.life.shutdown(|| self.devices.shutdown())
    }
}

impl<D: DeviceSource> fmt::Debug for ExecutionManager<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecutionManager")
            .field("state", &self.life)
            .field("devices", &self.devices)
            .finish()
    }
}
