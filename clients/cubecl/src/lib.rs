//! CubeCL's CUDA runtime on Leasehold, for unmodified programs.
//!
//! This package has the name of CubeCL's own CUDA runtime. A program that takes it by
//! `[patch.crates-io]` gives its work to Leasehold, and so does each package beneath it, such as
//! Burn.
//!
//! `LEASEHOLD_DEVICE` names the first device: `cuda:0` without it, `sim-cuda:0` for a simulated
//! one, whose kernels run in the emulator. CubeCL's device of index *n* is the *n*-th from there.
//!
//! What CubeCL declares of a kernel's buffers are the launch's accesses, so the runtime derives
//! the order between streams. What is refused is refused by name: tensor maps, graphs, collectives.

#![warn(missing_docs)]
#![deny(clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn)]

mod compile;
mod driver;
mod errors;
mod lane;
mod open;
mod runtime;
mod server;
mod storage;
mod stream;

pub use cubecl_server::device::CudaDevice;
pub use runtime::CudaRuntime;
pub use server::CudaServer;

/// The most bindings of a launch, as CubeCL counts them.
pub const CUDA_MAX_BINDINGS: u32 = 1024;
