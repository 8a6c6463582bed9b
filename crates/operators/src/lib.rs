//! The operator library of the Leasehold device runtime.
//!
//! * [`ops`] makes an [`Operator`] from shapes: what a Llama-family decoder needs, fused where that saves a pass over memory.
//! * [`Library`] is the set of kernels of one runtime, resolved from the most specific architecture that its device runs.
//! * [`kernels`] holds the sources, a folder per backend. They know no runtime: a kernel is a function over a tile.
//!
//! Operators allocate nothing but through the runtime; each declares what it reads and writes.

pub mod kernels;
pub mod library;
pub mod operator;
pub mod ops;
#[cfg(feature = "sim")]
mod simulated;
pub mod tensor;

pub use library::Library;
pub use operator::{Operator, Part};
#[cfg(feature = "sim")]
pub use simulated::simulate;
pub use tensor::{DType, Tensor};
