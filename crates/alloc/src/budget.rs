//! The budget: how many bytes may be taken from the driver.
//!
//! # Protocol
//! A growth first takes a ticket (one compare-and-swap that never passes the limit), then makes the
//! driver call without any lock, then keeps the ticket or gives it back. So at every instant
//! `committed` bounds what is really taken, which is `reserved`, and never exceeds the limit that
//! was in force when its tickets were taken. Lowering the limit below what is committed stops
//! growth; it takes nothing away.

use leasehold_core::defects::{Defect, planted};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};

/// Bytes taken and the most that may be taken.
#[derive(Debug)]
pub(crate) struct Budget {
    committed: AtomicU64,
    /// Of it, what the driver gave.
    reserved: AtomicU64,
    limit: AtomicU64,
    peak: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            committed: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            limit: AtomicU64::new(limit),
            peak: AtomicU64::new(0),
        }
    }

    /// Takes a ticket for `bytes`. `false`: it would pass the limit; nothing was taken.
    #[must_use]
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let mut now = self.committed.load(Ordering::Relaxed);
        loop {
            let Some(then) = now.checked_add(bytes) else { return false };
            if then > self.limit.load(Ordering::Relaxed) {
                return false;
            }
            if planted(Defect::BudgetUnchecked) {
                self.committed.store(then, Ordering::Release);
                return true;
            }
            match self.committed.compare_exchange_weak(
                now,
                then,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(other) => now = other,
            }
        }
    }

    /// The memory of a ticket came.
    pub(crate) fn keep(&self, bytes: u64) {
        let now = self.reserved.fetch_add(bytes, Ordering::AcqRel) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// Gives a ticket back whose memory never came.
    pub(crate) fn undo(&self, bytes: u64) {
        let before = self.committed.fetch_sub(bytes, Ordering::AcqRel);
        debug_assert!(before >= bytes);
    }

    /// Gives a ticket back after its memory went back to the driver.
    pub(crate) fn give_back(&self, bytes: u64) {
        let before = self.reserved.fetch_sub(bytes, Ordering::AcqRel);
        debug_assert!(before >= bytes);
        self.undo(bytes);
    }

    /// Bytes that the driver gave and has not got back.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Acquire)
    }

    /// Bytes that could still be taken.
    pub(crate) fn room(&self) -> u64 {
        self.limit().saturating_sub(self.committed())
    }

    pub(crate) fn committed(&self) -> u64 {
        self.committed.load(Ordering::Acquire)
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    pub(crate) fn reset_peak(&self) {
        self.peak.store(self.reserved(), Ordering::Relaxed);
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }
}
