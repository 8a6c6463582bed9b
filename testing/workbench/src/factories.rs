//! Factories of the conformance suite: CUDA and Metal, the vendor's and over the simulated driver,
//! and the simulated device.
//!
//! This module must not know what a case does.

use crate::simulated;
#[cfg(feature = "cuda")]
use leasehold::Error;
use leasehold::backend::DebugOptions;
use leasehold::backend::{Backend, KernelDesc};
use leasehold::{BackendKind, DeviceId};
#[cfg(feature = "cuda")]
use leasehold_collective::driver::Nccl;
#[cfg(feature = "cuda")]
use leasehold_conformance::Expectation;
use leasehold_conformance::simulated::{self as conformance, CallFaults};
use leasehold_conformance::{Expectations, Factory, Faulty, Ranks, TestKernel};
#[cfg(feature = "cuda")]
use leasehold_cuda::{CudaBackend, CudaConfig};
#[cfg(feature = "mps")]
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::collective::SimCollectives;
use leasehold_sim::{KernelRegistry, MachineConfig, SimBackend};
use std::sync::Arc;

/// A kernel's fault ends its context, and so every stream of the device.
#[cfg(feature = "cuda")]
const STICKY: Expectation = Expectation {
    case: 117,
    reason: "a kernel's fault ends its context, and so every stream of the device",
};

/// Observed on two H200s: after a trap on one device, a fill on the other reports 719.
#[cfg(feature = "cuda")]
const SHARED_FATE: Expectation = Expectation {
    case: 110,
    reason: "a kernel's fault ends the contexts of all devices in its process",
};

/// The cases that NCCL does not keep, with the reasons.
#[cfg(feature = "cuda")]
const NCCL: [Expectation; 2] = [
    Expectation { case: 174, reason: "NCCL reduces no integers of 16 bits" },
    Expectation { case: 204, reason: "NCCL does not say which rank has not come" },
];

/// The vendor's driver, with these debug checks.
#[cfg(feature = "cuda")]
pub(crate) struct Cuda(pub(crate) DebugOptions);

#[cfg(feature = "cuda")]
impl Factory for Cuda {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(Arc::new(CudaBackend::with_config(CudaConfig::default().debug(self.0))))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cuda())
    }

    fn fatal_faults(&self) -> bool {
        true
    }

    fn ranks(&self, most: u32) -> Option<leasehold::Result<Ranks>> {
        let made = self.backend().and_then(|backend| {
            let all: Vec<_> = backend.devices()?.iter().map(|d| d.id).take(most as usize).collect();
            if all.len() < 2 {
                return Err(Error::Unavailable("two devices are needed".into()));
            }
            Ranks::on(backend, &all, Arc::new(Nccl::load()?))
        });
        Some(made)
    }

    fn expectations(&self) -> Expectations {
        Expectations {
            unsupported: &[STICKY, SHARED_FATE, NCCL[0], NCCL[1]],
            expected_failure: &[],
        }
    }
}

/// The suite's kernels by their names.
fn kernels() -> KernelRegistry {
    // SAFETY: the suite makes all launches, and its cases have elements for each block.
    unsafe { conformance::kernels() }
}

/// A simulated machine with a device for each rank.
fn ranks_machine(seed: u64, most: u32) -> MachineConfig {
    simulated::machine(seed, kernels()).devices(most, 1 << 30)
}

/// CUDA over the simulated driver.
#[cfg(feature = "cuda")]
pub(crate) struct SimulatedCuda {
    pub(crate) seed: u64,
    pub(crate) debug: DebugOptions,
}

#[cfg(feature = "cuda")]
impl SimulatedCuda {
    fn make(&self) -> leasehold::Result<(Arc<dyn Backend>, Arc<leasehold_sim::cuda::SimDriver>)> {
        self.over(simulated::machine(self.seed, kernels()))
    }

    fn over(
        &self,
        machine: MachineConfig,
    ) -> leasehold::Result<(Arc<dyn Backend>, Arc<leasehold_sim::cuda::SimDriver>)> {
        let config = CudaConfig::default().debug(self.debug);
        let (backend, driver) = simulated::cuda(machine, config)?;
        conformance::ring(driver.machine(), &driver)?;
        Ok((Arc::new(backend), driver))
    }
}

#[cfg(feature = "cuda")]
impl Factory for SimulatedCuda {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(self.make()?.0)
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cuda())
    }

    fn faulty(&self) -> Option<leasehold::Result<Faulty>> {
        Some(self.make().map(|(backend, driver)| (backend, CallFaults::cuda(driver.machine()))))
    }

    fn ranks(&self, most: u32) -> Option<leasehold::Result<Ranks>> {
        let machine = ranks_machine(self.seed, most);
        Some(self.over(machine).and_then(|(backend, driver)| {
            let devices: Vec<_> = (0..most).map(DeviceId::cuda).collect();
            Ranks::on(backend, &devices, Arc::new(SimCollectives::of_cuda(&driver)))
        }))
    }

    fn expectations(&self) -> Expectations {
        Expectations { unsupported: &[conformance::DEVICES_EXIST, STICKY], expected_failure: &[] }
    }
}

/// Metal of the system, with these debug checks.
#[cfg(feature = "mps")]
pub(crate) struct Mps(pub(crate) DebugOptions);

#[cfg(feature = "mps")]
impl Factory for Mps {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(Arc::new(MpsBackend::with_config(MpsConfig::default().debug(self.0))))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        // A kernel of Metal has no clock, and nothing that ends it but an illegal address.
        (kernel != TestKernel::SpinUntilFlag).then(|| kernel.for_mps())
    }
}

/// Metal over the simulated driver.
#[cfg(feature = "mps")]
pub(crate) struct SimulatedMps {
    pub(crate) seed: u64,
    pub(crate) debug: DebugOptions,
}

#[cfg(feature = "mps")]
impl SimulatedMps {
    fn make(&self) -> leasehold::Result<(Arc<dyn Backend>, Arc<leasehold_sim::mps::SimDriver>)> {
        let config = MpsConfig::default().debug(self.debug);
        let (backend, driver) = simulated::mps(simulated::machine(self.seed, kernels()), config)?;
        conformance::ring(driver.machine(), &driver)?;
        Ok((Arc::new(backend), driver))
    }
}

#[cfg(feature = "mps")]
impl Factory for SimulatedMps {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(self.make()?.0)
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_mps())
    }

    fn faulty(&self) -> Option<leasehold::Result<Faulty>> {
        Some(self.make().map(|(backend, driver)| (backend, CallFaults::mps(driver.machine()))))
    }

    fn expectations(&self) -> Expectations {
        Expectations { unsupported: &[conformance::DEVICES_EXIST], expected_failure: &[] }
    }
}

/// The simulated device.
pub(crate) struct Simulated(pub(crate) u64);

impl Simulated {
    fn make(&self) -> leasehold::Result<SimBackend> {
        SimBackend::new(simulated::machine(self.0, kernels()))
    }
}

impl Factory for Simulated {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(Arc::new(self.make()?))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_sim())
    }

    fn faulty(&self) -> Option<leasehold::Result<Faulty>> {
        Some(self.make().map(|backend| {
            let faults = CallFaults::sim(backend.machine());
            (Arc::new(backend) as Arc<dyn Backend>, faults)
        }))
    }

    fn ranks(&self, most: u32) -> Option<leasehold::Result<Ranks>> {
        Some(SimBackend::new(ranks_machine(self.0, most)).and_then(|backend| {
            let devices: Vec<_> = (0..most).map(|n| DeviceId::new(BackendKind::Sim, n)).collect();
            let library = Arc::new(SimCollectives::of_sim(&backend));
            Ranks::on(Arc::new(backend), &devices, library)
        }))
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::devices::SEED;
    use leasehold::Layout;
    use leasehold::MemoryKind;
    use leasehold::backend::StreamDesc;
    use leasehold::backend::sync::Mutex;
    use leasehold_conformance::{Filter, Status, Tag, Wrap, run};
    use leasehold_sim::Monitor;

    /// Keeps the machines of the backends.
    struct Kept {
        inner: SimulatedCuda,
        machines: Mutex<Vec<Monitor>>,
    }

    impl Factory for Kept {
        fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
            let (backend, driver) = self.inner.make()?;
            self.machines.lock().push(driver.machine().clone());
            Ok(backend)
        }

        fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
            self.inner.kernel(kernel)
        }
    }

    fn pass_through() -> SimulatedCuda {
        SimulatedCuda { seed: SEED, debug: "pass-through".parse().unwrap() }
    }

    fn calls(machine: &Monitor, name: &str) -> u64 {
        machine.calls_by_name().iter().find(|c| c.0 == name).map_or(0, |c| c.1)
    }

    #[test]
    fn passed_through_each_buffer_is_an_allocation_of_the_drivers() {
        let (backend, driver) = pass_through().make().unwrap();
        let device = backend.open(DeviceId::cuda(0)).unwrap();
        let stream = device.stream(&StreamDesc::default()).unwrap();
        let on = leasehold::backend::On { timeline: stream.timeline(), source: &*stream };
        let memory = device.memory(MemoryKind::Device).unwrap();
        for n in 1..=20 {
            drop(memory.alloc(Layout::new(1000 * n), on).unwrap());
            assert_eq!(calls(driver.machine(), "cuMemAlloc"), n);
        }
        memory.trim(0).unwrap();
        assert_eq!(calls(driver.machine(), "cuMemFree"), 20);
        assert_eq!(calls(driver.machine(), "cuMemCreate"), 0, "memory beside the buffers");
    }

    /// The race detector reports what a checker of accesses would report. In these cases even reads
    /// of fresh memory are defects.
    #[test]
    fn the_cases_for_sanitizers_are_clean_with_each_buffer_of_its_own() {
        let kept = Arc::new(Kept { inner: pass_through(), machines: Mutex::default() });
        let filter =
            Filter { tag: Some(Tag::Sanitizer), wrap: Some(Wrap::Plain), ..Filter::default() };
        let report = run(kept.clone(), &filter);
        assert!(report.results.iter().all(|r| r.status == Status::Passed), "{report}");
        assert!(report.passed().len() >= 30, "{report}");
        let machines = kept.machines.lock();
        assert!(machines.iter().map(|m| calls(m, "cuMemAlloc")).sum::<u64>() > 100);
        // Granules are for memory that grows and for pools alone.
        let granules = machines.iter().filter(|m| calls(m, "cuMemCreate") > 0).count();
        let takes_granules = |case: u16| matches!(case, 212..=216 | 230..=231 | 254 | 260);
        let cases = report.results.iter().filter(|r| takes_granules(r.case)).count();
        assert_eq!(granules, cases);
        let reports: Vec<_> =
            machines.iter().flat_map(Monitor::take_reports).map(|r| r.to_string()).collect();
        assert!(reports.is_empty(), "{reports:#?}");
    }
}
