//! The execution manager: the driver, and the life cycle of all managers of the backend.
//!
//! This module must not know queues, memory or kernels.

use super::device::Devices;

/// Owns Metal's driver and the managers of the backend.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// use leasehold_core::Index;
/// use leasehold_core::sync::Arc;
/// use leasehold_hal::{BackendKind, DeviceId};
/// use leasehold_mps::driver::sim::{SimDriver, SimDriverConfig};
/// use leasehold_mps::{MpsConfig, MpsExecutionManager};
/// let driver = Arc::new(SimDriver::new(SimDriverConfig::default())?);
/// let manager = MpsExecutionManager::new();
/// manager.configure(driver.clone(), MpsConfig::default())?;
/// let device = manager.devices().open(DeviceId::new(BackendKind::Mps, 0))?;
/// let queue = device.command_queues().acquire(Index::new(0))?;
/// assert!(manager.shutdown().is_err(), "leases are held");
/// drop((queue, device));
/// manager.shutdown()?;
/// assert!(driver.census().is_nothing());
/// # }
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[doc(alias = "RuntimeManager")]
pub type MpsExecutionManager = leasehold_engine::execution::ExecutionManager<Devices>;
