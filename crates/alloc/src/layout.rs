//! Sizes: what a caller asks for, and the classes that small requests are rounded to.
//!
//! Must not know where blocks lie.

use leasehold_core::{Error, Result};

/// The row's block goes to no bin.
pub(crate) const NO_CLASS: u16 = u16::MAX;

/// The unit in which blocks above the slab classes are carved, in bytes.
pub const UNIT: u64 = 1 << UNIT_SHIFT;
pub(crate) const UNIT_SHIFT: u32 = 9;
/// Every block is aligned to this many bytes at least.
pub const MIN_ALIGN: u64 = 256;
/// Requests up to this size (and aligned to [`MIN_ALIGN`]) come from slabs.
pub(crate) const SLAB_MAX: u64 = 64 << 10;
/// Larger requests are refused before any arithmetic is done on them.
pub(crate) const SIZE_LIMIT: u64 = 1 << 60;
/// The number of slab classes.
pub(crate) const CLASSES: usize = 48;

/// A request: a size in bytes and an alignment in bytes (a power of two).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Bytes. Zero gives a valid, empty buffer.
    pub size: u64,
    /// Alignment in bytes; a power of two. Less than 256 is served as 256.
    pub align: u64,
}

impl Layout {
    /// `size` bytes with the ordinary alignment of 256 bytes.
    ///
    /// ```
    /// assert_eq!(leasehold_alloc::Layout::new(1000).align, 256);
    /// ```
    #[must_use]
    pub const fn new(size: u64) -> Self {
        Self { size, align: MIN_ALIGN }
    }

    /// `size` bytes aligned to `align` bytes.
    #[must_use]
    pub const fn aligned(size: u64, align: u64) -> Self {
        Self { size, align }
    }

    /// # Errors
    /// `InvalidArgument` for an alignment that is no power of two.
    #[inline]
    pub(crate) fn check(self) -> Result<Self> {
        if !self.align.is_power_of_two() {
            return Err(Error::invalid(format!("alignment {} is not a power of two", self.align)));
        }
        Ok(self)
    }
}

/// The slab class of `size` bytes, `1..=SLAB_MAX`: steps of 256 bytes up to 2 KiB, then eight
/// classes per doubling.
#[inline]
#[must_use]
pub(crate) fn class_of(size: u64) -> usize {
    debug_assert!((1..=SLAB_MAX).contains(&size));
    let below = size as u32 - 1;
    // Below 2 KiB the doubling counts as the eleventh, whose steps are the same.
    let doubling = (below | 2048).ilog2();
    ((below >> (doubling - 3)) + (doubling - 11) * 8) as usize
}

/// The size in bytes of the blocks of `class`.
#[inline]
#[must_use]
pub(crate) const fn class_size(class: usize) -> u64 {
    if class < 8 {
        return (class as u64 + 1) * 256;
    }
    let base = 2048u64 << ((class - 8) / 8);
    base + ((class - 8) % 8 + 1) as u64 * (base / 8)
}

#[cfg(test)]
#[path = "../tests/unit/layout.rs"]
mod tests;
