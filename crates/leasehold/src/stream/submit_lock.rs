//! The submission lock of a stream: its scratch memory behind a mutex, with the holder known.
//!
//! A kernel session's staged launches are a part of that memory.

use crate::kernel::rules::Rules;
use crate::trace::track::Track;
use crate::view::Operand;
use leasehold_core::sync::atomic::{AtomicUsize, Ordering};
use leasehold_core::sync::{Arc, Mutex, MutexGuard};
use leasehold_core::{Error, Lease, Result, Timepoint};
use leasehold_hal::{Binding, Dispatch, Op, Pipeline};

/// One launch, staged.
#[derive(Clone, Copy)]
pub(crate) struct StagedLaunch {
    pub(crate) pipeline: *const Lease<Pipeline>,
    pub(crate) rules: *const Arc<Rules>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) bindings: (u32, u32),
    pub(crate) params: (u32, u32),
}

/// The launches that a session stages; part of the stream's scratch. The raw pointers come from
/// borrows that outlive the session.
#[derive(Default)]
pub(crate) struct Staged {
    pub(crate) launches: Vec<StagedLaunch>,
    pub(crate) bindings: Vec<Binding>,
    pub(crate) params: Vec<u8>,
    /// The operands of all launches, for waits and tokens.
    pub(crate) operands: Vec<Operand<'static>>,
    /// Where the present launch's bindings and parameters begin.
    pub(crate) first_binding: usize,
    pub(crate) first_param: usize,
    /// All bits of the addresses of the present launch's bindings.
    pub(crate) addresses: u64,
}

impl Staged {
    pub(crate) fn clear(&mut self) {
        self.launches.clear();
        self.bindings.clear();
        self.params.clear();
        self.operands.clear();
    }

    /// Adds the launches to a submission.
    #[inline]
    pub(crate) fn add_launches(&self, ops: &mut Vec<Op<'static>>) {
        ops.extend(self.launches.iter().map(|launch| {
            // SAFETY: pipelines are borrowed for the session's life; the slices lie in the scratch,
            // which nobody touches while the submission lock is held; `finish` clears the
            // operations before either ends.
            unsafe {
                Op::Dispatch(Dispatch {
                    pipeline: &*launch.pipeline,
                    grid: launch.grid,
                    block: launch.block,
                    shared: launch.shared,
                    bindings: std::slice::from_raw_parts(
                        self.bindings.as_ptr().add(launch.bindings.0 as usize),
                        launch.bindings.1 as usize,
                    ),
                    params: std::slice::from_raw_parts(
                        self.params.as_ptr().add(launch.params.0 as usize),
                        launch.params.1 as usize,
                    ),
                })
            }
        }));
    }
}

/// Memory that a stream keeps between calls, so that a launch allocates nothing.
pub(crate) struct Scratch {
    pub(crate) session: Staged,
    pub(crate) waits: Vec<Timepoint>,
    /// Scratch for building a submission; empty between calls.
    pub(crate) ops: Vec<Op<'static>>,
    /// The trace that notes the stream's submissions, if one does.
    pub(crate) trace: Option<Arc<Track>>,
}

impl Scratch {
    /// Returns whether a submission waits for nothing and is not traced: one question for both.
    #[inline(always)]
    pub(crate) fn goes_straight(&self) -> bool {
        let trace = self.trace.as_ref().map_or(0, |track| Arc::as_ptr(track).addr());
        self.waits.len() | trace == 0
    }
}

// SAFETY: the raw pointers that keep it from being `Send` are what a session staged. They are read
// only by that session's `finish`, on the session's own thread, while what they point to is
// borrowed.
unsafe impl Send for Scratch {}

thread_local! {
    /// Its address is the thread's name among the living.
    static ME: u8 = const { 0 };
}

/// Tells the calling thread from every other that lives.
#[inline]
pub(crate) fn this_thread() -> usize {
    ME.with(|me| std::ptr::from_ref(me).addr())
}

/// A scratch and the submission lock at it: of a stream, or of a recording.
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
                trace: None,
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
        if self.holder.load(Ordering::Relaxed) == this_thread() {
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
            None if self.holder.load(Ordering::Relaxed) == this_thread() => Err(held_by_me()),
            None => Err(Error::Occupied {
                resource: "stream (another thread's call or session is at its turn)",
            }),
        }
    }

    #[inline]
    fn taken<'s>(&'s self, scratch: MutexGuard<'s, Scratch>) -> SubmitGuard<'s> {
        self.holder.store(this_thread(), Ordering::Relaxed);
        SubmitGuard { submit_lock: self, scratch }
    }
}

#[cold]
fn held_by_me() -> Error {
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
