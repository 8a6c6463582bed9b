//! Requests of a stream's holder: to signal, to tell how far it is, to wait.
//!
//! This module must not know what was submitted.

use crate::engine::driver::{DriverDevice, DriverStream};
use crate::engine::state::StreamCore;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::sync::{spin_loop, thread};
use leasehold_core::{Error, Result};
use std::time::{Duration, Instant};

/// Checks before a waiting thread yields.
const SPINS: u32 = 200;
/// The time before a waiting thread sleeps between checks: a sleep lasts for 60 µs at least.
const AWAKE: Duration = Duration::from_micros(300);
/// The longest sleep between checks.
const NAP_MAX: Duration = Duration::from_millis(1);

impl<N: DriverStream> StreamCore<N> {
    /// Queries the driver; see `hal::TimelineSource::refresh`.
    ///
    /// # Errors
    /// `DeviceLost`, or a driver error.
    pub fn refresh(&self) -> Result<u64> {
        let timeline = self.timeline();
        self.serve_inline();
        if timeline.is_idle() {
            return Ok(timeline.completed());
        }
        self.pump();
        self.poll();
        if timeline.completed() < self.issued.load(Ordering::Acquire) {
            self.look()?;
        }
        self.finish_failed();
        match self.core.device.loss() {
            Some(loss) if !timeline.is_idle() => Err(loss),
            _ => Ok(timeline.completed()),
        }
    }

    /// The last holder dropped the stream: the stream's work continues without calls. Returns
    /// whether the pool can lend the stream again at once.
    pub fn let_go(&self) -> bool {
        let timeline = self.timeline();
        if !timeline.is_idle() {
            self.pump();
            if let Err(error) = self.want(timeline.submitted()) {
                tracing::debug!(%error, stream = %self.name(), "the work of a dropped stream could not be signalled");
            }
            self.poll();
            self.finish_failed();
        }
        if timeline.is_idle() {
            // No stream waits for the marks, and nobody asks for the signals. Their events may
            // serve other streams.
            let recorded = std::mem::take(&mut self.state.lock().recorded);
            drop(recorded);
            self.native.rest();
        }
        self.is_sound()
    }

    /// Makes completion observable; see `hal::TimelineSource::signal`.
    ///
    /// # Errors
    /// The cause of the stream's failure, or `DeviceLost`.
    pub fn signal(&self) -> Result<u64> {
        self.healthy()?;
        let submitted = self.timeline().submitted();
        self.want(submitted)?;
        Ok(submitted)
    }

    /// See `hal::Stream::flush`.
    ///
    /// # Errors
    /// `DeviceLost`, or a driver error.
    pub fn flush(&self) -> Result<()> {
        if self.issued.load(Ordering::Acquire) > self.signalled.load(Ordering::Acquire) {
            let result = self.signal_locked(&mut self.state.lock());
            result.map_err(|e| self.core.settle(e))?;
        }
        match self.core.device.loss() {
            Some(loss) => Err(loss),
            None => Ok(()),
        }
    }

    /// Ensures that `value` gets published without further calls.
    pub(crate) fn want(&self, value: u64) -> Result<()> {
        self.wanted.fetch_max(value, Ordering::AcqRel);
        if self.timeline().completed() >= value {
            return Ok(());
        }
        if self.signalled.load(Ordering::Acquire) < value.min(self.issued.load(Ordering::Acquire)) {
            let result = self.signal_locked(&mut self.state.lock());
            result.map_err(|e| self.core.settle(e))?;
        }
        self.enlist();
        Ok(())
    }

    /// The timeline's publisher.
    pub(crate) fn publish_for(&self, value: u64, timeout: Option<Duration>) {
        if self.core.threads.is_inline() {
            // The timeline shows the outcome.
            let _ = self.wait_host(value, timeout);
        } else if let Err(error) = self.want(value) {
            tracing::debug!(%error, stream = %self.name(), "completion could not be signalled");
        }
    }

    /// Waits for work that continues without calls: the driver's work, the host's part of it, and
    /// host calls. The call does not wait for work that a host timeline or another timeline holds
    /// back.
    pub fn run_down(&self) {
        let mut looks = 0u32;
        loop {
            // The timeline shows a failure.
            let _ = self.refresh();
            if self.timeline().is_idle() || !self.is_moving() {
                return;
            }
            looks += 1;
            if looks < SPINS || self.core.device.poll_interval().is_zero() {
                thread::yield_now();
            } else {
                thread::sleep(NAP_MAX);
            }
        }
    }

    /// Without threads, does the work that a thread would do.
    pub(crate) fn serve_inline(&self) {
        if self.core.threads.is_inline() {
            self.core.threads.round();
        }
    }

    /// Blocks until a value is over; see `hal::TimelineSource::wait_host`.
    ///
    /// # Errors
    /// See `hal::TimelineSource::wait_host`; `InvalidState` in a host call of this very stream.
    pub fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        let timeline = self.timeline();
        if timeline.check(value)? {
            return Ok(());
        }
        timeline.check_caller(value)?;
        let begun = Instant::now();
        let deadline = timeout.and_then(|t| begun.checked_add(t));
        let interval = self.core.device.poll_interval();
        let mut nap = interval.max(Duration::from_micros(10));
        let mut looks = 0u32;
        loop {
            self.serve_inline();
            self.pump();
            let aim = value.min(self.issued.load(Ordering::Acquire));
            if self.signalled.load(Ordering::Acquire) < aim {
                let result = self.signal_locked(&mut self.state.lock());
                result.map_err(|e| self.core.settle(e))?;
            }
            if timeline.completed() < aim {
                self.poll();
            }
            // Without an interval the device advances only when it is queried: so each round
            // queries it. Pauses are few, because on a busy machine a thread that yields may not
            // run again for long.
            if (looks % 64 == 63 || interval.is_zero()) && timeline.completed() < aim {
                self.look()?;
            }
            self.finish_failed();
            if timeline.check(value)? {
                return Ok(());
            }
            if let Some(loss) = self.core.device.loss() {
                self.core.settle_loss();
                timeline.check(value)?;
                return Err(loss);
            }
            if deadline.is_some_and(|at| Instant::now() >= at) {
                return Err(timeline.late(value, timeout.unwrap_or_default()));
            }
            looks += 1;
            if looks < SPINS
                || interval.is_zero() && aim > timeline.completed() && !looks.is_multiple_of(SPINS)
            {
                spin_loop();
            } else if begun.elapsed() < AWAKE || interval.is_zero() && aim > timeline.completed() {
                thread::yield_now();
            } else {
                let left = deadline
                    .map_or(nap, |at| at.saturating_duration_since(Instant::now()).min(nap));
                match timeline.wait_published(value, Some(left)) {
                    Ok(()) => return Ok(()),
                    Err(Error::Timeout(_)) => {}
                    Err(e) => return Err(e),
                }
                // The host polls the device at its interval. For the host's part, another thread
                // wakes this one.
                if timeline.completed() >= aim {
                    nap = (nap * 2).min(NAP_MAX);
                }
            }
        }
    }
}
