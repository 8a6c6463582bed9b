//! A kernel that a Rust compiler made: `kernel.rs` became the PTX of `kernel.ptx`. With `--gpu` it
//! runs on a GPU. Without, simulated CUDA loads the PTX, and runs a function in its place.
//!
//! `cargo run -p leasehold --features cpu,cuda --example rust_kernel`

use bytemuck::{Pod, Zeroable};
use leasehold::Context;
use leasehold::cuda::{CudaBackend, CudaConfig};
use leasehold::kernel::{Grid, Kernel, KernelSource, Read, Write};
use leasehold::prelude::*;
use leasehold_sim::{KernelBody, KernelRegistry, KernelSpec, MachineConfig};
use std::sync::Arc;

const PTX: &str = include_str!("kernel.ptx");
const THREADS: u32 = 128;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    factor: f32,
    count: u32,
}

type Scale = Kernel<(Read<f32>, Write<f32>), Params>;

fn scale() -> Result<Scale> {
    let check = Scale::check(|launch| {
        launch.want(0, u64::from(launch.params.count))?;
        launch.want(1, u64::from(launch.params.count))
    });
    let source = KernelSource::Ptx(PTX.into());
    // SAFETY: a thread uses one value of each array, below the count that the check compares.
    unsafe { KernelBase::new(Scale::desc("scale", source, check)) }?.try_into()
}

/// The kernel's work on the simulated device, where a tile has the place of a block.
unsafe fn scaled(args: &CpuArgs<'_>) {
    let Params { factor, count } = args.params();
    let begin = args.tile()[0] as usize * THREADS as usize;
    let len = (count as usize).saturating_sub(begin).min(THREADS as usize);
    // SAFETY: binding 0 is only read; each tile writes values of its own of binding 1.
    let (x, y) = unsafe { (args.slice::<f32>(0), args.slice_mut::<f32>(1, begin, len)) };
    for (y, x) in y.iter_mut().zip(&x[begin..]) {
        *y = x * factor;
    }
}

fn simulated() -> Result<CudaBackend> {
    let kernels = KernelRegistry::new();
    // SAFETY: the machine gets the launches that the kernel's check accepted.
    let body = unsafe { KernelBody::cpu(scaled) };
    let size = size_of::<Params>() as u32;
    kernels.register("scale", KernelSpec::new(&[Access::Read, Access::Write], size, body));
    let machine = MachineConfig::seed(1).kernels(kernels);
    let driver = leasehold_sim::cuda::SimDriverConfig::new(machine);
    leasehold_sim::cuda::backend(driver, CudaConfig::default())
}

fn main() -> Result<()> {
    let gpu = std::env::args().any(|arg| arg == "--gpu");
    let cuda = if gpu { CudaBackend::new() } else { simulated()? };
    let runtime = Context::with_backends(vec![Arc::new(cuda)]).runtime(DeviceId::cuda(0))?;
    let values: Vec<f32> = (0..1000_u16).map(f32::from).collect();
    let (x, y) = (runtime.upload(&values)?, runtime.alloc_array::<f32>(values.len())?);
    let params = Params { factor: 2.5, count: values.len() as u32 };
    let grid = Grid::from((params.count.div_ceil(THREADS), THREADS));
    scale()?.launch(runtime.stream(), (&x, &y), &params, grid)?;
    let scaled = runtime.to_vec(&y)?;
    assert!(values.iter().map(|x| x * params.factor).eq(scaled.iter().copied()));
    println!("{} values, the last is {:?}", scaled.len(), scaled.last());
    runtime.close(std::time::Duration::from_secs(10))
}
