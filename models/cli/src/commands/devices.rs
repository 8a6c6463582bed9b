//! `leasehold devices`: every backend of the build, available or not, with the reason; architecture
//! and memory.

use crate::commands::print_json;
use crate::failure::Failure;
use crate::table::{Table, bytes};
use leasehold::{BackendKind, Context, DeviceInfo, Error};
use leasehold_collective::CollectiveOps;
use leasehold_collective::driver::Host;
use leasehold_input::{shown, shown_within};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    backends: Vec<Backend>,
}

#[derive(Debug, Serialize)]
struct Backend {
    backend: String,
    available: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// The library of collectives between its devices, with its version, or `unavailable`.
    #[serde(skip_serializing_if = "Option::is_none")]
    collectives: Option<String>,
    devices: Vec<Device>,
}

/// The library of collectives for a kind of devices; `None` if there is none in this build.
fn collectives(kind: BackendKind) -> Option<String> {
    match kind {
        BackendKind::Cpu => Some(Host.name().to_owned()),
        // A machine may well be without it.
        #[cfg(feature = "cuda")]
        BackendKind::Cuda => {
            let library = leasehold_collective::driver::Nccl::load();
            Some(library.map_or("unavailable".to_owned(), |nccl| nccl.name().to_owned()))
        }
        _ => None,
    }
}

#[derive(Debug, Serialize)]
struct Device {
    id: String,
    name: String,
    uuid: String,
    arch: Vec<String>,
    units: u32,
    memory_total_bytes: u64,
    memory_free_bytes: u64,
    details: BTreeMap<String, String>,
}

impl From<DeviceInfo> for Device {
    fn from(d: DeviceInfo) -> Self {
        Self {
            id: d.id.to_string(),
            name: d.name,
            uuid: d.uuid,
            arch: d.arch,
            units: d.units,
            memory_total_bytes: d.memory.total,
            memory_free_bytes: d.memory.free,
            details: d.details.into_iter().collect(),
        }
    }
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let backends = Context::new()
        .backends()
        .into_iter()
        .map(|b| {
            let (devices, reason) = match b.devices {
                Ok(devices) if devices.is_empty() => (Vec::new(), Some("no devices".to_owned())),
                Ok(devices) => (devices, None),
                // The line says itself that the backend is not available.
                Err(Error::Unavailable(why)) => (Vec::new(), Some(why.to_string())),
                Err(e) => (Vec::new(), Some(e.to_string())),
            };
            Backend {
                backend: b.kind.to_string(),
                available: reason.is_none(),
                // Without devices nothing is loaded.
                collectives: reason.is_none().then(|| collectives(b.kind)).flatten(),
                reason,
                devices: devices.into_iter().map(Device::from).collect(),
            }
        })
        .collect();
    let report = Report { backends };
    if arguments.json {
        return print_json(&report);
    }
    let mut out = std::io::stdout().lock();
    for backend in &report.backends {
        if let Some(reason) = &backend.reason {
            writeln!(out, "{}: not available ({})", backend.backend, shown_within(reason, 1000))?;
        }
        for device in &backend.devices {
            writeln!(out, "{}: {}", device.id, shown(&device.name))?;
            let mut table = Table::words();
            table.row(["  units".to_owned(), device.units.to_string()]);
            table.row([
                "  memory".to_owned(),
                format!(
                    "{} ({} free)",
                    bytes(device.memory_total_bytes),
                    bytes(device.memory_free_bytes)
                ),
            ]);
            table.row(["  architectures".to_owned(), device.arch.join(", ")]);
            if let Some(library) = &backend.collectives {
                table.row(["  collectives", library]);
            }
            for (label, value) in &device.details {
                table.row([format!("  {label}"), value.clone()]);
            }
            write!(out, "{table}")?;
        }
    }
    Ok(())
}
