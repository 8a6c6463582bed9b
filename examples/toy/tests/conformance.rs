//! The conformance suite on the toy: each case is a test.
//!
//! `cargo test -p leasehold-toy --test conformance`

use leasehold::Result;
use leasehold::backend::{Backend, KernelDesc};
use leasehold_conformance::{Factory, TestKernel, harness};
use leasehold_toy::ToyBackend;
use std::process::ExitCode;
use std::sync::Arc;

struct Toy;

impl Factory for Toy {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(ToyBackend::new()?))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cpu())
    }
}

fn main() -> ExitCode {
    // Kernels and host calls panic on purpose; the suite reports what came of it.
    std::panic::set_hook(Box::new(|_| {}));
    harness(Toy)
}
