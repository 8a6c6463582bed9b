//! Kernel sources, a folder for each backend. No other place of the project has kernel sources.

mod blocks;
pub mod cpu;
pub mod cuda;
pub mod mps;

/// The shape of a launch: the number of tiles or blocks, and the threads of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Tiles of a CPU kernel, blocks of a CUDA kernel, threadgroups of a Metal kernel, in x, y and
    /// z.
    pub grid: [u32; 3],
    /// Threads of a block; one on the CPU.
    pub block: [u32; 3],
}

#[cfg(test)]
mod tests;
