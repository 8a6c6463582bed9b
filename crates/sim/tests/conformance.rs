//! The conformance suite on the simulated backend.

use leasehold_conformance::{Expectations, Factory, Faults, Faulty, Injected, TestKernel, harness};
use leasehold_core::Result;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_hal::{Backend, KernelDesc, KernelSource};
use leasehold_sim::{
    FaultAction, FaultRule, KernelBody, KernelRegistry, KernelSpec, Launch, MachineConfig, Monitor,
    SimBackend, When,
};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Reads the flag at each poll, until its limit of real time has passed.
fn spin() -> KernelBody {
    // The start of each launch, by its output address.
    let begun: Mutex<BTreeMap<u64, Instant>> = Mutex::new(BTreeMap::new());
    KernelBody::poll(move |launch: &Launch<'_>| {
        let (flag, out) = (launch.pointer::<u32>(0).0, launch.pointer::<u32>(1).0);
        let limit = Duration::from_millis(launch.params::<u32>()?.into());
        let start = *begun.lock().entry(out as u64).or_insert_with(Instant::now);
        // SAFETY: the machine checked the bindings. Other code writes the flag without a cache.
        let seen = unsafe { flag.read_volatile() } != 0;
        if !seen && start.elapsed() < limit {
            return Ok(Poll::Pending);
        }
        begun.lock().remove(&(out as u64));
        // SAFETY: the machine checked the bindings, and `out` is this launch's own.
        unsafe { out.write(if seen { 1 } else { 2 }) };
        Ok(Poll::Ready(()))
    })
}

fn kernels() -> KernelRegistry {
    let all = KernelRegistry::new();
    for kernel in TestKernel::ALL {
        let body = match kernel {
            TestKernel::SpinUntilFlag => spin(),
            // SAFETY: all launches come from the suite, whose cases have elements for each block.
            other => unsafe { KernelBody::cpu(other.function()) },
        };
        all.register(kernel.name(), KernelSpec::new(kernel.bindings(), kernel.params(), body));
    }
    all
}

fn backend(devices: u32) -> Result<SimBackend> {
    SimBackend::new(MachineConfig::seed(3).devices(devices, 1 << 30).kernels(kernels()))
}

/// Makes the machine's calls fail.
struct Switchboard(Monitor);

impl Faults for Switchboard {
    fn next(&self, fault: Injected) -> bool {
        let (call, action) = match fault {
            Injected::Submission => ("submit", FaultAction::Fail(1)),
            Injected::Creation => ("pipeline_create", FaultAction::Fail(1)),
            Injected::OutOfMemory => ("create", FaultAction::OutOfMemory),
            Injected::DeviceLost => ("submit", FaultAction::DeviceLost),
            _ => return false,
        };
        self.0.add_fault(FaultRule::on(call, When::Once, action));
        true
    }
}

struct Sim;

impl Factory for Sim {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(backend(2)?))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.with_source(KernelSource::Registered(kernel.name().into())))
    }

    fn expectations(&self) -> Expectations {
        Expectations { unsupported: &[], expected_failure: &[] }
    }

    fn faulty(&self) -> Option<Result<Faulty>> {
        Some(backend(1).map(|backend| {
            let faults: Arc<dyn Faults> = Arc::new(Switchboard(backend.machine().clone()));
            (Arc::new(backend) as Arc<dyn Backend>, faults)
        }))
    }
}

fn main() -> ExitCode {
    // Kernels and host calls panic on purpose; the harness reports the relevant results.
    std::panic::set_hook(Box::new(|_| {}));
    harness(Sim)
}
