//! A backend over a simulated driver.

use leasehold_alloc::On;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result, Timeline, TimelineOwner, TimelineSource, Timepoint};
use leasehold_hal::{Backend, BackendKind, Device, DeviceId};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::MachineConfig;
use leasehold_sim::mps::{SimDriver, SimDriverConfig};
use std::time::Duration;

/// Bytes of the device's memory.
pub const MEMORY: u64 = 256 << 20;

pub fn mps(ordinal: u32) -> DeviceId {
    DeviceId::new(BackendKind::Mps, ordinal)
}

pub fn machine() -> SimDriverConfig {
    SimDriverConfig::new(MachineConfig::seed(1).devices(2, MEMORY))
}

pub struct Bench {
    pub driver: Arc<SimDriver>,
    pub backend: MpsBackend,
}

impl Bench {
    pub fn new(config: MpsConfig) -> Self {
        Self::over(machine(), config)
    }

    pub fn over(machine: SimDriverConfig, config: MpsConfig) -> Self {
        let driver = Arc::new(SimDriver::new(machine).unwrap());
        let backend = MpsBackend::with_ops(driver.clone(), config).unwrap();
        Self { driver, backend }
    }

    pub fn open(&self) -> Lease<dyn Device> {
        self.backend.open(mps(0)).unwrap()
    }

    /// The number of driver calls with this name.
    pub fn calls(&self, name: &str) -> u64 {
        let all = self.driver.machine().calls_by_name();
        all.into_iter().find(|(call, _)| call == name).map_or(0, |(_, count)| count)
    }

    /// Ends the backend, and checks that nothing is left and no rule was broken.
    pub fn close(self) {
        self.backend.shutdown().unwrap();
        assert_eq!(self.driver.take_broken_rules(), []);
        assert!(self.driver.census().is_nothing(), "{:?}", self.driver.census());
        assert!(self.driver.machine().memory_in_use().is_nothing());
    }
}

/// A timeline without submissions.
pub struct Nobody(TimelineOwner);

impl Nobody {
    pub fn new() -> Self {
        Self(TimelineOwner::take().unwrap())
    }

    pub fn on(&self) -> On<'_> {
        On { timeline: self.0.timeline(), source: self }
    }
}

// SAFETY: nothing is ever submitted to this timeline.
unsafe impl TimelineSource for Nobody {
    fn timeline(&self) -> &'static Timeline {
        self.0.timeline()
    }

    fn signal(&self) -> Result<u64> {
        Ok(0)
    }

    fn refresh(&self) -> Result<u64> {
        Ok(0)
    }

    fn wait(&self, _: Timepoint) -> Result<()> {
        Err(Error::Unsupported("nothing is submitted".into()))
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.0.timeline().wait(value, timeout)
    }
}
