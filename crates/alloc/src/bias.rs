//! A lock that belongs to the thread which uses it, until another thread comes.
//!
//! Most allocators are used by one thread most of the time, and an uncontended lock costs it two atomic read-modify-writes. Here the
//! owner enters and leaves with plain stores; whoever else comes takes the ownership away first, for a system call.
//!
//! # Protocol
//! `owner` is nobody, a thread and the number of its ownership, or everybody. It is written with `mutex` held only.
//!
//! | who | enters by | leaves by |
//! |---|---|---|
//! | the owner | its `inside = 1`; light fence; `owner` is still its own | its `inside = 0` |
//! | any other thread | `mutex`; if there is an owner: `owner` = everybody, heavy fence, wait until its `inside` is 0 | unlocking `mutex` |
//!
//! The two fences make a Dekker pair (see `leasehold_core::barrier`): either the owner sees that it is none any more, or the other sees `inside`. Each
//! ownership has a flag of its own, since a former owner may still be about to take its flag back. While the lock is shared it is an
//! ordinary mutex. Where the machine has no cheap fence for the owner, it always is. A thread that takes it often enough in a row becomes the
//! owner; each time that an ownership was taken away, the next needs twice as many, and there are so many ownerships only, so that threads in
//! turn pay for a bounded number of system calls.
//!
//! Must not know what it guards.

use crate::mutant::mutated;
use crate::numbers::{NOBODY, thread_number};
use crate::owned::{Inside, OWNERS, Owned};
use leasehold_core::barrier;
use leasehold_core::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use leasehold_core::sync::{Mutex, MutexGuard, UnsafeCell, spin_loop, thread};
use std::ops::{Deref, DerefMut};

/// Turns in a row that make a thread the owner; doubled each time that an ownership was taken away.
const STREAK: u32 = if cfg!(loom) { 1 } else { 64 };

/// How often a thread looks whether the mutex is free before it sleeps, and the logarithm of the longest pause between two looks.
const LOOKS: u32 = if cfg!(loom) { 0 } else { 32 };
const LONGEST: u32 = 8;

/// The lock.
pub(crate) struct BiasedLock<T> {
    owner: AtomicU32,
    inside: Inside,
    mutex: Mutex<Turns>,
    value: UnsafeCell<T>,
}

/// Who took the lock as a mutex. Guarded by it.
pub(crate) struct Turns {
    last: u32,
    streak: u32,
    /// Ownerships so far.
    owners: usize,
}

// SAFETY: the value is reached through a guard only, and there is one at a time (see the protocol).
unsafe impl<T: Send> Send for BiasedLock<T> {}
// SAFETY: a shared lock gives the value to one guard at a time, on the guard's thread (see the protocol).
unsafe impl<T: Send> Sync for BiasedLock<T> {}

/// The right to the value, however it was come by.
pub(crate) struct Guard<'a, T, W = Way<'a>> {
    lock: &'a BiasedLock<T>,
    way: W,
}

/// The owner's right to the value.
pub(crate) type OwnGuard<'a, T> = Guard<'a, T, OwnWay<'a>>;

/// The owner is inside; it takes its flag back when this goes.
pub(crate) struct OwnWay<'a>(&'a AtomicU8);

/// How the lock was taken. What leaves it again is in here.
pub(crate) enum Way<'a> {
    Owner { _own: OwnWay<'a> },
    Shared { turn: MutexGuard<'a, Turns> },
}

impl Drop for OwnWay<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl<T> BiasedLock<T> {
    pub(crate) fn new(value: T) -> Self {
        let owners = if barrier::available() { 0 } else { OWNERS };
        Self {
            owner: AtomicU32::new(Owned::NEW.0),
            inside: std::array::from_fn(|_| AtomicU8::new(0)),
            mutex: Mutex::new(Turns { last: 0, streak: 0, owners }),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits until nobody else is inside. A thread that is inside must not come again.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.lock_as(thread_number())
    }

    /// As [`lock`](Self::lock), for the thread of this number.
    #[inline]
    pub(crate) fn lock_as(&self, me: u32) -> Guard<'_, T> {
        if let Some(own) = self.enter_own(me) {
            return Guard { lock: self, way: Way::Owner { _own: own } };
        }
        Guard { lock: self, way: Way::Shared { turn: self.lock_shared(me) } }
    }

    /// As [`lock_as`](Self::lock_as), if the lock is the thread's own. Does not wait.
    #[inline(always)]
    pub(crate) fn lock_own(&self, me: u32) -> Option<OwnGuard<'_, T>> {
        self.enter_own(me).map(|way| Guard { lock: self, way })
    }

    /// Enters as the owner, if the thread is that.
    #[inline(always)]
    fn enter_own(&self, me: u32) -> Option<OwnWay<'_>> {
        let owner = self.owner.load(Ordering::Relaxed);
        let inside = &self.inside[Owned(owner).turn_of(me)?];
        // Coming again would give the value out twice: better no progress than that.
        assert!(inside.load(Ordering::Relaxed) == 0, "an allocator's lock was taken by who holds it");
        inside.store(1, Ordering::Relaxed);
        barrier::light();
        if self.owner.load(Ordering::Acquire) == owner || mutated('b') {
            return Some(OwnWay(inside));
        }
        inside.store(0, Ordering::Release);
        None
    }

    #[cold]
    fn lock_shared(&self, me: u32) -> MutexGuard<'_, Turns> {
        let mut turn = self.turn();
        let owner = Owned(self.owner.load(Ordering::Relaxed));
        if owner.is_owned() {
            self.owner.store(Owned::SHARED.0, Ordering::Relaxed);
            barrier::heavy();
            while self.inside[owner.turn()].load(Ordering::Acquire) != 0 {
                thread::yield_now();
            }
        }
        if turn.last == me {
            turn.streak = turn.streak.saturating_add(1);
        } else {
            // The first of all comes after nobody.
            (turn.last, turn.streak) = (me, u32::from(turn.last == 0));
        }
        if me != NOBODY && turn.owners < OWNERS && turn.streak >= STREAK << turn.owners && barrier::holds() {
            // From the next time on; this time the mutex is held.
            self.owner.store(Owned::by(me, turn.owners).0, Ordering::Release);
            turn.streak = 1;
            turn.owners += 1;
        }
        turn
    }

    /// The mutex, by patience: who holds it is about to give it back, and to put a thread to sleep and wake it costs both sides a hundred
    /// times what that takes. Looking in rarely lets the others do many turns meanwhile with everything in their caches.
    fn turn(&self) -> MutexGuard<'_, Turns> {
        for look in 0..LOOKS {
            if let Some(turn) = self.mutex.try_lock() {
                return turn;
            }
            for _ in 0..1 << look.min(LONGEST) {
                spin_loop();
            }
        }
        self.mutex.lock()
    }

    /// The value, for who has the lock to itself.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        // SAFETY: exclusive access to the lock.
        unsafe { &mut *self.value.get() }
    }
}

impl<T> Guard<'_, T> {
    /// Whether the lock is this thread's own.
    #[inline]
    pub(crate) fn is_own(&self) -> bool {
        matches!(self.way, Way::Owner { .. })
    }

    /// Whether another thread held the lock just before.
    #[inline]
    pub(crate) fn is_contended(&self) -> bool {
        match &self.way {
            Way::Owner { .. } => false,
            Way::Shared { turn } => turn.streak == 0,
        }
    }
}

impl<T, W> Deref for Guard<'_, T, W> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: a guard has the value to itself.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T, W> DerefMut for Guard<'_, T, W> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: a guard has the value to itself, and is borrowed exclusively here.
        unsafe { &mut *self.lock.value.get() }
    }
}
