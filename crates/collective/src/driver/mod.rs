//! Libraries of collectives: the interface to them, and the one for ranks that are threads.

pub mod host;
#[cfg(feature = "cuda")]
pub mod nccl;
pub mod ops;
#[cfg(all(feature = "bench", feature = "cuda"))]
pub(crate) mod raw;
#[cfg(feature = "cuda")]
mod window;

pub use host::Host;
#[cfg(feature = "cuda")]
pub use nccl::Nccl;
pub use ops::{Call, CollectiveOps, Communicator, Derived, Place};

use crate::error::unsupported;
use leasehold::backend::BackendKind;
use leasehold::{Result, Runtime};
use std::sync::Arc;

/// The library for a device.
pub(crate) fn of(runtime: &Runtime) -> Result<Arc<dyn CollectiveOps>> {
    match runtime.device().backend {
        BackendKind::Cpu => Ok(Arc::new(Host)),
        #[cfg(feature = "cuda")]
        BackendKind::Cuda if runtime.raw_device().caps().vendor_libraries => {
            Ok(Arc::new(Nccl::load()?))
        }
        _ => Err(unsupported(format!(
            "{} has no library of collectives here; take cpu:0, or give one (CommConfig::ops)",
            runtime.device()
        ))),
    }
}
