//! A launch of a kernel, and of the same kernel with a type that says what a launch takes. A launch
//! with a tensor map in its parameters.

mod idle;
mod program;

use leasehold::bytemuck::{Pod, Zeroable};
use leasehold::kernel::{Kernel, KernelSource, MapElement, Read, TensorMap, Write};
use leasehold::{Array, Grid, KernelBase, Result, Runtime, View};

type Add = Kernel<(Read<u8>, Read<u8>, Write<u8>), [u32; 4]>;

/// Sixteen bytes of parameters behind a map of the first operand.
#[derive(Clone, Copy, Pod, Zeroable)]
#[bytemuck(crate = "leasehold::bytemuck")]
#[repr(C)]
struct Mapped {
    map: TensorMap,
    numbers: [u32; 4],
}

type MappedAdd = Kernel<(Read<u8>, Read<u8>, Write<u8>), Mapped>;

fn mapped() -> Result<MappedAdd> {
    let check = MappedAdd::check(|launch| {
        let [rows, ..] = launch.params.numbers;
        (0..3).try_for_each(|i| launch.want(i, u64::from(rows) * 4))
    });
    let desc = MappedAdd::desc("k", KernelSource::Registered("k".into()), check);
    // SAFETY: the device runs nothing.
    unsafe { KernelBase::new(desc.map(0, 0)) }?.try_into()
}

struct Bench {
    runtime: Runtime,
    kernel: KernelBase,
    typed: Add,
    mapped: MappedAdd,
    params: Mapped,
    arrays: [Array<u8>; 3],
}

impl Bench {
    fn new() -> Result<Self> {
        let (runtime, kernel) = (idle::runtime()?, idle::kernel()?);
        let array = || runtime.alloc_array(4096);
        let arrays = [array()?, array()?, array()?];
        let typed = kernel.clone().try_into()?;
        let map = TensorMap::new(MapElement::U8, &[64, 64], &[64, 8]);
        let (mapped, params) = (mapped()?, Mapped { map, numbers: [0; 4] });
        Ok(Self { runtime, kernel, typed, mapped, params, arrays })
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

    fn mapped(&self) -> Result<()> {
        let [a, b, c] = &self.arrays;
        self.mapped.launch(self.runtime.stream(), (a, b, c), &self.params, GRID)
    }
}

const GRID: Grid = Grid::new([8, 1, 1]).threads([64, 1, 1]);

/// The paths, by the names of the table.
const PATHS: [program::Path<Bench>; 3] = [
    ("untyped_launch", Bench::untyped),
    ("typed_launch", Bench::typed),
    ("mapped_launch", Bench::mapped),
];

fn main() -> Result<()> {
    program::run(Bench::new, &PATHS)
}
