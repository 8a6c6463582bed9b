//! Waits on the host, which Ctrl-C ends.

use crate::errors::raise;
use leasehold::{Error, Result};
use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// The longest wait between two looks at the interpreter's signals.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

/// Waits by calls of `wait` with a limit each, in all for a limited time if there is a limit.
/// Ctrl-C ends the wait between two calls, on a thread with or without the interpreter's lock.
pub(crate) fn until(
    limit: Option<Duration>,
    mut wait: impl FnMut(Duration) -> Result<()>,
) -> Result<()> {
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let is_last = left.is_some_and(|left| left <= LOOK);
        match wait(left.unwrap_or(LOOK).min(LOOK)) {
            Err(Error::Timeout(_)) if !is_last => look()?,
            Err(Error::Timeout(_)) => {
                let limit = limit.unwrap_or_default();
                return Err(Error::Timeout(
                    format!("the work was not over after {limit:?}; wait longer").into(),
                ));
            }
            other => return other,
        }
    }
}

/// As [`until`], without the interpreter's lock.
pub(crate) fn within(
    py: Python<'_>,
    limit: Option<Duration>,
    wait: impl Fn(Duration) -> Result<()> + Sync,
) -> PyResult<()> {
    py.detach(|| until(limit, &wait)).map_err(raise)
}

/// Runs the handlers of the interpreter's signals.
///
/// # Errors
/// The exception of a handler, as the foreign error that [`raise`] raises again.
pub(crate) fn look() -> Result<()> {
    Python::try_attach(|py| py.check_signals()).unwrap_or(Ok(())).map_err(Error::other)
}

/// Whether a wait was ended by the exception of a signal's handler.
pub(crate) fn is_interrupt(error: &Error) -> bool {
    matches!(error, Error::Other(foreign) if foreign.is::<PyErr>())
}
