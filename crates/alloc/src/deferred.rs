//! Deferred frees: rows that are freed but still in use by a stream.
//!
//! Several streams may still be using such a row's block, or one stream what the row keeps alive.
//! The row stays as it was, with the record of its uses, in a list through its header. So a free
//! needs no host memory, however many streams used the block. The allocator's lock guards the lists
//! and links. PyTorch's caching allocator keeps events for this; here the record takes their place.

use crate::buffer::Row;
use crate::table::Table;
use leasehold_core::sync::atomic::Ordering;

/// A list of rows that are freed but still in use by a stream, through their headers.
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
