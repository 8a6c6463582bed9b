//! The CPU backend, to be made with a configuration of the caller's, and the managers under a
//! runtime.
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

use crate::runtime::Runtime;

pub use leasehold_cpu::manager::device::DeviceState;
pub use leasehold_cpu::{CpuBackend, CpuConfig, HugePages};

/// The device's state on the CPU backend, and through it the managers. `None` for a runtime of
/// another backend. A device that is wrapped shows what it wraps.
///
/// ```
/// use leasehold::{DeviceId, Runtime};
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let device = leasehold::cpu::device_state(&runtime).expect("it is of the CPU backend");
/// assert!(device.streams().stats().live >= 1, "the default stream");
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use]
pub fn device_state(runtime: &Runtime) -> Option<&DeviceState> {
    runtime.raw_device().state()?.downcast_ref()
}
