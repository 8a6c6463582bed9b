//! Safe code cannot forge the records that say when memory is free again.
#![forbid(unsafe_code)]

use leasehold::backend::{Allocator, Buffer, GraphArena, Lifetime, On};
use leasehold::{Lease, Timepoint, Result};

fn old_points(buffer: &Lease<Buffer>, arena: &GraphArena, old: Timepoint) -> Result<()> {
    buffer.mark_write(old);
    buffer.mark_read(old);
    arena.launch()?.launched(old);
    Ok(())
}

fn untrue_lifetimes(allocator: &Allocator, on: On<'_>, lifetimes: &[Lifetime]) -> Result<()> {
    let arena = allocator.arena()?;
    arena.seal(lifetimes, on)?;
    arena.share().seal(lifetimes, on).map(drop)
}

fn main() {}
