//! The conformance suite on the CPU backend.

use leasehold_conformance::{Expectation, Expectations, Factory, Ranks, TestKernel, harness};
use leasehold_core::Result;
use leasehold_core::sync::Arc;
use leasehold_cpu::{CpuBackend, CpuConfig};
use leasehold_hal::{Backend, KernelDesc};
use std::process::ExitCode;

struct Cpu;

impl Factory for Cpu {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(CpuBackend::new()))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cpu())
    }

    fn one_worker(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(CpuBackend::with_config(CpuConfig::threads(1))?))
    }

    /// A second instance: a device with memory and threads of its own.
    fn peer(&self) -> Option<Result<Arc<dyn Backend>>> {
        Some(self.backend())
    }

    fn ranks(&self, most: u32) -> Option<Result<Ranks>> {
        Some(self.backend().and_then(|backend| Ranks::on_cpu(backend, most)))
    }

    fn expectations(&self) -> Expectations {
        Expectations {
            unsupported: &[
                Expectation { case: 3, reason: "there is always a processor" },
                Expectation {
                    case: 101,
                    reason: "a library call in a graph runs when the graph does: nothing is captured",
                },
            ],
            expected_failure: &[],
        }
    }
}

fn main() -> ExitCode {
    // Kernels and host calls panic on purpose; the harness reports the outcome.
    std::panic::set_hook(Box::new(|_| {}));
    harness(Cpu)
}
