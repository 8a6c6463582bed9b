//! A stream: submission, completion, waiting. Submissions that the host holds back are in
//! `deferred`.
//!
//! # Protocol
//! | number | meaning | written |
//! |---|---|---|
//! | `timeline.submitted` | values that were taken | in the lock |
//! | `issued` | all up to this value was given to the driver | in the lock |
//! | `signalled` | the driver was told to signal completion up to this value | in the lock |
//! | `reached` | the device is done up to this value | by the driver |
//! | `timeline.completed` | device and host are done up to this value | by an observing thread |
//! | `wanted` | a waiter that does not poll needs the publication | by any thread, monotone |
//!
//! A submission on a stream that holds nothing back takes the lock, makes the driver's calls and
//! takes the next value. Such a submission allocates nothing. The driver is told to signal every
//! [`signal_every`](crate::engine::EngineConfig::signal_every) submissions, at a signal, at a flush
//! and for a waiter.
//!
//! Resources that need other locks (a recorded mark on another stream, staging memory) are prepared
//! before the lock is taken.
//!
//! # After a failure
//! The stream poisons its timeline from the failed value on, and drops the submissions that it held
//! back. The stream publishes the values once the driver is done with all work that it was given.
//! In a lost context the values are published at once.
//!
//! This module must not know managers.

mod complete;
mod submit;

use crate::deferred::{Job, PumpState};
use crate::driver::{DriverDevice, DriverStream};
use crate::engine::Engine;
use crate::host_part::HostPart;
use crate::stream_pool;
use crate::tables::Origin;
use crate::waits::Awaited;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result, Timeline, TimelineOwner, VALUE_LIMIT};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Weak;
use std::time::Duration;

/// The most recorded marks that a stream keeps.
const RECORDED_MARKS: usize = 4;
/// The number of submissions whose kernels are remembered, for reports.
const RECENT: usize = 64;
/// Checks before a waiting thread yields.
const SPINS: u32 = 200;
/// The time before a waiting thread sleeps between checks: a sleep lasts for 60 µs at least.
const AWAKE: Duration = Duration::from_micros(300);
/// The longest sleep between checks.
const NAP_MAX: Duration = Duration::from_millis(1);

/// A mark that was recorded when all up to `value` had been given to the driver.
struct RecordedMark<N: DriverStream> {
    value: u64,
    mark: N::Mark,
}

/// The awaited party of the first submission that is held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// A thread of this backend, which resumes the stream.
    ByBackend,
    /// Room in the driver. The watcher tries again until there is room.
    ForRoom,
    /// A timeline that nothing of this backend advances. The watcher looks at it.
    ByOthers,
}

/// The state that the lock guards.
pub(crate) struct State<N: DriverStream> {
    pub(crate) deferred: VecDeque<Job<N>>,
    pub(crate) pump: PumpState,
    /// A thread came to resume the stream while another thread was doing so.
    pub(crate) again: bool,
    /// Set by the device when it has reached the host call at the front.
    pub(crate) fence: Option<Arc<AtomicBool>>,
    pub(crate) held: Held,
    /// The driver was given work since it was last seen idle on this stream.
    pub(crate) dirty: bool,
    recorded: VecDeque<RecordedMark<N>>,
}

impl<N: DriverStream> State<N> {
    /// Whether submissions are held back, so that a new one must queue behind them.
    pub(crate) fn is_busy(&self) -> bool {
        self.pump != PumpState::Idle || !self.deferred.is_empty()
    }

    /// Whether nobody but the watcher resumes the first submission that is held back.
    pub(crate) fn needs_watcher(&self) -> bool {
        !self.deferred.is_empty() && (self.fence.is_some() || self.held != Held::ByBackend)
    }
}

/// An operation that the driver refused.
pub(crate) struct Refusal {
    pub(crate) error: Error,
    /// The driver had accepted another operation of the same submission.
    accepted: bool,
    /// The refused operation.
    op: String,
}

/// The execution state of a stream.
pub struct StreamCore<N: DriverStream> {
    /// Declared first: the driver's stream is destroyed before the queued host parts are dropped.
    native: N,
    pub(crate) core: Arc<Engine<N>>,
    pub(crate) owner: TimelineOwner,
    priority: i32,
    pub(crate) issued: AtomicU64,
    signalled: AtomicU64,
    pub(crate) wanted: AtomicU64,
    pub(crate) watched: AtomicBool,
    pub(crate) state: Mutex<State<N>>,
    pub(crate) host: HostPart<N>,
    recent: [AtomicU64; RECENT],
    pub(crate) me: Weak<Self>,
}

impl<N: DriverStream> StreamCore<N> {
    /// Makes a stream with a timeline of its own. May block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory` without timelines or memory, or a driver error.
    pub(crate) fn new(core: Arc<Engine<N>>, priority: i32) -> Result<Arc<Self>> {
        let owner = TimelineOwner::take()?;
        let start = owner.timeline().submitted();
        let native = N::create(&core.device, priority, start).map_err(|e| core.settle(e))?;
        let stream = Arc::new_cyclic(|me: &Weak<Self>| Self {
            owner,
            native,
            priority,
            issued: AtomicU64::new(start),
            signalled: AtomicU64::new(start),
            wanted: AtomicU64::new(0),
            watched: AtomicBool::new(false),
            state: Mutex::new(State {
                deferred: VecDeque::new(),
                pump: PumpState::Idle,
                again: false,
                fence: None,
                held: Held::ByBackend,
                dirty: false,
                recorded: VecDeque::with_capacity(RECORDED_MARKS + 1),
            }),
            host: HostPart::default(),
            recent: std::array::from_fn(|_| AtomicU64::new(0)),
            me: me.clone(),
            core,
        });
        let me = stream.me.clone();
        stream.owner.set_publisher(Some(Arc::new(move |value, timeout| {
            if let Some(stream) = me.upgrade() {
                stream.publish_for(value, timeout);
            }
            // The timeline shows the outcome.
            Ok(())
        })));
        stream.core.tables.add_origin(stream.timeline(), Origin::Stream(stream.me.clone()));
        stream.core.add_stream(&stream);
        Ok(stream)
    }

    /// The stream's timeline.
    #[inline]
    #[must_use]
    pub fn timeline(&self) -> &'static Timeline {
        self.owner.timeline()
    }

    /// The driver's stream.
    #[must_use]
    pub fn native(&self) -> &N {
        &self.native
    }

    /// The priority, in the driver's numbers.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// Whether the pool can lend the stream again.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        stream_pool::is_sound(self.timeline()) && self.host.is_empty()
    }

    /// The stream's name in reports.
    pub(crate) fn name(&self) -> String {
        format!("{} {:?}", self.core.device.id(), self.timeline().id())
    }

    /// Fails everything from `value` on.
    ///
    /// The failed submission `held` is dropped after the cause is set, and before the value is
    /// published.
    pub(crate) fn fail<T>(&self, value: u64, cause: Error, held: T) {
        self.owner.poison(value, cause);
        drop(held);
        self.after_failure();
    }

    /// Drops the submissions that are held back, wakes the waiting streams, and completes the
    /// values that are over.
    fn after_failure(&self) {
        let dropped = {
            let mut state = self.state.lock();
            state.fence = None;
            state.held = Held::ByBackend;
            std::mem::take(&mut state.deferred)
        };
        drop(dropped);
        self.core.tables.wake(self.timeline().id(), u64::MAX);
        self.finish_failed();
        if !self.timeline().is_idle() {
            self.attend();
        }
    }

    /// Publishes all values of a failed stream once the driver is done with its work.
    pub(crate) fn finish_failed(&self) {
        let timeline = self.timeline();
        if timeline.is_idle() && self.host.is_empty() || !timeline.failed(VALUE_LIMIT) {
            return;
        }
        if self.state.lock().pump != PumpState::Idle {
            // The thread that has the turn calls this function when it is done.
            return;
        }
        let over = self.core.device.loss().is_some() || self.query().is_ok_and(|over| over);
        // The query may have found a loss.
        let loss = self.core.device.loss();
        if let Some(loss) = &loss {
            self.fail_pending(loss);
        }
        if over || loss.is_some() {
            self.note_failure();
            let end = timeline.submitted();
            // `VALUE_LIMIT` includes the actions of a submission that was lost half way, and so has
            // no value.
            if let Some(publish) = self.host.carry_out(self, VALUE_LIMIT, end) {
                self.owner.complete(publish);
            }
        }
    }

    /// Fails the stream of a lost context, where no work runs any more.
    pub(crate) fn lost(&self, loss: &Error) {
        self.fail_pending(loss);
        self.after_failure();
    }

    /// Fails the pending values of a lost device's stream. A stream that has failed at a later
    /// value has such values too.
    fn fail_pending(&self, loss: &Error) {
        let next = self.timeline().completed() + 1;
        if !self.timeline().failed(next) {
            self.owner.poison(next, loss.clone());
        }
    }

    /// The submissions that are not over, and their kernels, for the report of a loss.
    pub(crate) fn pending_text(&self) -> Option<String> {
        let timeline = self.timeline();
        let (done, issued) = (timeline.completed(), timeline.submitted());
        if done >= issued {
            return None;
        }
        let mut names: Vec<String> = Vec::new();
        for value in (done + 1..=issued).rev().take(RECENT).collect::<Vec<_>>().into_iter().rev() {
            let function = self.recent[value as usize % RECENT].load(Ordering::Relaxed);
            if let Some(name) = self.core.device.kernel_name(function)
                && !names.contains(&name)
            {
                names.push(name);
            }
        }
        names.truncate(4);
        let kernels = if names.is_empty() {
            String::new()
        } else {
            format!(" (dispatch {})", names.join(", dispatch "))
        };
        Some(format!("submissions {} to {issued} of {}{kernels}", done + 1, self.name()))
    }
}

impl<N: DriverStream> Drop for StreamCore<N> {
    fn drop(&mut self) {
        let timeline = self.timeline();
        self.core.tables.remove_origin(timeline);
        let pending = !timeline.is_idle();
        if pending {
            // This happens only if the backend was dropped without a shutdown while a host timeline
            // held work back.
            let jobs = std::mem::take(&mut self.state.get_mut().deferred);
            self.owner.poison(
                timeline.completed() + 1,
                Error::state("the backend ended while the stream's work was held back"),
            );
            drop(jobs);
        }
        // All work may be over while the last signal is still on its way to the word. The next
        // owner of the word must not get this write.
        let signalled = self.core.device.loss().is_none()
            && self.reached() < self.signalled.load(Ordering::Acquire);
        match if pending || signalled { self.native.synchronize() } else { Ok(()) } {
            Ok(()) if pending => {
                self.note_failure();
                let end = timeline.submitted();
                // All pending values have failed, so no wait holds an action back.
                let _ = self.host.carry_out(self, end, end);
                self.owner.complete(end);
            }
            Ok(()) => {}
            Err(error) => {
                // The timeline does not say that the work is over. The memory that the work uses
                // leaks.
                tracing::error!(%error, stream = %self.name(), "the driver may still run work of a stream that ends");
                self.host.abandon();
                self.native.abandon();
            }
        }
    }
}

impl<N: DriverStream> fmt::Debug for StreamCore<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamCore")
            .field("timeline", &self.timeline())
            .field("issued", &self.issued.load(Ordering::Relaxed))
            .field("signalled", &self.signalled.load(Ordering::Relaxed))
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

impl<N: DriverStream> Awaited for StreamCore<N> {
    fn timeline(&self) -> &'static Timeline {
        Self::timeline(self)
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        Self::wait_host(self, value, timeout)
    }

    fn refresh(&self) -> Result<u64> {
        Self::refresh(self)
    }
}
