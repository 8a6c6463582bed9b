//! Chunks of elements that double in size and never move, found by index without a lock.
//!
//! [`SlotPool`](crate::SlotPool) keeps its slots in one, the allocator its table of blocks. Must
//! not know what the elements are.

use crate::sync::atomic::{AtomicPtr, Ordering};
use std::marker::PhantomData;
use std::ptr::NonNull;

const CHUNKS: usize = 25;
/// The most elements, whatever the first chunk holds.
const MOST: u32 = (1 << CHUNKS) - 1;

/// The table of chunks. Chunk `c` holds `1 << (shift + c)` elements.
#[derive(Debug)]
pub struct Chunks<T> {
    chunks: [AtomicPtr<T>; CHUNKS],
    shift: u32,
    _owned: PhantomData<T>,
}

impl<T> Chunks<T> {
    /// An empty table whose first chunk will hold `first` elements, rounded up to a power of two.
    #[must_use]
    pub fn new(first: u32) -> Self {
        Self {
            chunks: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
            shift: first.next_power_of_two().trailing_zeros(),
            _owned: PhantomData,
        }
    }

    /// The chunk of an element, and its offset in the chunk.
    #[inline]
    fn place(&self, index: u32) -> (usize, usize) {
        let n = (index >> self.shift) + 1;
        let chunk = n.ilog2();
        (chunk as usize, (index - (((1 << chunk) - 1) << self.shift)) as usize)
    }

    /// The element, if it was made. It stays where it is as long as the table lives.
    #[inline]
    pub fn get(&self, index: u32) -> Option<NonNull<T>> {
        if index >= MOST {
            return None;
        }
        let (chunk, offset) = self.place(index);
        let base = NonNull::new(self.chunks.get(chunk)?.load(Ordering::Acquire))?;
        // SAFETY: a published chunk holds `1 << (shift + chunk)` elements, and `place` gives a
        // smaller offset.
        Some(unsafe { base.add(offset) })
    }

    /// The element `index`, which must exist.
    ///
    /// # Safety
    /// - [`get`](Self::get) would find it.
    #[inline]
    pub(crate) unsafe fn made(&self, index: u32) -> NonNull<T> {
        let (chunk, offset) = self.place(index);
        // SAFETY: the caller vouches that the element exists, so its chunk was published.
        unsafe {
            let base = self.chunks.get_unchecked(chunk).load(Ordering::Acquire);
            debug_assert!(!base.is_null());
            NonNull::new_unchecked(base.add(offset))
        }
    }

    /// Makes the chunk that starts at element `len`, and returns how many elements the table gains:
    /// 0 if it is full. The caller excludes other calls. `len` is the sum of the results of earlier
    /// calls.
    ///
    /// # Errors
    /// The number of bytes that the host could not allocate.
    pub fn grow(&self, len: u32, mut make: impl FnMut(u32) -> T) -> Result<u32, u64> {
        if len >= MOST {
            return Ok(0);
        }
        let (chunk, offset) = self.place(len);
        debug_assert_eq!(offset, 0, "a chunk begins where the last one ended");
        let Some(cell) =
            self.chunks.get(chunk).filter(|cell| cell.load(Ordering::Acquire).is_null())
        else {
            return Ok(0);
        };
        let n = 1usize << (self.shift as usize + chunk);
        let mut elements: Vec<T> = Vec::new();
        if elements.try_reserve_exact(n).is_err() {
            return Err(n as u64 * size_of::<T>() as u64);
        }
        elements.extend((0..n as u32).map(|i| make(len + i)));
        cell.store(Box::into_raw(elements.into_boxed_slice()).cast::<T>(), Ordering::Release);
        Ok((n as u32).min(MOST - len))
    }
}

// SAFETY: the table owns its elements, so it goes where they may go.
unsafe impl<T: Send> Send for Chunks<T> {}
// SAFETY: a shared table gives pointers only; `grow` stores elements that another thread may drop.
unsafe impl<T: Send + Sync> Sync for Chunks<T> {}

impl<T> Drop for Chunks<T> {
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

/// The first generation of the slots of a new pool or table. Steps of the golden ratio keep the
/// offsets of any number of pools far apart, so that a foreign handle is refused.
pub fn next_first_generation() -> u32 {
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
#[path = "../tests/unit/chunks.rs"]
mod tests;
