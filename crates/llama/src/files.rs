//! Files of a model directory: the crate `leasehold_input`'s bounds, with this project's errors.

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

/// A regular file, opened.
pub(crate) fn open(path: &Path) -> Result<File> {
    leasehold_input::open(path).map_err(|e| error(&e))
}

/// The bytes of a regular file that has at most `limit` of them.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    leasehold_input::read(path, limit).map_err(|e| error(&e))
}
