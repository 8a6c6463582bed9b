//! A program of commands, from its arguments to its exit status.

use crate::failure::{Failure, suggest};
use crate::host;
use clap::Parser;
use clap::error::ErrorKind;
use std::process::ExitCode;

/// Parses the arguments of this process and runs the command. `moved` has better words for a
/// command line that cannot be parsed, if it knows them.
pub fn main<A: Parser>(
    moved: impl FnOnce(&clap::Error) -> Option<Failure>,
    run: impl FnOnce(&A) -> Result<ExitCode, Failure>,
) -> ExitCode {
    if host::output::closed() {
        return Failure::new("standard output is closed; there is no place for a result").report();
    }
    let arguments = match A::try_parse() {
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
            let failure = moved(&e).unwrap_or_else(|| {
                suggest(&mut e, &A::command());
                Failure::usage(&e)
            });
            return failure.report();
        }
    };
    run(&arguments).unwrap_or_else(|failure| failure.report())
}
