//! Functions that run when a thread ends, also for a host without memory: the C library ends the
//! process if it has no memory for the destructor of a thread-local value.
//!
//! This module must not know what the functions do.

use crate::sync::atomic::{AtomicUsize, Ordering};

/// A function that runs at the end of each thread that asked for it.
#[derive(Debug)]
pub struct ThreadEnd {
    run: fn(),
    /// The system's key plus one; 0 before there is one.
    key: AtomicUsize,
}

impl ThreadEnd {
    /// `run` must not panic. It may run again for a thread that asks again while it ends.
    #[must_use]
    pub const fn new(run: fn()) -> Self {
        Self { run, key: AtomicUsize::new(0) }
    }
}

#[cfg(unix)]
mod imp {
    use super::*;
    use std::ffi::c_void;

    unsafe extern "C" fn ends(end: *mut c_void) {
        // SAFETY: `watch` stored a reference to a `ThreadEnd` that lives as long as the process.
        let end = unsafe { &*end.cast::<ThreadEnd>() };
        (end.run)();
    }

    impl ThreadEnd {
        fn key(&self) -> Option<libc::pthread_key_t> {
            let known = self.key.load(Ordering::Acquire);
            if known != 0 {
                return Some((known - 1) as libc::pthread_key_t);
            }
            let mut key = 0;
            // SAFETY: the key is written to a local, and the destructor takes what `watch` stores.
            if unsafe { libc::pthread_key_create(&raw mut key, Some(ends)) } != 0 {
                return None;
            }
            let made = key as usize + 1;
            match self.key.compare_exchange(0, made, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => Some(key),
                Err(first) => {
                    // SAFETY: the key was made above, and nobody has it.
                    unsafe { libc::pthread_key_delete(key) };
                    Some((first - 1) as libc::pthread_key_t)
                }
            }
        }

        /// Has the function run when the calling thread ends. Returns `false` without memory.
        pub fn watch(&'static self) -> bool {
            let this = std::ptr::from_ref(self).cast::<c_void>();
            // SAFETY: the key is never deleted, and its destructor takes this reference.
            self.key().is_some_and(|key| unsafe { libc::pthread_setspecific(key, this) } == 0)
        }
    }
}

#[cfg(not(unix))]
mod imp {
    use super::*;
    use std::cell::RefCell;

    struct Ends(RefCell<Vec<&'static ThreadEnd>>);

    impl Drop for Ends {
        fn drop(&mut self) {
            self.0.take().into_iter().for_each(|end| (end.run)());
        }
    }

    thread_local! {
        static ENDS: Ends = const { Ends(RefCell::new(Vec::new())) };
    }

    impl ThreadEnd {
        /// Has the function run when the calling thread ends. Returns `false` without memory.
        pub fn watch(&'static self) -> bool {
            let _ = (&self.key, Ordering::Acquire);
            ENDS.try_with(|ends| {
                let mut ends = ends.0.borrow_mut();
                let room = ends.try_reserve(1).is_ok();
                if room && !ends.iter().any(|end| std::ptr::eq(*end, self)) {
                    ends.push(self);
                }
                room
            })
            .unwrap_or(false)
        }
    }
}

#[cfg(test)]
#[path = "../tests/unit/thread_end.rs"]
mod tests;
