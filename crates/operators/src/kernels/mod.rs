//! Kernel sources, a folder per backend: the only place in the project that has any.

pub mod cpu;
pub mod cuda;

/// The shape of a launch: how many tiles or blocks, of how many threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Tiles of a CPU kernel, blocks of a CUDA kernel, in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block; one on the CPU.
    pub block: [u32; 3],
}
