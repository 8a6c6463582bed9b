//! The Metal backend, for a context of one's own with another configuration.
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

pub use leasehold_mps::{MpsBackend, MpsConfig};
