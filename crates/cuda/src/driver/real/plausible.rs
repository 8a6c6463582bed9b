//! Plausibility checks of a driver's answers that say "success". An imitation of the vendor's
//! library, or one with damaged memory, may answer anything. If an answer would make this process
//! touch unmapped memory or never end, it becomes an error.
//!
//! This module must not know managers.

use leasehold_core::{Error, Result};

/// No memory is ever mapped below this address.
const LOWEST: u64 = 64 << 10;
/// Addresses have at most 57 bits.
const HIGHEST: u64 = 1 << 57;
/// The plausible granularities of memory, in bytes.
const GRANULARITY: std::ops::RangeInclusive<u64> = 4096..=1 << 30;
/// The most parameters of a function. Functions have about ten; the driver's limit is 32,764 bytes
/// of parameters.
pub(super) const PARAMETERS: usize = 32_764;

/// The error for "success" with an implausible answer.
#[cold]
fn untrue(api: &'static str, what: &str) -> Error {
    Error::Driver { api, code: 0, name: format!("CUDA_SUCCESS, but {what}").into() }
}

/// The handle of an object that the driver reports as made.
pub(super) fn object<T>(api: &'static str, native: *mut T) -> Result<u64> {
    if native.is_null() { Err(untrue(api, "no object")) } else { Ok(native as u64) }
}

/// The address of `bytes` bytes that the driver reports as allocated.
pub(super) fn address(api: &'static str, addr: u64, bytes: u64, align: u64) -> Result<u64> {
    let end = addr.checked_add(bytes).filter(|end| *end <= HIGHEST);
    if addr < LOWEST || end.is_none() || !addr.is_multiple_of(align.max(1)) {
        return Err(untrue(api, &format!("{bytes} bytes at {addr:#x}")));
    }
    Ok(addr)
}

/// The granularity of pieces of memory.
pub(super) fn granularity(api: &'static str, bytes: u64) -> Result<u64> {
    if bytes.is_power_of_two() && GRANULARITY.contains(&bytes) {
        return Ok(bytes);
    }
    Err(untrue(api, &format!("a granularity of {bytes} bytes")))
}

/// A number of devices.
pub(super) fn count(api: &'static str, count: i32) -> Result<u32> {
    u32::try_from(count).map_err(|_| untrue(api, &format!("{count} devices")))
}

/// The error for a function with endless parameters.
pub(super) fn endless(api: &'static str) -> Error {
    untrue(api, &format!("a function with more than {PARAMETERS} parameters"))
}

/// A driver's text for the user: without control characters, and at most one line.
pub(super) fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars()
        .take(200)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect::<String>()
        .trim()
        .to_owned()
}

#[cfg(test)]
#[path = "../../../tests/unit/plausible.rs"]
mod tests;
