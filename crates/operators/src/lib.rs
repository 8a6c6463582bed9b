//! The operator library of the Leasehold device runtime.
//!
//! * [`ops`] makes an [`Operator`] from shapes: the operators of a Llama-family decoder, fused if
//!   fusion saves a pass over memory.
//! * [`Library`] is the set of kernels of one runtime, for the most specific architecture that its
//!   device supports.
//! * [`kernels`] holds the sources, a folder for each backend. Kernels know no runtime: a kernel is
//!   a function over a tile.
//!
//! Operators allocate only through the runtime; each declares its reads and writes.

pub mod kernels;
pub mod library;
pub mod operator;
pub mod ops;
#[cfg(feature = "sim")]
mod simulated;
pub mod tensor;

pub use library::Library;
pub use operator::{BufferPart, Operator};
#[cfg(feature = "sim")]
pub use simulated::simulate;
pub use tensor::{DType, Tensor};
