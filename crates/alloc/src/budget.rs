//! The budget: how many bytes may be taken from the driver.
//!
//! # Protocol
//! A growth first reserves (one compare-and-swap that never passes the limit), then makes the
//! driver call without any lock, then keeps the reservation or gives it back. So at every instant
//! `committed` bounds what is really taken, which is `reserved`. It never exceeds the limit that
//! was in force when it was reserved. Lowering the limit below what is committed stops growth; it
//! takes nothing away.

use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Budgeted, Error};

/// Bytes taken and the most that may be taken.
///
/// Several allocators may share one budget: of a device with private pools, say. Each allocator
/// that names it in [`AllocatorConfig::shared_budget`](crate::AllocatorConfig::shared_budget) takes
/// memory only if both its own budget and this one allow it. The limit is hard: it is never
/// exceeded.
///
/// ```
/// use leasehold_alloc::Budget;
/// let budget = Budget::new(1 << 30);
/// assert_eq!((budget.limit(), budget.reserved()), (1 << 30, 0));
/// budget.set_limit(2 << 30);
/// assert_eq!(budget.room(), 2 << 30);
/// ```
#[derive(Debug)]
pub struct Budget {
    committed: AtomicU64,
    /// Of it, what the driver gave.
    reserved: AtomicU64,
    limit: AtomicU64,
    peak: AtomicU64,
    /// The budget that other allocators take from too.
    shared: Option<Arc<Budget>>,
}

impl Budget {
    /// A budget of `limit` bytes, of which nothing is taken.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self::within(None, limit)
    }

    /// The budget of one allocator, which takes from a shared one too.
    pub(crate) fn within(shared: Option<Arc<Budget>>, limit: u64) -> Self {
        Self {
            shared,
            committed: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            limit: AtomicU64::new(limit),
            peak: AtomicU64::new(0),
        }
    }

    /// The most bytes that all allocators together may take from the driver. The smaller limit, if
    /// this budget takes from a shared one.
    #[must_use]
    pub fn limit(&self) -> u64 {
        let own = self.limit.load(Ordering::Relaxed);
        self.shared.as_ref().map_or(own, |shared| own.min(shared.limit()))
    }

    /// Sets the limit. A limit below what is taken stops growth; it gives nothing back.
    pub fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// Bytes that the driver gave and has not got back.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Acquire)
    }

    /// The most that [`reserved`](Self::reserved) was. Exact.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Begins a new peak from what is reserved now.
    pub fn reset_peak(&self) {
        self.peak.store(self.reserved(), Ordering::Relaxed);
    }

    /// Bytes that could still be taken.
    #[must_use]
    pub fn room(&self) -> u64 {
        let own = self.limit.load(Ordering::Relaxed).saturating_sub(self.committed());
        self.shared.as_ref().map_or(own, |shared| own.min(shared.room()))
    }

    /// Bytes that were reserved, whether or not their memory came.
    pub(crate) fn committed(&self) -> u64 {
        self.committed.load(Ordering::Acquire)
    }

    /// Reserves `bytes`. `false`: it would pass the limit; nothing was taken.
    #[must_use]
    pub(crate) fn take(&self, bytes: u64) -> bool {
        if self.shared.as_ref().is_some_and(|shared| !shared.take(bytes)) {
            return false;
        }
        let limit = || self.limit.load(Ordering::Relaxed);
        let fits = |now: u64| now.checked_add(bytes).filter(|&then| then <= limit());
        let taken = self.committed.fetch_update(Ordering::AcqRel, Ordering::Relaxed, fits).is_ok();
        if let Some(shared) = &self.shared
            && !taken
        {
            shared.undo(bytes);
        }
        taken
    }

    /// The memory of a reservation came.
    pub(crate) fn keep(&self, bytes: u64) {
        let now = self.reserved.fetch_add(bytes, Ordering::AcqRel) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
        if let Some(shared) = &self.shared {
            shared.keep(bytes);
        }
    }

    /// Counts bytes that an allocator gives back right after, whatever the limit.
    pub(crate) fn count(&self, bytes: u64) {
        self.committed.fetch_add(bytes, Ordering::AcqRel);
        self.reserved.fetch_add(bytes, Ordering::AcqRel);
    }

    /// A request that the budget does not allow.
    pub(crate) fn refusal(&self, requested: u64) -> Error {
        let (used, limit) = (self.committed(), self.limit());
        Error::OverBudget { unit: Budgeted::Bytes, requested, used, limit }
    }

    /// Gives a reservation back whose memory never came.
    pub(crate) fn undo(&self, bytes: u64) {
        let before = self.committed.fetch_sub(bytes, Ordering::AcqRel);
        debug_assert!(before >= bytes);
        if let Some(shared) = &self.shared {
            shared.undo(bytes);
        }
    }

    /// Gives a reservation back after its memory went back to the driver.
    pub(crate) fn give_back(&self, bytes: u64) {
        let before = self.reserved.fetch_sub(bytes, Ordering::AcqRel);
        debug_assert!(before >= bytes);
        if let Some(shared) = &self.shared {
            shared.reserved.fetch_sub(bytes, Ordering::AcqRel);
        }
        self.undo(bytes);
    }
}
