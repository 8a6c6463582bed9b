//! Completion: signalling by the driver, observation, publication, and waiting.
//!
//! This module must not know what was submitted.

use super::{AWAKE, Held, NAP_MAX, SPINS, State, StreamCore};
use crate::deferred::PumpState;
use crate::driver::{DriverDevice, DriverStream};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::sync::{spin_loop, thread};
use leasehold_core::{Error, Result, VALUE_LIMIT};
use std::time::{Duration, Instant};

impl<N: DriverStream> StreamCore<N> {
    /// Tells the driver to signal completion up to the last issued value. The caller holds the
    /// lock.
    pub(crate) fn signal_locked(&self, state: &mut State<N>) -> Result<()> {
        let issued = self.issued.load(Ordering::Relaxed);
        if self.signalled.load(Ordering::Relaxed) >= issued {
            return Ok(());
        }
        self.native.signal(issued)?;
        state.dirty = true;
        self.signalled.store(issued, Ordering::Release);
        Ok(())
    }

    /// Handles an error after the lock is released.
    pub(crate) fn after(&self, result: Result<()>) {
        if let Err(e) = result {
            let e = self.core.settle(e);
            tracing::debug!(error = %e, stream = %self.name(), "completion could not be signalled");
        }
    }

    /// The last value that the driver signalled.
    pub(crate) fn reached(&self) -> u64 {
        #[cfg(feature = "planted-defects")]
        if self.core.config.has(crate::defects::Defect::ReuseBeforeCompletion) {
            return self.issued.load(Ordering::Acquire);
        }
        self.native.reached()
    }

    /// Publishes the values that the device is done with. Returns whether a new value was
    /// published.
    pub(crate) fn poll(&self) -> bool {
        let timeline = self.timeline();
        let reached = self.reached().min(timeline.submitted());
        reached > timeline.completed() && self.publish(reached)
    }

    /// The device is done up to `value`: runs the host's part, then publishes.
    pub(crate) fn publish(&self, value: u64) -> bool {
        let timeline = self.timeline();
        let before = timeline.completed();
        #[cfg(feature = "planted-defects")]
        if self.core.config.has(crate::defects::Defect::EarlyPublication) {
            self.owner.complete(value);
            if let Some(stream) = self.me.upgrade() {
                self.core.watch.attend(&stream);
            }
            thread::yield_now();
        }
        let sound = !timeline.failed(VALUE_LIMIT);
        self.note_failure();
        if let Some(publish) = self.host.carry_out(self, value, value) {
            self.owner.complete(publish);
        }
        if sound && timeline.failed(VALUE_LIMIT) {
            self.after_failure();
        }
        timeline.completed() > before
    }

    /// Poisons the timeline if the driver has reported that work failed on the device.
    pub(crate) fn note_failure(&self) {
        if let Some((value, cause)) = self.native.failure()
            && !self.timeline().failed(value)
        {
            let cause = self.fault("submission".to_owned(), value, &cause);
            self.owner.poison(value, cause);
        }
    }

    /// A stream that has waited for `value` is done, so this stream is done up to `value` too. The
    /// call publishes `value`, unless the host's part of this stream is not over. `abroad`: the
    /// other stream is of another context.
    pub(crate) fn passed(&self, value: u64, abroad: bool) {
        if abroad && self.timeline().completed() < value {
            // A driver may release the streams that wait for a lost device. The context of this
            // stream may not know of the loss yet.
            let _ = self.query();
            self.core.settle_loss();
        }
        self.publish(value);
    }

    /// Whether the driver is done with all work of the stream.
    pub(crate) fn query(&self) -> Result<bool> {
        self.native.query()
    }

    /// Queries the driver; see `hal::TimelineSource::refresh`.
    ///
    /// # Errors
    /// `DeviceLost`, or a driver error.
    pub fn refresh(&self) -> Result<u64> {
        let timeline = self.timeline();
        self.take_turn();
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

    /// Queries the driver whether all work is over, after it ensures that a signal is pending.
    pub(crate) fn look(&self) -> Result<()> {
        let before = self.issued.load(Ordering::Acquire);
        if self.signalled.load(Ordering::Acquire) < before {
            let result = self.signal_locked(&mut self.state.lock());
            result.map_err(|e| self.core.settle(e))?;
        }
        if self.query().map_err(|e| self.core.settle(e))? {
            self.publish(before);
        }
        Ok(())
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
        self.attend();
        Ok(())
    }

    /// The timeline's publisher.
    pub(crate) fn publish_for(&self, value: u64, timeout: Option<Duration>) {
        if self.core.watch.is_inline() {
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

    /// Whether some work of the stream continues by itself, if the stream is only observed.
    pub(crate) fn is_moving(&self) -> bool {
        let state = self.state.lock();
        let given = self.timeline().completed() < self.issued.load(Ordering::Acquire);
        given
            || state.pump != PumpState::Idle
            || (state.again || state.held == Held::ForRoom) && !state.deferred.is_empty()
            || state.fence.is_some()
            || self.timeline().failed(VALUE_LIMIT)
    }

    /// Puts the stream on the watcher's list. The watcher serves the stream as long as it needs
    /// attention.
    pub(crate) fn attend(&self) {
        if let Some(stream) = self.me.upgrade() {
            self.core.watch.attend(&stream);
        }
    }

    /// Without threads, does the work that a thread would do.
    pub(crate) fn take_turn(&self) {
        if self.core.watch.is_inline() {
            self.core.watch.round();
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
            self.take_turn();
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
                return Err(Error::Timeout(
                    format!(
                        "{:?} did not complete in time; completed is {}",
                        timeline.at(value),
                        timeline.completed()
                    )
                    .into(),
                ));
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
