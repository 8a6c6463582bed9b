//! Advice on sharing a job: the costs of tiles, the time to wake a sleeping helper, and the recent
//! amount of work.
//!
//! Waking a sleeping thread takes some microseconds on one machine and fifty on another, and ten
//! times that on a loaded one. So the pool measures it. A single job is worth a wake if it takes
//! longer than two wakes. A run of smaller jobs is worth a wake too, because a helper stays awake
//! while any queue runs something. Therefore the work of such a *period* so far, and that of the
//! period before, count as much as the current job.
//!
//! The advice only decides where tiles run, never what they compute. So a race that loses a sample
//! does no harm.
//!
//! This module must not know threads or jobs.

use leasehold_core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Jobs that take less than this many nanoseconds run on one thread. Handing a tile to another core
/// and back costs about as much.
const SHARE: u64 = 3_000;
/// The assumed time of a wake before a measurement, and the bounds of accepted measurements, in
/// nanoseconds.
const FIRST_WAKE: u32 = 15_000;
const WAKES: std::ops::RangeInclusive<u64> = 2_000..=100_000;
const COSTS: usize = 512;

/// The measurements. Times are in nanoseconds.
pub(crate) struct Advice {
    costs: Box<[AtomicU32]>,
    wake: AtomicU32,
    rung_at: AtomicU64,
    in_period: AtomicU64,
    period_before: AtomicU64,
}

impl Advice {
    pub(crate) fn new() -> Self {
        Self {
            costs: (0..COSTS).map(|_| AtomicU32::new(0)).collect(),
            wake: AtomicU32::new(FIRST_WAKE),
            rung_at: AtomicU64::new(0),
            in_period: AtomicU64::new(0),
            period_before: AtomicU64::new(0),
        }
    }

    #[inline]
    fn cost_cell(&self, key: u64) -> &AtomicU32 {
        // Functions are aligned to 16 bytes; Fibonacci hashing spreads the other bits.
        let hash = (key >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        &self.costs[(hash >> 55) as usize % COSTS]
    }

    /// The cost of a tile of the kernel `key`; 0 if unknown.
    #[inline]
    pub(crate) fn cost(&self, key: u64) -> u64 {
        u64::from(self.cost_cell(key).load(Ordering::Relaxed))
    }

    /// Records that `tiles` tiles of kernel `key` took `nanos` on one thread.
    pub(crate) fn note_cost(&self, key: u64, nanos: u64, tiles: u64) {
        let Some(new) = nanos.checked_div(tiles) else { return };
        let new = new.clamp(1, u64::from(u32::MAX)) as u32;
        let cell = self.cost_cell(key);
        let old = cell.load(Ordering::Relaxed);
        // A thread that lost its processor makes a tile look costly, so the estimate rises slowly.
        let mean = if old == 0 { new } else { mean(old, new.min(old.saturating_mul(4))) };
        cell.store(mean.max(1), Ordering::Relaxed);
    }

    /// Whether a job of `nanos` (0: unknown) is large enough to be shared with helpers that are
    /// awake.
    #[inline]
    pub(crate) fn shares(nanos: u64) -> bool {
        nanos == 0 || nanos >= SHARE
    }

    /// The number of sleeping helpers that a job of `nanos` (0: unknown) is worth. Counts the job
    /// as work of this period.
    pub(crate) fn wakes(&self, nanos: u64) -> u32 {
        if nanos == 0 {
            return u32::MAX;
        }
        let so_far = self.in_period.fetch_add(nanos, Ordering::Relaxed).saturating_add(nanos);
        let expected = so_far.max(self.period_before.load(Ordering::Relaxed));
        (expected / (2 * u64::from(self.wake.load(Ordering::Relaxed)))).min(u64::from(u32::MAX))
            as u32
    }

    /// Ends the period, because no queue runs anything.
    pub(crate) fn end_period(&self) {
        self.period_before.store(self.in_period.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Records the time of a signal to sleeping helpers.
    pub(crate) fn note_ring(&self, now: u64) {
        self.rung_at.store(now, Ordering::Relaxed);
    }

    /// Records the arrival of a helper.
    pub(crate) fn note_arrival(&self, now: u64) {
        let rung = self.rung_at.swap(0, Ordering::Relaxed);
        if rung != 0 {
            let took = now.saturating_sub(rung).clamp(*WAKES.start(), *WAKES.end()) as u32;
            self.wake.store(mean(self.wake.load(Ordering::Relaxed), took), Ordering::Relaxed);
        }
    }
}

/// A moving mean that follows slowly.
fn mean(old: u32, new: u32) -> u32 {
    ((u64::from(old) * 3 + u64::from(new)) / 4) as u32
}

#[cfg(test)]
#[path = "../../tests/unit/advice.rs"]
mod tests;
