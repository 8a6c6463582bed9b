//! Compares every operator kernel of a device with the CPU's, prints a table, and ends with status 1 on a mismatch.
//!
//! ```text
//! cargo run --release -p leasehold-operators --features cuda --example check_device -- [--device cuda:0] [--large]
//! ```
//! Without such a device it says why, and ends with status 0: there is nothing to compare. (The CPU's own threads take subnormal numbers
//! for zero and this one does not: on `cpu:0` the casts of subnormal numbers differ.)

#[path = "../tests/device/mod.rs"]
mod device;

use leasehold::{Context, DeviceId};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut name = "cuda:0".to_owned();
    let mut large = false;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--device" => name = arguments.next().unwrap_or_default(),
            "--large" => large = true,
            other => {
                eprintln!("{other} is unknown: check_device [--device ID] [--large]");
                return ExitCode::from(2);
            }
        }
    }
    match run(&name, large) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e @ leasehold::Error::Unavailable(_)) => {
            println!("skipped: {e}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

/// Whether everything agreed.
fn run(name: &str, large: bool) -> leasehold::Result<bool> {
    let id: DeviceId = name.parse()?;
    let runtime = Context::new().runtime(id)?;
    let info = runtime.info();
    println!("{} ({}), {}", info.id, info.name, info.arch.join(", "));
    let mut bench = device::Bench::new(&runtime)?;
    device::cases::all(&mut bench, large);
    println!("{:<18} {:>6} {:>9}  worst, of the bound", "kernel", "cases", "failed");
    for (kernel, tally) in &bench.tallies {
        println!("{kernel:<18} {:>6} {:>9}  {:.3}", tally.cases, tally.failures.len(), tally.worst);
    }
    let failures: Vec<_> = bench.tallies.iter().flat_map(|(k, t)| t.failures.iter().map(move |f| (k, f))).collect();
    for (kernel, why) in failures.iter().take(40) {
        eprintln!("{kernel}: {why}");
    }
    let cases: usize = bench.tallies.values().map(|t| t.cases).sum();
    println!("{cases} cases, {} failed", failures.len());
    Ok(failures.is_empty())
}
