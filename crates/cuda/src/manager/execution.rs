//! The top: the driver, and the life cycle of everything that the backend has.
//!
//! This module must not know streams, memory or kernels.

use super::device::DeviceManager;
use crate::config::CudaConfig;
use crate::driver::ops::CudaSlowOps;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{LifeCycle, Result};
use std::fmt;

/// Owns the driver and the managers of the backend: the first to be made and the last to go.
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
    /// A manager that must be configured.
    #[must_use]
    pub fn new() -> Self {
        Self { devices: DeviceManager::new(), life: LifeCycle::new(), for_test: AtomicBool::new(false) }
    }

    /// Makes it ready: starts the driver and enumerates devices. All-or-nothing. Blocks on the driver, without a lock.
    ///
    /// # Errors
    /// As [`CudaConfig::validate`]; `Unavailable` without a driver; `InvalidState` when it is configured already, and after a
    /// [`shutdown`](Self::shutdown): a new start needs a new manager, so that no handle of before names a thing of after;
    /// the driver's.
    pub fn configure(&self, ops: Arc<dyn CudaSlowOps>, config: CudaConfig) -> Result<()> {
        self.configure_as(ops, config, false)
    }

    /// As [`configure`](Self::configure), over a driver of the test's.
    ///
    /// # Errors
    /// As [`configure`](Self::configure).
    #[cfg(feature = "test-hooks")]
    #[doc(alias("configureForTest", "ORTEAF_ENABLE_TEST"))]
    pub fn configure_for_test(&self, ops: Arc<dyn CudaSlowOps>) -> Result<()> {
        self.configure_as(ops, CudaConfig::default(), true)
    }

    /// Whether it was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.is_configured() && self.for_test.load(Ordering::Acquire)
    }

    fn configure_as(&self, ops: Arc<dyn CudaSlowOps>, config: CudaConfig, for_test: bool) -> Result<()> {
        config.validate()?;
        self.life.configure("CUDA execution manager", || {
            ops.init()?;
            self.devices.initialize_devices(ops, config)?;
            self.for_test.store(for_test, Ordering::Release);
            Ok(())
        })
    }

    /// Whether [`configure`](Self::configure) has succeeded, and the manager was not shut down.
    pub fn is_configured(&self) -> bool {
        self.life.is_configured()
    }

    /// The devices.
    pub fn devices(&self) -> &DeviceManager {
        &self.devices
    }

    /// Ends everything; a second call is `Ok`. Waits for no work, and blocks on the driver without a lock.
    ///
    /// # Errors
    /// `LeasesOutstanding`, as [`DeviceManager::shutdown`]; nothing has changed then.
    pub fn shutdown(&self) -> Result<()> {
        self.life.shutdown(|| self.devices.shutdown())
    }
}

impl fmt::Debug for CudaExecutionManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaExecutionManager").field("state", &self.life).field("devices", &self.devices).finish()
    }
}
