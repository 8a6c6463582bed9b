//! The command against its output: results, one-line errors, exit statuses.

#[cfg(target_os = "linux")]
mod dice;
mod errors;
#[cfg(target_os = "linux")]
mod hostile;
mod manual;
mod memory;
#[cfg(target_os = "linux")]
mod mutations;
#[cfg(target_os = "linux")]
mod outputs;
mod ranks;
mod run;

use std::path::PathBuf;
use std::process::{Command, Output};

/// The command, ready for arguments.
fn leasehold() -> Command {
    Command::new(env!("CARGO_BIN_EXE_leasehold"))
}

/// Runs the command with arguments.
fn call(arguments: &[&str]) -> Output {
    leasehold().args(arguments).output().expect("the command runs")
}

/// Standard output as JSON; the run must have succeeded and printed one line.
fn json(arguments: &[&str]) -> serde_json::Value {
    let output = call(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    assert_eq!(text.lines().count(), 1, "exactly one object");
    serde_json::from_str(&text).expect("JSON")
}

/// A folder of the repository.
fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}
