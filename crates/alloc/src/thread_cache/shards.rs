//! The shards, found by the number of a thread without a check.

use super::Shard;
use std::ptr::NonNull;

/// A power of two of shards. Where there are none, one that stands for them: the caller has made it
/// so that it lets nobody in.
pub(super) struct Shards {
    first: NonNull<Shard>,
    /// One less than there are.
    mask: u32,
    none: bool,
}

// SAFETY: shards are `Sync` and owned by this.
unsafe impl Send for Shards {}
// SAFETY: a shared one gives `&Shard`, which is `Sync`.
unsafe impl Sync for Shards {}

impl Shards {
    /// `n` shards, a power of two or zero.
    pub(super) fn new(n: usize, shard: impl Fn() -> Shard) -> Self {
        assert!(n == 0 || n.is_power_of_two(), "{n} shards");
        let all: Box<[Shard]> = (0..n.max(1)).map(|_| shard()).collect();
        let mask = all.len() as u32 - 1;
        let first = NonNull::from(Box::leak(all)).cast();
        Self { first, mask, none: n == 0 }
    }

    /// The shard of a thread.
    #[inline(always)]
    pub(super) fn of(&self, thread: u32) -> &Shard {
        // SAFETY: the index is at most the mask, and so of a shard; they live as long as this.
        unsafe { self.first.add((thread & self.mask) as usize).as_ref() }
    }

    /// Whether there are none.
    #[inline]
    pub(super) fn is_none(&self) -> bool {
        self.none
    }

    /// Those that let somebody in.
    pub(super) fn all(&self) -> &[Shard] {
        let n = if self.none { 0 } else { self.mask as usize + 1 };
        // SAFETY: so many were made, and they live as long as this.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), n) }
    }
}

impl Drop for Shards {
    fn drop(&mut self) {
        let all = NonNull::slice_from_raw_parts(self.first, self.mask as usize + 1);
        // SAFETY: made from a box of so many, which nobody else owns.
        drop(unsafe { Box::from_raw(all.as_ptr()) });
    }
}
