//! Scoped threads for a fixed set of tasks: either all threads start or none does.
//!
//! `std::thread::spawn` panics if the system refuses a thread. This module returns an error
//! instead.

use crate::sync::Mutex;
use crate::{Error, Result};
use std::panic::resume_unwind;
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// Starts a thread of a scope.
///
/// # Errors
/// `Unavailable` if the system refuses the thread.
pub fn spawn_scoped<'scope, R: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> R + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, R>> {
    Builder::new().spawn_scoped(scope, work).map_err(|e| refused(&e))
}

/// The error for a thread that the system refuses.
#[must_use]
pub fn refused(e: &std::io::Error) -> Error {
    Error::Unavailable(
        format!("the system gives no more threads: {e}; raise the limit, or ask for fewer").into(),
    )
}

/// Runs each task on a thread of its own and returns the results in the same order. Blocks until
/// all tasks are over.
///
/// No task begins before every thread exists. If the system refuses a thread, no task begins. A
/// panic of a task continues in the caller.
///
/// ```
/// let squares = leasehold_core::threads::run((0..4).map(|n| move || n * n))?;
/// assert_eq!(squares, [0, 1, 4, 9]);
/// # Ok::<(), leasehold_core::Error>(())
/// ```
///
/// # Errors
/// `Unavailable` if the system refuses a thread.
pub fn run<R: Send, W: FnOnce() -> R + Send>(work: impl IntoIterator<Item = W>) -> Result<Vec<R>> {
    // The caller holds the lock while it starts the threads. Then the value says whether the tasks
    // begin.
    let begin = Mutex::new(false);
    std::thread::scope(|scope| {
        let mut started = begin.lock();
        let mut running = Vec::new();
        let mut missing = None;
        for work in work {
            let begin = &begin;
            match spawn_scoped(scope, move || {
                let begin = *begin.lock();
                begin.then(work)
            }) {
                Ok(thread) => running.push(thread),
                Err(e) => {
                    missing = Some(e);
                    break;
                }
            }
        }
        *started = missing.is_none();
        drop(started);
        let results: Vec<Option<R>> = running
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect();
        match missing {
            Some(e) => Err(e),
            None => Ok(results.into_iter().flatten().collect()),
        }
    })
}
