//! A simulated driver, and an execution manager over it.

use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{Access, BackendKind, DeviceId};
use leasehold_mps::driver::ops::{CompileOptions, HeapDesc, MemoryOptions, PipelineDesc};
use leasehold_mps::manager::device::DeviceState;
use leasehold_mps::{MpsConfig, MpsExecutionManager};
use leasehold_sim::mps::{SimDriver, SimDriverConfig};
use leasehold_sim::{KernelBody, KernelRegistry, KernelSpec, MachineConfig};

pub const SOURCE: &str = "kernel void bump(device uint* x) { x[0] += 1; }";

pub const HEAP: HeapDesc = HeapDesc {
    size: 1 << 20,
    options: MemoryOptions {
        storage: leasehold_mps::driver::ops::Storage::Shared,
        tracked: false,
        write_combined: false,
    },
    placement: true,
};

pub struct Bench {
    pub driver: Arc<SimDriver>,
    pub manager: MpsExecutionManager,
}

pub fn mps(ordinal: u32) -> DeviceId {
    DeviceId::new(BackendKind::Mps, ordinal)
}

pub fn driver() -> Arc<SimDriver> {
    let kernels = KernelRegistry::new();
    let bump = KernelBody::run(|launch| {
        let (at, len) = launch.pointer::<u32>(0);
        for i in 0..len {
            // SAFETY: the machine checked the binding, which has `len` elements.
            unsafe { *at.add(i) += 1 };
        }
        Ok(())
    });
    kernels.register("bump", KernelSpec::new(&[Access::ReadWrite], 0, bump));
    let machine = MachineConfig::seed(1).devices(2, 64 << 20).kernels(kernels);
    Arc::new(SimDriver::new(SimDriverConfig::new(machine)).unwrap())
}

impl Bench {
    pub fn new() -> Self {
        Self::with(MpsConfig::default())
    }

    pub fn with(config: MpsConfig) -> Self {
        let (driver, manager) = (driver(), MpsExecutionManager::new());
        manager.configure(driver.clone(), config).unwrap();
        Self { driver, manager }
    }

    pub fn open(&self) -> Lease<DeviceState> {
        self.manager.devices().open(mps(0)).unwrap()
    }

    /// The number of driver calls with this name.
    pub fn calls(&self, name: &str) -> u64 {
        let all = self.driver.machine().calls_by_name();
        all.into_iter().find(|(call, _)| call == name).map_or(0, |(_, count)| count)
    }

    /// Ends the managers, and checks that nothing is left and no rule was broken.
    pub fn close(self) {
        self.manager.shutdown().unwrap();
        assert!(self.driver.census().is_nothing(), "{:?}", self.driver.census());
        assert!(self.driver.machine().memory_in_use().is_nothing());
        assert_eq!(self.driver.take_broken_rules(), []);
    }
}

/// The resource whose leases prevent a shutdown.
pub fn refused(result: Result<()>) -> &'static str {
    match result {
        Err(Error::LeasesOutstanding { resource, .. }) => resource,
        other => panic!("wanted a refusal, got {other:?}"),
    }
}

pub fn options() -> CompileOptions {
    CompileOptions::default()
}

pub fn plain() -> PipelineDesc {
    PipelineDesc::default()
}
