//! Libraries of collectives: the interface to them, and the one for ranks that are threads.

pub mod host;
pub mod ops;

pub use host::Host;
pub use ops::{Call, CollectiveOps, Communicator, Derived, Place};

use leasehold::backend::BackendKind;
use leasehold::{Error, Result, Runtime};
use std::sync::Arc;

/// The library for a device.
pub(crate) fn of(runtime: &Runtime) -> Result<Arc<dyn CollectiveOps>> {
    match runtime.device().backend {
        BackendKind::Cpu => Ok(Arc::new(Host)),
        _ => Err(Error::Unsupported(
            format!(
                "{} has no library of collectives here; take cpu:0, or give one (CommConfig::ops)",
                runtime.device()
            )
            .into(),
        )),
    }
}
