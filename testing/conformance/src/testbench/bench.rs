//! A backend over its simulated driver, with the kernels that tests launch.

use crate::{TestKernel, simulated};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{Access, Backend, Device, DeviceId, KernelDesc};
use leasehold_sim::{
    FaultAction, FaultRule, KernelBody, KernelRegistry, KernelSpec, MachineConfig, Monitor, When,
};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

/// How long the end of a backend waits for leases that the engine's threads hold.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A backend under test, and its simulated driver.
pub trait Subject {
    /// The simulated driver.
    type Driver;
    /// The driver's configuration.
    type DriverConfig;
    /// The backend.
    type Backend: Backend;
    /// The backend's configuration.
    type Config;

    /// The driver's usual configuration over a machine.
    fn driver_config(machine: MachineConfig) -> Self::DriverConfig;

    /// The machine of a configuration.
    fn machine_config(config: &mut Self::DriverConfig) -> &mut MachineConfig;

    /// The backend's configuration in which all work runs on the calling thread.
    fn inline() -> Self::Config;

    /// A driver.
    ///
    /// # Errors
    /// As the driver's constructor.
    fn driver(config: Self::DriverConfig) -> Result<Self::Driver>;

    /// The backend over a driver.
    ///
    /// # Errors
    /// As the backend's constructor.
    fn backend(driver: Arc<Self::Driver>, config: Self::Config) -> Result<Self::Backend>;

    /// The driver's machine.
    fn machine(driver: &Self::Driver) -> &Monitor;

    /// The findings of the driver itself since the last call: objects that exist, broken rules.
    fn findings(driver: &Self::Driver) -> Vec<String>;

    /// The source of a test kernel.
    fn kernel(kernel: TestKernel) -> KernelDesc<'static>;
}

/// The simulated driver and the backend over it.
///
/// Its kernels are the conformance suite's, and three over one binding: `bump` adds one to each
/// word, `fail` fails, and `hold` runs until [`let_go`](Self::let_go).
pub struct Bench<S: Subject> {
    /// The driver.
    pub driver: Arc<S::Driver>,
    /// The backend.
    pub backend: S::Backend,
    /// The kernel `hold` runs until this is set.
    gate: Arc<AtomicBool>,
}

/// The driver's usual configuration with two devices. Their kernels come with the bench.
#[must_use]
pub fn two_devices<S: Subject>(seed: u64) -> S::DriverConfig {
    S::driver_config(MachineConfig::seed(seed).devices(2, 1 << 30))
}

/// The kernels that tests launch.
fn kernels(gate: &Arc<AtomicBool>) -> KernelRegistry {
    // SAFETY: the tests' launches have elements for each block.
    let registry = unsafe { simulated::kernels() };
    let bump = KernelBody::run(|launch| {
        let (at, len) = launch.pointer::<u32>(0);
        for i in 0..len {
            // SAFETY: the machine checked the binding, which has `len` elements.
            unsafe { *at.add(i) += 1 };
        }
        Ok(())
    });
    let fail = KernelBody::run(|_| Err(Error::state("the kernel failed on purpose")));
    let gate = gate.clone();
    let hold = KernelBody::poll(move |_| {
        let open = gate.load(Ordering::Acquire);
        Ok(if open { Poll::Ready(()) } else { Poll::Pending })
    });
    for (name, body) in [("bump", bump), ("fail", fail), ("hold", hold)] {
        registry.register(name, KernelSpec::new(&[Access::ReadWrite], 0, body));
    }
    registry
}

impl<S: Subject> Bench<S> {
    /// A driver with two devices, with all work on the calling thread.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::with(two_devices::<S>(seed), S::inline())
    }

    /// A driver and a backend with these configurations.
    ///
    /// # Panics
    /// If the driver or the backend cannot be made.
    #[must_use]
    pub fn with(driver: S::DriverConfig, config: S::Config) -> Self {
        Self::open_with(driver, config).1.expect("a backend")
    }

    /// Like [`with`](Self::with), with the driver also where the backend cannot be made.
    pub(crate) fn open_with(
        mut driver: S::DriverConfig,
        config: S::Config,
    ) -> (Arc<S::Driver>, Result<Self>) {
        let gate = Arc::new(AtomicBool::new(false));
        S::machine_config(&mut driver).kernels = kernels(&gate);
        let driver = Arc::new(S::driver(driver).expect("a driver"));
        let backend = S::backend(driver.clone(), config);
        (driver.clone(), backend.map(|backend| Self { driver, backend, gate }))
    }

    /// Opens a device.
    ///
    /// # Panics
    /// If the device cannot be opened.
    pub fn open(&self, ordinal: u32) -> Lease<dyn Device> {
        self.try_open(ordinal).expect("a device")
    }

    /// Opens a device.
    ///
    /// # Errors
    /// As [`Backend::open`].
    pub fn try_open(&self, ordinal: u32) -> Result<Lease<dyn Device>> {
        self.backend.open(DeviceId::new(self.backend.kind(), ordinal))
    }

    /// Ends the launches of the kernel `hold`.
    pub fn let_go(&self) {
        self.gate.store(true, Ordering::Release);
        // The machine checks such kernels again only if it is told.
        self.machine().ring();
    }

    /// Fails the next driver call with this name.
    pub fn fail(&self, call: &str, action: FaultAction) {
        self.machine().add_fault(FaultRule::on(call, When::Once, action));
    }

    /// The number of driver calls with this name.
    #[must_use]
    pub fn calls(&self, name: &str) -> u64 {
        let all = self.machine().calls_by_name();
        all.into_iter().find(|(call, _)| call == name).map_or(0, |(_, count)| count)
    }

    /// The race detector's reports since the last call.
    #[must_use]
    pub fn reports(&self) -> Vec<String> {
        self.machine().take_reports().iter().map(ToString::to_string).collect()
    }

    /// Ends the backend, and returns the findings of the race detector and of the driver.
    ///
    /// # Errors
    /// As [`Backend::shutdown`].
    pub fn findings(self) -> Result<Vec<String>> {
        let begin = Instant::now();
        loop {
            match self.backend.shutdown() {
                // A thread of the engine lets go of what work held after the work is over.
                Err(Error::LeasesOutstanding { .. }) if begin.elapsed() < TIMEOUT => {
                    thread::sleep(Duration::from_millis(1));
                }
                ended => break ended?,
            }
        }
        let mut all = self.reports();
        all.extend(S::findings(&self.driver));
        Ok(all)
    }

    /// Ends the backend, and checks that nothing was found.
    ///
    /// # Panics
    /// If something was found, or if the backend does not end.
    pub fn close(self) {
        assert_eq!(self.findings().expect("a backend without leases"), [""; 0]);
    }

    fn machine(&self) -> &Monitor {
        S::machine(&self.driver)
    }
}
