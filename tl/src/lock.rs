//! A spin lock over a value.
//!
//! Locks guard the shards of the object table and of the pool, and the rare lists of a manager. No
//! function of the program is called while one is held: critical sections are a few dozen
//! instructions.
//!
//! This module must not know what it guards.

use std::fmt;
use std::ops::{Deref, DerefMut};

use leasehold_core::sync::atomic::{AtomicU32, Ordering::*};
#[cfg(not(loom))]
use leasehold_core::sync::thread;
use leasehold_core::sync::{UnsafeCell, spin_loop};

/// The number of spins before the thread yields; critical sections are far shorter.
const SPINS: u32 = 64;

/// A spin lock for short sections. It allocates nothing, unlike a lock that puts threads to sleep,
/// and a fork can hold it.
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

    #[inline(always)]
    pub(crate) fn lock(&self) -> SpinGuard<'_, T> {
        if self.taken.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            self.hold();
        }
        SpinGuard(self)
    }

    /// The value, if nothing else can use it.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        // SAFETY: `&mut self` proves that no guard exists.
        unsafe { &mut *self.value.get() }
    }

    /// Takes the lock before a fork, until [`let_go`](Self::let_go).
    #[cold]
    pub(crate) fn hold(&self) {
        let mut spins = 0;
        while self.taken.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
            relax(&mut spins);
        }
    }

    /// Releases the lock after the fork, in both processes.
    #[inline(always)]
    pub(crate) fn let_go(&self) {
        self.taken.store(0, Release);
    }
}

impl<T> fmt::Debug for SpinLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SpinLock")
    }
}

/// A held [`SpinLock`].
pub(crate) struct SpinGuard<'a, T>(&'a SpinLock<T>);

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the lock is held as long as this guard lives, and only a guard leads to the
        // value.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held, and `&mut self` makes this the guard's only reference.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline(always)]
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

#[cfg(all(test, loom))]
mod model {
    use leasehold_core::sync::{Arc, UnsafeCell, thread};

    use super::SpinLock;

    /// A shard in the models: a cell in which loom detects two concurrent accesses.
    struct Guarded(SpinLock<()>, UnsafeCell<u32>);

    // SAFETY: the cell is used under the lock, which is the property under test.
    unsafe impl Sync for Guarded {}
    // SAFETY: any thread may use the cell's content.
    unsafe impl Send for Guarded {}

    fn add(guarded: &Guarded) {
        let _held = guarded.0.lock();
        // SAFETY: the lock is held.
        guarded.1.with_mut(|n| unsafe { *n += 1 });
    }

    #[test]
    fn two_threads_exclude_each_other() {
        loom::model(|| {
            let guarded = Arc::new(Guarded(SpinLock::new(()), UnsafeCell::new(0)));
            let other = Arc::clone(&guarded);
            let thread = thread::spawn(move || add(&other));
            add(&guarded);
            thread.join().unwrap();
            add(&guarded);
            // SAFETY: no other thread is left.
            assert_eq!(guarded.1.with(|n| unsafe { *n }), 3);
        });
    }

    #[test]
    fn a_fork_excludes_the_other_threads() {
        loom::model(|| {
            let guarded = Arc::new(Guarded(SpinLock::new(()), UnsafeCell::new(0)));
            let other = Arc::clone(&guarded);
            let thread = thread::spawn(move || add(&other));
            guarded.0.hold();
            // SAFETY: the lock is held.
            guarded.1.with_mut(|n| unsafe { *n += 1 });
            guarded.0.let_go();
            thread.join().unwrap();
            // SAFETY: no other thread is left.
            assert_eq!(guarded.1.with(|n| unsafe { *n }), 2);
        });
    }
}
