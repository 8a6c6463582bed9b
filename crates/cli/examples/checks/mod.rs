//! What the programs that check a built `leasehold` share: how they end, and how the command is asked for its JSON object.
//!
//! It must not know how the command works: it sees its arguments, its output and its exit status.

use serde_json::Value;
use std::process::{Command, ExitCode};

/// Prints what came of a check, and says so by the exit status.
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
    let output = command.output().map_err(|e| format!("{}: {e}", command.get_program().display()))?;
    if !output.status.success() {
        return Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()));
    }
    serde_json::from_slice(&output.stdout).map_err(|e| format!("standard output is not one JSON object: {e}"))
}
