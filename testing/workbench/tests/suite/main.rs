//! The command against its output: results, one-line errors, exit statuses.

mod bench;
mod collective;
mod conformance;
#[cfg(target_os = "linux")]
#[path = "../../../../models/cli/tests/suite/dice.rs"]
mod dice;
mod errors;
#[cfg(target_os = "linux")]
mod hostile;
#[cfg(target_os = "linux")]
mod mutations;
#[cfg(target_os = "linux")]
mod outputs;
mod ranks;
mod replay;
mod run;
mod stress;

use std::path::PathBuf;
use std::process::{Command, Output};

/// The command, ready for arguments.
fn workbench() -> Command {
    Command::new(env!("CARGO_BIN_EXE_leasehold-workbench"))
}

/// Runs the command with arguments.
fn call(arguments: &[&str]) -> Output {
    workbench().args(arguments).output().expect("the command runs")
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

/// A recorded trace.
fn trace(name: &str) -> String {
    let path = repository("testing/alloc-bench/traces").join(format!("{name}.csv.gz"));
    path.to_str().unwrap().to_owned()
}
