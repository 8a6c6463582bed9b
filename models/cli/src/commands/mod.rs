//! The subcommands, one file each.

mod arguments;
pub mod bench;
mod bench_batch;
mod bench_decode;
mod bench_ranks;
mod bench_suspend;
pub mod devices;
pub mod manual;
mod measures;
pub mod memory;
mod operators;
pub mod run;
mod timeline;

use crate::failure::Failure;
use std::io::Write;

/// Prints one JSON object on one line.
pub fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value)?;
    writeln!(std::io::stdout().lock(), "{text}")?;
    Ok(())
}

/// The percentile `p` (a fraction) of the values.
pub fn percentile(values: &[f64], p: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    sorted[((last as f64) * p).round() as usize]
}
