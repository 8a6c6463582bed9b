//! The conformance suite on Metal over the simulated driver. A case also fails if the race detector
//! reports a race, if a rule of Metal was broken, or if objects remain in the driver. The
//! environment variable `LEASEHOLD_MPS_SUITE` is a list of words:
//! - `private` puts device memory in private storage.
//! - `unset` selects a system without residency sets, `paravirtual` a virtual machine's device.
//! - `queues` gives each device four command queues.
//! - A number is the machine's seed.

use leasehold_conformance::{
    Expectation, Expectations, Factory, Faults, Injected, TestKernel, harness,
};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, PoolStats, Result};
use leasehold_hal::{Backend, BackendKind, Device, DeviceId, DeviceInfo, KernelDesc};
use leasehold_mps::driver::ops::Storage;
use leasehold_mps::driver::sim::{SimDriver, SimDriverConfig};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::{
    FaultAction, FaultPlan, FaultRule, KernelBody, KernelRegistry, KernelSpec, Launch,
    MachineConfig, When,
};
use std::collections::HashMap;
use std::process::ExitCode;
use std::task::Poll;
use std::time::{Duration, Instant};

/// A backend that also reports, at its end, leaks in the driver, broken rules and findings of the
/// race detector.
struct Checked {
    backend: MpsBackend,
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
        let broken = self.driver.take_broken_rules();
        if !broken.is_empty() {
            return Err(Error::state(format!("rules of Metal: {broken:?}")));
        }
        let census = self.driver.census();
        if !census.is_nothing() {
            return Err(Error::state(format!("left in the driver: {census:?}")));
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
        let (call, action) = match fault {
            Injected::Submission => ("commit", FaultAction::Fail(1)),
            Injected::DeviceLost => ("commit", FaultAction::DeviceLost),
            Injected::OutOfMemory => ("newHeapWithDescriptor", FaultAction::OutOfMemory),
            Injected::Creation => ("newComputePipelineStateWithDescriptor", FaultAction::Fail(3)),
            _ => return false,
        };
        let next = When::At(made.get(call).copied().unwrap_or(0));
        machine.set_faults(FaultPlan::none().with(FaultRule::on(call, next, action)));
        true
    }
}

struct Simulated {
    config: MpsConfig,
    seed: u64,
    residency_sets: bool,
    paravirtual: bool,
}

/// Makes the machine check words in shared memory from time to time, because cases set flags there
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
        let mut driver = SimDriverConfig::new(machine);
        driver.residency_sets = self.residency_sets;
        driver.paravirtual = self.paravirtual;
        let driver = Arc::new(SimDriver::new(driver)?);
        ring(&driver);
        let backend = MpsBackend::with_ops(driver.clone(), self.config.clone())?;
        Ok(Checked { backend, driver })
    }
}

impl Factory for Simulated {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(self.make()?))
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_mps())
    }

    fn faulty(&self) -> Option<Result<(Arc<dyn Backend>, Arc<dyn Faults>)>> {
        Some(self.make().map(|backend| {
            let faults: Arc<dyn Faults> = Arc::new(Switchboard(backend.driver.clone()));
            (Arc::new(backend) as Arc<dyn Backend>, faults)
        }))
    }

    fn expectations(&self) -> Expectations {
        const PRIVATE: &str = "a Metal device does not reach private storage of another one";
        const ALL: [Expectation; 4] = [
            Expectation { case: 3, reason: "a simulated machine has a device at least" },
            Expectation { case: 75, reason: PRIVATE },
            Expectation { case: 76, reason: PRIVATE },
            Expectation { case: 77, reason: PRIVATE },
        ];
        let private = self.config.storage == Some(Storage::Private);
        let unsupported = if private { &ALL[..] } else { &ALL[..1] };
        Expectations { unsupported, expected_failure: &[] }
    }
}

fn main() -> ExitCode {
    // Kernels and host calls panic on purpose; the harness reports the outcome.
    std::panic::set_hook(Box::new(|_| {}));
    let mut suite = Simulated {
        config: MpsConfig::default(),
        seed: 17,
        residency_sets: true,
        paravirtual: false,
    };
    for word in std::env::var("LEASEHOLD_MPS_SUITE").unwrap_or_default().split(',') {
        match word {
            "private" => suite.config = suite.config.storage(Storage::Private),
            "queues" => suite.config = suite.config.queues(4),
            "unset" => suite.residency_sets = false,
            "paravirtual" => suite.paravirtual = true,
            number => suite.seed = number.parse().unwrap_or(suite.seed),
        }
    }
    harness(suite)
}
