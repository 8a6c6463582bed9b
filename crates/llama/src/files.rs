//! Files of a model directory: `leasehold_input`'s functions with this project's errors.

use leasehold_core::{Error, Result};
use leasehold_input::{Cause, Refusal};
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
