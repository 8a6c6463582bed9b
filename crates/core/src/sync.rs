//! The shim for atomics, locks, cells and threads.
//!
//! By default these are the standard library's atomics and `parking_lot`'s locks. Those locks are
//! never poisoned, so a panic in a critical section does not turn later calls into panics. With
//! `--cfg loom` these are loom's types, so the models explore the shipped code. A lint
//! (`clippy.toml`) refuses every other source.
//!
//! This module must not know which code uses it.

#[cfg(not(loom))]
mod imp {
    pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
    pub use std::sync::{Arc, OnceLock};

    /// Atomic types, fences and orderings.
    pub mod atomic {
        pub use std::sync::atomic::{
            AtomicBool, AtomicI32, AtomicI64, AtomicIsize, AtomicPtr, AtomicU8, AtomicU16,
            AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence,
        };
    }

    /// Threads.
    pub mod thread {
        pub use std::thread::{
            Builder, JoinHandle, Thread, ThreadId, current, panicking, park, park_timeout, sleep,
            spawn, yield_now,
        };
    }

    /// A cell whose accesses loom checks.
    #[derive(Debug)]
    #[repr(transparent)]
    pub struct UnsafeCell<T: ?Sized>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        /// A cell that holds `value`.
        pub const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        /// Returns the value.
        pub fn into_inner(self) -> T {
            self.0.into_inner()
        }
    }

    impl<T: ?Sized> UnsafeCell<T> {
        /// Shared access: `f` may read through the pointer, provided that no thread writes during
        /// the call.
        #[inline(always)]
        pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        /// Exclusive access: `f` may write through the pointer, provided that no other thread
        /// accesses the value during the call.
        #[inline(always)]
        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }

        /// The raw pointer, for references that outlive a closure. Loom cannot check accesses
        /// through it.
        #[inline(always)]
        pub const fn get(&self) -> *mut T {
            self.0.get()
        }
    }

    /// Tells the processor that this is a spin loop.
    #[inline(always)]
    pub fn spin_loop() {
        std::hint::spin_loop();
    }
}

#[cfg(loom)]
mod imp {
    pub use loom::lazy_static;
    pub use loom::sync::Arc;
    pub use std::sync::OnceLock;

    /// Atomic types, fences and orderings.
    pub mod atomic {
        pub use loom::sync::atomic::{
            AtomicBool, AtomicI32, AtomicI64, AtomicIsize, AtomicPtr, AtomicU8, AtomicU16,
            AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
        };
        pub use std::sync::atomic::compiler_fence;
    }

    /// Threads.
    pub mod thread {
        pub use loom::thread::{JoinHandle, Thread, ThreadId, current, park, spawn, yield_now};
        pub use std::thread::panicking;
    }

    /// `loom`'s mutex under `parking_lot`'s interface.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);
    /// The guard of [`Mutex`].
    pub type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

    impl<T> Mutex<T> {
        /// A mutex that guards `value`.
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }
        /// Blocks until the lock is free.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(|p| p.into_inner())
        }
        /// Takes the lock if it is free.
        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
        /// The value, for the mutex's only owner.
        pub fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(|p| p.into_inner())
        }
    }

    /// `loom`'s condition variable under `parking_lot`'s interface.
    #[derive(Debug, Default)]
    pub struct Condvar(loom::sync::Condvar);

    impl Condvar {
        /// A condition variable.
        pub fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }
        /// Releases the lock, waits, and takes the lock again.
        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            // SAFETY: the guard is moved out, and a guard of the same lock is written back before
            // any code can read the place.
            unsafe {
                let taken = std::ptr::read(guard);
                let back = self.0.wait(taken).unwrap_or_else(|p| p.into_inner());
                std::ptr::write(guard, back);
            }
        }
        /// Wakes one waiter.
        pub fn notify_one(&self) {
            self.0.notify_one();
        }
        /// Wakes all waiters.
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    /// `loom`'s reader-writer lock under `parking_lot`'s interface.
    #[derive(Debug, Default)]
    pub struct RwLock<T>(loom::sync::RwLock<T>);
    /// The shared guard of [`RwLock`].
    pub type RwLockReadGuard<'a, T> = loom::sync::RwLockReadGuard<'a, T>;
    /// The exclusive guard of [`RwLock`].
    pub type RwLockWriteGuard<'a, T> = loom::sync::RwLockWriteGuard<'a, T>;

    impl<T> RwLock<T> {
        /// A lock that guards `value`.
        pub fn new(value: T) -> Self {
            Self(loom::sync::RwLock::new(value))
        }
        /// Shared access.
        pub fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(|p| p.into_inner())
        }
        /// Exclusive access.
        pub fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(|p| p.into_inner())
        }
    }

    /// `loom`'s cell with the same interface, and a raw pointer that loom does not check.
    #[derive(Debug)]
    pub struct UnsafeCell<T>(loom::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        /// A cell that holds `value`.
        pub fn new(value: T) -> Self {
            Self(loom::cell::UnsafeCell::new(value))
        }
        /// Takes the value out.
        pub fn into_inner(self) -> T {
            self.0.into_inner()
        }
        /// Shared access.
        pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            self.0.with(f)
        }
        /// Exclusive access.
        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            self.0.with_mut(f)
        }
        /// The raw pointer, for references that outlive a closure. Loom checks the access as a
        /// read.
        pub fn get(&self) -> *mut T {
            self.0.with(|p| p.cast_mut())
        }
    }

    /// Lets loom run another thread.
    pub fn spin_loop() {
        loom::thread::yield_now();
    }
}

pub use crossbeam_utils::CachePadded;
pub use imp::*;
