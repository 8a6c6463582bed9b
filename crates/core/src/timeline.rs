//! Timelines of streams, and timepoints on them: monotone counters that order work.
//!
//! A [`Timeline`] is the progress of one stream: the last submitted value, the last value known to
//! be complete, and the first failed value. A [`Timepoint`] is a value on a timeline; a
//! [`PackedTimepoint`] is a timepoint in one word. Timepoints hold no count and never dangle.
//! Timelines live for the whole process, another stream gets a timeline only when it is idle, and
//! its counter never restarts.
//!
//! A [`Timeline`] can only be read and waited for. Only its [`TimelineOwner`] (or
//! [`HostTimelineOwner`]) writes it, so the holder of a timepoint cannot complete work.
//!
//! # Protocol
//! All writes go through the timeline's owner. A submitter and a worker may share the owner
//! (`Arc<TimelineOwner>`).
//!
//! - `submitted`. Written by: the stream's submitter, in its turn on the stream; a release store
//!   after the driver accepted. Read by: any thread.
//! - `completed`. Written by: each thread that learns of completion (a worker, a host wait, a
//!   completion word), monotone. Read by: any thread.
//! - `first_failed`, the failures. Written by: the first thread that learns of a failure; the cause
//!   before the value. Read by: any thread.
//! - `known`, `known_besides`. Written by: the submitter, in its turn on the stream. Read by: the
//!   submitter, for which a stale read only costs a wait; threads that ask what has passed.
//!
//! # Change of owners
//! A timepoint has no count, so old timepoints outlive the owner of their values. Their meaning
//! must not change:
//! * A timeline gets another owner only when all its submitted work is over. The next owner
//!   continues with higher values, so an old timepoint that was complete stays complete.
//! * A failed timeline gets another owner only if no other timeline is free. The values from its
//!   first failure up to the next owner's first value stay failed for ever, with their cause. The
//!   timeline keeps a list of these ranges. Timepoints beyond the submitted values fail too: a host
//!   timeline has such timepoints, and streams may wait for them. The next owner therefore begins
//!   at least 2^36 values later.
//! * `first_failed` is the lowest value that ever failed on the timeline. Below this value a check
//!   reads no list; from this value on the list decides, under its lock. So timelines that never
//!   failed pay nothing.
//! * If an owner is dropped while work is pending, its end stays unknown. The pending values fail,
//!   never complete, and no other stream gets the timeline.
//!
//! # Passed timepoints
//! Failed work no longer waits for its dependencies. So failed work may be over while a dependency
//! still runs. Later users rely on more: a buffer's record drops the uses that the next use was
//! ordered after. A timepoint has *passed* under two conditions. Its timeline has completed it. If
//! it failed, all timepoints that its timeline knew by then have passed too. Code that reuses
//! memory, or that overwrites the result of a failure, asks whether the timepoint has passed.
//!
//! # Wake-up
//! A waiter adds itself to `waiters`, then reads `completed`. A completer writes `completed`, then
//! reads `waiters`. Both sides execute a full fence in between, so at least one of them sees the
//! other's write.
//!
//! If a backend publishes completion only on request, its timelines have a [`Publisher`]. A thread
//! calls the publisher before it sleeps. So any thread can wait for any timeline, also for one of
//! another backend or of a destroyed stream.
//!
//! This module must not know streams or devices.

mod owner;

pub use owner::{HostTimelineOwner, TimelineOwner};

use crate::defects::{Defect, planted};
use crate::error::{Error, OutOfMemory, Result};
use crate::name::Name;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{CachePadded, Condvar, Mutex, OnceLock};
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::time::Duration;
#[cfg(not(loom))]
use std::{cell::Cell, sync::Arc, time::Instant};

/// The end of a timeline's values. A timeline that comes near it is not used again.
pub const VALUE_LIMIT: u64 = 1 << 48;
const LINES: usize = 1 << 16;
const LINES_PER_CHUNK: usize = 256;
const KNOWN: usize = 8;
/// Room for timepoints that were displaced from these places.
const BESIDES: usize = 256;
/// The next owner of a failed timeline begins at a multiple of this number. An owner's timepoints
/// beyond its submitted values reach less far.
const LEASE_STRIDE: u64 = 1 << 36;
/// The longest time that a synchronisation waits for the remaining work of a failed timeline.
#[cfg(not(loom))]
const LONGEST_DRAIN: Duration = Duration::from_secs(1);

const NEVER: u64 = u64::MAX;

/// The name of a timeline. 0 names none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimelineId(u16);

impl TimelineId {
    /// The number, for reports.
    #[must_use]
    pub fn get(self) -> u16 {
        self.0
    }

    /// The timeline of a number, from a report.
    #[must_use]
    pub fn from_number(number: u16) -> Self {
        Self(number)
    }

    /// The name of the timeline's present owner, if it has one ([`Timeline::set_name`]).
    #[must_use]
    pub fn name(self) -> Option<Name> {
        let chunk = CHUNKS[usize::from(self.0) / LINES_PER_CHUNK].get()?;
        chunk[usize::from(self.0) % LINES_PER_CHUNK].name()
    }
}

/// `timeline 5`, or `timeline 5 "decode"` if it has a name.
impl fmt::Display for TimelineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "timeline {}", self.0)?;
        self.name().map_or(Ok(()), |name| write!(f, " {name}"))
    }
}

/// `timeline5`, or `timeline5"decode"` if it has a name.
impl fmt::Debug for TimelineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "timeline{}", self.0)?;
        self.name().map_or(Ok(()), |name| write!(f, "{name}"))
    }
}

/// A value on a timeline: the work that was submitted to the stream up to this value.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Timepoint {
    timeline: TimelineId,
    value: u64,
}

impl Timepoint {
    /// The timeline's name.
    #[inline]
    #[must_use]
    pub fn timeline_id(self) -> TimelineId {
        self.timeline
    }

    /// The value on the timeline.
    #[inline]
    #[must_use]
    pub fn value(self) -> u64 {
        self.value
    }

    /// The timeline. The reference never dangles.
    #[inline]
    #[must_use]
    pub fn timeline(self) -> &'static Timeline {
        timeline(self.timeline)
    }

    /// Returns whether the timepoint is complete and did not fail. Plain loads; the answer may lag
    /// behind the device.
    #[inline]
    #[must_use]
    pub fn is_settled(self) -> bool {
        self.timeline().is_settled(self.value)
    }

    /// Returns whether the timepoint has [passed](Timeline::has_passed).
    #[inline]
    #[must_use]
    pub fn has_passed(self) -> bool {
        self.timeline().has_passed(self.value)
    }
}

/// A timepoint is a list of one, for calls that wait for several.
impl AsRef<[Timepoint]> for Timepoint {
    fn as_ref(&self) -> &[Timepoint] {
        std::slice::from_ref(self)
    }
}

impl fmt::Debug for Timepoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}@{}", self.timeline, self.value)
    }
}

/// A timepoint in one word: 16 bits of timeline, 48 bits of value. All zero means "never".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct PackedTimepoint(u64);

impl PackedTimepoint {
    /// No timepoint: ordered before all timepoints.
    pub const NEVER: PackedTimepoint = PackedTimepoint(0);

    /// The word.
    #[inline]
    #[must_use]
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// A timepoint from its word.
    #[inline]
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns whether this is [`PackedTimepoint::NEVER`].
    #[inline]
    #[must_use]
    pub fn is_never(self) -> bool {
        self.0 == 0
    }

    /// Returns whether the work of the timepoint is over, complete or failed, with all that it came
    /// after: memory that it used may be reused. [`PackedTimepoint::NEVER`] has passed. A reader of
    /// results asks [`is_settled`](Self::is_settled) instead.
    #[inline]
    #[must_use]
    pub fn has_passed(self) -> bool {
        self.timepoint().is_none_or(|p| p.has_passed() || planted(Defect::PassedEarly))
    }

    /// The timeline's name; 0 for never.
    #[inline]
    #[must_use]
    pub fn timeline_id(self) -> TimelineId {
        TimelineId((self.0 >> 48) as u16)
    }

    /// The value on the timeline.
    #[inline]
    #[must_use]
    pub fn value(self) -> u64 {
        self.0 & (VALUE_LIMIT - 1)
    }

    /// The timepoint, or `None` for never.
    #[inline]
    #[must_use]
    pub fn timepoint(self) -> Option<Timepoint> {
        (self.0 != 0).then(|| Timepoint { timeline: self.timeline_id(), value: self.value() })
    }

    /// Returns whether the timepoint is never, or its timepoint is complete and did not fail.
    #[inline]
    #[must_use]
    pub fn is_settled(self) -> bool {
        self.timepoint().is_none_or(Timepoint::is_settled)
    }
}

impl From<Timepoint> for PackedTimepoint {
    #[inline]
    fn from(p: Timepoint) -> Self {
        debug_assert!(p.value < VALUE_LIMIT);
        PackedTimepoint((u64::from(p.timeline.0) << 48) | (p.value & (VALUE_LIMIT - 1)))
    }
}

impl fmt::Debug for PackedTimepoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.timepoint() {
            Some(p) => p.fmt(f),
            None => f.write_str("never"),
        }
    }
}

/// Makes the backend publish the completion of a value without further calls. A thread calls it
/// before the thread sleeps for this value. If no other thread would publish the value, the call
/// may publish it itself and block, at most for the given time. The wait returns its error.
#[cfg(not(loom))]
pub type Publisher = Arc<dyn Fn(u64, Option<Duration>) -> Result<()> + Send + Sync>;

#[cfg(not(loom))]
thread_local! {
    /// The timeline whose host call this thread runs, and the call's value.
    static CALL: Cell<Option<(TimelineId, u64)>> = const { Cell::new(None) };
}

/// The failures of a timeline.
#[derive(Default)]
struct Failures {
    /// The present owner's first failed value, and the cause.
    current: Option<(u64, Error)>,
    /// The failures of former owners: each from the first failed value up to the next owner's
    /// values, in order.
    former: Vec<(Range<u64>, Error)>,
}

impl Failures {
    /// The cause of `value`'s failure, if it failed.
    fn cause(&self, value: u64) -> Option<&Error> {
        match &self.current {
            Some((first, cause)) if value >= *first => Some(cause),
            _ => self.former_cause(value),
        }
    }

    fn former_cause(&self, value: u64) -> Option<&Error> {
        let at = self.former.partition_point(|(range, _)| range.end <= value);
        self.former.get(at).filter(|(range, _)| range.contains(&value)).map(|(_, cause)| cause)
    }
}

/// Timepoints that later ones displaced from the timeline's known ones.
#[derive(Default)]
struct Besides {
    /// The displaced timepoints that had not passed, each with the value from which it was known.
    points: Vec<(PackedTimepoint, u64)>,
    /// At this length the timeline removes the timepoints that have passed.
    full: usize,
    /// Room to look at the timepoints without the lock.
    room: Vec<(PackedTimepoint, u64)>,
}

/// The progress of one stream or host timeline, to read and to wait for. Its [`TimelineOwner`]
/// writes it.
pub struct Timeline {
    submitted: CachePadded<AtomicU64>,
    completed: CachePadded<AtomicU64>,
    /// The lowest value that ever failed.
    first_failed: AtomicU64,
    waiters: AtomicU32,
    external: AtomicBool,
    id: TimelineId,
    /// The owner's name; 0 for none.
    name: AtomicU32,
    known: [AtomicU64; KNOWN],
    /// For each place of `known`: the value from which its timepoint was known.
    known_from: [AtomicU64; KNOWN],
    known_besides: Mutex<Besides>,
    failures: Mutex<Failures>,
    sleep: Mutex<()>,
    wake: Condvar,
    #[cfg(not(loom))]
    publisher: Mutex<Option<Publisher>>,
}

impl Timeline {
    fn new(id: u16) -> Self {
        Self {
            submitted: CachePadded::new(AtomicU64::new(0)),
            completed: CachePadded::new(AtomicU64::new(0)),
            first_failed: AtomicU64::new(NEVER),
            waiters: AtomicU32::new(0),
            external: AtomicBool::new(false),
            id: TimelineId(id),
            name: AtomicU32::new(0),
            known: std::array::from_fn(|_| AtomicU64::new(0)),
            known_from: std::array::from_fn(|_| AtomicU64::new(0)),
            known_besides: Mutex::default(),
            failures: Mutex::new(Failures::default()),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            #[cfg(not(loom))]
            publisher: Mutex::new(None),
        }
    }

    /// The timeline's name.
    #[inline]
    pub fn id(&self) -> TimelineId {
        self.id
    }

    /// The name of the present owner, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<Name> {
        Name::from_number(self.name.load(Ordering::Relaxed))
    }

    /// Names the timeline in reports until another stream owns it. A label only: any thread may
    /// write it, and the last one counts.
    pub fn set_name(&self, name: Option<Name>) {
        self.name.store(Name::number(name), Ordering::Relaxed);
    }

    /// Returns whether the timeline is of an external stream, whose submissions its owner does not
    /// see: see [`TimelineOwner::set_external`].
    #[inline]
    #[must_use]
    pub fn is_external(&self) -> bool {
        self.external.load(Ordering::Relaxed)
    }

    /// Returns whether the process has external timelines at all.
    #[cfg(not(loom))]
    #[inline]
    #[must_use]
    pub fn any_external() -> bool {
        EXTERNAL.load(Ordering::Relaxed) > 0
    }

    /// Returns whether the process has external timelines at all. Models have none.
    #[cfg(loom)]
    #[must_use]
    pub fn any_external() -> bool {
        false
    }

    /// The last submitted value.
    #[inline]
    pub fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    /// The last value known to be complete (or, after a failure, known to be over). A plain load;
    /// the value may lag behind the device.
    #[inline]
    pub fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// The timepoint of all work submitted so far.
    #[inline]
    pub fn now(&self) -> Timepoint {
        Timepoint { timeline: self.id, value: self.submitted() }
    }

    /// A timepoint on this timeline. Its value need not have been submitted: a stream may wait for
    /// a future value of a host timeline. If the value never comes, the wait never ends. Values
    /// beyond [`VALUE_LIMIT`] are never reached and mean the last value below it.
    #[inline]
    pub fn at(&self, value: u64) -> Timepoint {
        Timepoint { timeline: self.id, value: value.min(VALUE_LIMIT - 1) }
    }

    /// Returns whether all submitted work is over.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.completed() >= self.submitted()
    }

    /// Returns whether `value` is complete and did not fail.
    #[inline]
    pub fn is_settled(&self, value: u64) -> bool {
        self.completed() >= value && !self.failed(value)
    }

    /// The known state of `value`: `Ok(true)` complete, `Ok(false)` pending.
    ///
    /// # Errors
    /// The cause if `value` failed. The error appears as soon as the failure is known, even before
    /// the value is over.
    #[inline]
    pub fn check(&self, value: u64) -> Result<bool> {
        // In this order: a failure is published before the completion of the failed value.
        let complete = self.completed() >= value;
        if value >= self.first_failed.load(Ordering::Acquire)
            && let Some(cause) = self.cause_slow(value)
        {
            return Err(cause);
        }
        Ok(complete)
    }

    /// The failure of the timeline's present owner, if it had one: the first failed value and the
    /// cause.
    #[inline]
    pub fn failure(&self) -> Option<(u64, Error)> {
        if self.first_failed.load(Ordering::Acquire) == NEVER {
            None
        } else {
            self.failures.lock().current.clone()
        }
    }

    /// Returns whether all work up to `value`, and all work that it was ordered after, is over.
    ///
    /// For work that did not fail, completion already means this. Failed work may be over before
    /// its dependencies. Memory may be reused when its uses have passed. Plain loads unless the
    /// timeline has failed; the answer may lag behind the device.
    #[inline]
    pub fn has_passed(&self, value: u64) -> bool {
        // In this order: a failure is published before the completion of the failed value.
        self.completed() >= value
            && (value < self.first_failed.load(Ordering::Acquire) || self.obstacle(value).is_none())
    }

    /// The last value that has [passed](Self::has_passed).
    #[inline]
    pub fn passed(&self) -> u64 {
        let done = self.completed();
        if done < self.first_failed.load(Ordering::Acquire) { done } else { self.passed_slow(done) }
    }

    #[cold]
    fn passed_slow(&self, done: u64) -> u64 {
        if self.obstacle(done).is_none() {
            return done;
        }
        let first = self
            .failures
            .lock()
            .current
            .as_ref()
            .map_or(done, |(first, _)| first.saturating_sub(1));
        first.min(done)
    }

    /// A pending timepoint that keeps `value` from having [passed](Self::has_passed): its own, or a
    /// dependency of failed work. `None` once the value has passed.
    #[cold]
    pub fn obstacle(&self, value: u64) -> Option<Timepoint> {
        // Timelines wait for each other, so the search visits each failed one once.
        let mut behind: Vec<Timepoint> = Vec::new();
        let mut point = self.at(value);
        let mut next = 0;
        loop {
            let timeline = if point.timeline == self.id { self } else { point.timeline() };
            // No work is pending beyond the submitted values.
            if timeline.completed() < point.value.min(timeline.submitted()) {
                return Some(point);
            }
            let fails = |(first, _): &(u64, Error)| point.value >= *first;
            if timeline.failures.lock().current.as_ref().is_some_and(fails) {
                // If the host has no memory for the search, the value counts as not passed.
                let looked = timeline.each_known(point.value, |known| {
                    let seen = known.timeline == self.id
                        || behind
                            .iter()
                            .any(|p| p.timeline == known.timeline && p.value >= known.value);
                    seen || behind.try_reserve(1).map(|()| behind.push(known)).is_ok()
                });
                if !looked {
                    return Some(point);
                }
            }
            point = *behind.get(next)?;
            next += 1;
        }
    }

    /// Calls `f` with each timepoint that the timeline knew at `value` and that may not have
    /// passed, until `f` returns `false`.
    fn each_known(&self, value: u64, mut f: impl FnMut(Timepoint) -> bool) -> bool {
        let mut one = |(timepoint, from): (PackedTimepoint, u64)| {
            from > value || timepoint.timepoint().is_none_or(&mut f)
        };
        // In this order: a displaced timepoint is noted in `known_besides` before its place is
        // written.
        let places = self.known.iter().zip(&self.known_from);
        places
            .map(|(known, from)| {
                (PackedTimepoint(known.load(Ordering::Acquire)), from.load(Ordering::Acquire))
            })
            .all(&mut one)
            && self.known_besides.lock().points.iter().copied().all(one)
    }

    /// Returns whether `value` failed: whether it is at or beyond the first failure of its owner.
    #[inline]
    pub fn failed(&self, value: u64) -> bool {
        value >= self.first_failed.load(Ordering::Acquire) && self.cause_slow(value).is_some()
    }

    #[cold]
    fn cause_slow(&self, value: u64) -> Option<Error> {
        self.failures.lock().cause(value).cloned()
    }

    /// Wakes the sleeping threads, after a write that may end their waits.
    #[inline]
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::Relaxed) != 0 {
            self.wake_slow();
        }
    }

    #[cold]
    fn wake_slow(&self) {
        drop(self.sleep.lock());
        self.wake.notify_all();
    }

    /// Returns whether all future work of this timeline is already ordered after `timepoint`. A
    /// timepoint that failed under a former owner of this timeline is not known: the users of its
    /// results must see the failure.
    #[inline]
    pub fn knows(&self, timepoint: PackedTimepoint) -> bool {
        // The value, if the timepoint is of this timeline; otherwise a number beyond all values.
        let own = timepoint.0 ^ u64::from(self.id.0) << 48;
        if timepoint.is_never()
            || own < VALUE_LIMIT && own < self.first_failed.load(Ordering::Relaxed)
        {
            return true;
        }
        self.knows_other(timepoint)
    }

    #[inline(never)]
    fn knows_other(&self, timepoint: PackedTimepoint) -> bool {
        if timepoint.timeline_id() == self.id {
            return self.knows_own_slow(timepoint.value());
        }
        let k = PackedTimepoint(
            self.known[usize::from(timepoint.timeline_id().0) % KNOWN].load(Ordering::Relaxed),
        );
        k.timeline_id() == timepoint.timeline_id()
            && (k.value() >= timepoint.value() || planted(Defect::KnowsTooMuch))
    }

    #[cold]
    fn knows_own_slow(&self, value: u64) -> bool {
        self.failures.lock().former_cause(value).is_none()
    }

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
                            Ok(false) => Err(Error::Timeout(
                                format!(
                                    "{:?} did not complete in time; completed is {}",
                                    self.at(value),
                                    self.completed()
                                )
                                .into(),
                            )),
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

    /// Waits, on a failed timeline, until `value` has [passed](Self::has_passed), so that none of
    /// its work still runs.
    ///
    /// Returns at `deadline`, and after one second at the latest, so that a known cause is reported
    /// soon. `refresh` updates the timeline's completed value, for timelines that publish only on
    /// request. Backends call this between a failure and its report.
    #[cold]
    #[cfg(not(loom))]
    pub fn drain(&self, value: u64, deadline: Option<Instant>, refresh: impl Fn() -> Result<u64>) {
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

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({}/{}", self.id, self.completed(), self.submitted())?;
        match self.failure() {
            Some((v, _)) => write!(f, ", failed from {v})"),
            None => f.write_str(")"),
        }
    }
}

/// External timelines that have an owner.
#[cfg(not(loom))]
static EXTERNAL: AtomicU32 = AtomicU32::new(0);

/// All timelines, allocated in chunks that are never moved or freed.
static CHUNKS: [OnceLock<Box<[Timeline]>>; LINES / LINES_PER_CHUNK] =
    [const { OnceLock::new() }; LINES / LINES_PER_CHUNK];

/// The timeline that `id` names.
#[inline]
fn timeline(id: TimelineId) -> &'static Timeline {
    let i = usize::from(id.0);
    let chunk = CHUNKS[i / LINES_PER_CHUNK].get_or_init(|| {
        let base = i / LINES_PER_CHUNK * LINES_PER_CHUNK;
        (base..base + LINES_PER_CHUNK).map(|n| Timeline::new(n as u16)).collect()
    });
    &chunk[i % LINES_PER_CHUNK]
}

/// The part of a timeline that needs the backend. Reads on hot paths use its [`Timeline`] only.
///
/// A stream that runs closures on a worker of its own:
///
/// ```
/// use leasehold_core::{Error, Timeline, TimelineOwner, Timepoint, Result, TimelineSource};
/// use std::sync::{Arc, Mutex, mpsc};
/// use std::time::Duration;
///
/// type Job = Box<dyn FnOnce() -> Result<()> + Send>;
/// struct WorkerStream {
///     timeline: Arc<TimelineOwner>,
///     /// The turn: values are taken in the order in which the worker gets them.
///     jobs: Mutex<mpsc::Sender<(u64, Job)>>,
/// }
///
/// impl WorkerStream {
///     fn new() -> Result<Self> {
///         let timeline = Arc::new(TimelineOwner::take()?);
///         let (jobs, todo) = mpsc::channel::<(u64, Job)>();
///         let worker = timeline.clone();
///         std::thread::spawn(move || {
///             for (value, job) in todo {
///                 // After a failure nothing runs, and everything completes all the same.
///                 if !worker.timeline().failed(value)
///                     && let Err(cause) = job()
///                 {
///                     worker.poison(value, cause);
///                 }
///                 worker.complete(value);
///             }
///         });
///         Ok(Self { timeline, jobs: Mutex::new(jobs) })
///     }
///
///     fn submit(&self, job: Job) -> Result<Timepoint> {
///         let jobs = self.jobs.lock().unwrap();
///         let value = self.timeline().submitted() + 1;
///         jobs.send((value, job)).map_err(|_| Error::state("the worker is gone"))?;
///         Ok(self.timeline().at(self.timeline.advance()?))
///     }
/// }
///
/// // SAFETY: the worker completes a value after its job returned. Jobs run one after the
/// // other, and a wait is a job.
/// unsafe impl TimelineSource for WorkerStream {
///     fn timeline(&self) -> &'static Timeline {
///         self.timeline.timeline()
///     }
///     fn signal(&self) -> Result<u64> {
///         Ok(self.timeline().submitted())
///     }
///     fn refresh(&self) -> Result<u64> {
///         Ok(self.timeline().completed())
///     }
///     fn wait(&self, on: Timepoint) -> Result<()> {
///         self.submit(Box::new(move || on.timeline().wait(on.value(), None)))?;
///         self.timeline.learn(on);
///         Ok(())
///     }
///     fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
///         self.timeline().wait(value, timeout)
///     }
/// }
///
/// let stream = WorkerStream::new()?;
/// let done = stream.submit(Box::new(|| Ok(())))?;
/// stream.wait_host(done.value(), None)?;
/// assert!(done.is_settled());
/// let broken = stream.submit(Box::new(|| Err(Error::invalid("no such thing"))))?;
/// assert!(stream.wait_host(broken.value(), None).is_err());
/// # Ok::<(), Error>(())
/// ```
///
/// # Safety
/// Allocators reuse memory, and runtimes start later work on it, because of a timeline's values.
/// The implementer vouches:
/// - `timeline` returns the same timeline on every call, its owner belongs to this object, and no
///   other object submits to it.
/// - `completed` reaches a value only when all work submitted up to it is over: no device and no
///   thread accesses memory for this work any more. This holds for failed work too, even though
///   failed work need not wait for its dependencies. The timeline
///   [has passed](Timeline::has_passed) the value once those dependencies are over as well.
/// - Later submitted work starts once earlier work is over, or behaves as if it did.
/// - After `wait(on)` returned `Ok`, all work submitted later starts after `on` is over, or does
///   not run. Only then the owner [`learn`](TimelineOwner::learn)s a timepoint.
pub unsafe trait TimelineSource: Send + Sync {
    /// The timeline that this object advances.
    fn timeline(&self) -> &'static Timeline;

    /// Makes the completion of all submitted work observable without further calls, and returns its
    /// value. Does not block.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `DeviceLost`.
    fn signal(&self) -> Result<u64>;

    /// Asks the driver for the timeline's progress, updates the timeline and returns the completed
    /// value. Does not block.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's error.
    fn refresh(&self) -> Result<u64>;

    /// Makes later submissions of this timeline start after `on`, on the device, and learns `on`.
    /// Does not block the host.
    ///
    /// # Errors
    /// `Unsupported` if the device cannot wait for that timeline; the stream's cause if the stream
    /// is poisoned. A wait for a failed timepoint poisons this timeline.
    fn wait(&self, on: Timepoint) -> Result<()>;

    /// Blocks the calling thread until `value` is over. `None` waits without a limit; zero polls.
    ///
    /// # Errors
    /// `Timeout`; the cause if `value` failed; `Recording` on a recorder.
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()>;
}
