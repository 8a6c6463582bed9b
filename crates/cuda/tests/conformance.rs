//! The conformance suite on CUDA over the simulated driver. A case also fails if the race detector
//! reports a race, or if objects remain in the driver. The environment variable
//! `LEASEHOLD_CUDA_SUITE` is a list of words:
//! - `events`, `plain` and `pool` select the code for devices without stream words or virtual
//!   memory management.
//! - A number is the machine's seed.
//! - `real` selects the vendor's driver, and skips all cases without one.

use leasehold_conformance::{
    Expectation, Expectations, Factory, Faults, Injected, TestKernel, harness,
};
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use leasehold_core::{Error, Lease, PoolStats, Result};
use leasehold_cuda::driver::ops::{ContextOps, DeviceOps, EventOps, StreamOps};
use leasehold_cuda::driver::ops::{CudaSlowOps, EventFlags, NativeFill, NativeStream};
use leasehold_cuda::driver::real::RealDriver;
use leasehold_cuda::driver::sim::{SimDriver, SimDriverConfig};
use leasehold_cuda::{CompletionSource, CudaBackend, CudaConfig, MemorySource};
use leasehold_hal::{Backend, BackendKind, Device, DeviceId, DeviceInfo, ForeignCall, KernelDesc};
use leasehold_sim::{
    FaultAction, FaultPlan, FaultRule, KernelBody, KernelRegistry, KernelSpec, Launch,
    MachineConfig, When,
};
use std::collections::HashMap;
use std::process::ExitCode;
use std::task::Poll;
use std::time::{Duration, Instant};

/// The calls with which cases submit work. A plan cannot say which of two kinds of calls comes
/// first, so copies are left out. A fault in a copy would strike later, when the results are read
/// back.
const SUBMISSIONS: [&str; 2] = ["cuMemsetD8Async", "cuLaunchKernel"];

/// A backend that also reports, at its end, leaks in the driver and findings of the race detector.
struct Checked {
    backend: CudaBackend,
    driver: Arc<SimDriver>,
}

// SAFETY: every call is the inner backend's.
unsafe impl Backend for Checked {
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
        let reports: Vec<_> =
            self.driver.machine().take_reports().iter().map(ToString::to_string).collect();
        // The spinning kernel reads memory that other threads write meanwhile, as it is meant to.
        // Cases read fresh memory on purpose.
        let meant = |r: &&String| {
            r.contains(TestKernel::SpinUntilFlag.name())
                || r.starts_with("read of memory that nobody wrote")
        };
        let races: Vec<_> = reports.iter().filter(|r| !meant(r)).collect();
        if !races.is_empty() {
            return Err(Error::state(format!("the race detector: {races:?}")));
        }
        let leaks = self.driver.take_leaks();
        let mut census = self.driver.census();
        if (0..2).any(|d| self.driver.machine().device_status(d).is_err()) {
            // The driver takes back nothing that belongs to a lost device. These objects end with
            // the process.
            (census.pieces, census.reservations) = (0, 0);
        }
        if !leaks.is_empty() || !census.is_nothing() {
            return Err(Error::state(format!("left in the driver: {census:?}, {leaks:?}")));
        }
        Ok(())
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.backend.pools(report);
    }
}

/// Fails the next call of a kind.
struct Switchboard(Arc<SimDriver>);

impl Faults for Switchboard {
    fn next(&self, fault: Injected) -> bool {
        let machine = self.0.machine();
        let made: HashMap<String, u64> = machine.calls_by_name().into_iter().collect();
        let mut plan = FaultPlan::none();
        let mut add = |call: &str, action: FaultAction| {
            let next = When::At(made.get(call).copied().unwrap_or(0));
            plan.rules.push(FaultRule::on(call, next, action));
        };
        match fault {
            Injected::Submission => {
                SUBMISSIONS.iter().for_each(|call| add(call, FaultAction::Fail(1)))
            }
            Injected::DeviceLost => {
                SUBMISSIONS.iter().for_each(|call| add(call, FaultAction::DeviceLost))
            }
            Injected::OutOfMemory => add("cuMemCreate", FaultAction::OutOfMemory),
            Injected::Creation => add("cuModuleGetFunction", FaultAction::Fail(999)),
            _ => return false,
        }
        machine.set_faults(plan);
        true
    }
}

struct Simulated {
    config: CudaConfig,
    seed: u64,
    /// The driver that was made last.
    last: Mutex<Option<Arc<SimDriver>>>,
}

/// Makes the machine check words in pinned memory from time to time, because cases set flags there
/// without telling the machine.
fn ring(driver: &Arc<SimDriver>) {
    let driver = Arc::downgrade(driver);
    std::thread::spawn(move || {
        while let Some(driver) = driver.upgrade() {
            driver.machine().ring();
            drop(driver);
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

/// A kernel that waits for a flag without blocking the machine.
fn spin() -> KernelBody {
    let begun: Mutex<HashMap<u64, Instant>> = Mutex::new(HashMap::new());
    KernelBody::poll(move |launch: &Launch<'_>| {
        let (flag, _) = launch.pointer::<u32>(0);
        let (out, _) = launch.pointer::<u32>(1);
        let limit = Duration::from_millis(u64::from(launch.params::<u32>()?));
        let mut begun = begun.lock();
        let start = *begun.entry(flag as u64).or_insert_with(Instant::now);
        // SAFETY: the machine checked the bindings. Other threads write the flag meanwhile, so the
        // read is volatile.
        let seen = unsafe { flag.read_volatile() } != 0;
        if !seen && start.elapsed() < limit {
            return Ok(Poll::Pending);
        }
        begun.remove(&(flag as u64));
        // SAFETY: the machine checked the bindings.
        unsafe { out.write(if seen { 1 } else { 2 }) };
        Ok(Poll::Ready(()))
    })
}

fn kernels() -> KernelRegistry {
    let registry = KernelRegistry::new();
    for kernel in TestKernel::ALL {
        let body = match kernel {
            TestKernel::SpinUntilFlag => spin(),
            // SAFETY: the suite makes all launches, and its cases have elements for each block.
            other => unsafe { KernelBody::cpu(other.function()) },
        };
        registry.register(kernel.name(), KernelSpec::new(kernel.bindings(), kernel.params(), body));
    }
    registry
}

impl Simulated {
    fn make(&self) -> Result<Checked> {
        let machine = MachineConfig::seed(self.seed).devices(2, 4 << 30).kernels(kernels());
        let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine))?);
        *self.last.lock() = Some(driver.clone());
        ring(&driver);
        let ops: Arc<dyn CudaSlowOps> = driver.clone();
        Ok(Checked { backend: CudaBackend::with_ops(ops, self.config.clone())?, driver })
    }
}

impl Factory for Simulated {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(self.make()?))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cuda())
    }

    fn faulty(&self) -> Option<Result<(Arc<dyn Backend>, Arc<dyn Faults>)>> {
        Some(self.make().map(|backend| {
            let faults: Arc<dyn Faults> = Arc::new(Switchboard(backend.driver.clone()));
            (Arc::new(backend) as Arc<dyn Backend>, faults)
        }))
    }

    fn current_device(&self) -> Option<DeviceId> {
        let driver = self.last.lock().clone()?;
        let current = driver.current().ok().filter(|c| !c.is_null())?;
        (0..2).find_map(|ordinal| {
            let primary = driver.primary_retain(ordinal).ok()?;
            // SAFETY: the simulated driver looks every handle and address up, and refuses unknown
            // ones.
            unsafe { driver.primary_release(ordinal) }.ok()?;
            (primary == current).then(|| DeviceId::cuda(ordinal))
        })
    }

    fn unjoined_fork(&self) -> Option<ForeignCall> {
        let driver = self.last.lock().clone()?;
        Some(ForeignCall::new("forks", Vec::new(), move |stream| {
            let (stream, event) =
                (NativeStream(stream), driver.event_create(EventFlags::default())?);
            let beside = driver.stream_create(0)?;
            // SAFETY: the simulated driver looks every handle and address up, and refuses unknown
            // ones.
            unsafe { driver.event_record(event, stream) }?;
            // SAFETY: the simulated driver looks every handle and address up, and refuses unknown
            // ones.
            let forked = unsafe { driver.stream_wait_event(beside, event) }.and_then(|()| {
                // SAFETY: nothing is filled.
                unsafe { driver.fill(beside, &NativeFill { dst: 0, value: 0, width: 1, count: 0 }) }
            });
            // SAFETY: the simulated driver looks every handle and address up, and refuses unknown
            // ones.
            unsafe { driver.stream_destroy(beside) }?;
            // SAFETY: the simulated driver looks every handle and address up, and refuses unknown
            // ones.
            unsafe { driver.event_destroy(event) }?;
            forked
        }))
    }

    fn expectations(&self) -> Expectations {
        let unsupported: &[Expectation] = match self.config.completion {
            CompletionSource::Events => {
                &[NO_MACHINE_WITHOUT_DEVICES, ONE_FAULT_ENDS_ALL, SIGNALS_ARE_EVENTS]
            }
            CompletionSource::Auto => &[NO_MACHINE_WITHOUT_DEVICES, ONE_FAULT_ENDS_ALL],
        };
        Expectations { unsupported, expected_failure: &[] }
    }
}

const NO_MACHINE_WITHOUT_DEVICES: Expectation =
    Expectation { case: 3, reason: "a simulated machine has a device at least" };
const ONE_FAULT_ENDS_ALL: Expectation = Expectation {
    case: 117,
    reason: "a kernel's fault ends its context, and so every stream of the device",
};

/// Seen on two H200s: after a trap on one device, a fill on the other device reports 719.
const SHARED_FATE: Expectation = Expectation {
    case: 110,
    reason: "a kernel's fault ends the contexts of all devices in its process",
};
const SIGNALS_ARE_EVENTS: Expectation =
    Expectation { case: 150, reason: "without words completion is signalled by events of a pool" };

/// The vendor's driver.
struct Real {
    config: CudaConfig,
    /// Keeps the primary context alive between cases. Otherwise each case would make the context
    /// again.
    held: OnceLock<Option<RealDriver>>,
}

impl Factory for Real {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        self.held.get_or_init(|| {
            let driver = RealDriver::new();
            driver.init().and_then(|()| driver.primary_retain(0)).ok().map(|_| driver)
        });
        Ok(Arc::new(CudaBackend::with_config(self.config.clone())))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cuda())
    }

    fn fatal_faults(&self) -> bool {
        true
    }

    fn expectations(&self) -> Expectations {
        Expectations { unsupported: &[ONE_FAULT_ENDS_ALL, SHARED_FATE], expected_failure: &[] }
    }
}

fn main() -> ExitCode {
    // Kernels and host calls panic on purpose; the harness reports the outcome.
    std::panic::set_hook(Box::new(|_| {}));
    // The configurations for older devices and drivers.
    let (mut config, mut seed, mut real) = (CudaConfig::default(), 17, false);
    for word in std::env::var("LEASEHOLD_CUDA_SUITE").unwrap_or_default().split(',') {
        config = match word {
            "events" => config.completion(CompletionSource::Events),
            "pool" => config.memory(MemorySource::Pool),
            "plain" => config.memory(MemorySource::Plain),
            "real" => {
                real = true;
                config
            }
            number => {
                seed = number.parse().unwrap_or(seed);
                config
            }
        };
    }
    if real {
        return harness(Real { config, held: OnceLock::new() });
    }
    harness(Simulated { config, seed, last: Mutex::new(None) })
}
