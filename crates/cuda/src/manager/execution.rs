//! The execution manager: the driver, and the life cycle of all managers of the backend.
//!
//! This module must not know streams, memory or kernels.

use super::device::Devices;

/// Owns CUDA's driver and the managers of the backend.
#[doc(alias = "RuntimeManager")]
pub type CudaExecutionManager = leasehold_hal::engine::execution::ExecutionManager<Devices>;
