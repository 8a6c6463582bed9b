//! The lock-free core of the tile pool: jobs of independent tiles, claimed by threads that are
//! awake, and the sleep of helpers.
//!
//! # Protocol
//! A *job* is a number of tiles and a function that runs a range of them. The *owner* of a job (a
//! queue's worker) takes a slot, opens it and runs tiles itself. Then the owner closes the slot and
//! leaves when no helper is inside. The function lives on the owner's stack.
//!
//! - `taken`: CAS by an owner; a slot has one owner at a time.
//! - `body`, `parts`: written while the slot is closed and has no members; read by helpers inside.
//! - `members`: the `OPEN` bit, set and cleared by the owner, and the number of helpers
//!   inside.
//! - `next`: the next unclaimed tile; threads claim tiles by `fetch_add`, each time a part of those
//!   that are left. So ranges are long at first, and the last ones balance the load.
//! - `open`: one bit for each slot that may have unclaimed tiles.
//! - `sleepers`, `stop`: the number of sleeping helpers; whether the helpers are dismissed.
//!
//! - `members`: A helper first adds itself and checks the bit of the old value. If the slot
//!   is closed, the helper subtracts itself without access to other fields.
//! - `next`: The thread that claims the last tiles clears the slot's bit in `open`.
//! - `open` is a hint for helpers, which may be wrong in both directions for an instant.
//! - `sleepers`: A helper adds itself to `sleepers`, then checks `open`. An owner sets its bit in
//!   `open`, then checks `sleepers`. Each has a full fence between the two, so that one sees the
//!   other. A helper holds the lock of `stop` from the check to the wait. An owner takes the lock
//!   before it notifies.
//!
//! # Why this is safe
//! - A helper calls the function only between an addition that returned `OPEN` and its subtraction.
//!   The owner leaves only after it cleared `OPEN` and saw zero inside. So no call outlives the
//!   owner's borrow.
//! - The writes of a tile are visible to the owner: the helper's subtraction releases, the owner's
//!   load acquires.
//! - If the job is small, an owner may choose to wake no helper: then helpers that are awake help,
//!   and the owner runs the other tiles. No job depends on a helper, so jobs without helpers are
//!   complete.
//!
//! This module must not know threads, time or what a tile is.

use leasehold_core::panics::caught;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use leasehold_core::sync::{CachePadded, Condvar, Mutex, UnsafeCell, spin_loop};

/// A function that runs tiles `from..to`.
pub(crate) type Body<'a> = &'a (dyn Fn(u64, u64) + Sync + 'a);

#[cfg(not(loom))]
const SLOTS: usize = 32;
#[cfg(loom)]
const SLOTS: usize = 1;
const OPEN: u32 = 1 << 31;

struct Slot {
    taken: AtomicBool,
    members: AtomicU32,
    next: AtomicU64,
    total: AtomicU64,
    parts: AtomicU64,
    body: UnsafeCell<Option<Body<'static>>>,
    panic: Mutex<Option<String>>,
}

/// Jobs, and the state of the helpers.
pub(crate) struct Jobs {
    slots: Box<[CachePadded<Slot>]>,
    open: CachePadded<AtomicU64>,
    sleepers: CachePadded<AtomicU32>,
    stop: Mutex<bool>,
    bell: Condvar,
}

// SAFETY: the slot's one owner writes `body` while no helper is inside. Helpers read it inside the
// open host timeline (see the protocol).
unsafe impl Sync for Jobs {}
// SAFETY: the functions are `Sync`, so their references are `Send`. The host timeline orders all
// accesses to `body` (see the protocol).
unsafe impl Send for Jobs {}

impl Jobs {
    pub(crate) fn new() -> Self {
        let slot = || {
            CachePadded::new(Slot {
                taken: AtomicBool::new(false),
                members: AtomicU32::new(0),
                next: AtomicU64::new(0),
                total: AtomicU64::new(0),
                parts: AtomicU64::new(1),
                body: UnsafeCell::new(None),
                panic: Mutex::new(None),
            })
        };
        Self {
            slots: (0..SLOTS).map(|_| slot()).collect(),
            open: CachePadded::new(AtomicU64::new(0)),
            sleepers: CachePadded::new(AtomicU32::new(0)),
            stop: Mutex::new(false),
            bell: Condvar::new(),
        }
    }

    /// Runs `total` tiles on this thread and on helpers. Each claim takes one of `parts` equal
    /// parts of the tiles that are left. Returns when all tiles are over. The call wakes at most
    /// `ring` sleeping helpers. Helpers call `body`; this thread calls `mine`, which must do the
    /// same. If all slots are taken, this thread runs all tiles.
    ///
    /// # Errors
    /// The text of the first panic. Tiles that had not begun then never run.
    pub(crate) fn run(
        &self,
        total: u64,
        parts: u64,
        ring: u32,
        body: Body<'_>,
        mine: &dyn Fn(u64, u64),
    ) -> Result<(), String> {
        let free = self.slots.iter().position(|s| {
            !s.taken.load(Ordering::Relaxed)
                && s.taken
                    .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
        });
        let Some(index) = free else {
            return caught(|| mine(0, total));
        };
        let slot = &self.slots[index];
        // SAFETY: the cast only changes the lifetime. The host timeline keeps every use of the
        // reference inside this call (see the protocol).
        let lasting: Body<'static> = unsafe { std::mem::transmute(body) };
        // SAFETY: this thread owns the slot, whose host timeline is closed and empty: no other
        // thread reads the cell.
        slot.body.with_mut(|b| unsafe { *b = Some(lasting) });
        slot.parts.store(parts.max(1), Ordering::Relaxed);
        slot.total.store(total, Ordering::Relaxed);
        slot.next.store(0, Ordering::Relaxed);
        slot.members.fetch_or(OPEN, Ordering::Release);
        self.open.fetch_or(1 << index, Ordering::Release);
        self.ring(ring);
        self.claim(index, mine);
        self.open.fetch_and(!(1 << index), Ordering::Relaxed);
        slot.members.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while slot.members.load(Ordering::Acquire) != 0 {
            // Helpers run the last tiles. These are soon over, unless a helper has lost its
            // processor.
            spins += 1;
            if spins < 1000 { spin_loop() } else { leasehold_core::sync::thread::yield_now() }
        }
        let panic = slot.panic.lock().take();
        slot.taken.store(false, Ordering::Release);
        match panic {
            Some(text) => Err(text),
            None => Ok(()),
        }
    }

    /// Runs tiles of the job in a slot until none is unclaimed. Returns whether it ran any. The
    /// caller owns the slot or is inside its host timeline.
    fn claim(&self, index: usize, body: &dyn Fn(u64, u64)) -> bool {
        let slot = &self.slots[index];
        let total = slot.total.load(Ordering::Relaxed);
        let parts = slot.parts.load(Ordering::Relaxed);
        let mut any = false;
        loop {
            let left = total.saturating_sub(slot.next.load(Ordering::Relaxed));
            let chunk = (left / parts).max(1);
            let from = slot.next.fetch_add(chunk, Ordering::Relaxed);
            if from.saturating_add(chunk) >= total {
                self.open.fetch_and(!(1 << index), Ordering::Relaxed);
            }
            if from >= total {
                return any;
            }
            let to = from.saturating_add(chunk).min(total);
            if let Err(text) = caught(|| body(from, to)) {
                slot.panic.lock().get_or_insert(text);
                // From here on, no thread begins another tile.
                slot.next.fetch_max(total, Ordering::Relaxed);
            }
            any = true;
        }
    }

    /// Helps with the open jobs, beginning at slot `first`. Returns whether it ran a tile.
    pub(crate) fn help(&self, first: usize) -> bool {
        let mut helped = false;
        let open = self.open.load(Ordering::Relaxed);
        if open == 0 {
            return false;
        }
        for i in 0..SLOTS {
            let index = (first + i) % SLOTS;
            if open & (1 << index) == 0 {
                continue;
            }
            let slot = &self.slots[index];
            if slot.members.fetch_add(1, Ordering::Acquire) & OPEN != 0 {
                // SAFETY: this thread is inside an open host timeline. The owner wrote the cell
                // before, and does not leave before this thread does.
                let body = slot.body.with(|b| unsafe { *b });
                if let Some(body) = body {
                    helped |= self.claim(index, body);
                }
            }
            slot.members.fetch_sub(1, Ordering::Release);
        }
        helped
    }

    /// Whether a job may have unclaimed tiles: one load.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        self.open.load(Ordering::Relaxed) != 0
    }

    /// The number of sleeping helpers (a snapshot).
    #[inline]
    pub(crate) fn sleepers(&self) -> u32 {
        self.sleepers.load(Ordering::Relaxed)
    }

    /// Wakes at most `most` helpers.
    pub(crate) fn ring(&self, most: u32) {
        if most == 0 {
            return;
        }
        fence(Ordering::SeqCst);
        let asleep = self.sleepers.load(Ordering::Relaxed).min(most);
        if asleep != 0 {
            drop(self.stop.lock());
            for _ in 0..asleep {
                self.bell.notify_one();
            }
        }
    }

    /// Sleeps until a wake-up. Returns `false` if the helpers are dismissed. May return without
    /// cause.
    pub(crate) fn sleep(&self) -> bool {
        let mut stop = self.stop.lock();
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !*stop && self.open.load(Ordering::Relaxed) == 0 {
            self.bell.wait(&mut stop);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        !*stop
    }

    /// Dismisses the helpers.
    pub(crate) fn dismiss(&self) {
        *self.stop.lock() = true;
        self.bell.notify_all();
    }
}
