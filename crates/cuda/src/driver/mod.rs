//! The vendor's driver behind one trait.
//!
//! | module | what |
//! |---|---|
//! | [`ops`] | [`CudaSlowOps`](ops::CudaSlowOps), the one door |
//!
//! This module must not know managers.

pub mod ops;
