//! Operations on handles and leases.

mod operations;
#[expect(dead_code, reason = "these operations repeat themselves")]
mod program;

use leasehold_core::Result;
use operations::{Bench, Body};

/// Each operation with its name.
const OPERATIONS: [(&str, Body); 6] = [
    ("acquire_release", Bench::acquire_release),
    ("acquire_handle_release", Bench::acquire_handle_release),
    ("acquire_release_cells", Bench::acquire_release_cells),
    ("clone_drop", Bench::clone_drop),
    ("lease_handle_drop", Bench::lease_handle_drop),
    ("is_alive", Bench::is_alive),
];

fn main() -> Result<()> {
    let (name, times) = program::arguments()?;
    let found = OPERATIONS.iter().find(|operation| operation.0 == name);
    let (_, body) = found.ok_or_else(|| program::unknown(&name))?;
    body(&Bench::new()?, times);
    Ok(())
}
