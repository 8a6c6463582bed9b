//! The subcommands, a file each.

pub(crate) mod bench;
pub(crate) mod devices;
pub(crate) mod replay;
pub(crate) mod run;

use crate::failure::Failure;
use leasehold::cpu::{CpuBackend, CpuConfig};
use leasehold::{BackendKind, Context, DeviceId, Runtime};
use std::io::Write;
use std::sync::Arc;

/// Opens a device, with so many threads where it is the CPU.
pub(crate) fn open(device: DeviceId, threads: Option<usize>) -> Result<Runtime, Failure> {
    let context = match (device.backend, threads) {
        (BackendKind::Cpu, Some(n)) => {
            let backend = CpuBackend::with_config(CpuConfig::threads(n))
                .map_err(|e| Failure::misuse(format!("--threads {n}: {e}")))?;
            Context::with_backends(vec![Arc::new(backend)])
        }
        (other, Some(_)) => {
            return Err(Failure::misuse(format!("--threads is for the CPU; {other} devices have their own")));
        }
        (_, None) => Context::new(),
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
