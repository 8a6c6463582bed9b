//! Threads for one piece of work: all of them begin, or none does and the caller learns why.
//!
//! `std::thread::spawn` panics where the system gives no thread; what is limited from outside is an
//! error here.

use crate::sync::Mutex;
use crate::{Error, Result};
use std::panic::resume_unwind;
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// Starts a thread of a scope.
///
/// # Errors
/// `Unavailable` when the system gives no thread.
pub fn spawn_scoped<'scope, R: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> R + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, R>> {
    Builder::new().spawn_scoped(scope, work).map_err(|e| refused(&e))
}

/// The error for a thread that the system does not give.
#[must_use]
pub fn refused(e: &std::io::Error) -> Error {
    Error::Unavailable(format!("the system gives no more threads: {e}; raise the limit, or ask for fewer").into())
}

/// Runs each piece of work on a thread of its own and returns the results in the same order. Blocks
/// until all are over.
///
/// No piece begins before every thread is there; where the system refuses one, none begins. A panic
/// goes on in the caller.
///
/// ```
/// let squares = leasehold_core::crew::run((0..4).map(|n| move || n * n))?;
/// assert_eq!(squares, [0, 1, 4, 9]);
/// # Ok::<(), leasehold_core::Error>(())
/// ```
///
/// # Errors
/// `Unavailable` when the system gives too few threads.
pub fn run<R: Send, W: FnOnce() -> R + Send>(work: impl IntoIterator<Item = W>) -> Result<Vec<R>> {
    // Held while threads are started; then it says whether they begin.
    let begin = Mutex::new(false);
    std::thread::scope(|scope| {
        let mut started = begin.lock();
        let mut crew = Vec::new();
        let mut missing = None;
        for work in work {
            let begin = &begin;
            match spawn_scoped(scope, move || {
                let begin = *begin.lock();
                begin.then(work)
            }) {
                Ok(thread) => crew.push(thread),
                Err(e) => {
                    missing = Some(e);
                    break;
                }
            }
        }
        *started = missing.is_none();
        drop(started);
        let results: Vec<Option<R>> =
            crew.into_iter().map(|t| t.join().unwrap_or_else(|panic| resume_unwind(panic))).collect();
        match missing {
            Some(e) => Err(e),
            None => Ok(results.into_iter().flatten().collect()),
        }
    })
}
