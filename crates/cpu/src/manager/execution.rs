//! The execution manager: the life cycle of all managers of the backend.
//!
//! This module must not know streams, memory or kernels.

use super::device::DeviceManager;
use crate::config::CpuConfig;
use leasehold_core::{LifeCycle, Result};

/// Owns the managers of the backend. The execution manager is made first and ends last.
#[doc(alias = "RuntimeManager")]
#[doc(alias = "ExecutionManager")]
#[derive(Debug)]
pub struct CpuExecutionManager {
    devices: DeviceManager,
    life: LifeCycle,
}

impl Default for CpuExecutionManager {
    fn default() -> Self {
        Self::new()
    }
}

impl CpuExecutionManager {
    /// Makes a manager that is not configured.
    #[must_use]
    pub fn new() -> Self {
        Self { devices: DeviceManager::new(), life: LifeCycle::new() }
    }

    /// Configures the manager, all or nothing. The call reads files that describe the machine, and
    /// starts no thread.
    ///
    /// # Errors
    /// - As [`CpuConfig::validate`].
    /// - `InvalidState` if the manager is configured already, and after a
    ///   [`shutdown`](Self::shutdown). A new start needs a new manager, so that no handle of the
    ///   old one names a resource of the new one.
    pub fn configure(&self, config: CpuConfig) -> Result<()> {
        config.validate()?;
        self.life.configure("CPU execution manager", || self.devices.initialize_devices(config))
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

    /// Ends all managers. A second call is `Ok`. Blocks while idle threads end, without a lock.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.life.shutdown(|| self.devices.shutdown())
    }
}
