//! A kernel in CUDA C++ on the host: simulated CUDA compiles the source with g++, and looks at each
//! access of the kernel. With `--gpu` the same program runs on a GPU.
//!
//! `cargo run -p leasehold --features cuda --example kernel_without_gpu`

use leasehold::cuda::{CudaBackend, CudaConfig};
use leasehold::kernel::{Grid, KernelCheck, KernelDesc, KernelSource};
use leasehold::prelude::*;
use leasehold::{Access, Context};
use std::sync::Arc;

const THREADS: u32 = 128;

/// The sum of each row: a block for a row. `ci/ptx.sh` compiles it with NVIDIA's compiler.
const SOURCE: &str = include_str!("kernel_without_gpu.cu");

/// The kernel, with the rule that makes its launches safe.
fn row_sums() -> Result<KernelBase> {
    let check = KernelCheck::new(|launch| {
        let columns = u64::from(launch.params::<u32>()?);
        let ([rows, 1, 1], [THREADS, 1, 1]) = (launch.grid, launch.block) else {
            return Err(leasehold::Error::invalid("a block of 128 threads for each row"));
        };
        launch.want(0, u64::from(rows) * 4)?;
        launch.want(1, u64::from(rows) * columns * 4)
    });
    let source = KernelSource::CudaC { source: SOURCE.into(), options: Vec::new().into() };
    let access = [Access::Write, Access::Read];
    let desc = KernelDesc::new("row_sums", source, &access, check).params_of::<u32>().aligned(4);
    // SAFETY: a block reads its row of binding 1 and writes one float of binding 0. The check asks
    // for as many, and blocks write floats of their own.
    unsafe { KernelBase::new(desc) }
}

/// The device: a GPU, or a simulated one.
fn runtime(simulated: bool) -> Result<Runtime> {
    let cuda = if simulated {
        let driver = leasehold_sim::cuda::SimDriverConfig::default();
        leasehold_sim::cuda::backend(driver, CudaConfig::default())?
    } else {
        CudaBackend::new()
    };
    Context::with_backends(vec![Arc::new(cuda)]).runtime(DeviceId::cuda(0))
}

fn main() -> Result<()> {
    let runtime = runtime(!std::env::args().any(|arg| arg == "--gpu"))?;
    let (rows, columns) = (64, 1000_u32);
    let values: Vec<f32> = (0..rows * columns).map(|i| (i % 10) as f32).collect();
    let x = runtime.upload(&values)?;
    let sums = runtime.alloc_array::<f32>(rows as usize)?;
    let grid = Grid::from((rows, THREADS));
    let row_sums = row_sums()?;
    if let Err(leasehold::Error::Unavailable(why)) = row_sums.prepare(&runtime) {
        println!("{why}"); // no g++, or no run-time compiler of NVIDIA's
        return Ok(());
    }
    runtime.stream().launch(&row_sums, &[sums.write(), x.read()], &columns, grid)?;
    let sums = runtime.to_vec(&sums)?;
    let wanted = values.chunks_exact(columns as usize).map(|row| row.iter().sum::<f32>());
    assert!(wanted.eq(sums.iter().copied()));
    println!("{rows} rows of {columns}: the first sums to {}", sums[0]);
    runtime.close(std::time::Duration::from_secs(10))
}
