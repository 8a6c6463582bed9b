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

/// A budget that several allocators share: of a device with private pools, say. Clones are the same
/// budget.
///
/// Each allocator that names it in
/// [`AllocatorConfig::shared_budget`](crate::AllocatorConfig::shared_budget) takes memory only if
/// both its own budget and this one allow it. The limit is hard: it is never exceeded.
///
/// ```
/// use leasehold_alloc::SharedBudget;
/// let budget = SharedBudget::new(1 << 30);
/// assert_eq!((budget.limit(), budget.reserved()), (1 << 30, 0));
/// budget.set_limit(2 << 30);
/// assert_eq!(budget.room(), 2 << 30);
/// ```
#[derive(Debug, Clone)]
pub struct SharedBudget(Arc<Budget>);

impl SharedBudget {
    /// A budget of `limit` bytes, of which nothing is taken.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Budget::new(limit, None)))
    }

    /// The most bytes that all allocators together may take from the driver.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.0.limit()
    }

    /// Sets the limit. A limit below what is taken stops growth; it gives nothing back.
    pub fn set_limit(&self, bytes: u64) {
        self.0.set_limit(bytes);
    }

    /// Bytes that the driver gave to the allocators.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.0.reserved()
    }

    /// The most that [`reserved`](Self::reserved) was. Exact.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.0.peak()
    }

    /// Begins a new peak from what is reserved now.
    pub fn reset_peak(&self) {
        self.0.reset_peak();
    }

    /// Bytes that could still be taken.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.0.room()
    }

    /// The budget itself, for a backing that gives memory back and takes it again by itself.
    pub(crate) fn budget(&self) -> &Budget {
        &self.0
    }
}

/// Bytes taken and the most that may be taken.
#[derive(Debug)]
pub(crate) struct Budget {
    committed: AtomicU64,
    /// Of it, what the driver gave.
    reserved: AtomicU64,
    limit: AtomicU64,
    peak: AtomicU64,
    /// The budget that other allocators take from too.
    shared: Option<SharedBudget>,
}

impl Budget {
    pub(crate) fn new(limit: u64, shared: Option<SharedBudget>) -> Self {
        Self {
            shared,
            committed: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            limit: AtomicU64::new(limit),
            peak: AtomicU64::new(0),
        }
    }

    /// Reserves `bytes`. `false`: it would pass the limit; nothing was taken.
    #[must_use]
    pub(crate) fn take(&self, bytes: u64) -> bool {
        if let Some(shared) = &self.shared
            && !shared.0.take(bytes)
        {
            return false;
        }
        let taken = self.take_own(bytes);
        if let Some(shared) = &self.shared
            && !taken
        {
            shared.0.undo(bytes);
        }
        taken
    }

    fn take_own(&self, bytes: u64) -> bool {
        let mut now = self.committed.load(Ordering::Relaxed);
        loop {
            let Some(then) = now.checked_add(bytes) else { return false };
            if then > self.limit.load(Ordering::Relaxed) {
                return false;
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

    /// The memory of a reservation came.
    pub(crate) fn keep(&self, bytes: u64) {
        let now = self.reserved.fetch_add(bytes, Ordering::AcqRel) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
        if let Some(shared) = &self.shared {
            shared.0.keep(bytes);
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
            shared.0.undo(bytes);
        }
    }

    /// Gives a reservation back after its memory went back to the driver.
    pub(crate) fn give_back(&self, bytes: u64) {
        let before = self.reserved.fetch_sub(bytes, Ordering::AcqRel);
        debug_assert!(before >= bytes);
        if let Some(shared) = &self.shared {
            shared.0.reserved.fetch_sub(bytes, Ordering::AcqRel);
        }
        self.undo(bytes);
    }

    /// Bytes that the driver gave and has not got back.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Acquire)
    }

    /// Bytes that could still be taken.
    pub(crate) fn room(&self) -> u64 {
        let own = self.limit.load(Ordering::Relaxed).saturating_sub(self.committed());
        self.shared.as_ref().map_or(own, |shared| own.min(shared.room()))
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

    /// The smaller one of the own limit and the shared one.
    pub(crate) fn limit(&self) -> u64 {
        let own = self.limit.load(Ordering::Relaxed);
        self.shared.as_ref().map_or(own, |shared| own.min(shared.limit()))
    }

    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }
}
