//! Records that a pool keeps locked while its memory is away.
//!
//! A submission locks the records of its operands until it has marked them. A pool locks the
//! records of all its buffers in the same way before it gives its memory away, and keeps them
//! locked until the memory is back. So no submission begins with memory that is away, and a launch
//! looks at nothing more than it does without pools. A submission that cannot lock a record asks
//! whether a pool has locked it, and is refused then.
//!
//! A pool has a timeline of its own for this, on which nothing is ever submitted.
//!
//! This module must not know pools or streams.

use leasehold_alloc::Buffer;
use leasehold_core::sync::{Arc, RwLock};
use leasehold_core::{Error, Result, TimelineId, TimelineOwner};

/// The timelines of all pools, with the pools' names.
static POOLS: RwLock<Vec<(TimelineId, Arc<str>)>> = RwLock::new(Vec::new());

/// The name by which a pool locks records. Whoever may find such a lock keeps it.
pub(crate) struct PoolTurn {
    owner: TimelineOwner,
}

impl PoolTurn {
    /// A name that nobody else has.
    ///
    /// # Errors
    /// `OutOfMemory` if all timelines are in use.
    pub(crate) fn new(pool: &Arc<str>) -> Result<Self> {
        let owner = TimelineOwner::take()?;
        POOLS.write().push((owner.timeline().id(), pool.clone()));
        Ok(Self { owner })
    }

    /// Locks a record. Waits while a submission has locked it.
    ///
    /// # Safety
    /// - The caller has the pool's turn, and the record is not locked by it.
    /// - Whoever can reach the buffer keeps this value until the record is unlocked, or until
    ///   nobody holds the buffer.
    /// - The thread is not in the middle of a submission.
    pub(crate) unsafe fn lock(&self, buffer: &Buffer) {
        let mut rounds = 0u32;
        // SAFETY: nothing is submitted on the pool's timeline, whose turn the caller has. A buffer
        // that nobody holds any more loses its lock with its record.
        while !unsafe { buffer.try_lock_record(self.owner.timeline().id()) } {
            // The holder is in the middle of one submission, unless it has lost its processor.
            if rounds < 100 {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
            rounds = rounds.saturating_add(1);
        }
    }

    /// Unlocks a record.
    ///
    /// # Safety
    /// - [`lock`](Self::lock) has locked it, and the buffer's memory is there.
    pub(crate) unsafe fn unlock(&self, buffer: &Buffer) {
        // SAFETY: the caller vouches for the lock; nothing was submitted.
        unsafe { buffer.unlock_record() };
    }
}

impl Drop for PoolTurn {
    fn drop(&mut self) {
        POOLS.write().retain(|(timeline, _)| *timeline != self.owner.timeline().id());
    }
}

/// Refuses a buffer whose memory is away.
///
/// # Errors
/// `Suspended`, which names the pool.
#[cold]
pub(crate) fn check(buffer: &Buffer) -> Result<()> {
    check_all(std::iter::once(buffer))
}

/// Refuses buffers whose memory is away, for a caller that only names them to the driver.
///
/// # Errors
/// `Suspended`, which names the pool of the first.
pub(crate) fn check_all<'b>(buffers: impl IntoIterator<Item = &'b Buffer>) -> Result<()> {
    let pools = POOLS.read();
    if pools.is_empty() {
        return Ok(());
    }
    for buffer in buffers {
        if let Some((_, pool)) = pools.iter().find(|(turn, _)| buffer.has_locked_record(*turn)) {
            return Err(is_suspended(pool));
        }
    }
    Ok(())
}

/// The error of a use of a pool whose memory is away.
pub(crate) fn is_suspended(pool: &str) -> Error {
    Error::Suspended(
        format!("pool {pool} is suspended; resume it first, and repeat the call").into(),
    )
}
