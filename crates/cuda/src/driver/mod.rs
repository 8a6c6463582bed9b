//! The vendor's driver behind one trait.
//!
//! | module | content |
//! |---|---|
//! | [`ops`] | [`CudaSlowOps`](ops::CudaSlowOps), the interface to the driver |
//! | [`codes`] | the driver's result codes, and the errors that they become |
//! | [`condition`] | the code of the kernel that sets a condition of a graph |
//! | [`real`] | the vendor's driver, loaded at run time |
//! | [`nvrtc`] | the vendor's compiler, loaded at run time |
//! | `loader` | the reason why a library cannot be loaded |
//! | `pages` | host memory for large pinned segments |
//! | `probe` | whether this process can read an address |
//!
//! This module must not know managers.

pub mod codes;
pub mod condition;
mod loader;
pub mod nvrtc;
pub mod ops;
pub(crate) mod pages;
pub(crate) mod probe;
pub mod real;
