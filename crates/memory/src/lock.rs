//! A lock that costs its usual taker two plain stores and two loads.
//!
//! It guards one shard of the object table. It must not know what it guards, and nothing may call out while it is held:
//! critical sections are a few dozen instructions.
//!
//! # Protocol
//! `owner` is [`NOBODY`], the id of one thread, or [`SHARED`]; it moves in that direction, under `spin`, and back to `NOBODY` only
//! when the owner itself renounces (its thread ends).
//! - Biased to me: `busy = 1`; light barrier; `owner` still me? Then I hold the lock, and give it back with `busy = 0`. Only the
//!   owner writes `busy`.
//! - Anybody else takes `spin`. Finding another's bias there, it stores `SHARED`, runs a heavy barrier and waits for
//!   `busy == 0`; from then on everybody uses `spin` alone.
//!
//! Why this is safe: [`barrier::light`] only stops the compiler; [`barrier::heavy`] makes every running thread of the process pass a full
//! fence. A biased taker whose load of `owner` came before that fence has its `busy = 1` seen by the revoker, which waits; one whose load
//! comes after it sees `SHARED` and takes `spin`. Where there is no heavy barrier the lock starts out `SHARED`; where the kernel has begun
//! to refuse it, no lock is given to a thread any more. Loom has no asymmetric barriers: there both are sequentially consistent fences.

use leasehold_core::barrier;
use leasehold_core::sync::atomic::{AtomicU32, Ordering::*};
use leasehold_core::sync::spin_loop;
#[cfg(not(loom))]
use leasehold_core::sync::thread;

/// No thread has taken the lock yet.
const NOBODY: u32 = 0;
/// More than one thread has taken the lock.
const SHARED: u32 = u32::MAX;
/// Spins before the processor is given away; critical sections are far shorter.
const SPINS: u32 = 64;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct BiasedLock {
    owner: AtomicU32,
    busy: AtomicU32,
    spin: AtomicU32,
}

/// How the lock was taken; wanted back by [`BiasedLock::unlock`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum Held {
    /// Through the bias.
    Biased,
    /// Through the spin word.
    Spin,
}

impl BiasedLock {
    /// A lock that is nobody's; `bias`: what [`may_bias`] says.
    pub(crate) fn new(bias: bool) -> Self {
        let owner = if bias { NOBODY } else { SHARED };
        Self { owner: AtomicU32::new(owner), busy: AtomicU32::new(0), spin: AtomicU32::new(0) }
    }

    /// Takes the lock for the thread `me` (an id that is never reused, neither 0 nor `u32::MAX`).
    #[inline(always)]
    pub(crate) fn lock(&self, me: u32) -> Held {
        if self.owner.load(Relaxed) == me {
            self.busy.store(1, Relaxed);
            barrier::light();
            if self.owner.load(Relaxed) == me {
                return Held::Biased;
            }
            self.busy.store(0, Release);
        } else if self.owner.load(Relaxed) == SHARED && self.spin.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
            return Held::Spin;
        }
        self.lock_slow(me)
    }

    #[inline(always)]
    pub(crate) fn unlock(&self, held: Held) {
        match held {
            Held::Biased => self.busy.store(0, Release),
            Held::Spin => self.spin.store(0, Release),
        }
    }

    /// Gives up the bias to `me`, if there is one: this thread will not come back. It must not hold the lock.
    pub(crate) fn renounce(&self, me: u32) {
        if self.owner.load(Relaxed) == me {
            let mut spins = 0;
            while self.spin.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
                relax(&mut spins);
            }
            if self.owner.load(Relaxed) == me {
                self.owner.store(NOBODY, Relaxed);
            }
            self.spin.store(0, Release);
        }
    }

    #[cold]
    fn lock_slow(&self, me: u32) -> Held {
        let mut spins = 0;
        while self.spin.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
            relax(&mut spins);
        }
        match self.owner.load(Relaxed) {
            SHARED => Held::Spin,
            NOBODY if !barrier::holds() => {
                self.owner.store(SHARED, Relaxed);
                Held::Spin
            }
            NOBODY => {
                self.busy.store(1, Relaxed);
                self.owner.store(me, Relaxed);
                self.spin.store(0, Release);
                Held::Biased
            }
            _ => {
                self.owner.store(SHARED, Relaxed);
                barrier::heavy();
                let mut spins = 0;
                while self.busy.load(Acquire) != 0 {
                    relax(&mut spins);
                }
                Held::Spin
            }
        }
    }
}

#[cfg(not(loom))]
fn relax(spins: &mut u32) {
    *spins += 1;
    if spins.is_multiple_of(SPINS) { thread::yield_now() } else { spin_loop() }
}

#[cfg(loom)]
fn relax(_: &mut u32) {
    let _ = SPINS;
    spin_loop();
    leasehold_core::sync::thread::yield_now();
}

/// Whether locks may be biased. `TL_MEM_BIAS=0` says no: ThreadSanitizer cannot see the heavy barrier.
pub(crate) fn may_bias() -> bool {
    barrier::available() && crate::env::get(c"TL_MEM_BIAS", |v| v != c"0").unwrap_or(true)
}

#[cfg(all(test, loom))]
mod model {
    use leasehold_core::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use leasehold_core::sync::{Arc, UnsafeCell, thread};

    use super::{BiasedLock, Held};

    /// What a shard is to its lock: a cell that loom complains about when two are in it.
    struct Guarded(BiasedLock, UnsafeCell<u32>);

    // SAFETY: the cell is used under the lock, which is what is to be shown.
    unsafe impl Sync for Guarded {}
    // SAFETY: as above.
    unsafe impl Send for Guarded {}

    fn add(guarded: &Guarded, me: u32) -> Held {
        let held = guarded.0.lock(me);
        // SAFETY: the lock is held.
        guarded.1.with_mut(|n| unsafe { *n += 1 });
        guarded.0.unlock(held);
        held
    }

    #[test]
    fn the_owner_and_the_one_who_revokes_exclude_each_other() {
        loom::model(|| {
            let guarded = Arc::new(Guarded(BiasedLock::new(true), UnsafeCell::new(0)));
            assert_eq!(add(&guarded, 1), Held::Biased);
            let other = Arc::clone(&guarded);
            let thread = thread::spawn(move || add(&other, 2));
            let _ = add(&guarded, 1);
            assert_eq!(thread.join().unwrap(), Held::Spin);
            let _ = add(&guarded, 1);
            // SAFETY: nobody else is left.
            assert_eq!(guarded.1.with(|n| unsafe { *n }), 4);
        });
    }

    #[test]
    fn an_owner_that_renounces_hands_over_or_is_revoked() {
        loom::model(|| {
            let guarded = Arc::new(Guarded(BiasedLock::new(true), UnsafeCell::new(0)));
            assert_eq!(add(&guarded, 1), Held::Biased);
            let (other, seen) = (Arc::clone(&guarded), Arc::new(AtomicU32::new(0)));
            let thread = thread::spawn(move || {
                seen.fetch_add(1, Relaxed);
                add(&other, 2)
            });
            guarded.0.renounce(1);
            let _ = thread.join().unwrap();
            // SAFETY: nobody else is left.
            assert_eq!(guarded.1.with(|n| unsafe { *n }), 2);
        });
    }

    #[test]
    fn two_newcomers_exclude_each_other() {
        loom::model(|| {
            let guarded = Arc::new(Guarded(BiasedLock::new(true), UnsafeCell::new(0)));
            let other = Arc::clone(&guarded);
            let thread = thread::spawn(move || add(&other, 2));
            let _ = add(&guarded, 1);
            let _ = thread.join().unwrap();
            // SAFETY: nobody else is left.
            assert_eq!(guarded.1.with(|n| unsafe { *n }), 2);
        });
    }
}
