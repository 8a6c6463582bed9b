//! The submission lock of a stream: its scratch memory behind a mutex, with the holder known.

use super::staged::Staged;
use leasehold_core::sync::atomic::{AtomicUsize, Ordering};
use leasehold_core::sync::{Mutex, MutexGuard};
use leasehold_core::{Error, Result, Timepoint};
use leasehold_hal::Op;

/// Memory that a stream keeps between calls, so that a launch allocates nothing.
pub(crate) struct Scratch {
    pub(crate) session: Staged,
    pub(crate) waits: Vec<Timepoint>,
    /// Scratch for building a submission; empty between calls.
    pub(crate) ops: Vec<Op<'static>>,
}

// SAFETY: the raw pointers that keep it from being `Send` are what a session staged. They are read
// only by that session's `finish`, on the session's own thread, while what they point to is
// borrowed.
unsafe impl Send for Scratch {}

thread_local! {
    /// Its address is the thread's name among the living.
    static ME: u8 = const { 0 };
}

#[inline]
fn me() -> usize {
    ME.with(|me| std::ptr::from_ref(me).addr())
}

/// A scratch and the submission lock at it: of a stream, or of a thread that records.
pub(crate) struct SubmitLock {
    /// The thread that holds the submission lock, 0 for none. Only its holder writes it, so every
    /// thread knows whether it is itself.
    holder: AtomicUsize,
    scratch: Mutex<Scratch>,
}

impl SubmitLock {
    pub(crate) fn new() -> Self {
        Self {
            holder: AtomicUsize::new(0),
            scratch: Mutex::new(Scratch {
                session: Staged::default(),
                waits: Vec::with_capacity(8),
                ops: Vec::with_capacity(16),
            }),
        }
    }

    /// Returns whether somebody holds the submission lock.
    pub(crate) fn is_taken(&self) -> bool {
        self.scratch.try_lock().is_none()
    }

    /// Takes the submission lock; waits while another thread holds it.
    ///
    /// # Errors
    /// `Occupied` when this thread holds it.
    #[inline]
    pub(crate) fn submit_guard(&self) -> Result<SubmitGuard<'_>> {
        if self.holder.load(Ordering::Relaxed) == me() {
            return Err(held_by_me());
        }
        Ok(self.taken(self.scratch.lock()))
    }

    /// Takes the submission lock if nobody holds it.
    ///
    /// # Errors
    /// `Occupied` when somebody does.
    pub(crate) fn try_submit_guard(&self) -> Result<SubmitGuard<'_>> {
        match self.scratch.try_lock() {
            Some(scratch) => Ok(self.taken(scratch)),
            None if self.holder.load(Ordering::Relaxed) == me() => Err(held_by_me()),
            None => Err(Error::Occupied {
                resource: "stream (another thread's call or session is at its turn)",
            }),
        }
    }

    #[inline]
    fn taken<'s>(&'s self, scratch: MutexGuard<'s, Scratch>) -> SubmitGuard<'s> {
        self.holder.store(me(), Ordering::Relaxed);
        SubmitGuard { submit_lock: self, scratch }
    }
}

#[cold]
pub(super) fn held_by_me() -> Error {
    Error::Occupied {
        resource: "stream (this very thread has a session open on it, and would wait for itself)",
    }
}

/// The right to submit to a stream and to use its scratch.
pub(crate) struct SubmitGuard<'s> {
    submit_lock: &'s SubmitLock,
    scratch: MutexGuard<'s, Scratch>,
}

impl SubmitGuard<'_> {
    /// The scratch.
    #[inline]
    pub(crate) fn scratch(&mut self) -> &mut Scratch {
        &mut self.scratch
    }
}

impl Drop for SubmitGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        // Before the lock is free: the next holder writes after it.
        self.submit_lock.holder.store(0, Ordering::Relaxed);
    }
}
