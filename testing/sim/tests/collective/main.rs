//! Ranks as threads over simulated devices: values, wrong programs, dead-locks, races and faults.

mod common;
mod conformance;
mod life;
#[path = "../../../../crates/collective/tests/suite/orders.rs"]
mod orders;
#[path = "../../../../crates/collective/tests/suite/random.rs"]
mod random;
mod values;
mod windows;
mod wrong;

use leasehold::{Context, Result, Runtime};
use leasehold_collective::{Comm, CommConfig, World};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_sim::collective::SimCollectives;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{MachineConfig, Monitor, SimBackend};
use std::sync::Arc;
use std::time::Duration;

/// The backend of the simulated devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    Sim,
    Cuda,
}

/// A machine with a device for each rank, and its library.
struct Bench {
    over: Over,
    context: Context,
    library: SimCollectives,
    size: u32,
}

/// A rank of a bench, on a thread of its own.
struct Rank {
    world: World,
    runtime: Runtime,
    config: CommConfig,
}

impl Rank {
    fn comm(&self) -> Comm {
        self.world.comm(&self.runtime, &self.config).unwrap()
    }

    fn number(&self) -> u32 {
        self.world.rank()
    }

    /// Waits until all ranks have come here.
    fn barrier(&self, name: &str) {
        self.world.barrier(name, Duration::from_secs(60)).unwrap();
    }
}

impl Bench {
    fn new(over: Over, size: u32, machine: MachineConfig) -> Self {
        let machine = machine.devices(size, 256 << 20);
        let (context, library) = match over {
            Over::Sim => {
                let backend = Arc::new(SimBackend::new(machine).unwrap());
                let library = SimCollectives::of_sim(&backend);
                (Context::with_backends(vec![backend]), library)
            }
            Over::Cuda => {
                let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine)).unwrap());
                let library = SimCollectives::of_cuda(&driver);
                let backend =
                    CudaBackend::with_ops(driver, CudaConfig::default().inline(true)).unwrap();
                (Context::with_backends(vec![Arc::new(backend)]), library)
            }
        };
        Self { over, context, library, size }
    }

    fn machine(&self) -> &Monitor {
        self.library.machine()
    }

    fn config(&self) -> CommConfig {
        CommConfig::new("tp").ops(Arc::new(self.library.clone())).timeout(Duration::from_secs(60))
    }

    fn runtime(&self, rank: u32) -> Result<Runtime> {
        let backend = if self.over == Over::Sim { "sim" } else { "cuda" };
        self.context.runtime(format!("{backend}:{rank}").parse()?)
    }

    /// Runs a program on all ranks, and returns what each gives.
    fn run<T: Send>(&self, program: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
        let worlds = World::threads(self.size).unwrap();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = worlds
                .into_iter()
                .map(|world| {
                    let program = &program;
                    scope.spawn(move || {
                        let runtime = self.runtime(world.rank()).unwrap();
                        program(&Rank { world, runtime, config: self.config() })
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}
