//! Common part of the programs that check a built `leasehold`: their exit, and the call of the
//! command for its JSON object.
//!
//! This module must not know how the command works; it knows its arguments, its output and its exit
//! status.

use serde_json::Value;
use std::process::{Command, ExitCode};

/// Prints the result of a check, and returns the matching exit status.
pub fn end(result: Result<String, String>) -> ExitCode {
    match result {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command that must succeed and print one JSON object.
pub fn json(command: &mut Command) -> Result<Value, String> {
    let output =
        command.output().map_err(|e| format!("{}: {e}", command.get_program().display()))?;
    if !output.status.success() {
        return Err(format!(
            "{}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|e| format!("standard output is not one JSON object: {e}"))
}
