//! The program around a group of operations: it runs one a number of times, for
//! `ci/instructions.sh` to count its instructions.
//!
//! `PROGRAM NAME TIMES`; the names are those of `bench/instructions.txt`.

use leasehold_core::{Error, Result};

/// An operation with its name.
pub type Path<B> = (&'static str, fn(&B) -> Result<()>);

/// The operation that the arguments name, and how often it runs.
///
/// # Errors
/// Arguments that are missing or no number.
pub fn arguments() -> Result<(String, u64)> {
    let mut args = std::env::args().skip(1);
    let name_and_times = args.next().zip(args.next().and_then(|n| n.parse().ok()));
    name_and_times.ok_or_else(|| Error::invalid("usage: PROGRAM NAME TIMES"))
}

/// The error for a name that no operation has.
pub fn unknown(name: &str) -> Error {
    Error::NotFound(format!("operation {name}").into())
}

/// Runs the operation that the arguments name.
///
/// # Errors
/// Those of `arguments`, of the operation, and an unknown name.
pub fn run<B>(new: fn() -> Result<B>, paths: &[Path<B>]) -> Result<()> {
    let (name, times) = arguments()?;
    let (_, body) = paths.iter().find(|path| path.0 == name).ok_or_else(|| unknown(&name))?;
    let bench = new()?;
    (0..times).try_for_each(|_| body(&bench))
}
