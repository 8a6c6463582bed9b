//! `leasehold completions` and `leasehold man`: what shells and `man` know about the command.

use crate::failure::Failure;
use clap::{Command, ValueEnum};
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct CompletionsArguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Shell {
    Bash,
    Elvish,
    Fish,
    Powershell,
    Zsh,
}

impl From<Shell> for clap_complete::Shell {
    fn from(shell: Shell) -> Self {
        match shell {
            Shell::Bash => Self::Bash,
            Shell::Elvish => Self::Elvish,
            Shell::Fish => Self::Fish,
            Shell::Powershell => Self::PowerShell,
            Shell::Zsh => Self::Zsh,
        }
    }
}

#[derive(Debug, clap::Args)]
pub struct ManArguments {
    /// Writes a page of each command into this folder, which must be there; without it, the
    /// command's own page goes to standard output
    folder: Option<PathBuf>,
}

pub fn completions(arguments: &CompletionsArguments, mut command: Command) -> Result<(), Failure> {
    let mut text = Vec::new();
    let (shell, name) =
        (clap_complete::Shell::from(arguments.shell), command.get_name().to_owned());
    clap_complete::generate(shell, &mut command, name, &mut text);
    Ok(std::io::stdout().lock().write_all(&text)?)
}

pub fn man(arguments: &ManArguments, command: Command) -> Result<(), Failure> {
    match &arguments.folder {
        Some(folder) => {
            clap_mangen::generate_to(command, folder).map_err(|e| Failure::from_file(folder, &e))
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page)?;
            Ok(std::io::stdout().lock().write_all(&page)?)
        }
    }
}
