//! State of the streams of a device: the state of each, and the state that they share.
//!
//! The types name each other, so they stand in one file. The methods here read, and write down what
//! happened. None of them resumes work or publishes a value.
//!
//! This module must not know how work goes on.

use crate::engine::driver::{CompletionAction, DriverDevice, DriverStream};
use crate::engine::host_part::HostPart;
use crate::engine::threads::Threads;
use crate::engine::timelines::Timelines;
use crate::engine::{stream_pool, waits};
use crate::{Op, OpList, Partition};
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Fault, Lease, Result, Timeline, TimelineOwner, Timepoint, VALUE_LIMIT,
};
use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Weak;

/// The most recorded marks that a stream keeps.
pub(crate) const RECORDED_MARKS: usize = 4;
/// The number of submissions whose kernels are remembered, for reports.
pub(crate) const RECENT: usize = 64;

/// The settings of the engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// No threads: the thread that waits, queries or synchronises does the work of the engine's
    /// threads.
    pub inline: bool,
    /// The most submissions before the driver is told to signal.
    pub signal_every: u32,
}

impl EngineConfig {
    /// A configuration of these values.
    #[must_use]
    pub fn new(inline: bool, signal_every: u32) -> Self {
        Self { inline, signal_every }
    }
}

/// A device's streams, and the threads that serve them. Dereferences to the driver's device.
pub struct Engine<N: DriverStream> {
    pub(crate) device: Arc<N::Device>,
    pub(crate) tables: Arc<Timelines<StreamCore<N>>>,
    pub(crate) config: EngineConfig,
    pub(crate) threads: Arc<Threads<StreamCore<N>, Job<N>>>,
    pub(crate) streams: Mutex<Vec<Weak<StreamCore<N>>>>,
}

impl<N: DriverStream> Engine<N> {
    /// The driver's device.
    pub fn device(&self) -> &Arc<N::Device> {
        &self.device
    }

    /// Registers a stream.
    pub(crate) fn add_stream(&self, stream: &Arc<StreamCore<N>>) {
        let mut streams = self.streams.lock();
        if streams.len() == streams.capacity() {
            streams.retain(|s| s.strong_count() > 0);
        }
        streams.push(Arc::downgrade(stream));
    }

    /// The streams that exist.
    pub fn streams(&self) -> Vec<Arc<StreamCore<N>>> {
        self.streams.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

impl<N: DriverStream> Deref for Engine<N> {
    type Target = N::Device;

    fn deref(&self) -> &N::Device {
        &self.device
    }
}

/// A mark that was recorded when all up to `value` had been given to the driver.
pub(crate) struct RecordedMark<N: DriverStream> {
    pub(crate) value: u64,
    pub(crate) mark: N::Mark,
}

/// The thing that the first submission that is held back waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockedOn {
    /// A thread of this backend, which resumes the stream.
    Backend,
    /// Room in the driver. The completion thread tries again until there is room.
    Room,
    /// A timeline that nothing of this backend advances. The completion thread looks at it.
    Others,
}

/// The activity of the thread that resumes a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PumpState {
    /// No thread resumes the stream.
    Idle,
    /// A thread gives operations to the driver.
    Pumping,
    /// A host call runs.
    Calling,
}

/// A submission, or the rest of one.
pub(crate) struct Job<N: DriverStream> {
    pub(crate) value: u64,
    pub(crate) ops: OpList,
    /// Preparations, by the operations' indexes.
    pub(crate) prepared: Vec<(usize, N::Preparation)>,
    /// The next operation.
    pub(crate) next: usize,
    /// The next step of the graph, if the next operation is a graph.
    pub(crate) step: usize,
}

/// The state that the lock guards.
pub(crate) struct State<N: DriverStream> {
    pub(crate) deferred: VecDeque<Job<N>>,
    pub(crate) pump: PumpState,
    /// A thread came to resume the stream while another thread was doing so.
    pub(crate) again: bool,
    /// Set by the device when it has reached the host call at the front.
    pub(crate) fence: Option<Arc<AtomicBool>>,
    pub(crate) blocked_on: BlockedOn,
    /// The driver was given work since it was last seen idle on this stream.
    pub(crate) dirty: bool,
    pub(crate) recorded: VecDeque<RecordedMark<N>>,
}

impl<N: DriverStream> State<N> {
    /// Whether submissions are held back, so that a new one must queue behind them.
    pub(crate) fn is_busy(&self) -> bool {
        self.pump != PumpState::Idle || !self.deferred.is_empty()
    }

    /// Whether nobody but the completion thread resumes the first submission that is held back.
    pub(crate) fn needs_completion_thread(&self) -> bool {
        !self.deferred.is_empty() && (self.fence.is_some() || self.blocked_on != BlockedOn::Backend)
    }
}

/// The execution state of a stream.
pub struct StreamCore<N: DriverStream> {
    /// Declared first: the driver's stream is destroyed before the queued host parts are dropped.
    pub(crate) native: N,
    pub(crate) core: Arc<Engine<N>>,
    pub(crate) owner: TimelineOwner,
    pub(crate) priority: i32,
    /// Ends after the driver's stream.
    pub(crate) partition: Option<Lease<Partition>>,
    /// The pool may lend the stream again. Not so on a partition, which would never end.
    pub(crate) pooled: bool,
    pub(crate) issued: AtomicU64,
    pub(crate) signalled: AtomicU64,
    pub(crate) wanted: AtomicU64,
    pub(crate) listed: AtomicBool,
    pub(crate) state: Mutex<State<N>>,
    pub(crate) host: HostPart<CompletionAction<N>>,
    pub(crate) recent: [AtomicU64; RECENT],
    pub(crate) me: Weak<Self>,
}

impl<N: DriverStream> StreamCore<N> {
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

    /// The partition, if the stream is on one.
    #[must_use]
    pub fn partition(&self) -> Option<&Lease<Partition>> {
        self.partition.as_ref()
    }

    /// Whether the pool can lend the stream again.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.pooled && stream_pool::is_sound(self.timeline()) && self.host.is_empty()
    }

    /// The stream's name in reports.
    pub(crate) fn name(&self) -> String {
        format!("{} {:?}", self.core.device.id(), self.timeline().id())
    }

    /// Returns the cause of a poisoned timeline as an error.
    #[inline]
    pub(crate) fn healthy(&self) -> Result<()> {
        waits::healthy(self.timeline())
    }

    pub(crate) fn next_value(&self) -> Result<u64> {
        let value = self.timeline().submitted() + 1;
        if value >= VALUE_LIMIT {
            return Err(Error::state("a timeline's 2^48 values are used up; replace the stream"));
        }
        Ok(value)
    }

    /// Whether a timepoint is this stream's own. A failure that a former owner of the timeline left
    /// behind does not count as the stream's own.
    #[inline]
    pub(crate) fn is_own(&self, point: Timepoint) -> bool {
        point.timeline_id() == self.timeline().id() && self.timeline().knows(point.into())
    }

    /// The last value that the driver signalled.
    pub(crate) fn reached(&self) -> u64 {
        self.native.reached()
    }

    /// Whether the driver is done with all work of the stream.
    pub(crate) fn query(&self) -> Result<bool> {
        self.native.query()
    }

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

    /// Poisons the timeline if the driver has reported that work failed on the device.
    pub(crate) fn note_failure(&self) {
        if let Some((value, cause)) = self.native.failure()
            && !self.timeline().failed(value)
        {
            let cause = self.fault("submission".to_owned(), value, &cause);
            self.owner.poison(value, cause);
        }
    }

    /// The failure of an operation, with its stream and value. The loss of this device has neither.
    pub(crate) fn fault(&self, op: String, value: u64, cause: &Error) -> Error {
        match (cause, self.core.device.loss()) {
            (Error::DeviceLost { .. }, Some(loss)) => loss,
            (cause, _) if cause.is_external() => cause.clone(),
            _ => Fault::new(op, self.name(), value, cause.to_string()).into(),
        }
    }

    /// The cause of a failure that an operation waited for. The loss of another device does not
    /// lose this one.
    pub(crate) fn inherited(&self, op: &Op<'_>, value: u64, cause: Error) -> Error {
        match cause {
            Error::DeviceLost { .. } => self.fault(op.name(), value, &cause),
            other => other,
        }
    }

    /// Fails the pending values of a lost device's stream. A stream that has failed at a later
    /// value has such values too.
    pub(crate) fn fail_pending(&self, loss: &Error) {
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

    /// Whether some work of the stream continues by itself, if the stream is only observed.
    pub(crate) fn is_moving(&self) -> bool {
        let state = self.state.lock();
        let given = self.timeline().completed() < self.issued.load(Ordering::Acquire);
        given
            || state.pump != PumpState::Idle
            || (state.again || state.blocked_on == BlockedOn::Room) && !state.deferred.is_empty()
            || state.fence.is_some()
            || self.timeline().failed(VALUE_LIMIT)
    }

    /// Whether the completion thread must serve the stream again.
    pub(crate) fn needs_attention(&self) -> bool {
        let timeline = self.timeline();
        if timeline.is_idle() {
            return false;
        }
        let state = self.state.lock();
        if timeline.failed(VALUE_LIMIT) {
            return state.pump == PumpState::Idle;
        }
        let aim = self.wanted.load(Ordering::Acquire).min(self.issued.load(Ordering::Acquire));
        timeline.completed() < aim || state.needs_completion_thread()
    }
}
