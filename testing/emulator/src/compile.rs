//! The compilers: from texts to the bytes of a library. Nothing of a text runs here.
//!
//! This module must not know languages.

use crate::failure::{Failure, SWITCH};
use leasehold_core::sync::OnceLock;
use leasehold_input::{CompileCache, Key};
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Output};

/// A folder for a compilation, which ends with this value.
#[derive(Debug)]
pub(crate) struct Workshop {
    folder: tempfile::TempDir,
}

/// The library that a tool makes of a text with options. A cache on disk keeps it for all processes
/// of the user.
///
/// # Errors
/// [`Failure::Missing`] without the tool; those of `make`.
pub(crate) fn kept(
    tool: &str,
    options: &[&str],
    text: &str,
    make: impl FnOnce() -> Result<Vec<u8>, Failure>,
) -> Result<Vec<u8>, Failure> {
    static CACHE: OnceLock<CompileCache> = OnceLock::new();
    let said = Command::new(tool).arg("--version").output();
    let said = said.map_err(|e| Failure::Missing(format!("{tool}: {e}")))?;
    let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
    let key = Key {
        source: text,
        name: "emulated",
        options: &options,
        architecture: std::env::consts::ARCH,
        compiler: &String::from_utf8_lossy(&said.stdout),
        driver: 0,
    };
    CACHE.get_or_init(CompileCache::from_env).get_or_compile(&key, make)
}

fn unwritten(e: &io::Error) -> Failure {
    Failure::Refused(format!("the sources are not written: {e}"))
}

impl Workshop {
    /// A folder with files in it. A name may have a folder of its own.
    ///
    /// # Errors
    /// A failure of the file system; [`Failure::Missing`] if emulation is switched off.
    pub(crate) fn new<'a>(
        files: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<Self, Failure> {
        if std::env::var_os(SWITCH).is_some() {
            return Err(Failure::Missing(format!("{SWITCH} is set")));
        }
        let workshop = Self { folder: tempfile::tempdir().map_err(|e| unwritten(&e))? };
        files.into_iter().try_for_each(|(name, bytes)| workshop.write(name, bytes))?;
        Ok(workshop)
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Failure> {
        let path = self.path().join(name);
        let folder = path.parent().unwrap_or(self.path());
        fs::create_dir_all(folder).and_then(|()| fs::write(&path, bytes)).map_err(|e| unwritten(&e))
    }

    pub(crate) fn read(&self, name: &str) -> Result<Vec<u8>, Failure> {
        fs::read(self.path().join(name)).map_err(|e| unwritten(&e))
    }

    /// Runs a tool in a folder of the workshop.
    ///
    /// # Errors
    /// [`Failure::Missing`] without the tool; [`Failure::Refused`] with its messages.
    pub(crate) fn run<S: AsRef<std::ffi::OsStr>>(
        &self,
        folder: &str,
        tool: &str,
        options: impl IntoIterator<Item = S>,
    ) -> Result<Output, Failure> {
        let ran = Command::new(tool).args(options).current_dir(self.path().join(folder)).output();
        match ran {
            Ok(output) if output.status.success() => Ok(output),
            Ok(output) => {
                let log = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
                Err(Failure::Refused(if log.is_empty() {
                    format!("{tool}: {}", output.status)
                } else {
                    log
                }))
            }
            Err(e) => Err(Failure::Missing(format!("{tool}: {e}"))),
        }
    }
}
