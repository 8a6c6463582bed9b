//! The calls of a communicator.
//!
//! The library accepts everything and enqueues nothing. The device is a simulated CUDA device. So
//! what is counted is the public path with the engine below, the same every time.

mod program;

use leasehold::{Array, Context, Result, Runtime};
use leasehold_collective::driver::{Call, CollectiveOps, Communicator, Place};
use leasehold_collective::{Comm, CommConfig, Reduce, World};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_sim::MachineConfig;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use std::sync::Arc;

/// A library that does nothing, at once.
struct Idle;

impl CollectiveOps for Idle {
    fn name(&self) -> &str {
        "idle"
    }

    fn unique_id(&self) -> Result<Vec<u8>> {
        Ok(vec![0])
    }

    fn init(&self, _: &Place) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self))
    }
}

impl Communicator for Idle {
    unsafe fn enqueue(&self, stream: u64, calls: &[Call<'_>]) -> Result<()> {
        std::hint::black_box((stream, calls));
        Ok(())
    }

    fn abort(&self, _: leasehold::Error) {}
}

struct Bench {
    runtime: Runtime,
    comm: Comm,
    x: Array<f32>,
    y: Array<f32>,
}

impl Bench {
    fn new() -> Result<Self> {
        let machine = MachineConfig::seed(1).devices(1, 64 << 20);
        let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine))?);
        let backend = CudaBackend::with_ops(driver, CudaConfig::default().inline(true))?;
        let context = Context::with_backends(vec![Arc::new(backend)]);
        let runtime = context.runtime("cuda:0".parse()?)?.create_stream()?.runtime();
        let [world] = <[World; 1]>::try_from(World::threads(1)?).expect("one rank");
        let comm = world.comm(&runtime, &CommConfig::new("tp").ops(Arc::new(Idle)))?;
        let (x, y) = (runtime.zeros(2048)?, runtime.zeros(2048)?);
        runtime.stream().synchronize()?;
        Ok(Self { runtime, comm, x, y })
    }
}

/// The calls, by the names of the table.
const PATHS: [program::Path<Bench>; 2] = [
    ("comm_all_reduce", |b| b.comm.all_reduce(b.runtime.stream(), &b.x, Reduce::Sum)),
    ("comm_group_of_two", |b| {
        b.comm.group(b.runtime.stream(), |g| {
            g.all_reduce(&b.x, Reduce::Sum)?;
            g.all_reduce(&b.y, Reduce::Sum)
        })
    }),
];

fn main() -> Result<()> {
    program::run(Bench::new, &PATHS)
}
