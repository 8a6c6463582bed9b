//! Thread cells: one idle slot in each, for threads that repeatedly acquire and release the same
//! cheap resource.
//!
//! # Protocol
//! A cell is 0 (empty), `index + 1` (that slot, idle, payload present) or [`CLOSED`]. The thread
//! that is alone with a slot fills a cell by a CAS from empty. A thread empties a cell by a CAS to
//! 0 and is then alone with the slot. A shutdown swaps in `CLOSED`; later attempts to fill the cell
//! fail, and the slot goes to a list.
//!
//! If more threads than cells exist, threads share cells. Sharing costs time, never correctness.
//!
//! This module must not know what a slot holds.

use crate::sync::CachePadded;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::thread_number::thread_number;

#[cfg(not(loom))]
const CELLS: usize = 32;
#[cfg(loom)]
const CELLS: usize = 1;
const EMPTY: u32 = 0;
/// The value of a cell whose pool is shutting down.
const CLOSED: u32 = u32::MAX;

/// The cells.
pub(super) struct Cells([CachePadded<AtomicU32>; CELLS]);

impl Cells {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| CachePadded::new(AtomicU32::new(EMPTY))))
    }

    /// Takes the slot out of the cell.
    #[inline]
    pub(super) fn take(&self, at: usize) -> Option<u32> {
        let cell = &self.0[at % CELLS];
        let at = cell.load(Ordering::Relaxed);
        // The cell is neither empty nor closed.
        if at.wrapping_sub(1) < CLOSED - 1
            && cell.compare_exchange(at, EMPTY, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            return Some(at - 1);
        }
        None
    }

    /// Puts a slot into the cell. `false`: the cell is in use or closed, and the slot is
    /// still the caller's.
    ///
    /// # Safety
    /// - The caller is alone with the slot. On `true` it gives the slot up, and another thread may
    ///   free the pool.
    /// - `this` belongs to the slot's pool.
    #[inline]
    pub(super) unsafe fn put(this: *const Self, at: usize, index: u32) -> bool {
        // SAFETY: the slot keeps the pool alive until the CAS succeeds. Nothing is accessed after
        // that.
        unsafe {
            let cell: *const AtomicU32 = &*(&(*this).0)[at % CELLS];
            (*cell).load(Ordering::Relaxed) == EMPTY
                && (*cell)
                    .compare_exchange(EMPTY, index + 1, Ordering::Release, Ordering::Relaxed)
                    .is_ok()
        }
    }

    /// Takes a slot out of any cell.
    pub(super) fn take_any(&self) -> Option<u32> {
        (0..CELLS).find_map(|at| self.take(at))
    }

    /// Closes all cells and passes their slots to `found`.
    pub(super) fn close(&self, mut found: impl FnMut(u32)) {
        for cell in &self.0 {
            let at = cell.swap(CLOSED, Ordering::AcqRel);
            if at != EMPTY && at != CLOSED {
                found(at - 1);
            }
        }
    }

    /// Opens closed cells again.
    pub(super) fn reopen(&self) {
        for cell in &self.0 {
            let _ = cell.compare_exchange(CLOSED, EMPTY, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

/// This thread's number: the shard and the cell that the thread tries first. In a model all
/// threads share a number, which is the hard case.
#[inline]
pub(super) fn this_cell() -> usize {
    thread_number() as usize
}
