//! Metal behind one trait.
//!
//! | module | content |
//! |---|---|
//! | [`ops`] | [`MpsSlowOps`](ops::MpsSlowOps), the interface to the driver |
//! | [`types`] | handles, properties and descriptors of the interface |
//! | `real` (Apple's systems) | Metal itself, over `objc2-metal` |
//!
//! This module must not know managers.

pub mod ops;
#[cfg(any(target_vendor = "apple", metal_messages))]
pub mod real;
pub mod types;
