//! Lists of rows that nobody holds, linked through their headers.
//!
//! A list needs no memory of its own. Its owner alone reads and writes the links.

use crate::buffer::Row;
use leasehold_core::sync::atomic::Ordering;
use std::ptr;

/// Rows on their way to the heap.
pub(crate) struct List(*const Row);

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
    pub(crate) unsafe fn pop<'a>(&mut self) -> Option<&'a Row> {
        // SAFETY: the list is empty or begins with a row that was pushed, whose table the caller
        // keeps alive for `'a`.
        let row = unsafe { self.0.as_ref() }?;
        self.0 = link(row);
        Some(row)
    }

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
