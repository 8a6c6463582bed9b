//! `--verbose`: the operators of a prompt and of a step, and what computes them.

use crate::failure::Failure;
use crate::table::Table;
use leasehold_llama::OperatorCount;
use std::io::Write;

/// Prints a table to standard error, so that standard output stays as it is.
pub(crate) fn print(prompt: &[OperatorCount], step: &[OperatorCount]) -> Result<(), Failure> {
    let mut table = Table::words();
    table.row(["", "operator", "shape", "computed by", "times"]);
    for (of, counts) in [("prompt", prompt), ("step", step)] {
        for c in counts {
            let times = c.count.to_string();
            table.row([of, c.name, c.shape.as_str(), c.computed_by, times.as_str()]);
        }
    }
    write!(std::io::stderr().lock(), "{table}")?;
    Ok(())
}
