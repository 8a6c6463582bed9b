//! The devices of the commands: those of the machine, or simulated ones.
//!
//! This module must not know what the commands do.

use leasehold::{BackendKind, DeviceId};
use leasehold_cli::failure::Failure;
use leasehold_cli::system::{Devices, Machine, Request, System};

/// The default seed of a simulated driver's random order.
pub(crate) const SEED: u64 = 1;

/// The machine's devices, and simulated ones with a seed. With `sim`, the drivers of all others are
/// simulated too.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Simulator {
    pub(crate) sim: bool,
    #[cfg_attr(not(feature = "sim"), expect(dead_code, reason = "no driver is simulated"))]
    pub(crate) seed: u64,
}

impl Simulator {
    /// With the default seed.
    pub(crate) fn new(sim: bool) -> Self {
        Self { sim, seed: SEED }
    }
}

impl Devices for Simulator {
    fn open(&self, request: &Request) -> Result<System, Failure> {
        if !self.simulates(request.device)? {
            return Machine.open(request);
        }
        #[cfg(feature = "sim")]
        return crate::simulated::open(request, self.seed);
        #[cfg(not(feature = "sim"))]
        Err(unknown())
    }

    fn simulates(&self, device: DeviceId) -> Result<bool, Failure> {
        match device.backend {
            BackendKind::Cpu if self.sim => {
                Err(Failure::misuse("--sim: the CPU has no driver to simulate"))
            }
            BackendKind::Sim => Ok(true),
            _ if self.sim && cfg!(not(feature = "sim")) => Err(unknown()),
            _ => Ok(self.sim),
        }
    }
}

fn unknown() -> Failure {
    Failure::misuse("this build has no simulated devices (feature `sim`)")
}
