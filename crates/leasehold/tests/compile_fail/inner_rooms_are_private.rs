//! Modules that run raw addresses and handles are private to the backends, as is thread state.
#![forbid(unsafe_code)]

use leasehold_cpu::driver::float as _;
use leasehold_cpu::driver::queue as _;
use leasehold_cuda::allocator as _;
use leasehold_cuda::conv as _;
use leasehold_cuda::encoder::Encoder as _;
use leasehold_cuda::engine::program::Program as _;
use leasehold_cuda::manager::retired as _;

fn main() {}
