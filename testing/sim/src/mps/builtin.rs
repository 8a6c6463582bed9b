//! The backend's own kernels on the simulated driver: copies and fills.
//!
//! This module must not know who launches them.

use crate::{KernelBody, KernelRegistry, KernelSpec, Launch};
use leasehold_core::{Error, Result};
use leasehold_hal::Access;

/// The parameter number `i` of 8 bytes.
fn word(launch: &Launch<'_>, i: usize) -> Result<u64> {
    let bytes = launch.params_bytes().get(i * 8..i * 8 + 8);
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    bytes.map(u64::from_ne_bytes).ok_or_else(|| Error::invalid("a transfer without parameters"))
}

/// Checks that the grid covers the bytes of a row, as the kernel in MSL needs it.
fn check_grid(launch: &Launch<'_>, bytes: u64, each: u64) -> Result<()> {
    let threads = u64::from(launch.grid()[0]) * u64::from(launch.block()[0]);
    if launch.block() != [256, 1, 1] || threads * each < bytes {
        return Err(Error::invalid(format!(
            "{}: {threads} threads of {each} bytes for {bytes}",
            launch.name()
        )));
    }
    Ok(())
}

/// Checks the alignment that the kernels by 16 bytes rely on.
fn check_aligned(launch: &Launch<'_>, each: u64, addr: u64) -> Result<()> {
    if !addr.is_multiple_of(each) {
        return Err(Error::invalid(format!("{}: {addr:#x} is not aligned", launch.name())));
    }
    Ok(())
}

fn copy(launch: &Launch<'_>, each: u64) -> Result<()> {
    let (bytes, src_pitch, dst_pitch) = (word(launch, 0)?, word(launch, 1)?, word(launch, 2)?);
    check_grid(launch, bytes, each)?;
    let ((src, has), (dst, room)) = (launch.pointer::<u8>(0), launch.pointer::<u8>(1));
    for row in 0..u64::from(launch.grid()[1]) {
        let (from, to) = (row * src_pitch, row * dst_pitch);
        if from + bytes > has as u64 || to + bytes > room as u64 {
            return Err(Error::invalid(format!("{}: row {row} is outside", launch.name())));
        }
        check_aligned(launch, each, src as u64 + from)?;
        check_aligned(launch, each, dst as u64 + to)?;
        // SAFETY: the machine checked both bindings, and the row lies in them. The source and the
        // target of a copy do not overlap.
        unsafe {
            std::ptr::copy(src.add(from as usize), dst.add(to as usize), bytes as usize);
        }
    }
    Ok(())
}

fn fill(launch: &Launch<'_>, each: u64) -> Result<()> {
    let (bytes, pattern) = (word(launch, 0)?, (word(launch, 1)? as u32).to_le_bytes());
    check_grid(launch, bytes, each)?;
    let (dst, room) = launch.pointer::<u8>(0);
    check_aligned(launch, each, dst as u64)?;
    if bytes > room as u64 {
        return Err(Error::invalid(format!("{}: {bytes} bytes of {room}", launch.name())));
    }
    let bytes = bytes as usize;
    let mut filled = bytes.min(pattern.len());
    // SAFETY: the machine checked the binding, which has `room` bytes.
    unsafe { dst.copy_from_nonoverlapping(pattern.as_ptr(), filled) };
    while filled < bytes {
        let more = filled.min(bytes - filled);
        // SAFETY: as above; the second part begins where the first one ends.
        unsafe { dst.add(filled).copy_from_nonoverlapping(dst, more) };
        filled += more;
    }
    Ok(())
}

/// Registers the kernels.
pub(super) fn register(registry: &KernelRegistry) {
    let copies = [Access::Read, Access::Write];
    for each in [16, 1] {
        let body = || KernelBody::run(move |launch| copy(launch, each));
        let linear = KernelSpec::new(&copies, 24, body());
        registry.register(&format!("leasehold_copy_{each}"), linear);
        let rows = KernelSpec::new(&copies, 24, body()).leaving_gaps();
        registry.register(&format!("leasehold_rows_{each}"), rows);
        let body = KernelBody::run(move |launch| fill(launch, each));
        let spec = KernelSpec::new(&[Access::Write], 16, body);
        registry.register(&format!("leasehold_fill_{each}"), spec);
    }
}
