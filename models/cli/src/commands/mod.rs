//! The subcommands, one file each.

pub(crate) mod arguments;
pub(crate) mod bench;
pub(crate) mod bench_alloc;
pub(crate) mod bench_batch;
pub(crate) mod bench_collective;
pub(crate) mod bench_copy;
#[cfg(feature = "cuda")]
pub(crate) mod bench_cuda;
pub(crate) mod bench_ranks;
pub(crate) mod bench_suspend;
pub(crate) mod conformance;
pub(crate) mod devices;
pub(crate) mod manual;
pub(crate) mod measures;
pub(crate) mod memory;
pub(crate) mod operators;
pub(crate) mod replay;
pub(crate) mod run;
pub(crate) mod stress;
pub(crate) mod timeline;

use crate::failure::Failure;
use crate::system::{Request, System};
use leasehold::{DeviceId, Runtime};
use std::io::Write;

/// Opens a device, with this number of threads if the device is the CPU.
pub(crate) fn open(device: DeviceId, threads: Option<usize>) -> Result<Runtime, Failure> {
    Ok(System::open(&Request::new(device, threads))?.runtime)
}

/// Opens a device for a measurement; with `sim`, one of a simulated driver.
pub(crate) fn open_measured(
    device: DeviceId,
    threads: Option<usize>,
    sim: bool,
) -> Result<System, Failure> {
    System::open(&Request { sim: sim.then_some(1), ..Request::new(device, threads) })
}

/// Prints one JSON object on one line.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value)?;
    writeln!(std::io::stdout().lock(), "{text}")?;
    Ok(())
}

/// The percentile `p` (a fraction) of the values.
pub(crate) fn percentile(values: &[f64], p: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    sorted[((last as f64) * p).round() as usize]
}
