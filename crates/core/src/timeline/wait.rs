//! Waits of threads for timelines, the host calls that must not wait, and the wait for the
//! remaining work of a failed timeline. The head of the parent module has the protocol of wake-up.
//!
//! This module must not know streams or devices.

use super::Timeline;
#[cfg(not(loom))]
use super::{NEVER, TimelineId, VALUE_LIMIT};
#[cfg(not(loom))]
use crate::error::Error;
use crate::error::Result;
#[cfg(not(loom))]
use crate::panics::quietly;
use crate::sync::atomic::{Ordering, fence};
#[cfg(not(loom))]
use std::cell::Cell;
use std::time::Duration;
#[cfg(not(loom))]
use std::time::Instant;

/// The longest time that a synchronisation waits for the remaining work of a failed timeline.
#[cfg(not(loom))]
const LONGEST_DRAIN: Duration = Duration::from_secs(1);

#[cfg(not(loom))]
thread_local! {
    /// The timeline whose host call this thread runs, and the call's value.
    static CALL: Cell<Option<(TimelineId, u64)>> = const { Cell::new(None) };
}

impl Timeline {
    /// Runs a host call of this timeline's `value`. A wait of this thread for this value or a later
    /// one would never end. Until `call` returns, such a wait is an error.
    #[cfg(not(loom))]
    pub fn run_call<R>(&self, value: u64, call: impl FnOnce() -> R) -> R {
        struct Former(Option<(TimelineId, u64)>);
        impl Drop for Former {
            fn drop(&mut self) {
                CALL.set(self.0);
            }
        }
        let _former = Former(CALL.replace(Some((self.id, value))));
        call()
    }

    /// Checks that this thread may wait for `value`, and that it runs no [host
    /// call](Self::run_call) that must end first.
    ///
    /// # Errors
    /// `InvalidState` if it runs such a call.
    #[cfg(not(loom))]
    pub fn check_caller(&self, value: u64) -> Result<()> {
        match CALL.get() {
            Some((timeline, running)) if timeline == self.id && value >= running => {
                Err(Error::state("a host call waits for the stream that it runs on"))
            }
            _ => Ok(()),
        }
    }

    /// Blocks until `value` is over or known to have failed. Works for timelines of every backend.
    ///
    /// # Errors
    /// The cause if `value` failed; `Timeout`; `InvalidState` in a [host call](Self::run_call) that
    /// must end first. A timeout of zero polls.
    #[cfg(not(loom))]
    pub fn wait(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        if self.check(value)? {
            return Ok(());
        }
        self.check_caller(value)?;
        let publisher = self.publisher.lock().clone();
        let Some(publish) = publisher else { return self.wait_published(value, timeout) };
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        publish(value, timeout)?;
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        self.wait_published(value, if deadline.is_some() { left } else { timeout })
    }

    /// The error of a wait for `value` that ends after `limit`.
    #[cfg(not(loom))]
    #[cold]
    pub fn late(&self, value: u64, limit: Duration) -> Error {
        let (id, done) = (self.id(), self.completed());
        let text = format!(
            "{id:?} is at {done} and did not come to {value} within {limit:?}; wait longer, or look at what its work waits for"
        );
        Error::Timeout(text.into())
    }

    /// Like [`wait`](Self::wait), for a backend in which another thread publishes completion: the
    /// call does not use the publisher.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    #[cfg(not(loom))]
    pub fn wait_published(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        if self.check(value)? {
            return Ok(());
        }
        let deadline = timeout.map(|t| Instant::now().checked_add(t));
        self.waiters.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut guard = self.sleep.lock();
        let result = loop {
            match self.check(value) {
                Ok(true) => break Ok(()),
                Err(e) => break Err(e),
                Ok(false) => {}
            }
            match deadline {
                Some(Some(at)) => {
                    if self.wake.wait_until(&mut guard, at).timed_out() {
                        break match self.check(value) {
                            Ok(true) => Ok(()),
                            Err(e) => Err(e),
                            Ok(false) => Err(self.late(value, timeout.unwrap_or_default())),
                        };
                    }
                }
                _ => self.wake.wait(&mut guard),
            }
        };
        drop(guard);
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        result
    }

    /// Has `call` told what becomes of a host timeline's value, once: on the thread that signals,
    /// fails or ends it, or at once. It must not block. Its panic is lost.
    ///
    /// # Errors
    /// The call, if the timeline is no host timeline's.
    #[cfg(not(loom))]
    pub fn call_when_over<C>(&self, value: u64, call: C) -> std::result::Result<(), C>
    where
        C: FnOnce(Result<()>) + Send + 'static,
    {
        let value = value.min(VALUE_LIMIT - 1);
        if self.expected.fetch_max(value, Ordering::AcqRel) == NEVER {
            return Err(call);
        }
        self.calls.lock().push((value, Box::new(call)));
        self.make_calls();
        Ok(())
    }

    /// Makes the calls whose values are over. The caller holds no lock.
    #[cfg(not(loom))]
    pub(super) fn make_calls(&self) {
        loop {
            let mut calls = self.calls.lock();
            let over = |(value, _): &(u64, _)| !matches!(self.check(*value), Ok(false));
            let Some(at) = calls.iter().position(over) else { return };
            let (value, call) = calls.swap_remove(at);
            drop(calls);
            quietly(|| call(self.check(value).map(drop)));
        }
    }

    /// Waits, on a failed timeline, until `value` has [passed](Self::has_passed), so that none of
    /// its work still runs.
    ///
    /// Returns at `deadline`, and after one second at the latest, so that a known cause is reported
    /// soon. Returns at once in a [host call](Self::run_call) that must end first. `refresh`
    /// updates the timeline's completed value, for timelines that publish only on request. Backends
    /// call this between a failure and its report.
    #[cold]
    #[cfg(not(loom))]
    pub fn drain(&self, value: u64, deadline: Option<Instant>, refresh: impl Fn() -> Result<u64>) {
        if self.check_caller(value).is_err() {
            return;
        }
        let last = Instant::now() + LONGEST_DRAIN;
        let deadline = deadline.map_or(last, |at| at.min(last));
        let mut looks = 0u32;
        while !self.has_passed(value) {
            if self.completed() >= value {
                self.ask(value);
            } else if refresh().is_err() {
                // The error of a lost device is known already.
                return;
            }
            if Instant::now() >= deadline {
                return;
            }
            looks += 1;
            if looks < 100 {
                std::thread::yield_now()
            } else {
                std::thread::sleep(Duration::from_micros(50))
            }
        }
    }

    /// Requests publication on another timeline whose pending work keeps a failed `value` from
    /// having [passed](Self::has_passed). Does not block.
    #[cold]
    #[cfg(not(loom))]
    pub fn ask(&self, value: u64) {
        if let Some(point) = self.obstacle(value).filter(|p| p.timeline != self.id) {
            // The timeline shows the result of this wait.
            let _ = point.timeline().wait(point.value, Some(Duration::ZERO));
        }
    }

    /// Blocks until `value` is over or failed. Has no deadline, because loom has no clock.
    #[cfg(loom)]
    pub fn wait(&self, value: u64, _timeout: Option<Duration>) -> Result<()> {
        self.waiters.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut guard = self.sleep.lock();
        let result = loop {
            match self.check(value) {
                Ok(true) => break Ok(()),
                Err(e) => break Err(e),
                Ok(false) => self.wake.wait(&mut guard),
            }
        };
        drop(guard);
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        result
    }
}
