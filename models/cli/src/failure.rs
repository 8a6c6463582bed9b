//! Failures of the command: a message of one line, and an exit status.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use leasehold_input::shown_within;
use std::fmt::Write;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// The maximum length of the message in characters.
const LONGEST: usize = 4000;

/// The reason why the command fails.
#[derive(Debug)]
pub struct Failure {
    message: String,
    usage: bool,
}

impl Failure {
    /// A failure of an operation.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), usage: false }
    }

    /// A failure of the command line's meaning.
    pub fn misuse(message: impl Into<String>) -> Self {
        Self { message: message.into(), usage: true }
    }

    /// A file that cannot be opened or written.
    pub fn from_file(path: &Path, e: &io::Error) -> Self {
        Self::new(format!("{}: {e}", path.display()))
    }

    /// A command line that cannot be parsed: the parser's message and tip in one line. Unless the
    /// message is about a value, it also names the help.
    pub fn usage(error: &clap::Error) -> Self {
        let text = error.to_string();
        let mut message = String::new();
        // The first paragraph is the message; the rest is help.
        for line in text.lines().take_while(|l| !l.trim().is_empty()) {
            let line = line.trim();
            let _ = write!(message, "{}{line}", if message.is_empty() { "" } else { " " });
        }
        for tip in text.lines().filter_map(|l| l.trim().strip_prefix("tip: ")) {
            let _ = write!(message, "; {tip}");
        }
        if !matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation) {
            let usage = text.lines().find_map(|l| l.strip_prefix("Usage: ")).unwrap_or("leasehold");
            let command: Vec<_> = usage
                .split_whitespace()
                .take_while(|word| !word.starts_with(['[', '<', '-']))
                .collect();
            let _ = write!(message, "; try '{} --help'", command.join(" "));
        }
        Self::misuse(message.strip_prefix("error: ").unwrap_or(&message).to_owned())
    }

    /// Adds the place of the failure.
    pub fn at(mut self, place: impl std::fmt::Display) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// Prints the message and returns the exit status.
    pub fn report(&self) -> ExitCode {
        // One line without control characters, because parts of it may come from a file or driver.
        let line = self.message.replace('\n', " ");
        let line = shown_within(&line, LONGEST);
        // A closed standard error leaves only the status.
        let _ = io::Write::write_fmt(&mut io::stderr(), format_args!("leasehold: {line}\n"));
        ExitCode::from(if self.usage { 2 } else { 1 })
    }
}

/// Suggests the option that has the letters of an unknown one in another order. The parser finds
/// another one as similar, such as `--mode` for `--modle`.
pub fn suggest(error: &mut clap::Error, command: &clap::Command) {
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidArg) else { return };
    let letters = |option: &str| {
        let mut letters: Vec<char> = option.chars().collect();
        letters.sort_unstable();
        letters
    };
    let given = letters(given.trim_start_matches('-'));
    let mut commands = vec![command];
    while let Some(command) = commands.pop() {
        let mut options = command.get_arguments().filter_map(|argument| argument.get_long());
        if let Some(option) = options.find(|option| letters(option) == given) {
            let suggested = ContextValue::String(format!("--{option}"));
            error.insert(ContextKind::SuggestedArg, suggested);
            return;
        }
        commands.extend(command.get_subcommands());
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
