//! The conformance suite on the CPU backend.

use leasehold_conformance::{Expectations, Factory, TestKernel, harness};
use leasehold_core::Result;
use leasehold_core::sync::Arc;
use leasehold_cpu::CpuBackend;
use leasehold_hal::{Backend, KernelDesc, KernelSource};
use std::process::ExitCode;

struct Cpu;

impl Factory for Cpu {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(CpuBackend::new()))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.with_source(KernelSource::Cpu(kernel.function())))
    }

    fn expectations(&self) -> Expectations {
        Expectations { unsupported: &[], expected_failure: &[] }
    }
}

fn main() -> ExitCode {
    // Kernels and host calls panic on purpose; the harness says what matters.
    std::panic::set_hook(Box::new(|_| {}));
    harness(Cpu)
}
