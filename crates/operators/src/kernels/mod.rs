//! Kernel sources, a folder for each backend. No other place of the project has kernel sources.

mod blocks;
pub mod cpu;
pub mod cuda;
pub mod mps;

use leasehold::kernel::Grid;

/// The shape of a launch: the number of tiles or blocks, and the threads of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Tiles of a CPU kernel, blocks of a CUDA kernel, threadgroups of a Metal kernel, in x, y and
    /// z.
    pub grid: [u32; 3],
    /// Threads of a block; one on the CPU.
    pub block: [u32; 3],
    /// Bytes of shared memory of a block beside what the kernel declares.
    pub shared: u32,
}

impl Geometry {
    const fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self { grid, block, shared: 0 }
    }

    /// The shape as the runtime takes it.
    pub(crate) const fn grid(self) -> Grid {
        Grid::new(self.grid).threads(self.block).shared(self.shared)
    }
}

#[cfg(test)]
mod tests;
