//! The backend over the simulated driver, for the shared test bench.

use leasehold_conformance::TestKernel;
pub use leasehold_conformance::testbench::*;
use leasehold_core::Result;
use leasehold_core::sync::Arc;
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_hal::KernelDesc;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{MachineConfig, Monitor};

pub type Bench = leasehold_conformance::testbench::Bench<Cuda>;

/// CUDA over the simulated driver.
pub struct Cuda;

impl Subject for Cuda {
    type Driver = SimDriver;
    type DriverConfig = SimDriverConfig;
    type Backend = CudaBackend;
    type Config = CudaConfig;

    fn driver_config(machine: MachineConfig) -> SimDriverConfig {
        SimDriverConfig::new(machine)
    }

    fn machine_config(config: &mut SimDriverConfig) -> &mut MachineConfig {
        &mut config.machine
    }

    fn inline() -> CudaConfig {
        CudaConfig::default().inline(true)
    }

    fn driver(config: SimDriverConfig) -> Result<SimDriver> {
        SimDriver::new(config)
    }

    fn backend(driver: Arc<SimDriver>, config: CudaConfig) -> Result<CudaBackend> {
        CudaBackend::with_ops(driver, config)
    }

    fn machine(driver: &SimDriver) -> &Monitor {
        driver.machine()
    }

    fn findings(driver: &SimDriver) -> Vec<String> {
        let mut all = driver.take_leaks();
        let census = driver.census();
        if !census.is_nothing() {
            all.push(format!("left in the driver: {census:?}"));
        }
        all
    }

    fn kernel(kernel: TestKernel) -> KernelDesc<'static> {
        kernel.for_cuda()
    }
}

/// A driver with two devices.
pub fn driver_config(seed: u64) -> SimDriverConfig {
    two_devices::<Cuda>(seed)
}

/// The configuration in which all work runs on the calling thread.
pub fn inline() -> CudaConfig {
    Cuda::inline()
}
