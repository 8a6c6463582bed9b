//! A launch of a kernel, and of the same kernel with a type that says what a launch takes.

mod idle;
mod program;

use leasehold::kernel::{Kernel, Read, Write};
use leasehold::{Array, Grid, KernelBase, Result, Runtime, View};

type Add = Kernel<(Read<u8>, Read<u8>, Write<u8>), [u32; 4]>;

struct Bench {
    runtime: Runtime,
    kernel: KernelBase,
    typed: Add,
    arrays: [Array<u8>; 3],
}

impl Bench {
    fn new() -> Result<Self> {
        let (runtime, kernel) = (idle::runtime()?, idle::kernel()?);
        let array = || runtime.alloc_array(4096);
        let arrays = [array()?, array()?, array()?];
        let typed = kernel.clone().try_into()?;
        Ok(Self { runtime, kernel, typed, arrays })
    }

    fn untyped(&self) -> Result<()> {
        let [a, b, c] = &self.arrays;
        let operands = [a.read(), b.read(), c.write()];
        self.runtime.stream().launch(&self.kernel, &operands, &[0u32; 4], GRID)
    }

    fn typed(&self) -> Result<()> {
        let [a, b, c] = &self.arrays;
        self.typed.launch(self.runtime.stream(), (a, b, c), &[0; 4], GRID)
    }
}

const GRID: Grid = Grid::new([8, 1, 1]).threads([64, 1, 1]);

/// The paths, by the names of the table.
const PATHS: [program::Path<Bench>; 2] =
    [("untyped_launch", Bench::untyped), ("typed_launch", Bench::typed)];

fn main() -> Result<()> {
    program::run(Bench::new, &PATHS)
}
