//! The conformance suite on a backend in one file: each case is a test.
//!
//! `cargo test -p leasehold-conformance --example toy`

mod backend;

use backend::{KIND, ToyBackend};
use leasehold::backend::{Backend, KernelDesc};
use leasehold::{Context, DeviceId, Result, View};
use leasehold_conformance::{Factory, TestKernel, harness};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

struct Toy;

impl Factory for Toy {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(ToyBackend::new()?))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cpu())
    }
}

/// A program of a user: it names the backend once, in the context.
fn program() -> Result<()> {
    let context = Context::with_backends(vec![Arc::new(ToyBackend::new()?)]);
    let runtime = context.runtime(DeviceId::new(KIND, 0))?;
    let x = runtime.upload(&[1.0f32, 2.0, 3.0])?;
    let y = runtime.zeros::<f32>(3)?;
    runtime.stream().copy(y.view(), x.view())?;
    assert_eq!(runtime.to_vec(&y)?, [1.0, 2.0, 3.0]);
    runtime.close(Duration::from_secs(10))
}

fn main() -> ExitCode {
    program().expect("a program on the backend");
    // Kernels and host calls panic on purpose; the suite reports what came of it.
    std::panic::set_hook(Box::new(|_| {}));
    harness(Toy)
}
