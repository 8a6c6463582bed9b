//! The block table: rows at stable addresses, found by index without a lock.
//!
//! Chunks double in size and are never moved or given back while the allocator lives. Rows that nobody uses form lists through their
//! headers, which the allocator's lock guards.

use crate::buffer::Row;
use crate::list::{link, set_link};
use crate::numbers::thread_number;
use leasehold_core::sync::OnceLock;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::{Error, Header, OutOfMemory, Owner, Result};
use std::ptr;

const FIRST: u32 = 64;
const CHUNKS: usize = 25;

/// The rows of one allocator.
pub(crate) struct Table {
    chunks: [OnceLock<Box<[Row]>>; CHUNKS],
    rows: AtomicU32,
    first_generation: u32,
}

/// Lists of rows that nobody uses; a thread has the list of its number.
pub(crate) const LISTS: usize = 16;
/// Rows that come to a list together: a page of them.
const PAGE: u32 = 32;

/// The part that the allocator's lock guards.
///
/// The rows of a page belong to one list for good, and so to one thread as far as possible: a processor that reads rows fetches their
/// neighbours in advance, and takes them away from another one that is writing them. With the rows of two threads mixed, each on 1,000
/// blocks of its own, a pair took 50 ns; 28 ns since then.
pub(crate) struct Vacant {
    heads: [*const Row; LISTS],
    /// Rows that have never been used.
    fresh: std::ops::Range<u32>,
    /// How many are out.
    pub(crate) live: u32,
}

// SAFETY: rows are `Sync`.
unsafe impl Send for Vacant {}

impl Vacant {
    pub(crate) fn new() -> Self {
        Self { heads: [ptr::null(); LISTS], fresh: 0..0, live: 0 }
    }

    /// Puts a row into its list, uncounted.
    #[inline]
    pub(crate) fn link(&mut self, row: &Row) {
        let head = &mut self.heads[usize::from(row.list.load(Ordering::Relaxed)) % LISTS];
        set_link(row, *head);
        *head = row;
    }

    /// A row of a list.
    ///
    /// # Safety
    /// - The table whose rows these are is alive for `'a`.
    #[inline]
    unsafe fn unlink<'a>(&mut self, list: usize) -> Option<&'a Row> {
        // SAFETY: a head is null or a row that was linked, whose table the caller keeps alive for `'a`.
        let row = unsafe { self.heads[list].as_ref() }?;
        self.heads[list] = link(row);
        Some(row)
    }
}

#[inline]
fn list_of(thread: u32) -> usize {
    thread as usize % LISTS
}

#[inline]
fn split(index: u32) -> (usize, usize) {
    let chunk = (index / FIRST + 1).ilog2();
    (chunk as usize, (index - FIRST * ((1 << chunk) - 1)) as usize)
}

impl Table {
    /// An empty table. Tables begin their generations at different offsets, so that a foreign handle is refused.
    pub(crate) fn new() -> Self {
        #[cfg(not(loom))]
        static NEXT: AtomicU32 = AtomicU32::new(1);
        #[cfg(not(loom))]
        let first = NEXT.fetch_add(0x9E37_79B9, Ordering::Relaxed).max(1);
        #[cfg(loom)]
        let first = 1;
        Self { chunks: std::array::from_fn(|_| OnceLock::new()), rows: AtomicU32::new(0), first_generation: first }
    }

    /// The row of an index, if there is one.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&Row> {
        if index >= self.rows.load(Ordering::Acquire) {
            return None;
        }
        let (chunk, at) = split(index);
        self.chunks.get(chunk)?.get()?.get(at)
    }

    /// How many rows there are, lent or not.
    pub(crate) fn len(&self) -> u32 {
        self.rows.load(Ordering::Acquire)
    }

    /// A row that nobody holds. Under the allocator's lock.
    #[inline]
    pub(crate) fn take(&self, vacant: &mut Vacant, owner: *const Owner) -> Result<&Row> {
        self.take_for(thread_number(), vacant, owner)
    }

    /// As [`take`](Self::take), for the thread of this number.
    #[inline]
    pub(crate) fn take_for(&self, thread: u32, vacant: &mut Vacant, owner: *const Owner) -> Result<&Row> {
        let own = list_of(thread);
        let list = if vacant.heads[own].is_null() { self.supply_slow(vacant, own, owner)? } else { own };
        // SAFETY: rows are of this table.
        let row = unsafe { vacant.unlink(list) }.ok_or_else(lost)?;
        vacant.live += 1;
        Ok(row)
    }

    /// Brings unused rows to a list, or names another list that has some.
    #[cold]
    fn supply_slow(&self, vacant: &mut Vacant, list: usize, owner: *const Owner) -> Result<usize> {
        if vacant.fresh.is_empty() {
            if let Some(other) = vacant.heads.iter().position(|h| !h.is_null()) {
                return Ok(other);
            }
            self.grow_slow(vacant, owner)?;
        }
        let end = (vacant.fresh.start + PAGE).min(vacant.fresh.end);
        let page = vacant.fresh.start..end;
        vacant.fresh.start = end;
        for row in page.rev().filter_map(|index| self.get(index)) {
            row.list.store(list as u8, Ordering::Relaxed);
            vacant.link(row);
        }
        Ok(list)
    }

    /// Gives a row back, under a new generation. A row whose generations are used up is not used again. Under the allocator's lock.
    #[inline]
    pub(crate) fn put(&self, vacant: &mut Vacant, row: &Row) {
        if self.renew(row) {
            self.put_renewed(vacant, row);
        } else {
            vacant.live -= 1;
        }
    }

    /// As [`put`](Self::put), for a row that has its new generation already.
    #[inline]
    pub(crate) fn put_renewed(&self, vacant: &mut Vacant, row: &Row) {
        vacant.live -= 1;
        vacant.link(row);
    }

    /// Puts a row into the list that was counted and renewed when it was freed, unless its generations are used up: `false`. Under the
    /// allocator's lock.
    pub(crate) fn restore(&self, vacant: &mut Vacant, row: &Row) -> bool {
        let fine = row.header.generation() != self.first_generation;
        if fine {
            vacant.link(row);
        }
        fine
    }

    /// Ends the row's generation. `false`: it was the last one.
    #[inline]
    #[must_use]
    pub(crate) fn renew(&self, row: &Row) -> bool {
        row.header.set_vacant_again() != self.first_generation
    }

    #[cold]
    fn grow_slow(&self, vacant: &mut Vacant, owner: *const Owner) -> Result<()> {
        let base = self.rows.load(Ordering::Relaxed);
        let chunk = split(base).0;
        let n = FIRST << chunk;
        let full = || -> Error { OutOfMemory::new("rows of the block table", u64::from(n)).into() };
        let cell = self.chunks.get(chunk).ok_or_else(full)?;
        let mut rows: Vec<Row> = Vec::new();
        rows.try_reserve_exact(n as usize).map_err(|_| full())?;
        for i in 0..n {
            rows.push(Row::new(Header::new(owner, base + i, self.first_generation)));
        }
        if cell.set(rows.into_boxed_slice()).is_err() {
            return Err(lost());
        }
        self.rows.store(base + n, Ordering::Release);
        vacant.fresh = base..base + n;
        Ok(())
    }
}

#[cold]
fn lost() -> Error {
    Error::state("the block table's list of rows is damaged")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever takes and gives rows: the rows of a page are of one list, and go back to it.
    #[test]
    fn rows_of_a_page_stay_together() {
        let (table, mut vacant) = (Table::new(), Vacant::new());
        let mut held: Vec<u32> = Vec::new();
        for round in 0..50usize {
            // Another thread each time, and so another list.
            let (me, none) = (round as u32, ptr::null());
            let mut take = || table.take_for(me, &mut vacant, none).expect("a row").header.index();
            held.extend((0..40).map(|_| take()));
            for i in (0..30).rev() {
                let row = held.swap_remove((i * 7 + round) % held.len());
                table.put(&mut vacant, table.get(row).expect("a row"));
            }
        }
        let used = vacant.fresh.start;
        let list = |row: u32| table.get(row).expect("a row").list.load(Ordering::Relaxed);
        assert!((0..used).all(|row| list(row) == list(row / PAGE * PAGE)));
        assert!((1..used / PAGE).any(|page| list(page * PAGE) != list(0)), "there are several lists");
        for (name, &head) in vacant.heads.iter().enumerate() {
            let mut at = head;
            // SAFETY: rows of the table.
            while let Some(row) = unsafe { at.as_ref() } {
                assert_eq!(usize::from(list(row.header.index())), name);
                at = link(row);
            }
        }
        assert_eq!(vacant.live as usize, held.len());
    }

    #[test]
    fn indexes_fill_the_chunks_in_order() {
        let mut expect = (0, 0);
        for i in 0..100_000 {
            assert_eq!(split(i), expect);
            expect.1 += 1;
            if expect.1 == (FIRST << expect.0) as usize {
                expect = (expect.0 + 1, 0);
            }
        }
    }
}
