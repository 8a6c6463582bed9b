//! Records the vendor driver's answers to the scenarios of `leasehold_sim::traces`, as JSON
//! lines on standard output.
//!
//! ```text
//! driver_trace > h200.jsonl          all scenarios
//! driver_trace --only capture        scenarios whose name contains a text
//! driver_trace --list                the names of the scenarios
//! ```
//!
//! The program needs only the C library and the driver, so it can be copied to another machine.
//! Each scenario runs in a process of its own (`--child NAME`), because some scenarios end their
//! process. The recorder keeps the lines that a scenario wrote before its process ended. The last
//! line says how the process ended.

use leasehold_cuda::driver::ops::{CudaSlowOps, DeviceOps};
use leasehold_cuda::driver::real::RealDriver;
use leasehold_sim::traces::{self, Scenario};
use serde_json::json;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest time of a scenario. The slowest take a second.
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["--child", name] => child(name),
        ["--list"] => {
            traces::scenarios().for_each(|scenario| println!("{}", scenario.name));
            ExitCode::SUCCESS
        }
        [] => record(""),
        ["--only", text] => record(text),
        _ => {
            eprintln!("usage: driver_trace [--only TEXT | --list]");
            ExitCode::from(2)
        }
    }
}

/// Runs one scenario and prints each of its lines at once.
fn child(name: &str) -> ExitCode {
    let Some(scenario) = traces::scenarios().find(|scenario| scenario.name == name) else {
        eprintln!("no scenario {name}");
        return ExitCode::from(2);
    };
    let driver = RealDriver::new();
    if let Err(error) = driver.init() {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    let ops: Arc<dyn CudaSlowOps> = Arc::new(driver);
    let mut out = std::io::stdout();
    let mut line = |line: String| {
        // Without a reader an error can be reported nowhere.
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    };
    // SAFETY: each scenario has this process for itself.
    unsafe { traces::run(&ops, scenario, &mut line) };
    ExitCode::SUCCESS
}

/// Runs the scenarios whose name holds `text`, each in its own process.
fn record(text: &str) -> ExitCode {
    let driver = RealDriver::new();
    let about = driver.init().and_then(|()| {
        let properties = driver.device_properties(0)?;
        Ok(json!({
            "driver": driver.driver_version()?,
            "device": properties.name,
            "devices": driver.device_count()?,
            "compute_capability": format!("{}.{}", properties.compute_capability.0, properties.compute_capability.1),
        }))
    });
    let about = match about {
        Ok(about) => about,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let devices = about["devices"].as_u64().unwrap_or(0);
    println!("{about}");
    let mut failed = false;
    for scenario in traces::scenarios().filter(|scenario| scenario.name.contains(text)) {
        if u64::from(scenario.devices) > devices {
            eprintln!("{}: needs {} devices", scenario.name, scenario.devices);
            continue;
        }
        match one(scenario) {
            Ok(lines) => println!("{}", json!({ "scenario": scenario.name, "lines": lines })),
            Err(error) => {
                eprintln!("{}: {error}", scenario.name);
                failed = true;
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// The lines of one scenario, and how its process ended if it did not end well.
fn one(scenario: &Scenario) -> std::io::Result<Vec<String>> {
    let program = std::env::current_exe()?;
    let mut child = Command::new(program)
        .args(["--child", scenario.name])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout =
        child.stdout.take().ok_or_else(|| std::io::Error::other("the child has no output"))?;
    let reader = std::thread::spawn(move || {
        BufReader::new(stdout).lines().map_while(Result::ok).collect::<Vec<_>>()
    });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if start.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut lines = reader.join().map_err(|_| std::io::Error::other("the reader panicked"))?;
    match status {
        Some(status) if status.success() => {}
        Some(status) => lines.push(format!("died: {status}")),
        None => lines.push("hung".to_owned()),
    }
    Ok(lines)
}
