//! The CPU backend, to be made with a configuration of the caller's.
//!
//! ```
//! use leasehold::backend::Backend;
//! use leasehold::cpu::{CpuBackend, CpuConfig};
//! use leasehold::{Context, DeviceId};
//! # fn main() -> leasehold::Result<()> {
//! let backend = CpuBackend::with_config(CpuConfig::threads(2))?;
//! let backend: std::sync::Arc<dyn Backend> = std::sync::Arc::new(backend);
//! let context = Context::with_backends(vec![backend]);
//! assert_eq!(context.runtime(DeviceId::cpu(0))?.device(), DeviceId::cpu(0));
//! # Ok(())
//! # }
//! ```

pub use leasehold_cpu::{CpuBackend, CpuConfig, HugePages};
