//! A CUDA kernel of one's own, beside the same kernel for the CPU: the sums of a matrix's rows.
//!
//! `cargo run --release -p leasehold --features cuda --example cuda_kernel`
//!
//! It runs on `cuda:0` where there is a GPU with CUDA's run-time compiler, else on `cpu:0`; then
//! over the simulated CUDA driver, which needs neither.

use leasehold::cuda::CudaConfig;
use leasehold::kernel::{Kernel, KernelSource, Read, Write};
use leasehold::prelude::*;
use leasehold_sim::cuda::SimDriverConfig;
use leasehold_sim::{KernelBody, KernelRegistry, KernelSpec, MachineConfig};
use std::sync::Arc;

/// A block sums a row. Its threads add up the columns in turns, then their sums in shared memory.
const ROW_SUMS: &str = r#"
extern "C" __global__ void row_sums(const float* x, float* y, unsigned columns) {
    extern __shared__ float part[];
    const float* row = x + (unsigned long long)blockIdx.x * columns;
    float sum = 0.0f;
    for (unsigned i = threadIdx.x; i < columns; i += blockDim.x) sum += row[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}
"#;
const THREADS: u32 = 256;

/// The same for the CPU: a tile sums a row.
unsafe fn row_sums(args: &CpuArgs<'_>) {
    let (row, columns) = (args.tile()[0] as usize, args.params::<u32>() as usize);
    // SAFETY: binding 0 is only read; each tile writes one element of its own of binding 1.
    let (x, y) = unsafe { (args.slice::<f32>(0), args.slice_mut::<f32>(1, row, 1)) };
    y[0] = x[row * columns..][..columns].iter().sum();
}

/// Blocks of `THREADS` threads with a float of shared memory each, one block for each row.
fn grid(rows: u32) -> Grid {
    Grid::from((rows, THREADS)).shared(THREADS * size_of::<f32>() as u32)
}

/// The type says what a launch takes: a matrix, room for its sums, and the number of columns.
type RowSums = Kernel<(Read<f32>, Write<f32>), u32>;

fn kernel() -> Result<RowSums> {
    let check = RowSums::check(|launch| {
        let [rows, 1, 1] = launch.info.grid else {
            return Err(Error::invalid("a grid of one dimension: a block for each row"));
        };
        if (launch.info.block, launch.info.shared) != ([THREADS, 1, 1], THREADS * 4) {
            return Err(Error::invalid("blocks of 256 threads with 1,024 bytes of shared memory"));
        }
        launch.want(0, u64::from(rows) * u64::from(launch.params))?;
        launch.want(1, u64::from(rows))
    });
    let cuda = KernelSource::CudaC { source: ROW_SUMS.into(), options: vec![].into() };
    let describe = |source| RowSums::desc("row_sums", source, check.clone());
    let sources = vec![describe(cuda), describe(KernelSource::Cpu(row_sums))];
    // SAFETY: a launch that the check accepts reads the matrix and writes one float a row, and each
    // block or tile has a row of its own.
    unsafe { KernelBase::with_sources(sources) }?.try_into()
}

fn sum(runtime: &Runtime) -> Result<Vec<f32>> {
    let (rows, columns) = (4u32, 1000u32);
    let matrix: Vec<f32> = (0..rows * columns).map(|i| (i / columns) as f32 + 0.5).collect();
    let x = runtime.upload(&matrix)?;
    let y = runtime.alloc_array::<f32>(rows as usize)?;
    let row_sums = kernel()?;
    row_sums.launch(runtime.stream(), (&x, &y), &columns, grid(rows))?;
    // A wrong launch is refused, and nothing runs.
    let refused = row_sums.launch(runtime.stream(), (&x, &y), &columns, grid(rows + 1));
    println!("{}", refused.unwrap_err());
    runtime.to_vec(&y)
}

fn simulated() -> Result<Runtime> {
    let kernels = KernelRegistry::new();
    // SAFETY: the machine gets the launches of the kernel above, which its check accepted.
    let body = unsafe { KernelBody::cpu(row_sums) };
    kernels.register("row_sums", KernelSpec::new(&[Access::Read, Access::Write], 4, body));
    let machine = MachineConfig::seed(1).kernels(kernels);
    let backend =
        leasehold_sim::cuda::backend(SimDriverConfig::new(machine), CudaConfig::default())?;
    Context::with_backends(vec![Arc::new(backend)]).runtime(DeviceId::cuda(0))
}

fn main() -> Result<()> {
    let there = Runtime::open(DeviceId::cuda(0)).or_else(|why| {
        println!("{why}");
        Runtime::open(DeviceId::cpu(0))
    })?;
    for runtime in [there, simulated()?] {
        let sums = sum(&runtime)?;
        println!("{}: {sums:?}", runtime.info());
        assert_eq!(sums, [500.0, 1500.0, 2500.0, 3500.0]);
    }
    Ok(())
}
