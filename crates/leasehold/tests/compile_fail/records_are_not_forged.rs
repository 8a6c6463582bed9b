//! Safe code cannot forge the records that say when memory is free again.
#![forbid(unsafe_code)]

use leasehold::backend::{Allocator, Buffer, Lifetime, On};
use leasehold::{Lease, Timepoint, Result};

fn old_points(buffer: &Lease<Buffer>, old: Timepoint) {
    buffer.mark_write(old);
    buffer.mark_read(old);
}

fn untrue_lifetimes(allocator: &Allocator, on: On<'_>, lifetimes: &[Lifetime]) -> Result<()> {
    let arena = allocator.arena()?;
    arena.seal(lifetimes, on)?;
    arena.share().seal(lifetimes, on).map(drop)
}

fn main() {}
