//! The `leasehold` command: devices, run, replay, bench, conformance, stress.
//!
//! An error is one line on standard error that names the problem and its place. The exit status is
//! 2 for an invalid command line and 1 for every other failure. Results go to standard output,
//! progress to standard error.

mod bundled;
mod commands;
mod examples;
#[cfg(feature = "sim")]
mod factories;
mod failure;
mod host;
mod output;
mod ranks;
mod style;
mod system;
mod table;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
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
    #[command(after_help = examples::DEVICES)]
    Devices(commands::devices::Arguments),
    /// Generates text with a Llama-family model, all on the runtime
    #[command(after_help = examples::RUN)]
    Run(commands::run::Arguments),
    /// Replays an allocation trace against the allocator
    #[command(after_help = examples::REPLAY)]
    Replay(commands::replay::Arguments),
    /// Measures the runtime beside its peers
    #[command(after_help = examples::BENCH)]
    Bench(commands::bench::Arguments),
    /// Tries what every backend must do, on a device
    #[command(after_help = examples::CONFORMANCE)]
    Conformance(commands::conformance::Arguments),
    /// Runs random programs on a device, against a model
    #[command(after_help = examples::STRESS)]
    Stress(commands::stress::Arguments),
    /// Prints what a shell needs to complete this command's arguments
    #[command(after_help = examples::COMPLETIONS)]
    Completions(commands::manual::CompletionsArguments),
    /// Prints or writes the manual pages of this command
    #[command(after_help = examples::MAN)]
    Man(commands::manual::ManArguments),
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
        // The help of a command that wants another word, on standard error.
        Err(e) if e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = e.print();
            return ExitCode::from(2);
        }
        Err(mut e) => {
            failure::suggest(&mut e, &Arguments::command());
            return Failure::usage(&e).report();
        }
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
        Command::Completions(a) => commands::manual::completions(&a, Arguments::command()),
        Command::Man(a) => commands::manual::man(&a, Arguments::command()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
