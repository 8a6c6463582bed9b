//! The execution manager: the driver, and the life cycle of all managers of the backend.
//!
//! This module must not know streams, memory or kernels.

use super::device::DeviceManager;
use crate::config::CudaConfig;
use crate::driver::ops::CudaSlowOps;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{LifeCycle, Result};
use std::fmt;

/// Owns the driver and the managers of the backend. The execution manager is made first and ends
/// last.
#[doc(alias = "RuntimeManager")]
pub struct CudaExecutionManager {
    devices: DeviceManager,
    life: LifeCycle,
    for_test: AtomicBool,
}

impl Default for CudaExecutionManager {
    fn default() -> Self {
        Self::new()
    }
}

impl CudaExecutionManager {
    /// Makes a manager that is not configured.
    #[must_use]
    pub fn new() -> Self {
        Self {
            devices: DeviceManager::new(),
            life: LifeCycle::new(),
            for_test: AtomicBool::new(false),
        }
    }

    /// Starts the driver and enumerates the devices, all or nothing. Blocks on the driver, without
    /// a lock.
    ///
    /// # Errors
    /// - As [`CudaConfig::validate`].
    /// - `Unavailable` without a driver.
    /// - `InvalidState` if the manager is configured already, and after a
    ///   [`shutdown`](Self::shutdown). A new start needs a new manager, so that no handle of the
    ///   old one names a resource of the new one.
    /// - A driver error.
    pub fn configure(&self, ops: Arc<dyn CudaSlowOps>, config: CudaConfig) -> Result<()> {
        self.configure_as(ops, config, false)
    }

    /// As [`configure`](Self::configure), over a driver that a test supplies.
    ///
    /// # Errors
    /// As [`configure`](Self::configure).
    #[cfg(feature = "test-hooks")]
    #[doc(alias("configureForTest", "ORTEAF_ENABLE_TEST"))]
    pub fn configure_for_test(&self, ops: Arc<dyn CudaSlowOps>) -> Result<()> {
        self.configure_as(ops, CudaConfig::default(), true)
    }

    /// Whether the manager was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.is_configured() && self.for_test.load(Ordering::Acquire)
    }

    fn configure_as(
        &self,
        ops: Arc<dyn CudaSlowOps>,
        config: CudaConfig,
        for_test: bool,
    ) -> Result<()> {
        config.validate()?;
        self.life.configure("CUDA execution manager", || {
            ops.init()?;
            self.devices.initialize_devices(ops, config)?;
            self.for_test.store(for_test, Ordering::Release);
            Ok(())
        })
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

    /// Ends all managers. A second call is `Ok`. The call waits for no work, and blocks on the
    /// driver without a lock.
    ///
    /// # Errors
    /// `LeasesOutstanding`, as [`DeviceManager::shutdown`]. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.life.shutdown(|| self.devices.shutdown())
    }
}

impl fmt::Debug for CudaExecutionManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaExecutionManager")
            .field("state", &self.life)
            .field("devices", &self.devices)
            .finish()
    }
}
