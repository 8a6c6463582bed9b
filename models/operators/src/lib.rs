//! The operators of a Llama-family decoder, with kernels for CPU, CUDA and Metal. No Apple GPU has
//! run those for Metal.
//!
//! * [`ops`] makes an [`Operator`] from shapes: the operators of a Llama-family decoder, fused if
//!   fusion saves a pass over memory.
//! * [`Library`] is the set of kernels of one runtime, for the most specific architecture that its
//!   device supports.
//! * [`Checks`] finds values that are not finite, on a stream.
//! * [`kernels`] holds the sources, a folder for each backend. Kernels know no runtime: a kernel is
//!   a function over a tile.
//!
//! Three types to know: [`Library`], [`Operator`] and [`Tensor`], a matrix in a buffer.
//!
//! ```
//! use leasehold::{DeviceId, Runtime};
//! use leasehold_operators::{DType, Tensor};
//! let runtime = Runtime::open(DeviceId::cpu(0))?;
//! let x = Tensor::alloc(&runtime, DType::F32, 2, 3)?;
//! assert_eq!((x.rows(), x.dtype()), (2, DType::F32));
//! # Ok::<(), leasehold::Error>(())
//! ```
//!
//! Operators allocate only through the runtime; each declares its reads and writes.

mod cache;
pub mod check;
#[cfg(feature = "emulate")]
mod emulated;
#[cfg(feature = "cuda")]
mod gemm;
pub mod kernels;
pub mod library;
pub mod operator;
pub mod ops;
pub mod part;
#[cfg(feature = "sim")]
mod simulated;
pub mod tensor;

pub use check::{Checks, Float};
#[cfg(feature = "emulate")]
pub use emulated::{EmulatedCuda, EmulatedMps, emulate_cuda, emulate_mps};
pub use library::Library;
pub use operator::Operator;
pub use part::BufferPart;
#[cfg(feature = "sim")]
pub use simulated::{simulate, simulate_mps, simulate_without_results};
pub use tensor::{DType, Tensor};
