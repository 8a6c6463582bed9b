//! The conformance suite on CUDA over the simulated driver. A case also fails if the race detector
//! reports a race, or if objects remain in the driver. The environment variable
//! `LEASEHOLD_CUDA_SUITE` is a list of words:
//! - `events`, `plain` and `pool` select the code for devices without stream words or virtual
//!   memory management.
//! - A number is the machine's seed.
//! - `real` selects the vendor's driver, and skips all cases without one.

use leasehold_conformance::simulated::{self, CallFaults, Checked, DEVICES_EXIST};
use leasehold_conformance::{Expectation, Expectations, Factory, Faulty, TestKernel, harness};
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use leasehold_core::{Error, Result};
use leasehold_cuda::driver::ops::{ContextOps, DeviceOps, EventOps, StreamOps};
use leasehold_cuda::driver::ops::{CudaSlowOps, EventFlags, NativeFill, NativeStream};
use leasehold_cuda::driver::real::RealDriver;
use leasehold_cuda::{CompletionSource, CudaBackend, CudaConfig, MemorySource};
use leasehold_hal::{Backend, DeviceId, ForeignCall, KernelDesc};
use leasehold_sim::MachineConfig;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use std::process::ExitCode;

struct Simulated {
    config: CudaConfig,
    seed: u64,
    /// The driver that was made last.
    last: Mutex<Option<Arc<SimDriver>>>,
}

/// An error if objects are left in the driver.
fn nothing_left(driver: &SimDriver) -> Result<()> {
    let leaks = driver.take_leaks();
    let mut census = driver.census();
    if (0..2).any(|d| driver.machine().device_status(d).is_err()) {
        // The driver takes back nothing that belongs to a lost device. These objects end with the
        // process.
        (census.pieces, census.reservations) = (0, 0);
    }
    if !leaks.is_empty() || !census.is_nothing() {
        return Err(Error::state(format!("left in the driver: {census:?}, {leaks:?}")));
    }
    Ok(())
}

impl Simulated {
    fn make(&self) -> Result<(Arc<dyn Backend>, Arc<SimDriver>)> {
        // SAFETY: the suite makes all launches, and its cases have elements for each block.
        let kernels = unsafe { simulated::kernels() };
        let machine = MachineConfig::seed(self.seed).devices(2, 4 << 30).kernels(kernels);
        let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine))?);
        *self.last.lock() = Some(driver.clone());
        simulated::ring(driver.machine(), &driver)?;
        let ops: Arc<dyn CudaSlowOps> = driver.clone();
        let backend = CudaBackend::with_ops(ops, self.config.clone())?;
        let (machine, below) = (driver.machine().clone(), driver.clone());
        let checked = Checked::new(backend, machine, move || nothing_left(&below));
        Ok((Arc::new(checked), driver))
    }
}

impl Factory for Simulated {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(self.make()?.0)
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cuda())
    }

    fn faulty(&self) -> Option<Result<Faulty>> {
        Some(self.make().map(|(backend, driver)| (backend, CallFaults::cuda(driver.machine()))))
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
            CompletionSource::Events => &[DEVICES_EXIST, ONE_FAULT_ENDS_ALL, SIGNALS_ARE_EVENTS],
            CompletionSource::Auto => &[DEVICES_EXIST, ONE_FAULT_ENDS_ALL],
        };
        Expectations { unsupported, expected_failure: &[] }
    }
}

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
