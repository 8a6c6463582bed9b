//! The device's allocators and their backings. This module fills the cells of the device's state.
//!
//! This module must not know how blocks are placed.

pub mod device;
pub mod pinned_host;
pub mod shareable;
