//! Runs a built `leasehold run` and compares the peaks of the reserved and the live device memory.
//!
//! ```text
//! cargo build --release
//! cargo run --release -p leasehold-cli --example check_memory -- \
//!     target/release/leasehold 1.2 --tokens 8 --device cuda:0 --sim
//! ```
//!
//! The second argument is the maximum ratio of reserved to live memory. In any case two granules
//! above live are allowed. The remaining arguments go to `run`. The program must not know how the
//! command works; it knows its arguments, its output and its exit status.

mod checks;

use std::process::{Command, ExitCode};

/// Device memory comes in granules of 2 MiB.
const GRANULE: u64 = 2 << 20;

fn main() -> ExitCode {
    checks::end(check())
}

fn check() -> Result<String, String> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: check_memory BINARY RATIO [argument of run]…";
    let binary = arguments.next().ok_or(usage)?;
    let ratio: f64 = arguments.next().and_then(|r| r.parse().ok()).ok_or(usage)?;
    let report = checks::json(Command::new(&binary).args(["run", "--json"]).args(arguments))?;
    let memory =
        |key: &str| report["memory"][key].as_u64().ok_or_else(|| format!("no memory.{key}"));
    let (live, reserved) = (memory("live_peak_bytes")?, memory("reserved_peak_bytes")?);
    let sizes = format!("{reserved} bytes reserved for {live} live");
    if live == 0 || reserved < live {
        return Err(format!("{sizes}: that cannot be"));
    }
    if reserved > live + 2 * GRANULE {
        return Err(format!("{sizes}: more than two granules above"));
    }
    let of_live = reserved as f64 / live as f64;
    if of_live > ratio {
        return Err(format!("{sizes}: {of_live:.4} of it, {ratio} is allowed"));
    }
    Ok(format!(
        "{sizes}: {of_live:.4} of it, {:.2} granules above",
        (reserved - live) as f64 / GRANULE as f64
    ))
}
