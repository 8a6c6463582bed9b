//! A launch with a tensor map in its parameters: the launch of `typed.rs` with a map besides.

#[expect(dead_code, reason = "the kernel is another one")]
mod idle;
mod program;

use leasehold::bytemuck::{Pod, Zeroable};
use leasehold::kernel::{Kernel, KernelSource, MapElement, Read, TensorMap, Write};
use leasehold::{Array, Grid, KernelBase, Result, Runtime};

/// Sixteen bytes of parameters behind a map of the first operand.
#[derive(Clone, Copy, Pod, Zeroable)]
#[bytemuck(crate = "leasehold::bytemuck")]
#[repr(C)]
struct Params {
    map: TensorMap,
    numbers: [u32; 4],
}

type Add = Kernel<(Read<u8>, Read<u8>, Write<u8>), Params>;

struct Bench {
    runtime: Runtime,
    kernel: Add,
    params: Params,
    arrays: [Array<u8>; 3],
}

impl Bench {
    fn new() -> Result<Self> {
        let runtime = idle::runtime()?;
        let check = Add::check(|launch| {
            let [rows, ..] = launch.params.numbers;
            (0..3).try_for_each(|i| launch.want(i, u64::from(rows) * 4))
        });
        let desc = Add::desc("k", KernelSource::Registered("k".into()), check);
        // SAFETY: the device runs nothing.
        let kernel = unsafe { KernelBase::new(desc.map(0, 0)) }?.try_into()?;
        let map = TensorMap::new(MapElement::U8, &[64, 64], &[64, 8]);
        let array = || runtime.alloc_array(4096);
        let arrays = [array()?, array()?, array()?];
        Ok(Self { runtime, kernel, params: Params { map, numbers: [0; 4] }, arrays })
    }

    fn mapped(&self) -> Result<()> {
        let [a, b, c] = &self.arrays;
        let grid = Grid::new([8, 1, 1]).threads([64, 1, 1]);
        self.kernel.launch(self.runtime.stream(), (a, b, c), &self.params, grid)
    }
}

fn main() -> Result<()> {
    program::run(Bench::new, &[("mapped_launch", Bench::mapped)])
}
