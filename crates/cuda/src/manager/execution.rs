//! The top: the driver, and the life cycle of everything that the backend has.
//!
//! This module must not know streams, memory or kernels.

use super::device::DeviceManager;
use crate::config::CudaConfig;
use crate::driver::ops::CudaSlowOps;
use crate::engine::shared::Shared;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result};
use std::fmt;

/// Owns the driver and the managers of the backend: the first to be made and the last to go.
#[doc(alias = "RuntimeManager")]
pub struct CudaExecutionManager {
    devices: DeviceManager,
    state: Mutex<State>,
}

enum State {
    Unconfigured,
    Configured { for_test: bool },
    ShutDown,
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
        Self { devices: DeviceManager::new(), state: Mutex::new(State::Unconfigured) }
    }

    /// Makes it ready: starts the driver and enumerates devices. All-or-nothing.
    ///
    /// # Errors
    /// As [`CudaConfig::validate`]; `Unavailable` without a driver; `InvalidState` when it is configured or shut down already; the driver's.
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
        matches!(*self.state.lock(), State::Configured { for_test: true })
    }

    fn configure_as(&self, ops: Arc<dyn CudaSlowOps>, config: CudaConfig, for_test: bool) -> Result<()> {
        config.validate()?;
        let mut state = self.state.lock();
        if !matches!(*state, State::Unconfigured) {
            return Err(Error::state("the CUDA execution manager is configured already"));
        }
        ops.init()?;
        self.devices.initialize_devices(Arc::new(Shared::new(ops, config)))?;
        *state = State::Configured { for_test };
        Ok(())
    }

    /// Whether [`configure`](Self::configure) has succeeded, and the manager was not shut down.
    pub fn is_configured(&self) -> bool {
        matches!(*self.state.lock(), State::Configured { .. })
    }

    /// The devices.
    pub fn devices(&self) -> &DeviceManager {
        &self.devices
    }

    /// Ends everything; a second call is `Ok`.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then.
    pub fn shutdown(&self) -> Result<()> {
        let mut state = self.state.lock();
        if matches!(*state, State::Configured { .. }) {
            self.devices.shutdown()?;
        }
        *state = State::ShutDown;
        Ok(())
    }
}

impl fmt::Debug for CudaExecutionManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match *self.state.lock() {
            State::Unconfigured => "unconfigured",
            State::Configured { for_test: true } => "configured for a test",
            State::Configured { for_test: false } => "configured",
            State::ShutDown => "shut down",
        };
        f.debug_struct("CudaExecutionManager").field("state", &state).field("devices", &self.devices).finish()
    }
}
