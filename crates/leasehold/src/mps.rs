//! The Metal backend, for a context of one's own with another configuration, and the managers under
//! a runtime.
//!
//! ```
//! use leasehold::Context;
//! use leasehold::mps::{MpsBackend, MpsConfig};
//! use std::sync::Arc;
//! let metal = MpsBackend::with_config(MpsConfig::default().streams(8));
//! let context = Context::with_backends(vec![Arc::new(metal)]);
//! for report in context.backends() {
//!     println!("{:?}: {:?}", report.kind, report.devices.map(|all| all.len()));
//! }
//! ```

use crate::runtime::Runtime;

pub use leasehold_mps::manager::device::DeviceState;
pub use leasehold_mps::{MpsBackend, MpsConfig};

/// The device's state on the Metal backend, and through it the managers. `None` for a runtime of
/// another backend. A device that is wrapped shows what it wraps.
#[must_use]
pub fn device_state(runtime: &Runtime) -> Option<&DeviceState> {
    runtime.raw_device().state()?.downcast_ref()
}
