//! The block table: rows at stable addresses, found by index without a lock. And lists of rows
//! that nobody holds.
//!
//! Rows lie in chunks that never move. A list needs no memory of its own: it links rows through
//! their headers. Its owner alone reads and writes the links.

use crate::buffer::{ARENA, CLASSLESS, EMPTY, KIND_MASK, Row};
use crate::extent::Block;
use crate::layout::NO_CLASS;
use leasehold_core::chunks::{Chunks, next_first_generation};
use leasehold_core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use leasehold_core::thread_number::thread_number;
use leasehold_core::{Error, Header, OutOfMemory, Owner, PackedTimepoint, Result, Timeline};
use std::ptr;

/// Rows of the first chunk.
const FIRST: u32 = 64;

/// The rows of one allocator.
pub(crate) struct Table {
    chunks: Chunks<Row>,
    rows: AtomicU32,
    first_generation: u32,
    /// The rows' owner, whose allocation a header leads to.
    owner: AtomicPtr<Owner>,
    /// The flags of ordinary rows.
    flags: u32,
}

/// Lists of rows that nobody uses; a thread has the list of its number.
pub(crate) const LISTS: usize = 16;
/// Rows that come to a list together: a page of them.
const PAGE: u32 = 32;

/// The part that the allocator's lock guards.
///
/// The rows of a page belong to one list for good, and so to one thread as far as possible: a
/// processor that reads rows fetches their neighbours in advance, and takes them away from another
/// one that is writing them. With the rows of two threads mixed, each on 1,000 blocks of its own, a
/// pair took 50 ns; 28 ns since then.
pub(crate) struct Vacant {
    lists: [List; LISTS],
    /// Rows that have never been used.
    fresh: std::ops::Range<u32>,
    /// How many are out.
    pub(crate) live: u32,
}

impl Vacant {
    pub(crate) fn new() -> Self {
        Self { lists: [List::EMPTY; LISTS], fresh: 0..0, live: 0 }
    }

    /// Puts a row into its list, uncounted.
    #[inline]
    pub(crate) fn link(&mut self, row: &Row) {
        self.lists[usize::from(row.list.load(Ordering::Relaxed)) % LISTS].push(row);
    }
}

impl Table {
    /// An empty table. Tables begin their generations at different offsets, so that a foreign
    /// handle is refused. `flags`: those of ordinary rows.
    pub(crate) fn new(flags: u32) -> Self {
        Self {
            chunks: Chunks::new(FIRST),
            rows: AtomicU32::new(0),
            first_generation: next_first_generation(),
            owner: AtomicPtr::default(),
            flags,
        }
    }

    /// The rows' owner.
    #[inline]
    pub(crate) fn owner(&self) -> *const Owner {
        self.owner.load(Ordering::Relaxed)
    }

    /// Names the rows' owner, before there is a row.
    pub(crate) fn set_owner(&self, owner: *mut Owner) {
        self.owner.store(owner, Ordering::Relaxed);
    }

    /// The row of an index, if there is one.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&Row> {
        // SAFETY: rows are `Sync`, are written through shared references only, and live as long as
        // the table.
        self.chunks.get(index).map(|row| unsafe { row.as_ref() })
    }

    /// How many rows there are, lent or not.
    pub(crate) fn len(&self) -> u32 {
        self.rows.load(Ordering::Acquire)
    }

    /// A row that nobody holds. Under the allocator's lock.
    #[inline]
    pub(crate) fn take(&self, vacant: &mut Vacant) -> Result<&Row> {
        self.take_for(thread_number(), vacant)
    }

    /// As [`take`](Self::take), for the thread of this number.
    #[inline]
    pub(crate) fn take_for(&self, thread: u32, vacant: &mut Vacant) -> Result<&Row> {
        let own = thread as usize % LISTS;
        let list = if vacant.lists[own].is_empty() { self.supply_slow(vacant, own)? } else { own };
        // SAFETY: rows are of this table.
        let row = unsafe { vacant.lists[list].pop() }.ok_or_else(lost)?;
        vacant.live += 1;
        Ok(row)
    }

    /// Brings unused rows to a list, or names another list that has some.
    #[cold]
    fn supply_slow(&self, vacant: &mut Vacant, list: usize) -> Result<usize> {
        if vacant.fresh.is_empty() {
            if let Some(other) = vacant.lists.iter().position(|l| !l.is_empty()) {
                return Ok(other);
            }
            self.grow_slow(vacant)?;
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

    /// Gives a row back, under a new generation. A row whose generations are used up is not used
    /// again. Under the allocator's lock.
    #[inline]
    pub(crate) fn put(&self, vacant: &mut Vacant, row: &Row) {
        self.put_aside(vacant, row);
        self.restore(vacant, row);
    }

    /// As [`put`](Self::put), for a row that has its new generation already.
    #[inline]
    pub(crate) fn put_bumped(&self, vacant: &mut Vacant, row: &Row) {
        vacant.live -= 1;
        vacant.link(row);
    }

    /// Puts a row into its list that was counted when it was put aside, unless its generations are
    /// used up. Under the allocator's lock.
    pub(crate) fn restore(&self, vacant: &mut Vacant, row: &Row) {
        if row.header.generation() != self.first_generation {
            vacant.link(row);
        }
    }

    /// Ends the row's generation and counts the row as put, while it is to stay out of the lists.
    /// Whether it may be used again is asked by [`restore`](Self::restore).
    pub(crate) fn put_aside(&self, vacant: &mut Vacant, row: &Row) {
        let _ = self.bump_generation(row);
        vacant.live -= 1;
    }

    /// Makes a row describe a block.
    #[inline(always)]
    pub(crate) fn fill(&self, row: &Row, block: Block, size: u64, timeline: &'static Timeline) {
        row.set_placement(block.placement, block.class);
        let flags = self.flags | if block.class == NO_CLASS { CLASSLESS } else { 0 };
        let place = (block.addr, block.native);
        row.buffer.describe(place, size, Some(timeline), flags, block.timepoint);
    }

    /// Makes a row describe memory that is no block of the store and ready for use.
    pub(crate) fn fill_special(
        &self,
        row: &Row,
        place: (u64, u64),
        size: u64,
        home: Option<&'static Timeline>,
        flags: u32,
    ) {
        let flags = self.flags & KIND_MASK | flags;
        row.buffer.describe(place, size, home, flags, PackedTimepoint::NEVER);
    }

    /// Calls `f` with the row of every buffer that leases hold, and how many do, except members of
    /// graphs and empty ones.
    pub(crate) fn for_each_live(&self, mut f: impl FnMut(&Row, u32)) {
        for row in (0..self.len()).filter_map(|i| self.get(i)) {
            let leases = row.header.strong();
            if leases > 0 && row.buffer.flags() & (ARENA | EMPTY) == 0 {
                f(row, leases);
            }
        }
    }

    /// Ends the row's generation. `false`: it was the last one.
    #[inline]
    #[must_use]
    pub(crate) fn bump_generation(&self, row: &Row) -> bool {
        row.header.set_vacant_again() != self.first_generation
    }

    #[cold]
    fn grow_slow(&self, vacant: &mut Vacant) -> Result<()> {
        let base = self.rows.load(Ordering::Relaxed);
        let full =
            |rows: u64| -> Error { OutOfMemory::new("rows of the block table", rows).into() };
        let make = |index| Row::new(Header::new(self.owner(), index, self.first_generation));
        let n =
            self.chunks.grow(base, make).map_err(|bytes| full(bytes / size_of::<Row>() as u64))?;
        if n == 0 {
            return Err(full(1));
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

/// Rows that nobody holds, the last one that came first.
pub(crate) struct List(*const Row);

// SAFETY: rows are `Sync`, and are reached by who keeps their table alive.
unsafe impl Send for List {}

impl List {
    pub(crate) const EMPTY: List = List(ptr::null());

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_null()
    }

    /// The next row of the list.
    ///
    /// # Safety
    /// - The table whose rows these are is alive for `'a`.
    #[inline(always)]
    pub(crate) unsafe fn pop<'a>(&mut self) -> Option<&'a Row> {
        // SAFETY: the list is empty or begins with a row that was pushed, whose table the caller
        // keeps alive for `'a`.
        let row = unsafe { self.0.as_ref() }?;
        self.0 = link(row);
        Some(row)
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, row: &Row) {
        set_link(row, self.0);
        self.0 = row;
    }
}

/// The row after this one.
#[inline]
pub(crate) fn link(row: &Row) -> *const Row {
    ptr::with_exposed_provenance(row.header.user.load(Ordering::Relaxed) as usize)
}

#[inline]
pub(crate) fn set_link(row: &Row, to: *const Row) {
    row.header.user.store(to.expose_provenance() as u64, Ordering::Relaxed);
}

/// Deferred frees: a list of rows that are freed but still in use by a stream.
///
/// Several streams may still be using such a row's block, or one stream what the row keeps alive.
/// The row stays as it was, with the record of its uses. So a free needs no host memory, however
/// many streams used the block. The allocator's lock guards the list. PyTorch's caching allocator
/// keeps events for this; here the record takes their place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deferred {
    first: u32,
    pub(crate) last: u32,
}

/// No row.
const NONE: u32 = u32::MAX;

impl Deferred {
    pub(crate) const NONE: Deferred = Deferred { first: NONE, last: NONE };

    #[inline]
    pub(crate) fn any(self) -> bool {
        self.first != NONE
    }

    /// Puts a row at the end.
    pub(crate) fn append(&mut self, table: &Table, row: &Row) {
        row.header.next.store(NONE, Ordering::Relaxed);
        let last = std::mem::replace(&mut self.last, row.header.index());
        match table.get(last) {
            Some(last) => last.header.next.store(row.header.index(), Ordering::Relaxed),
            None => self.first = row.header.index(),
        }
    }

    /// Takes the first row out.
    pub(crate) fn take<'a>(&mut self, table: &'a Table) -> Option<&'a Row> {
        let row = table.get(self.first)?;
        self.first = row.header.next.load(Ordering::Relaxed);
        if self.first == NONE {
            self.last = NONE;
        }
        Some(row)
    }

    /// Calls `f` with every row.
    pub(crate) fn each(self, table: &Table, mut f: impl FnMut(&Row)) {
        let mut at = self.first;
        while let Some(row) = table.get(at) {
            at = row.header.next.load(Ordering::Relaxed);
            f(row);
        }
    }
}

#[cfg(test)]
#[path = "../tests/unit/table.rs"]
mod tests;
