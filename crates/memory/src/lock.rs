//! A biased lock: its usual owner takes it with two plain stores and two loads.
//!
//! The lock guards one shard of the object table and must not know its content. No function of the
//! program is called while it is held: critical sections are a few dozen instructions.
//!
//! # Protocol
//! `owner` is [`NOBODY`], the id of one thread, or [`SHARED`]. It changes in this order, under
//! `spin`. It returns to `NOBODY` only when the owner itself releases the bias (its thread ends).
//! - The owner stores `busy = 1`, executes a light barrier, and checks that it still is the owner.
//!   Then it holds the lock; it releases the lock with `busy = 0`. Only the owner writes `busy`.
//! - Every other thread takes `spin`. If it finds another thread's bias, it stores `SHARED`, runs a
//!   heavy barrier and waits for `busy == 0`. From then on every thread uses `spin` alone.
//!
//! Soundness: [`barrier::light`] is only a compiler fence; [`barrier::heavy`] makes every running
//! thread of the process execute a full fence. If a biased owner's load of `owner` came before this
//! fence, the revoker sees its `busy = 1` and waits. If the load comes after the fence, the owner
//! sees `SHARED` and takes `spin`.
//!
//! If no heavy barrier is available, the lock starts as `SHARED`. If the kernel has begun to refuse
//! the barrier, no lock gets a bias any more. Loom has no asymmetric barriers: in models both are
//! sequentially consistent fences.

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
/// The number of spins before the thread yields; critical sections are far shorter.
const SPINS: u32 = 64;

/// A biased lock; see the module's documentation.
#[derive(Debug)]
pub(crate) struct BiasedLock {
    owner: AtomicU32,
    busy: AtomicU32,
    spin: AtomicU32,
}

/// The way in which the lock was taken; [`BiasedLock::unlock`] needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum Held {
    /// Through the bias.
    Biased,
    /// Through the spin word.
    Spin,
}

impl BiasedLock {
    /// A lock without an owner; `bias` is the result of [`may_bias`].
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
        } else if self.owner.load(Relaxed) == SHARED
            && self.spin.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
        {
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

    /// Gives up the bias of thread `me`, if it has one, because the thread will not return. The
    /// thread must not hold the lock.
    pub(crate) fn release_bias(&self, me: u32) {
        if self.owner.load(Relaxed) == me {
            self.take_spin();
            if self.owner.load(Relaxed) == me {
                self.owner.store(NOBODY, Relaxed);
            }
            self.spin.store(0, Release);
        }
    }

    /// Takes the lock before a fork by the thread `me`. Returns `true` if a bias was revoked: then
    /// a heavy barrier and [`hold_end`](Self::hold_end) must follow. A lock that is biased to `me`
    /// stays biased: `me` does not hold it, and other threads need `spin` to revoke the bias.
    pub(crate) fn hold(&self, me: u32) -> bool {
        self.take_spin();
        let owner = self.owner.load(Relaxed);
        let biased = owner != NOBODY && owner != SHARED && owner != me;
        if biased {
            self.owner.store(SHARED, Relaxed);
        }
        biased
    }

    /// Waits for the former owner of the bias. Afterwards no thread holds the lock.
    pub(crate) fn hold_end(&self) {
        let mut spins = 0;
        while self.busy.load(Acquire) != 0 {
            relax(&mut spins);
        }
    }

    /// Releases the lock after the fork, in both processes.
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

/// A plain spin lock for rare and short sections. It allocates nothing, unlike a lock that puts
/// threads to sleep, and a fork can hold it.
#[derive(Debug)]
pub(crate) struct SpinLock<T> {
    taken: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: only a guard leads to the value, and at most one guard exists.
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

    /// Takes the lock before a fork, until [`let_go`](Self::let_go).
    pub(crate) fn hold(&self) {
        let mut spins = 0;
        while self.taken.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
            relax(&mut spins);
        }
    }

    /// Releases the lock after the fork, in both processes.
    pub(crate) fn let_go(&self) {
        self.taken.store(0, Release);
    }
}

/// A held [`SpinLock`].
pub(crate) struct SpinGuard<'a, T>(&'a SpinLock<T>);

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is held as long as this guard lives, and only a guard leads to the
        // value.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held, and `&mut self` makes this the guard's only reference.
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

/// Returns whether locks may be biased. `TL_MEM_BIAS=0` forbids it, because ThreadSanitizer cannot
/// see the heavy barrier.
pub(crate) fn may_bias() -> bool {
    barrier::available() && crate::env::get(c"TL_MEM_BIAS", |v| v != c"0").unwrap_or(true)
}

#[cfg(all(test, loom))]
mod model {
    use leasehold_core::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use leasehold_core::sync::{Arc, UnsafeCell, thread};

    use super::{BiasedLock, Held};

    /// A shard in the models: a cell in which loom detects two concurrent accesses.
    struct Guarded(BiasedLock, UnsafeCell<u32>);

    // SAFETY: the cell is used under the lock, which is the property under test.
    unsafe impl Sync for Guarded {}
    // SAFETY: any thread may use the cell's content.
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
            // SAFETY: no other thread is left.
            assert_eq!(guarded.1.with(|n| unsafe { *n }), 4);
        });
    }

    #[test]
    fn an_owner_that_releases_its_bias_hands_over_or_is_revoked() {
        loom::model(|| {
            let guarded = Arc::new(Guarded(BiasedLock::new(true), UnsafeCell::new(0)));
            assert_eq!(add(&guarded, 1), Held::Biased);
            let (other, seen) = (Arc::clone(&guarded), Arc::new(AtomicU32::new(0)));
            let thread = thread::spawn(move || {
                seen.fetch_add(1, Relaxed);
                add(&other, 2)
            });
            guarded.0.release_bias(1);
            let _ = thread.join().unwrap();
            // SAFETY: no other thread is left.
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
            // SAFETY: no other thread is left.
            assert_eq!(guarded.1.with(|n| unsafe { *n }), 2);
        });
    }
}
