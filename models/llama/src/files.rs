//! Files of a model directory: `leasehold_input`'s functions with this project's errors.

use crate::guess;
use leasehold::{Error, Result};
use leasehold_input::{Cause, Refusal, shown};
use std::fs::File;
use std::path::Path;

fn error(refusal: &Refusal) -> Error {
    let text = refusal.to_string();
    match refusal.cause {
        Cause::Missing | Cause::Unreadable => Error::NotFound(text.into()),
        Cause::NotRegular | Cause::TooLong => Error::invalid(text),
    }
}

/// Opens a regular file.
pub(crate) fn open(path: &Path) -> Result<File> {
    leasehold_input::open(path).map_err(|e| error(&e))
}

/// The bytes of a regular file of at most `limit` bytes.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    leasehold_input::read(path, limit).map_err(|e| error(&e))
}

/// As [`read`], for a file of a model directory. Its neighbours tell why it may be missing.
pub(crate) fn read_in(
    dir: &Path,
    name: &str,
    limit: u64,
    telling: &guess::Telling,
) -> Result<Vec<u8>> {
    read(&dir.join(name), limit).map_err(|e| match e {
        Error::NotFound(why) => {
            Error::NotFound(format!("{why}{}", guess::missing(dir, telling)).into())
        }
        other => other,
    })
}

/// Files that makers of quantised weights leave beside them: AutoGPTQ, AutoAWQ, ModelOpt, quanto,
/// Pruna.
const QUANTISED: [&str; 6] = [
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "quanto_qmap.json",
    "quantization_config.json",
    "smash_config.json",
];

/// The error for quantised weights; `told` is what tells that they are.
pub(crate) fn quantised(told: &str) -> Error {
    let supported = "supported: weights in BF16, F16, F32 or F64";
    Error::Unsupported(format!("{told}: the weights are quantised; {supported}").into())
}

/// Refuses a directory whose files tell that its weights are quantised.
pub(crate) fn refuse_quantised(dir: &Path) -> Result<()> {
    // A directory that cannot be read has an error of its own when its files are opened.
    let Ok(entries) = dir.read_dir() else { return Ok(()) };
    let mut names: Vec<String> =
        entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    match names.iter().find(|name| QUANTISED.contains(&name.as_str())) {
        Some(name) => Err(quantised(&dir.join(shown(name).to_string()).display().to_string())),
        None => Ok(()),
    }
}
