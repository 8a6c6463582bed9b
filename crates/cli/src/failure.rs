//! What the command says when it fails: one line, and an exit status.

use leasehold_input::shown_within;
use std::fmt::Write;
use std::io;
use std::process::ExitCode;

/// The most characters that it says.
const LONGEST: usize = 4000;

/// Why the command fails.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    usage: bool,
}

impl Failure {
    /// Something failed.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), usage: false }
    }

    /// The command line makes no sense.
    pub(crate) fn misuse(message: impl Into<String>) -> Self {
        Self { message: message.into(), usage: true }
    }

    /// The command line cannot be parsed: the parser's message in one line.
    pub(crate) fn usage(error: &clap::Error) -> Self {
        let text = error.to_string();
        let mut message = String::new();
        // The first paragraph says what is wrong; the rest is help.
        for line in text.lines().take_while(|l| !l.trim().is_empty()) {
            let line = line.trim();
            let _ = write!(message, "{}{line}", if message.is_empty() { "" } else { " " });
        }
        Self::misuse(message.strip_prefix("error: ").unwrap_or(&message).to_owned())
    }

    /// Adds where it happened.
    pub(crate) fn at(mut self, place: impl std::fmt::Display) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// Says it and gives the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        // One line that no terminal obeys, whatever file or driver parts of it come from.
        let line = self.message.replace('\n', " ");
        let line = shown_within(&line, LONGEST);
        // A closed standard error leaves only the status.
        let _ = io::Write::write_fmt(&mut io::stderr(), format_args!("leasehold: {line}\n"));
        ExitCode::from(if self.usage { 2 } else { 1 })
    }
}

impl From<leasehold::Error> for Failure {
    fn from(e: leasehold::Error) -> Self {
        Self::new(e.to_string())
    }
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        Self::new(format!("standard output: {e}"))
    }
}

impl From<serde_json::Error> for Failure {
    fn from(e: serde_json::Error) -> Self {
        Self::new(format!("cannot write JSON: {e}"))
    }
}
