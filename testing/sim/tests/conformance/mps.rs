//! The conformance suite on Metal over the simulated driver. A case also fails if the race detector
//! reports a race, if a rule of Metal was broken, or if objects remain in the driver. The
//! environment variable `LEASEHOLD_MPS_SUITE` is a list of words:
//! - `private` puts device memory in private storage.
//! - `unset` selects a system without residency sets, `paravirtual` a virtual machine's device.
//! - `queues` gives each device four command queues.
//! - A number is the machine's seed.

use leasehold_conformance::simulated::{self, CallFaults, Checked, DEVICES_EXIST};
use leasehold_conformance::{Expectation, Expectations, Factory, Faulty, TestKernel, harness};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use leasehold_hal::{Backend, KernelDesc};
use leasehold_mps::driver::ops::Storage;
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::MachineConfig;
use leasehold_sim::mps::{SimDriver, SimDriverConfig};
use std::process::ExitCode;

struct Simulated {
    config: MpsConfig,
    seed: u64,
    residency_sets: bool,
    paravirtual: bool,
}

/// An error if a rule of Metal was broken, or if objects are left in the driver.
fn rules_kept(driver: &SimDriver) -> Result<()> {
    let broken = driver.take_broken_rules();
    if !broken.is_empty() {
        return Err(Error::state(format!("rules of Metal: {broken:?}")));
    }
    let census = driver.census();
    if !census.is_nothing() {
        return Err(Error::state(format!("left in the driver: {census:?}")));
    }
    Ok(())
}

impl Simulated {
    fn make(&self) -> Result<(Arc<dyn Backend>, Arc<SimDriver>)> {
        // SAFETY: the suite makes all launches, and its cases have elements for each block.
        let kernels = unsafe { simulated::kernels() };
        let machine = MachineConfig::seed(self.seed).devices(2, 4 << 30).kernels(kernels);
        let mut driver = SimDriverConfig::new(machine);
        driver.residency_sets = self.residency_sets;
        driver.paravirtual = self.paravirtual;
        let driver = Arc::new(SimDriver::new(driver)?);
        simulated::ring(driver.machine(), &driver)?;
        let backend = MpsBackend::with_ops(driver.clone(), self.config.clone())?;
        let (machine, below) = (driver.machine().clone(), driver.clone());
        let checked = Checked::new(backend, machine, move || rules_kept(&below));
        Ok((Arc::new(checked), driver))
    }
}

impl Factory for Simulated {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(self.make()?.0)
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_mps())
    }

    fn faulty(&self) -> Option<Result<Faulty>> {
        Some(self.make().map(|(backend, driver)| (backend, CallFaults::mps(driver.machine()))))
    }

    fn expectations(&self) -> Expectations {
        const PRIVATE: &str = "a Metal device does not reach private storage of another one";
        const ALL: [Expectation; 4] = [
            DEVICES_EXIST,
            Expectation { case: 75, reason: PRIVATE },
            Expectation { case: 76, reason: PRIVATE },
            Expectation { case: 77, reason: PRIVATE },
        ];
        let private = self.config.storage == Some(Storage::Private);
        let unsupported = if private { &ALL[..] } else { &ALL[..1] };
        Expectations { unsupported, expected_failure: &[] }
    }
}

fn main() -> ExitCode {
    // Kernels and host calls panic on purpose; the harness reports the outcome.
    std::panic::set_hook(Box::new(|_| {}));
    let mut suite = Simulated {
        config: MpsConfig::default(),
        seed: 17,
        residency_sets: true,
        paravirtual: false,
    };
    for word in std::env::var("LEASEHOLD_MPS_SUITE").unwrap_or_default().split(',') {
        match word {
            "private" => suite.config = suite.config.storage(Storage::Private),
            "queues" => suite.config = suite.config.queues(4),
            "unset" => suite.residency_sets = false,
            "paravirtual" => suite.paravirtual = true,
            number => suite.seed = number.parse().unwrap_or(suite.seed),
        }
    }
    harness(suite)
}
