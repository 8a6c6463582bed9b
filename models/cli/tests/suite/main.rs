//! The command against its output: results, one-line errors, exit statuses.

mod common;
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

use common::*;

/// The program that is tested.
const PROGRAM: &str = env!("CARGO_BIN_EXE_leasehold");
