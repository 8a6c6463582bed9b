//! The `leasehold` command: devices, run, replay, bench, conformance, stress.
//!
//! An error is one line on standard error that names the problem and its place. The exit status is
//! 2 for an invalid command line and 1 for every other failure. Results go to standard output,
//! progress to standard error.

mod bundled;
mod commands;
#[cfg(feature = "sim")]
mod factories;
mod failure;
mod host;
mod output;
mod system;
mod table;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use failure::Failure;
use std::process::ExitCode;

/// A device runtime for CPU, CUDA and Metal.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lists every backend that this build knows, found or not, with its devices
    Devices(commands::devices::Arguments),
    /// Generates text with a Llama-family model, all on the runtime
    Run(commands::run::Arguments),
    /// Replays an allocation trace against the allocator
    Replay(commands::replay::Arguments),
    /// Measures the runtime beside its peers
    Bench(commands::bench::Arguments),
    /// Tries what every backend must do, on a device
    Conformance(commands::conformance::Arguments),
    /// Runs random programs on a device, against a model
    Stress(commands::stress::Arguments),
}

fn main() -> ExitCode {
    if host::output::closed() {
        return Failure::new("standard output is closed; there is no place for a result").report();
    }
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return match e.print() {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            };
        }
        Err(e) => return Failure::usage(&e).report(),
    };
    let result = match arguments.command {
        Command::Devices(a) => commands::devices::run(&a),
        Command::Run(a) => commands::run::run(&a),
        Command::Replay(a) => commands::replay::run(&a),
        Command::Bench(a) => commands::bench::run(&a),
        Command::Conformance(a) => {
            return commands::conformance::run(&a).unwrap_or_else(|failure| failure.report());
        }
        Command::Stress(a) => {
            return commands::stress::run(&a).unwrap_or_else(|failure| failure.report());
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
