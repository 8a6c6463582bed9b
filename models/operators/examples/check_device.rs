//! Compares operator kernels of a device with the CPU's, prints a table, and ends with status 1 on
//! a mismatch.
//!
//! ```text
//! cargo run --release -p leasehold-operators --features cuda --example check_device -- \
//!     [--device cuda:0] [--large | --quick] [--filter TEXT[,TEXT…]] [--list]
//! ```
//! Metal's devices need the feature `mps`. `--filter` selects the kernels whose names contain one
//! of the texts. `--quick` selects a few small cases of each kernel; `--large` adds the sizes of
//! real models. `--list` prints the comparisons without a device. Under a much slower checker:
//!
//! ```text
//! compute-sanitizer --tool racecheck check_device --quick
//! for part in linear norm rope,cache attention; do
//!     compute-sanitizer --tool racecheck check_device --filter $part
//! done
//! ```
//! Without such a device the program prints the reason, and ends with status 0. (The CPU backend's
//! threads treat subnormal numbers as zero, and this thread does not. So on `cpu:0` the casts of
//! subnormal numbers differ.)

#[path = "../tests/device/mod.rs"]
mod device;

use device::{Bench, Choice, cases, choose};
use leasehold::{DeviceId, Runtime};
use std::process::ExitCode;

const USAGE: &str =
    "check_device [--device ID] [--large | --quick] [--filter TEXT[,TEXT…]] [--list]";

/// The kernels to compare, and the device.
#[derive(Default)]
struct Wanted {
    device: String,
    large: bool,
    quick: bool,
    parts: Vec<String>,
    list: bool,
}

impl Wanted {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut wanted = Self { device: "cuda:0".to_owned(), ..Self::default() };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} wants a value"));
            match argument.as_str() {
                "--device" => wanted.device = value()?,
                "--filter" => wanted.parts.extend(value()?.split(',').map(|p| p.trim().to_owned())),
                "--large" => wanted.large = true,
                "--quick" => wanted.quick = true,
                "--list" => wanted.list = true,
                other => return Err(format!("{other} is unknown")),
            }
        }
        if wanted.large && wanted.quick {
            return Err("--large and --quick exclude each other".to_owned());
        }
        Ok(wanted)
    }
}

fn main() -> ExitCode {
    let wanted = match Wanted::parse(std::env::args().skip(1)) {
        Ok(wanted) => wanted,
        Err(why) => {
            eprintln!("{why}: {USAGE}");
            return ExitCode::from(2);
        }
    };
    let mut listing = Bench::listing();
    cases::all(&mut listing, wanted.large);
    let choice = choose(&listing.catalogue, &wanted.parts, wanted.quick);
    if choice.is_empty() {
        let all: Vec<_> = listing.catalogue.keys().copied().collect();
        eprintln!("--filter {}: no such kernel among {}", wanted.parts.join(","), all.join(", "));
        return ExitCode::from(2);
    }
    if wanted.list {
        println!("{:<18} {:>6} {:>12}", "kernel", "cases", "bytes");
        for (name, places) in &choice {
            let bytes: usize = places.iter().map(|&at| listing.catalogue[name][at]).sum();
            println!("{name:<18} {:>6} {bytes:>12}", places.len());
        }
        return ExitCode::SUCCESS;
    }
    match run(&wanted, choice) {
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

/// Returns whether all results agreed.
fn run(wanted: &Wanted, choice: Choice) -> leasehold::Result<bool> {
    let id: DeviceId = wanted.device.parse()?;
    let runtime = Runtime::open(id)?;
    let info = runtime.info();
    println!("{} ({}), {}", info.id, info.name, info.arch.join(", "));
    let mut bench = Bench::new(&runtime)?.only(choice);
    cases::all(&mut bench, wanted.large);
    println!("{:<18} {:>6} {:>9}  worst, of the bound", "kernel", "cases", "failed");
    for (kernel, tally) in &bench.tallies {
        println!("{kernel:<18} {:>6} {:>9}  {:.3}", tally.cases, tally.failures.len(), tally.worst);
    }
    let failures: Vec<_> =
        bench.tallies.iter().flat_map(|(k, t)| t.failures.iter().map(move |f| (k, f))).collect();
    for (kernel, why) in failures.iter().take(40) {
        eprintln!("{kernel}: {why}");
    }
    let cases: usize = bench.tallies.values().map(|t| t.cases).sum();
    println!("{cases} cases, {} failed", failures.len());
    Ok(failures.is_empty())
}
