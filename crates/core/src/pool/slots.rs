//! The slots of a pool, and the arithmetic of generations.
//!
//! This module must not know which slots are free.

use super::free_list::NIL;
use crate::chunks::Chunks;
use crate::lease::Header;
use crate::sync::UnsafeCell;
use std::mem::MaybeUninit;

/// The maximum number of slots of a pool.
pub(super) const SLOTS_MAX: u32 = NIL;

/// A resource after its control block. Aligned to a cache line, to avoid false sharing between
/// slots.
#[repr(C, align(64))]
pub(super) struct Slot<P> {
    pub(super) header: Header,
    pub(super) payload: UnsafeCell<MaybeUninit<P>>,
}

impl<P> Slot<P> {
    /// A slot without a payload.
    pub(super) fn new(header: Header) -> Self {
        Self { header, payload: UnsafeCell::new(MaybeUninit::uninit()) }
    }
}

/// The slots of a pool.
pub(super) type Slots<P> = Chunks<Slot<P>>;

/// The next generation; zero is skipped.
#[inline]
pub(super) fn generation_after(generation: u32) -> u32 {
    generation.wrapping_add(1).max(1)
}

/// The number of generations since `first` of a slot whose generation is `now`.
#[inline]
pub(super) fn generations_since(first: u32, now: u32) -> u32 {
    if now >= first { now - first } else { now.wrapping_sub(first).wrapping_sub(1) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn generations_go_round_without_zero() {
        assert_eq!(generation_after(u32::MAX), 1);
        for (first, now, behind) in
            [(1, 1, 0), (5, 9, 4), (u32::MAX, 1, 1), (u32::MAX - 1, 3, 4), (2, 1, u32::MAX - 1)]
        {
            assert_eq!(generations_since(first, now), behind, "{first} to {now}");
        }
        let mut g = u32::MAX - 3;
        for behind in 0..10 {
            assert_eq!(generations_since(u32::MAX - 3, g), behind);
            g = generation_after(g);
        }
    }
}
