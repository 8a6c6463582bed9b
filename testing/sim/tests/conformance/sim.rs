//! The conformance suite on the simulated backend.

use leasehold_conformance::simulated::{self, CallFaults};
use leasehold_conformance::{Factory, Faulty, TestKernel, harness};
use leasehold_core::Result;
use leasehold_core::sync::Arc;
use leasehold_hal::{Backend, KernelDesc};
use leasehold_sim::{MachineConfig, SimBackend};
use std::process::ExitCode;

fn backend(devices: u32) -> Result<SimBackend> {
    // SAFETY: the suite makes all launches, and its cases have elements for each block.
    let kernels = unsafe { simulated::kernels() };
    SimBackend::new(MachineConfig::seed(3).devices(devices, 1 << 30).kernels(kernels))
}

struct Sim;

impl Factory for Sim {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(backend(2)?))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_sim())
    }

    fn faulty(&self) -> Option<Result<Faulty>> {
        Some(backend(1).map(|backend| {
            let faults = CallFaults::sim(backend.machine());
            (Arc::new(backend) as Arc<dyn Backend>, faults)
        }))
    }
}

fn main() -> ExitCode {
    // Kernels and host calls panic on purpose; the harness reports the relevant results.
    std::panic::set_hook(Box::new(|_| {}));
    harness(Sim)
}
