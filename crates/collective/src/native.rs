//! The life of a library's communicators: made within a limit, given back without a wait.
//!
//! A library may block as it makes or destroys its part, and may never come back. So both are done
//! on threads of their own. What comes too late is given back by the thread that made it.

use crate::driver::ops::Communicator;
use leasehold::backend::sync::{Arc, Condvar, Mutex, thread};
use leasehold::{Error, Result, Runtime, Timepoint};
use std::mem::ManuallyDrop;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The time that a library gets above the limit that it knows itself.
const GRACE: Duration = Duration::from_secs(5);

/// A library's part of a communicator, which goes back to the library when it is dropped.
pub(crate) struct Native(Arc<dyn Communicator>);

/// Communicators that are being given back.
static RETIRING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

impl Native {
    /// Makes a part on a thread of its own.
    ///
    /// # Errors
    /// `Timeout` if it takes longer than the limit and a grace; its own.
    pub(crate) fn make(
        what: &str,
        limit: Duration,
        make: impl FnOnce() -> Result<Option<Arc<dyn Communicator>>> + Send + 'static,
    ) -> Result<Option<Self>> {
        let (tell, hear) = mpsc::sync_channel(1);
        thread::Builder::new().name("lh-collective".to_owned()).spawn(move || {
            let made = make().map(|part| part.map(Self));
            // Nobody hears it any more: its drop gives it back.
            drop(tell.send(made));
        })?;
        match hear.recv_timeout(limit.saturating_add(GRACE)) {
            Ok(made) => made,
            Err(mpsc::RecvTimeoutError::Timeout) => Err(Error::Timeout(
                format!("{what}: the library has not made it within {limit:?}; look at what the other ranks do").into(),
            )),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(Error::state(format!("{what}: the library panicked as it made it")))
            }
        }
    }

    pub(crate) fn part(&self) -> &dyn Communicator {
        &*self.0
    }

    /// Ends the part's work, on a thread of its own: waits for `limit` at most.
    pub(crate) fn abort(&self, cause: Error, limit: Duration) -> Result<()> {
        let (part, (tell, hear)) = (self.0.clone(), mpsc::sync_channel(1));
        thread::Builder::new().name("lh-collective".to_owned()).spawn(move || {
            part.abort(cause);
            let _ = tell.send(());
        })?;
        hear.recv_timeout(limit).map_err(|_| {
            Error::Timeout(
                format!("the library has not aborted within {limit:?}; it goes on to, and its memory stays taken").into(),
            )
        })
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        let (part, retiring) = (self.0.clone(), Retiring::begin());
        let destroy = move || {
            if let Err(error) = part.destroy() {
                tracing::warn!(%error, "a communicator was not given back");
            }
            // The resources of the part are gone once it is seen as over.
            drop(part);
            drop(retiring);
        };
        // Without a thread the part is leaked, which blocks nobody.
        drop(thread::Builder::new().name("lh-collective".to_owned()).spawn(destroy));
    }
}

/// A communicator that is being given back.
struct Retiring;

impl Retiring {
    fn begin() -> Self {
        *RETIRING.0.lock() += 1;
        Self
    }
}

impl Drop for Retiring {
    fn drop(&mut self) {
        *RETIRING.0.lock() -= 1;
        RETIRING.1.notify_all();
    }
}

/// Keeps a value until timepoints are over, for `limit` at most. Does not wait for that.
pub(crate) fn keep_until(
    points: Vec<Timepoint>,
    limit: Duration,
    runtime: &Runtime,
    kept: impl Send + 'static,
) {
    if points.iter().all(|point| point.is_settled()) {
        return;
    }
    let (runtime, retiring, kept) = (runtime.clone(), Retiring::begin(), ManuallyDrop::new(kept));
    let wait = move || {
        // A stream that has failed is over too.
        let _ = runtime.wait_for_timeout(points, limit);
        drop(ManuallyDrop::into_inner(kept));
        drop((runtime, retiring));
    };
    // Without a thread the value is leaked, which blocks nobody.
    drop(thread::Builder::new().name("lh-collective".to_owned()).spawn(wait));
}

/// Waits until all communicators that were dropped are given back.
///
/// # Errors
/// `Timeout`.
pub(crate) fn wait_for_retired(limit: Duration) -> Result<()> {
    let until = Instant::now().checked_add(limit);
    let (count, changed) = &RETIRING;
    let mut count = count.lock();
    while *count != 0 {
        let over = match until {
            Some(until) => changed.wait_until(&mut count, until).timed_out(),
            None => {
                changed.wait(&mut count);
                false
            }
        };
        if over && *count != 0 {
            return Err(Error::Timeout(
                format!("{} communicators were not given back within {limit:?}; wait longer, or look at what their other ranks do", *count).into(),
            ));
        }
    }
    Ok(())
}
