//! The subcommands, one file each.

pub(crate) mod bench;
pub(crate) mod bench_alloc;
pub(crate) mod bench_collective;
pub(crate) mod bench_copy;
pub(crate) mod bench_cpu;
#[cfg(feature = "cuda")]
pub(crate) mod bench_cuda;
pub(crate) mod conformance;
pub(crate) mod leases;
#[cfg(feature = "cuda")]
pub(crate) mod maps;
pub(crate) mod replay;
pub(crate) mod run;
pub(crate) mod stress;

use crate::devices::Simulator;
use leasehold::{DeviceId, Runtime};
use leasehold_cli::failure::Failure;
use leasehold_cli::system::{Devices, Request};

/// Opens a device, with this number of threads if the device is the CPU.
pub(crate) fn open(device: DeviceId, threads: Option<usize>) -> Result<Runtime, Failure> {
    Ok(Simulator::new(false).open(&Request::new(device, threads))?.runtime)
}
