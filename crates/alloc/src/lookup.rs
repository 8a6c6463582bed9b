//! From an address to the buffer that holds it, for layers that check what they are given.
//!
//! Rows are read without the allocator's lock. The answer about a buffer that the caller keeps
//! alive is exact; about any other it may be out of date when it arrives.

use crate::allocator::Allocator;
use crate::buffer::ARENA;

/// A live buffer that holds a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// Its row in the block table: a good hint for the next question about the same address.
    pub row: u32,
    /// Its first byte.
    pub addr: u64,
    /// Its length in bytes, as asked for.
    pub len: u64,
    /// The native object that spans it, or 0.
    pub native: u64,
    /// Its tag, by which reports and snapshots name it.
    pub tag: u32,
}

impl Allocator {
    /// The live buffer that holds all of `[addr, addr + bytes)`, imported ones included, members of
    /// graphs not. The row `hint` is looked at first, then every row there is. Any thread; takes no
    /// lock, allocates nothing.
    #[must_use]
    pub fn holding(&self, addr: u64, bytes: u64, hint: u32) -> Option<Holding> {
        let table = &self.inner().table;
        let end = addr.checked_add(bytes)?;
        let fits = |row: u32| {
            let r = table.get(row)?;
            if r.header.strong() == 0 || r.buffer.flags() & ARENA != 0 {
                return None;
            }
            let (at, len) = (r.buffer.addr(), r.buffer.len());
            (at <= addr && end <= at.saturating_add(len) && len != 0).then(|| Holding {
                row,
                addr: at,
                len,
                native: r.buffer.native(),
                tag: r.buffer.tag(),
            })
        };
        fits(hint).or_else(|| (0..table.len()).find_map(fits))
    }
}

#[cfg(test)]
#[path = "../tests/unit/lookup.rs"]
mod tests;
