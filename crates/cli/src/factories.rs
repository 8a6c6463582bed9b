//! How the conformance suite gets the backends of this build: the vendor's CUDA, CUDA over the simulated driver, the simulated device.
//!
//! This module must not know what a case does.

use crate::system::simulated;
use leasehold::hal::{Backend, KernelDesc, KernelSource};
use leasehold_conformance::{Expectation, Expectations, Factory, Faults, Injected, TestKernel};
use leasehold_core::sync::Mutex;
use leasehold_cuda::driver::sim::SimDriver;
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_sim::{
    FaultAction, FaultRule, FaultScope, KernelBody, KernelRegistry, KernelSpec, Launch, Machine, SimBackend, When,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// A kernel's fault ends its context, and so every stream of the device.
const STICKY: Expectation =
    Expectation { case: 117, reason: "a kernel's fault ends its context, and so every stream of the device" };

/// Seen on two H200s: after a trap on one, a fill on the other reports 719.
const SHARED_FATE: Expectation =
    Expectation { case: 110, reason: "a kernel's fault ends the contexts of all devices in its process" };

/// The vendor's driver.
pub(crate) struct Cuda;

impl Factory for Cuda {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(Arc::new(CudaBackend::new()))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cuda())
    }

    fn fatal_faults(&self) -> bool {
        true
    }

    fn expectations(&self) -> Expectations {
        Expectations { unsupported: &[STICKY, SHARED_FATE], expected_failure: &[] }
    }
}

/// Looks at the flag each time that it is asked, until its limit of real time is over.
fn spin() -> KernelBody {
    // When each launch began, by where it answers.
    let begun: Mutex<BTreeMap<u64, Instant>> = Mutex::new(BTreeMap::new());
    KernelBody::poll(move |launch: &Launch<'_>| {
        let (flag, out) = (launch.pointer::<u32>(0).0, launch.pointer::<u32>(1).0);
        let limit = Duration::from_millis(launch.params::<u32>()?.into());
        let mut begun = begun.lock();
        let start = *begun.entry(out as u64).or_insert_with(Instant::now);
        // SAFETY: the machine checked the bindings; the flag is written by others past any cache.
        let seen = unsafe { flag.read_volatile() } != 0;
        if !seen && start.elapsed() < limit {
            return Ok(Poll::Pending);
        }
        begun.remove(&(out as u64));
        // SAFETY: as above.
        unsafe { out.write(if seen { 1 } else { 2 }) };
        Ok(Poll::Ready(()))
    })
}

/// The suite's kernels by their names.
fn kernels() -> KernelRegistry {
    let all = KernelRegistry::new();
    for kernel in TestKernel::ALL {
        let body = match kernel {
            TestKernel::SpinUntilFlag => spin(),
            other => KernelBody::cpu(other.function()),
        };
        all.register(kernel.name(), KernelSpec::new(kernel.bindings(), kernel.params(), body));
    }
    all
}

/// Makes the next calls of a kind fail.
struct Switchboard {
    machine: Machine,
    /// The names of the calls that submit, create and take memory.
    calls: [&'static [&'static str]; 3],
}

impl Faults for Switchboard {
    fn next(&self, fault: Injected) -> bool {
        let [submissions, creations, memory] = self.calls;
        let (calls, action) = match fault {
            Injected::Submission => (submissions, FaultAction::Fail(1)),
            Injected::DeviceLost => (submissions, FaultAction::DeviceLost),
            Injected::Creation => (creations, FaultAction::Fail(218)),
            Injected::OutOfMemory => (memory, FaultAction::OutOfMemory),
            _ => return false,
        };
        for call in calls {
            self.machine.add_fault(FaultRule::on(call, When::Once, action.clone()));
        }
        true
    }
}

/// CUDA over the simulated driver.
pub(crate) struct SimulatedCuda(pub(crate) u64);

impl SimulatedCuda {
    fn make(&self) -> leasehold::Result<(CudaBackend, Arc<SimDriver>)> {
        simulated::cuda(simulated::machine(self.0, kernels()), CudaConfig::default())
    }
}

impl Factory for SimulatedCuda {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(Arc::new(self.make()?.0))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cuda())
    }

    fn faulty(&self) -> Option<leasehold::Result<(Arc<dyn Backend>, Arc<dyn Faults>)>> {
        Some(self.make().map(|(backend, driver)| {
            let calls: [&'static [&'static str]; 3] = [
                &[
                    "cuLaunchKernel",
                    "cuMemsetD8Async",
                    "cuMemsetD32Async",
                    "cuMemcpyDtoDAsync",
                    "cuMemcpyHtoDAsync",
                    "cuMemcpyDtoHAsync",
                ],
                &["cuModuleLoadDataEx"],
                &["cuMemCreate"],
            ];
            let faults: Arc<dyn Faults> = Arc::new(Switchboard { machine: driver.machine().clone(), calls });
            (Arc::new(backend) as Arc<dyn Backend>, faults)
        }))
    }

    fn expectations(&self) -> Expectations {
        Expectations {
            unsupported: &[Expectation { case: 3, reason: "a simulated machine has a device at least" }, STICKY],
            expected_failure: &[],
        }
    }
}

/// The simulated device.
pub(crate) struct Simulated(pub(crate) u64);

impl Simulated {
    fn machine(&self) -> leasehold::Result<Machine> {
        Machine::new(simulated::machine(self.0, kernels()).fault_scope(FaultScope::Queue))
    }
}

impl Factory for Simulated {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(Arc::new(SimBackend::over(self.machine()?)?))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.with_source(KernelSource::Registered(kernel.name().into())))
    }

    fn faulty(&self) -> Option<leasehold::Result<(Arc<dyn Backend>, Arc<dyn Faults>)>> {
        Some(self.machine().and_then(|machine| {
            let backend: Arc<dyn Backend> = Arc::new(SimBackend::over(machine.clone())?);
            let calls: [&'static [&'static str]; 3] = [&["submit"], &["pipeline_create"], &["create"]];
            Ok((backend, Arc::new(Switchboard { machine, calls }) as Arc<dyn Faults>))
        }))
    }

    fn expectations(&self) -> Expectations {
        Expectations { unsupported: &[], expected_failure: &[] }
    }
}
