//! The backend over the simulated driver, for the shared test bench.

use leasehold_conformance::TestKernel;
pub use leasehold_conformance::testbench::*;
use leasehold_core::sync::Arc;
use leasehold_core::{Lease, Result};
use leasehold_hal::{Access, Device, KernelCheck, KernelDesc, KernelSource, Pipeline};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::mps::{SimDriver, SimDriverConfig};
use leasehold_sim::{MachineConfig, Monitor};

pub type Bench = leasehold_conformance::testbench::Bench<Mps>;

/// Metal over the simulated driver.
pub struct Mps;

impl Subject for Mps {
    type Driver = SimDriver;
    type DriverConfig = SimDriverConfig;
    type Backend = MpsBackend;
    type Config = MpsConfig;

    fn driver_config(machine: MachineConfig) -> SimDriverConfig {
        SimDriverConfig::new(machine)
    }

    fn machine_config(config: &mut SimDriverConfig) -> &mut MachineConfig {
        &mut config.machine
    }

    fn inline() -> MpsConfig {
        MpsConfig::default().inline(true)
    }

    fn driver(config: SimDriverConfig) -> Result<SimDriver> {
        SimDriver::new(config)
    }

    fn backend(driver: Arc<SimDriver>, config: MpsConfig) -> Result<MpsBackend> {
        MpsBackend::with_ops(driver, config)
    }

    fn machine(driver: &SimDriver) -> &Monitor {
        driver.machine()
    }

    fn findings(driver: &SimDriver) -> Vec<String> {
        let broken = driver.take_broken_rules();
        let mut all: Vec<_> = broken.iter().map(ToString::to_string).collect();
        let census = driver.census();
        if !census.is_nothing() {
            all.push(format!("left in the driver: {census:?}"));
        }
        all
    }

    fn kernel(kernel: TestKernel) -> KernelDesc<'static> {
        kernel.for_mps()
    }
}

/// A driver with two devices.
pub fn driver_config(seed: u64) -> SimDriverConfig {
    two_devices::<Mps>(seed)
}

/// The configuration in which all work runs on the calling thread.
pub fn inline() -> MpsConfig {
    Mps::inline()
}

/// A kernel over one binding, of the tests' own source.
pub fn kernel(device: &Lease<dyn Device>, name: &'static str) -> Lease<Pipeline> {
    const SOURCE: &str = "kernel void bump(device uint* x [[buffer(0)]]) { x[0] += 1; }
        kernel void hold(device uint* x [[buffer(0)]]) {}
        kernel void fail(device uint* x [[buffer(0)]]) {}";
    let source = KernelSource::Msl(SOURCE.into());
    let any = KernelCheck::new(|_| Ok(()));
    device.pipeline(&KernelDesc::new(name, source, &[Access::ReadWrite], any)).unwrap()
}
