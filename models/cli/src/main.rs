//! The `leasehold` command. Its library has what it does.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use leasehold_cli::commands::{bench, devices, manual, run};
use leasehold_cli::examples;
use leasehold_cli::failure::Failure;
use leasehold_cli::program;
use leasehold_cli::system::Machine;
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
    Devices(devices::Arguments),
    /// Generates text with a Llama-family model, all on the runtime
    #[command(after_help = examples::RUN)]
    Run(run::Arguments),
    /// Measures a model on a device
    #[command(after_help = examples::BENCH)]
    Bench(BenchArguments),
    /// Prints what a shell needs to complete this command's arguments
    #[command(after_help = examples::COMPLETIONS)]
    Completions(manual::CompletionsArguments),
    /// Prints or writes the manual pages of this command
    #[command(after_help = examples::MAN)]
    Man(manual::ManArguments),
}

#[derive(Debug, clap::Args)]
struct BenchArguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Tokens per second of a model, eager and as a graph, in turns
    #[command(after_help = examples::BENCH_DECODE)]
    Decode(bench::DecodeArguments),
    /// A model whose weights leave the device and come back: times, and the text after each round
    #[command(after_help = examples::BENCH_SUSPEND)]
    Suspend(bench::SuspendArguments),
}

/// The program that has the rest of what this command once had.
const WORKBENCH: &str = "leasehold-workbench";
/// Its commands, and its benchmarks.
const COMMANDS: [&str; 3] = ["conformance", "replay", "stress"];
const BENCHMARKS: [&str; 8] =
    ["alloc", "collective", "copy", "cuda", "graph", "lease", "memory", "stream"];

/// The words about a command or an option that another program has.
fn moved(error: &clap::Error) -> Option<Failure> {
    let word = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    let there = match error.kind() {
        ErrorKind::InvalidSubcommand => match word(ContextKind::InvalidSubcommand)? {
            name if COMMANDS.contains(&name) => format!("{WORKBENCH} {name}"),
            name if BENCHMARKS.contains(&name) => format!("{WORKBENCH} bench {name}"),
            _ => return None,
        },
        ErrorKind::UnknownArgument => match word(ContextKind::InvalidArg)? {
            option @ ("--sim" | "--sim-seed") => format!("{WORKBENCH}, with {option}"),
            _ => return None,
        },
        _ => return None,
    };
    Some(Failure::misuse(format!("this is in another program: {there}")))
}

fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.command {
        Command::Devices(a) => devices::run(a),
        Command::Run(a) => run::run(a, &Machine),
        Command::Bench(BenchArguments { what: What::Decode(a) }) => bench::decode(a, &Machine),
        Command::Bench(BenchArguments { what: What::Suspend(a) }) => bench::suspend(a, &Machine),
        Command::Completions(a) => manual::completions(a, Arguments::command()),
        Command::Man(a) => manual::man(a, Arguments::command()),
    }
}

fn main() -> ExitCode {
    program::main(moved, |arguments| run(arguments).map(|()| ExitCode::SUCCESS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_examples_and_takes_them() {
        assert!(examples::check::<Arguments>() > 20);
    }
}
