//! Parts of a [`Factory`](crate::Factory) over a simulated driver: kernels, faults on demand, and a
//! backend that checks its machine at its end.
//!
//! This module knows the machine of `leasehold-sim`, and must not know a backend or a case.

use crate::factory::{BoxAt, Expectation, Faults, Injected, TestKernel};
use leasehold::backend::sync::Mutex;
use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::backend::{Backend, BackendKind, Device, DeviceId, DeviceInfo, PoolStats};
use leasehold::{Error, Lease, Result};
use leasehold_core::threads;
use leasehold_sim::machine::tensor_map;
use leasehold_sim::{
    FaultAction, FaultPlan, FaultRule, KernelBody, KernelRegistry, KernelSpec, Monitor, ReportKind,
    When,
};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// The test kernels by their names. [`SpinUntilFlag`](TestKernel::SpinUntilFlag) does not block the
/// machine: the machine polls it and runs other work meanwhile.
///
/// # Safety
/// - Every launch of a kernel of this registry has elements for each of its blocks, as the kernel's
///   own check demands, at addresses aligned to 4 bytes. The machine checks less: the bindings lie
///   in live memory, and their number and the size of the parameters match.
#[must_use]
pub unsafe fn kernels() -> KernelRegistry {
    let registry = KernelRegistry::new();
    for kernel in TestKernel::ALL {
        let body = match kernel {
            // SAFETY: every launch has elements for each block (this function's contract).
            TestKernel::SpinUntilFlag => unsafe { spin() },
            // SAFETY: every launch has elements for each block (this function's contract).
            TestKernel::Box | TestKernel::LimitedBox => unsafe { copy_box(kernel) },
            // SAFETY: every launch has elements for each block (this function's contract).
            other => unsafe { KernelBody::cpu(other.function()) },
        };
        let spec = KernelSpec::new(kernel.bindings(), kernel.params(), body);
        let mut spec = if kernel.early_reads() != 0 { spec.reading_early() } else { spec };
        spec.limits = kernel.limits().to_vec();
        spec.maps = !kernel.maps().is_empty();
        registry.register(kernel.name(), spec);
    }
    registry
}

/// Copies a box by a map in CUDA's form, of the operand's address, or by its description.
///
/// # Safety
/// - As for [`kernels`].
unsafe fn copy_box(kernel: TestKernel) -> KernelBody {
    // SAFETY: by this function's contract.
    let KernelBody::Run(copy) = (unsafe { KernelBody::cpu(kernel.function()) }) else {
        unreachable!("a CPU kernel runs to its end")
    };
    KernelBody::run(move |launch| {
        let BoxAt { map, .. } = launch.params()?;
        match tensor_map::address(bytemuck::bytes_of(&map)) {
            Some(addr) if addr != launch.given()[0].addr => {
                Err(Error::state("the tensor map has an address that is not its operand's"))
            }
            _ => copy(launch),
        }
    })
}

/// Reads the flag at each poll, until its limit of real time has passed.
///
/// # Safety
/// - Each of a launch's two bindings holds an aligned `u32`.
unsafe fn spin() -> KernelBody {
    // The start of each launch, by its output address.
    let begun: Mutex<HashMap<usize, Instant>> = Mutex::new(HashMap::new());
    KernelBody::poll(move |launch| {
        let (flag, out) = (launch.pointer::<AtomicU32>(0).0, launch.pointer::<u32>(1).0);
        let limit = Duration::from_millis(launch.params::<u32>()?.into());
        let mut begun = begun.lock();
        let start = *begun.entry(out as usize).or_insert_with(Instant::now);
        // SAFETY: the binding holds an aligned word (this function's contract), which the machine
        // found in live memory. Other code writes the flag atomically meanwhile.
        let seen = unsafe { &*flag }.load(Ordering::Acquire) != 0;
        if !seen && start.elapsed() < limit {
            return Ok(Poll::Pending);
        }
        begun.remove(&(out as usize));
        // SAFETY: the binding holds an aligned word (this function's contract), which the machine
        // found in live memory. The output is this launch's own.
        unsafe { out.write(if seen { 1 } else { 2 }) };
        Ok(Poll::Ready(()))
    })
}

/// Makes the machine check words in host memory every 20 milliseconds, as long as the driver
/// exists. Cases set flags in pinned memory without a call of the machine, whose threads may sleep.
///
/// # Errors
/// `Unavailable` if the system refuses the thread.
pub fn ring<D: Send + Sync + 'static>(machine: &Monitor, driver: &Arc<D>) -> Result<()> {
    let (machine, driver) = (machine.clone(), Arc::downgrade(driver));
    let watch = move || {
        while driver.strong_count() > 0 {
            machine.ring();
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let named = std::thread::Builder::new().name("bell".into());
    named.spawn(watch).map(|_| ()).map_err(|e| threads::refused(&e))
}

/// The case about a system without devices: a simulated machine has one at least.
pub const DEVICES_EXIST: Expectation =
    Expectation { case: 3, reason: "a simulated machine has a device at least" };

/// Failures on demand, by the names of a simulated driver's calls.
///
/// Leave copies out of `submissions`: a failed copy shows only at the end of a case, when the case
/// reads its results back.
#[derive(Debug, Clone)]
pub struct CallFaults {
    /// The machine that counts the calls.
    pub machine: Monitor,
    /// The calls that submit work to the device.
    pub submissions: &'static [&'static str],
    /// The calls that create objects, of which each new kernel makes one.
    pub creations: &'static [&'static str],
    /// The calls that request memory.
    pub memory: &'static [&'static str],
}

impl CallFaults {
    /// The failures of CUDA's driver, over this machine.
    #[must_use]
    pub fn cuda(machine: &Monitor) -> Arc<dyn Faults> {
        Arc::new(Self {
            machine: machine.clone(),
            submissions: &["cuMemsetD8Async", "cuLaunchKernel"],
            // Modules are cached by their source, so the next kernel may need no new module, but
            // always its function.
            creations: &["cuModuleGetFunction"],
            // A pool takes its memory by one of these calls.
            memory: &["cuMemCreate", "cuMemAlloc", "cuMemAllocAsync"],
        })
    }

    /// The failures of Metal, over this machine.
    #[must_use]
    pub fn mps(machine: &Monitor) -> Arc<dyn Faults> {
        Arc::new(Self {
            machine: machine.clone(),
            submissions: &["commit"],
            // A library is made once for its source, so the next kernel may need none, but always a
            // pipeline.
            creations: &["newComputePipelineStateWithDescriptor"],
            memory: &["newHeapWithDescriptor"],
        })
    }

    /// The failures of this machine without a vendor's driver.
    #[must_use]
    pub fn sim(machine: &Monitor) -> Arc<dyn Faults> {
        Arc::new(Self {
            machine: machine.clone(),
            submissions: &["submit"],
            creations: &["pipeline_create"],
            memory: &["create"],
        })
    }
}

impl Faults for CallFaults {
    /// Replaces the machine's fault plan.
    fn next(&self, fault: Injected) -> bool {
        let (calls, action) = match fault {
            Injected::Submission => (self.submissions, FaultAction::Fail(1)),
            Injected::DeviceLost => (self.submissions, FaultAction::DeviceLost),
            Injected::Creation => (self.creations, FaultAction::Fail(218)),
            Injected::OutOfMemory => (self.memory, FaultAction::OutOfMemory),
        };
        let rule = |call: &&str| FaultRule::on(call, When::Once, action.clone());
        self.machine.set_faults(FaultPlan { rules: calls.iter().map(rule).collect() });
        true
    }
}

/// A backend that also checks the simulated driver below it, at its end.
///
/// [`shutdown`](Backend::shutdown) fails if the race detector has reports, or if the driver's own
/// check fails.
pub struct Checked<B> {
    backend: B,
    machine: Monitor,
    driver: Box<dyn Fn() -> Result<()> + Send + Sync>,
}

impl<B: Backend> Checked<B> {
    /// The backend over a driver with this machine. `driver` is the driver's own check, which runs
    /// after the backend's end: objects that are left, rules that were broken.
    pub fn new(
        backend: B,
        machine: Monitor,
        driver: impl Fn() -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self { backend, machine, driver: Box::new(driver) }
    }
}

impl<B: fmt::Debug> fmt::Debug for Checked<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked").field("backend", &self.backend).finish_non_exhaustive()
    }
}

// SAFETY: every call is the inner backend's; `shutdown` only adds a check after it.
unsafe impl<B: Backend> Backend for Checked<B> {
    fn kind(&self) -> BackendKind {
        self.backend.kind()
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        self.backend.devices()
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        self.backend.open(device)
    }

    fn shutdown(&self) -> Result<()> {
        self.backend.shutdown()?;
        // Cases read fresh memory on purpose. Other threads write the flag of the spinning kernel
        // while the kernel reads it.
        let reports = self.machine.take_reports().into_iter();
        let races: Vec<String> = reports
            .filter(|report| report.kind != ReportKind::NeverWritten)
            .map(|report| report.to_string())
            .filter(|race| !race.contains(TestKernel::SpinUntilFlag.name()))
            .collect();
        if !races.is_empty() {
            return Err(Error::state(format!("the race detector: {races:?}")));
        }
        (self.driver)()
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.backend.pools(report);
    }
}
