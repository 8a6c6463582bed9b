//! Prints the times of loops over the vendor's driver alone on this machine, as JSON lines on
//! standard output. The first line describes the machine. Each further line is a figure
//! (nanoseconds per call).
//!
//! ```text
//! raw_figures [SAMPLES]        50 samples by default
//! ```
//!
//! The program needs only the C library and the driver.

use leasehold_core::Result;
use leasehold_cuda::driver::ops::DeviceOps;
use leasehold_cuda::driver::real::RealDriver;
use leasehold_sim::traces::figures::RawLoop;
use serde_json::json;
use std::process::ExitCode;

fn run(samples: u32) -> Result<()> {
    let driver = RealDriver::new();
    driver.init()?;
    let properties = driver.device_properties(0)?;
    println!(
        "{}",
        json!({ "device": properties.name, "driver": driver.driver_version()?, "processors": std::thread::available_parallelism().map_or(0, usize::from) })
    );
    for figure in RawLoop::new(&driver, 0)?.all(samples)? {
        println!(
            "{}",
            json!({
                "name": figure.name,
                "host_ns": figure.host,
                "host_best_ns": figure.host_best,
                "total_ns": figure.total,
                "total_best_ns": figure.total_best,
                "bytes": figure.bytes,
                "gigabytes_per_second": figure.gigabytes_per_second(),
                "batch": figure.batch,
                "samples": figure.samples,
            })
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    let samples = std::env::args().nth(1).map_or(Ok(50), |text| text.parse());
    let Ok(samples) = samples else {
        eprintln!("usage: raw_figures [SAMPLES]");
        return ExitCode::from(2);
    };
    match run(samples) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
