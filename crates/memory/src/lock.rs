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

use std::ops::{Deref, DerefMut};

use leasehold_core::barrier;
use leasehold_core::sync::atomic::{AtomicU32, Ordering::*};
#[cfg(not(loom))]
use leasehold_core::sync::thread;
use leasehold_core::sync::{UnsafeCell, spin_loop};

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
            self.take_spin();
            if self.owner.load(Relaxed) == me {
                self.owner.store(NOBODY, Relaxed);
            }
            self.spin.store(0, Release);
        }
    }

    /// Before a fork by the thread `me`: keeps everybody else out. True if a bias was taken away: then a heavy barrier must follow, and
    /// [`hold_end`](Self::hold_end). A lock that is biased to `me` stays so: `me` is not inside, and the others need `spin` to take it away.
    pub(crate) fn hold(&self, me: u32) -> bool {
        self.take_spin();
        let owner = self.owner.load(Relaxed);
        let biased = owner != NOBODY && owner != SHARED && owner != me;
        if biased {
            self.owner.store(SHARED, Relaxed);
        }
        biased
    }

    /// Waits for the thread to whom the lock was biased. Nobody is inside then.
    pub(crate) fn hold_end(&self) {
        let mut spins = 0;
        while self.busy.load(Acquire) != 0 {
            relax(&mut spins);
        }
    }

    /// After the fork, in both processes.
    pub(crate) fn let_go(&self) {
        self.spin.store(0, Release);
    }

    fn take_spin(&self) {
        let mut spins = 0;
        while self.spin.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
            relax(&mut spins);
        }
    }

    #[cold]
    fn lock_slow(&self, me: u32) -> Held {
        self.take_spin();
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

/// A plain lock for what is rare and short. It allocates nothing, unlike one that puts threads to sleep, and a fork can hold it.
#[derive(Debug)]
pub(crate) struct SpinLock<T> {
    taken: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through a guard only, and there is one at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}
// SAFETY: the value may move with its lock.
unsafe impl<T: Send> Send for SpinLock<T> {}

impl<T> SpinLock<T> {
    #[cfg(not(loom))]
    pub(crate) const fn new(value: T) -> Self {
        Self { taken: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    #[cfg(loom)]
    pub(crate) fn new(value: T) -> Self {
        Self { taken: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    pub(crate) fn lock(&self) -> SpinGuard<'_, T> {
        self.hold();
        SpinGuard(self)
    }

    /// Before a fork: keeps everybody out until [`let_go`](Self::let_go).
    pub(crate) fn hold(&self) {
        let mut spins = 0;
        while self.taken.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
            relax(&mut spins);
        }
    }

    /// After the fork, in both processes.
    pub(crate) fn let_go(&self) {
        self.taken.store(0, Release);
    }
}

/// A [`SpinLock`] that is taken.
pub(crate) struct SpinGuard<'a, T>(&'a SpinLock<T>);

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is taken as long as this guard lives, and only a guard leads to the value.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is taken, and `&mut self` makes this the only reference that the guard gives out.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    fn drop(&mut self) {
        self.0.let_go();
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
    // SAFETY: what is in the cell may be used by any thread.
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
