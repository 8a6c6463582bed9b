//! The vendor's driver behind one trait.
//!
//! | module | what |
//! |---|---|
//! | [`ops`] | [`CudaSlowOps`](ops::CudaSlowOps), the one door |
//! | [`real`] | the vendor's driver, loaded at run time |
//! | [`nvrtc`] | the vendor's compiler, loaded at run time |
//! | [`cache`] | compiled kernels on disk |
//! | [`fork`] | telling a forked child from its parent |
//!
//! This module must not know managers.

pub mod cache;
pub mod fork;
pub mod nvrtc;
pub mod ops;
pub mod real;
