//! The execution manager: the driver, and the life cycle of all managers of the backend.
//!
//! This module must not know devices, queues, memory or kernels.

use super::device::DeviceManager;
use crate::config::MpsConfig;
use crate::driver::ops::MpsSlowOps;
use leasehold_core::sync::Arc;
#[cfg(feature = "test-hooks")]
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{LifeCycle, Result};
use std::fmt;

/// Owns the driver and the managers of the backend. The execution manager is made first and ends
/// last.
#[doc(alias = "RuntimeManager")]
pub struct MpsExecutionManager {
    devices: DeviceManager,
    life: LifeCycle,
    #[cfg(feature = "test-hooks")]
    for_test: AtomicBool,
}

impl Default for MpsExecutionManager {
    fn default() -> Self {
        Self::new()
    }
}

impl MpsExecutionManager {
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

    /// Enumerates the devices of a driver, all or nothing. Blocks on the driver, without a lock.
    ///
    /// # Errors
    /// - As [`MpsConfig::validate`].
    /// - `Unavailable` without a device.
    /// - `InvalidState` if the manager is configured already, and after a
    ///   [`shutdown`](Self::shutdown). A new start needs a new manager, so that no handle of the
    ///   old one names a resource of the new one.
    /// - A driver error.
    pub fn configure(&self, ops: Arc<dyn MpsSlowOps>, config: MpsConfig) -> Result<()> {
        config.validate()?;
        self.life
            .configure("Metal execution manager", || self.devices.initialize_devices(ops, config))
    }

    /// As [`configure`](Self::configure), over a driver that a test supplies.
    ///
    /// # Errors
    /// As [`configure`](Self::configure).
    #[cfg(feature = "test-hooks")]
    #[doc(alias("configureForTest", "ORTEAF_ENABLE_TEST"))]
    pub fn configure_for_test(&self, ops: Arc<dyn MpsSlowOps>) -> Result<()> {
        self.configure(ops, MpsConfig::default())?;
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
    pub fn devices(&self) -> &DeviceManager {
        &self.devices
    }

    /// Ends all managers. A second call is `Ok`. The call waits for no work.
    ///
    /// # Errors
    /// `LeasesOutstanding`, as [`DeviceManager::shutdown`]. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.life.shutdown(|| self.devices.shutdown())
    }
}

impl fmt::Debug for MpsExecutionManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpsExecutionManager")
            .field("state", &self.life)
            .field("devices", &self.devices)
            .finish()
    }
}
