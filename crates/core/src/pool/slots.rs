//! Storage of slots: chunks that double in size and never move, and the arithmetic of generations.
//!
//! This module must not know which slots are free.

use super::free_list::NIL;
use crate::lease::{Header, Owner};
use crate::sync::UnsafeCell;
use crate::sync::atomic::{AtomicPtr, Ordering};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

/// The maximum number of slots of a pool.
pub(super) const SLOTS_MAX: u32 = NIL;
/// Enough chunks for [`SLOTS_MAX`] when the first holds one slot.
const CHUNKS: usize = 25;

/// A resource after its control block. Aligned to a cache line, to avoid false sharing between
/// slots.
#[repr(C, align(64))]
pub(super) struct Slot<P> {
    pub(super) header: Header,
    pub(super) payload: UnsafeCell<MaybeUninit<P>>,
}

/// The table of chunks. Chunk `c` holds `1 << (shift + c)` slots.
pub(super) struct Slots<P> {
    chunks: [AtomicPtr<Slot<P>>; CHUNKS],
    shift: u32,
}

impl<P> Slots<P> {
    /// An empty table whose first chunk will hold `block` slots, rounded up to a power of two.
    pub(super) fn new(block: u32) -> Self {
        Self {
            chunks: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
            shift: block.next_power_of_two().trailing_zeros(),
        }
    }

    /// The chunk of a slot, and its offset in the chunk.
    #[inline]
    fn place(&self, index: u32) -> (usize, usize) {
        let n = (index >> self.shift) + 1;
        let chunk = n.ilog2();
        (chunk as usize, (index - (((1 << chunk) - 1) << self.shift)) as usize)
    }

    /// The slot, if it was made.
    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<NonNull<Slot<P>>> {
        if index >= SLOTS_MAX {
            return None;
        }
        let (chunk, offset) = self.place(index);
        let base = NonNull::new(self.chunks.get(chunk)?.load(Ordering::Acquire))?;
        // SAFETY: a published chunk holds `1 << (shift + chunk)` slots, and `place` gives a smaller
        // offset.
        Some(unsafe { base.add(offset) })
    }

    /// The slot `index`, which must exist.
    ///
    /// # Safety
    /// - `index` came from a list, a cell or a header of this pool.
    #[inline]
    pub(super) unsafe fn made(&self, index: u32) -> NonNull<Slot<P>> {
        let (chunk, offset) = self.place(index);
        // SAFETY: lists and cells hold only slots of chunks that were published before.
        unsafe {
            let base = self.chunks.get_unchecked(chunk).load(Ordering::Acquire);
            debug_assert!(!base.is_null());
            NonNull::new_unchecked(base.add(offset))
        }
    }

    /// Makes the chunk that starts at slot `capacity`. Returns the number of slots that the pool
    /// gains, which is 0 if the pool is full. The caller holds the pool's growth lock. `capacity`
    /// is the sum of the results of earlier calls.
    ///
    /// # Errors
    /// The number of bytes that the host could not allocate.
    pub(super) fn grow(&self, capacity: u32, owner: *const Owner, generation: u32) -> Result<u32, u64> {
        let room = SLOTS_MAX - capacity;
        if room == 0 {
            return Ok(0);
        }
        let (chunk, offset) = self.place(capacity);
        debug_assert_eq!(offset, 0, "a chunk begins where the last one ended");
        let len = 1usize << (self.shift as usize + chunk);
        let mut slots: Vec<Slot<P>> = Vec::new();
        if slots.try_reserve_exact(len).is_err() {
            return Err(len as u64 * size_of::<Slot<P>>() as u64);
        }
        // The last chunk's slots beyond SLOTS_MAX stay unused.
        slots.extend((0..len as u32).map(|i| Slot {
            header: Header::new(owner, capacity + i, generation),
            payload: UnsafeCell::new(MaybeUninit::uninit()),
        }));
        let base = Box::into_raw(slots.into_boxed_slice()).cast::<Slot<P>>();
        self.chunks[chunk].store(base, Ordering::Release);
        Ok((len as u64).min(u64::from(room)) as u32)
    }
}

impl<P> Drop for Slots<P> {
    fn drop(&mut self) {
        for (i, chunk) in self.chunks.iter().enumerate() {
            let base = chunk.load(Ordering::Acquire);
            if !base.is_null() {
                let len = 1usize << (self.shift as usize + i);
                // SAFETY: the chunk was leaked from a boxed slice of this length, and the table is
                // its only owner.
                drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(base, len)) });
            }
        }
    }
}

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

/// The first generation of a new pool. Steps of the golden ratio keep the offsets of many pools far
/// apart.
pub(super) fn next_first_generation() -> u32 {
    #[cfg(not(loom))]
    {
        use crate::sync::atomic::AtomicU32;
        static POOLS: AtomicU32 = AtomicU32::new(1);
        POOLS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9).max(1)
    }
    // A loom atomic cannot outlive a model's execution.
    #[cfg(loom)]
    1
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn generations_go_round_without_zero() {
        assert_eq!(generation_after(u32::MAX), 1);
        for (first, now, behind) in [(1, 1, 0), (5, 9, 4), (u32::MAX, 1, 1), (u32::MAX - 1, 3, 4), (2, 1, u32::MAX - 1)]
        {
            assert_eq!(generations_since(first, now), behind, "{first} to {now}");
        }
        let mut g = u32::MAX - 3;
        for behind in 0..10 {
            assert_eq!(generations_since(u32::MAX - 3, g), behind);
            g = generation_after(g);
        }
    }

    #[test]
    fn every_index_has_a_place_of_its_own() {
        for block in [1, 2, 3, 32, 1000, SLOTS_MAX] {
            let slots = Slots::<u8>::new(block);
            let first = block.next_power_of_two();
            let (mut chunk, mut offset) = (0, 0);
            for index in 0..100_000u32 {
                assert_eq!(slots.place(index), (chunk, offset), "block {block}, slot {index}");
                offset += 1;
                if offset == (first as usize) << chunk {
                    (chunk, offset) = (chunk + 1, 0);
                }
            }
            assert!(slots.place(SLOTS_MAX - 1).0 < CHUNKS);
            assert!(slots.get(0).is_none() && slots.get(SLOTS_MAX).is_none() && slots.get(u32::MAX).is_none());
        }
    }

    #[test]
    fn slots_do_not_move_and_the_table_stops_at_its_end() {
        let slots = Slots::<u8>::new(2);
        let owner = std::ptr::null();
        assert_eq!(slots.grow(0, owner, 1), Ok(2));
        let first = slots.get(1).expect("made");
        assert!(slots.get(2).is_none(), "not made yet");
        assert_eq!(slots.grow(2, owner, 1), Ok(4));
        assert_eq!(slots.get(1), Some(first));
        assert!(slots.get(5).is_some() && slots.get(6).is_none());
        assert_eq!(slots.grow(SLOTS_MAX, owner, 1), Ok(0), "full");
    }
}
