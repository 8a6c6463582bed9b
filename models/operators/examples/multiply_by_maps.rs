//! A product of matrices on Hopper's tensor cores: boxes by tensor maps, `wgmma`, a ring of stages.
//! The same source runs without a GPU: simulated CUDA compiles it with g++, and looks at each
//! access.
//!
//! `cargo run -p leasehold-operators --example multiply_by_maps`
//!
//! On a GPU it computes 4,096 × 4,096 × 4,096 elements, in turns with cuBLASLt:
//! `cargo run --release -p leasehold-operators --features cuda --example multiply_by_maps -- --gpu`

use half::bf16;
use leasehold::cuda::{CudaBackend, CudaConfig};
use leasehold::kernel::{
    Grid, Kernel, KernelBase, KernelSource, MapElement, Read, Swizzle, TensorMap, Write,
};
use leasehold::{Array, Context, DeviceId, Error, Graph, Result, Runtime, Stream};
use leasehold_operators::ops::{self, Projection};
use leasehold_operators::{DType, Library, Tensor};
use std::sync::Arc;
use std::time::Duration;

/// The kernel. `ci/ptx.sh` compiles it with NVIDIA's compiler.
const SOURCE: &str = include_str!("multiply_by_maps.cu");

/// Elements of a tile, threads of a block, and bytes of its ring with the flags: the source's.
const ROWS: u32 = 128;
const COLUMNS: u32 = 256;
const DEPTH: u32 = 64;
const THREADS: u32 = 384;
const SHARED: u32 = 4 * (ROWS + COLUMNS) * DEPTH * 2 + 64;

/// The parameters: maps of x and w, and the sizes.
#[derive(Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Product {
    x: TensorMap,
    w: TensorMap,
    rows: u32,
    columns: u32,
    depth: u32,
}

impl Product {
    /// `y[rows, columns] = x[rows, depth] · w[columns, depth]ᵀ`.
    fn new(rows: u32, columns: u32, depth: u32) -> Self {
        let map = |lines: u32, of: u32| {
            TensorMap::new(MapElement::Bf16, &[depth.into(), lines.into()], &[DEPTH, of])
                .swizzle(Swizzle::B128)
                .l2_promotion(256)
        };
        Self { x: map(rows, ROWS), w: map(columns, COLUMNS), rows, columns, depth }
    }

    fn flops(&self) -> f64 {
        2.0 * f64::from(self.rows) * f64::from(self.columns) * f64::from(self.depth)
    }
}

type Multiply = Kernel<(Read<bf16>, Read<bf16>, Write<bf16>), Product>;

/// The kernel, with the rule that makes its launches safe.
fn multiply() -> Result<Multiply> {
    let check = Multiply::check(|launch| {
        let Product { rows, columns, depth, .. } = launch.params;
        if launch.params != Product::new(rows, columns, depth) || columns % 2 != 0 {
            return Err(Error::invalid("the maps of these sizes, and an even number of columns"));
        }
        if launch.info.block != [THREADS, 1, 1] || launch.info.shared != SHARED {
            return Err(Error::invalid("384 threads a block, and the ring's shared memory"));
        }
        launch.want(2, u64::from(rows) * u64::from(columns))
    });
    // `wgmma` is of one architecture, whose code runs on no other.
    let options = vec!["--gpu-architecture=compute_90a".into()].into();
    let source = KernelSource::CudaC { source: SOURCE.into(), options };
    let desc = Multiply::desc("multiply_by_maps", source, check).map(0, 0).map(1, TensorMap::BYTES);
    // SAFETY: copies read what lies in the maps, which the launch has found in bindings 0 and 1.
    // Tiles are apart, and a thread writes pairs within the rows and columns of binding 2, whose
    // length the check asks for. The ring has the bytes that the check asks for.
    unsafe { KernelBase::new(desc) }?.try_into()
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

/// Numbers from -2 to 2 that are no pattern.
fn numbers(count: u32, seed: u32) -> Vec<bf16> {
    let number = |i: u32| {
        let bits = (i ^ seed).wrapping_mul(0x9e37_79b1);
        let bits = (bits ^ bits >> 15).wrapping_mul(0x85eb_ca77);
        bf16::from_f32((bits >> 24) as f32 / 64.0 - 2.0)
    };
    (0..count).map(number).collect()
}

/// x, w, and a product of not-a-number.
struct Matrices {
    x: Array<bf16>,
    w: Array<bf16>,
    y: Array<bf16>,
}

impl Matrices {
    fn new(runtime: &Runtime, size: &Product) -> Result<Self> {
        Ok(Self {
            x: runtime.upload(&numbers(size.rows * size.depth, 1))?,
            w: runtime.upload(&numbers(size.columns * size.depth, 2))?,
            y: runtime.upload(&vec![bf16::NAN; (size.rows * size.columns) as usize])?,
        })
    }

    fn multiply(
        &self,
        kernel: &Multiply,
        stream: &Stream,
        size: &Product,
        blocks: u32,
    ) -> Result<()> {
        let grid = Grid::new([blocks, 1, 1]).threads([THREADS, 1, 1]).shared(SHARED);
        kernel.launch(stream, (&self.x, &self.w, &self.y), size, grid)
    }
}

/// Small products beside the host's, on as few blocks as make the ring turn.
fn check(runtime: &Runtime, kernel: &Multiply) -> Result<()> {
    for (rows, columns, depth, blocks) in [(256, 512, 192, 3), (200, 258, 328, 2), (16, 8, 8, 1)] {
        let size = Product::new(rows, columns, depth);
        let all = Matrices::new(runtime, &size)?;
        all.multiply(kernel, runtime.stream(), &size, blocks)?;
        let [x, w, y] = [&all.x, &all.w, &all.y].map(|array| runtime.to_vec(array));
        let (x, w, y) = (x?, w?, y?);
        let lines = |of: &[bf16]| -> Vec<f64> { of.iter().map(|v| v.to_f64()).collect() };
        let (x, w) = (lines(&x), lines(&w));
        for (i, y) in y.iter().enumerate() {
            let line = |of: &[f64], n: usize| of[n * depth as usize..][..depth as usize].to_vec();
            let (x, w) = (line(&x, i / columns as usize), line(&w, i % columns as usize));
            let sum: f64 = std::iter::zip(x, w).map(|(x, w)| x * w).sum();
            let off = (y.to_f64() - sum).abs();
            assert!(
                off <= 0.004 * sum.abs() + 0.001,
                "{rows} x {columns} x {depth}: {y} at {i}, not {sum}"
            );
        }
        println!("{rows} × {columns} × {depth} by {blocks} blocks: as the host's");
    }
    Ok(())
}

/// The time of a product of a graph that has ten.
fn time(runtime: &Runtime, graph: &Graph) -> Result<Duration> {
    let (start, end) = (runtime.create_event()?, runtime.create_event()?);
    runtime.stream().record(&start)?;
    let _ = graph.launch()?;
    runtime.stream().record(&end)?;
    end.synchronize()?;
    Ok(end.elapsed_since(&start)? / 10)
}

/// A large product in turns with cuBLASLt's.
fn compare(runtime: &Runtime, kernel: &Multiply) -> Result<()> {
    let size = Product::new(4096, 4096, 4096);
    let (own, vendor) = (Matrices::new(runtime, &size)?, Matrices::new(runtime, &size)?);
    let tensor = |array: &Array<bf16>| Tensor::new(array, DType::Bf16, 4096, 4096);
    let (x, weight, y) = (tensor(&vendor.x)?, tensor(&vendor.w)?, tensor(&vendor.y)?);
    let to = Projection { weight: &weight, bias: None, y: &y };
    let linear = ops::linear(&*Library::of(runtime)?, &x, None, to)?;
    let blocks = kernel.base().resident_blocks(runtime, THREADS, SHARED)? as u32;
    let ten = |one: &dyn Fn(&Runtime) -> Result<()>| {
        runtime.record_graph(|r| (0..10).try_for_each(|_| one(r)))
    };
    let graphs = [
        ten(&|r| own.multiply(kernel, r.stream(), &size, blocks))?,
        ten(&|r| r.add_graph_operator(&linear).map(drop))?,
    ];
    let mut times = [const { Vec::new() }; 2];
    for _ in 0..30 {
        for (times, graph) in std::iter::zip(&mut times, &graphs) {
            times.push(time(runtime, graph)?);
        }
    }
    let (ours, theirs) = (runtime.to_vec(&own.y)?, runtime.to_vec(&vendor.y)?);
    let apart =
        std::iter::zip(&ours, &theirs).map(|(a, b)| (a.to_f64() - b.to_f64()).powi(2)).sum::<f64>();
    let all = theirs.iter().map(|b| b.to_f64().powi(2)).sum::<f64>();
    assert!(apart <= 1e-6 * all, "the products differ by {}", (apart / all).sqrt());
    let rates = times.map(|mut times| {
        times.sort();
        size.flops() / times[times.len() / 2].as_secs_f64() / 1e12
    });
    println!(
        "4,096 × 4,096 × 4,096 by {blocks} blocks: {:.0} TFLOP/s, {}: {:.0}: {:.0} %; apart by {:.1e}",
        rates[0],
        linear.computed_by(),
        rates[1],
        100.0 * rates[0] / rates[1],
        (apart / all).sqrt(),
    );
    Ok(())
}

fn main() -> Result<()> {
    let gpu = std::env::args().any(|arg| arg == "--gpu");
    let runtime = runtime(!gpu)?;
    let kernel = multiply()?;
    match kernel.base().prepare(&runtime) {
        // No g++, no run-time compiler of NVIDIA's, or a device that is no Hopper.
        Err(Error::Unavailable(why) | Error::Unsupported(why)) => println!("{why}"),
        prepared => {
            prepared?;
            check(&runtime, &kernel)?;
            if gpu {
                compare(&runtime, &kernel)?;
            }
        }
    }
    runtime.close(Duration::from_secs(10))
}
