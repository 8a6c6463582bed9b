//! The execution manager: the driver, and the life cycle of all managers of the backend.
//!
//! This module must not know queues, memory or kernels.

use super::device::Devices;

/// Owns Metal's driver and the managers of the backend.
#[doc(alias = "RuntimeManager")]
pub type MpsExecutionManager = leasehold_hal::engine::execution::ExecutionManager<Devices>;
