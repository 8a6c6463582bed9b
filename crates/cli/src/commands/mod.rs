//! The subcommands, a file each.

pub(crate) mod bench;
pub(crate) mod bench_alloc;
pub(crate) mod conformance;
pub(crate) mod devices;
pub(crate) mod memory;
pub(crate) mod replay;
pub(crate) mod run;

use crate::commands::memory::Wishes;
use crate::failure::Failure;
use leasehold::cpu::{CpuBackend, CpuConfig};
use leasehold::{BackendKind, Context, DeviceId, Runtime};
use std::io::Write;
use std::sync::Arc;

/// Opens a device, with so many threads where it is the CPU.
pub(crate) fn open(device: DeviceId, threads: Option<usize>) -> Result<Runtime, Failure> {
    open_with(device, threads, Wishes::default())
}

/// As [`open`], with these wishes for its memory, which only the CPU grants so far.
pub(crate) fn open_with(device: DeviceId, threads: Option<usize>, memory: Wishes) -> Result<Runtime, Failure> {
    let plain = memory == Wishes::default();
    let context = match (device.backend, threads) {
        (_, None) if plain => Context::new(),
        (BackendKind::Cpu, n) => {
            let mut config = n.map_or_else(CpuConfig::default, CpuConfig::threads);
            config = config.debug(memory.debug).trace_events(memory.trace_events);
            let backend = CpuBackend::with_config(config).map_err(|e| match n {
                Some(n) => Failure::misuse(format!("--threads {n}: {e}")),
                None => Failure::from(e),
            })?;
            Context::with_backends(vec![Arc::new(backend)])
        }
        (other, Some(_)) => {
            return Err(Failure::misuse(format!("--threads is for the CPU; {other} devices have their own")));
        }
        (other, None) => {
            let what = "--memory-debug, --memory-trace and --memory-snapshot";
            return Err(Failure::misuse(format!("{what} are for the CPU so far, not for {other} devices")));
        }
    };
    context.runtime(device).map_err(|e| {
        let named = e.to_string().contains(&device.to_string());
        let failure = Failure::from(e);
        if named { failure } else { failure.at(device) }
    })
}

/// Prints one JSON object on one line.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value)?;
    writeln!(std::io::stdout().lock(), "{text}")?;
    Ok(())
}

/// The value at fraction `p` of the sorted values.
pub(crate) fn percentile(values: &[f64], p: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    sorted[((last as f64) * p).round() as usize]
}
