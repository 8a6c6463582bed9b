//! The conformance suite's cases about collectives, over both kinds of simulated devices.

use crate::Over;
use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::backend::{Backend, KernelDesc};
use leasehold::{DeviceId, Result};
use leasehold_conformance::simulated::{Checked, kernels};
use leasehold_conformance::{Factory, Filter, Ranks, Suite, TestKernel, run};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_sim::collective::SimCollectives;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{MachineConfig, Monitor, SimBackend};
use std::sync::Arc;

struct Simulated {
    over: Over,
    seed: AtomicU64,
}

impl Simulated {
    fn make(&self, devices: u32) -> Result<(Arc<dyn Backend>, SimCollectives)> {
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the suite makes all launches, and its cases have elements for each block.
        let kernels = unsafe { kernels() };
        let machine = MachineConfig::seed(seed).devices(devices, 1 << 28).kernels(kernels);
        let checked = |backend: Arc<dyn Backend>, machine: &Monitor| -> Arc<dyn Backend> {
            Arc::new(Checked::new(backend, machine.clone(), || Ok(())))
        };
        Ok(match self.over {
            Over::Sim => {
                let backend = Arc::new(SimBackend::new(machine)?);
                let library = SimCollectives::of_sim(&backend);
                (checked(backend, library.machine()), library)
            }
            Over::Cuda => {
                let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine))?);
                let library = SimCollectives::of_cuda(&driver);
                let backend = CudaBackend::with_ops(driver, CudaConfig::default())?;
                (checked(Arc::new(backend), library.machine()), library)
            }
        })
    }
}

impl Factory for Simulated {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(self.make(1)?.0)
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(match self.over {
            Over::Sim => kernel.for_sim(),
            Over::Cuda => kernel.for_cuda(),
        })
    }

    fn ranks(&self, most: u32) -> Option<Result<Ranks>> {
        let devices: Vec<_> = match self.over {
            Over::Sim => (0..most).map(|n| DeviceId::new(leasehold::BackendKind::Sim, n)).collect(),
            Over::Cuda => (0..most).map(DeviceId::cuda).collect(),
        };
        let made = self.make(most);
        Some(made.and_then(|(backend, library)| Ranks::on(backend, &devices, Arc::new(library))))
    }
}

fn passes(over: Over) {
    let suite = Suite::new();
    let cases = suite.cases().iter().filter(|case| case.name.contains("collective"));
    let numbers: Vec<u16> = cases.map(|case| case.number).collect();
    assert!(numbers.len() >= 30);
    let report = run(Simulated { over, seed: AtomicU64::new(1) }, &Filter::only(&numbers));
    assert!(report.ok(), "{report}");
    assert_eq!(report.passed(), numbers, "{report}");
    assert_eq!(report.skipped(), 0, "{report}");
}

#[test]
fn simulated_devices_pass_the_suite() {
    passes(Over::Sim);
}

#[test]
fn simulated_cuda_passes_the_suite() {
    passes(Over::Cuda);
}
