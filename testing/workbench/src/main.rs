//! The `leasehold-workbench` command: benchmarks beside their peers, replay, conformance, stress,
//! and the user's commands on simulated devices.
//!
//! Errors and exit statuses are those of the command `leasehold`, whose library this program has.

mod commands;
mod devices;
mod examples;
#[cfg(feature = "sim")]
mod factories;
#[cfg(feature = "sim")]
mod simulated;

use clap::{Parser, Subcommand};
use commands::run::RunArguments;
use commands::{bench, conformance, replay, stress};
use leasehold_cli::program;
use std::process::ExitCode;

/// The instruments of Leasehold: measurements, checks of backends, simulated devices.
#[derive(Debug, Parser)]
#[command(name = "leasehold-workbench", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Generates text with a Llama-family model, also on simulated devices
    #[command(after_help = examples::RUN)]
    Run(RunArguments),
    /// Replays an allocation trace against the allocator
    #[command(after_help = examples::REPLAY)]
    Replay(replay::Arguments),
    /// Measures the runtime beside its peers
    #[command(after_help = examples::BENCH)]
    Bench(bench::Arguments),
    /// Tries what every backend must do, on a device
    #[command(after_help = examples::CONFORMANCE)]
    Conformance(conformance::Arguments),
    /// Runs random programs on a device, against a model
    #[command(after_help = examples::STRESS)]
    Stress(stress::Arguments),
    /// Tries random tensor maps beside CUDA's driver, and copies their boxes
    #[cfg(feature = "cuda")]
    #[command(after_help = examples::MAPS)]
    Maps(commands::maps::Arguments),
}

fn main() -> ExitCode {
    program::main(
        |_| None,
        |arguments: &Arguments| {
            match &arguments.command {
                Command::Run(a) => a.run()?,
                Command::Replay(a) => replay::run(a)?,
                Command::Bench(a) => bench::run(a)?,
                Command::Conformance(a) => return conformance::run(a),
                Command::Stress(a) => return stress::run(a),
                #[cfg(feature = "cuda")]
                Command::Maps(a) => commands::maps::run(a)?,
            }
            Ok(ExitCode::SUCCESS)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_examples_and_takes_them() {
        assert!(leasehold_cli::examples::check::<Arguments>() > 30);
    }
}
