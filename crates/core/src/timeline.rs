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
//! - `expected`. Written by: any thread that may wait for a host timeline's value, monotone; the
//!   host timeline at its start and end. Read by: the host timeline at its end.
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
//! * A host timeline that ends fails the values that it has not signalled and that somebody may
//!   wait for ([`Timeline::expect`]). So another one's signal never stands for them.
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
//! | module | content |
//! |---|---|
//! | `timepoint` | timepoints, and the names of timelines |
//! | `owner` | owners, which alone write a timeline |
//! | `wait` | waits of threads |
//! | `source` | the part that needs the backend |
//!
//! This module must not know streams or devices.

mod owner;
mod source;
mod timepoint;
mod wait;

pub use owner::{HostTimelineOwner, TimelineOwner};
pub use source::TimelineSource;
pub use timepoint::{PackedTimepoint, TimelineId, Timepoint};

use crate::error::{Error, OutOfMemory, Result};
use crate::name::{Name, NameCell};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{CachePadded, Condvar, Mutex, OnceLock};
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
#[cfg(not(loom))]
use std::{sync::Arc, time::Duration};

/// The end of a timeline's values. A timeline that comes near it is not used again.
pub const VALUE_LIMIT: u64 = 1 << 48;
const TIMELINES: usize = 1 << 16;
const TIMELINES_PER_CHUNK: usize = 256;
const KNOWN: usize = 8;
/// Room for timepoints that were displaced from these places.
const BESIDES: usize = 256;
/// The next owner of a failed timeline begins at a multiple of this number. An owner's timepoints
/// beyond its submitted values reach less far.
const LEASE_STRIDE: u64 = 1 << 36;

const NEVER: u64 = u64::MAX;

/// Makes the backend publish the completion of a value without further calls. A thread calls it
/// before the thread sleeps for this value. If no other thread would publish the value, the call
/// may publish it itself and block, at most for the given time. The wait returns its error.
#[cfg(not(loom))]
pub type Publisher = Arc<dyn Fn(u64, Option<Duration>) -> Result<()> + Send + Sync>;

/// A call that is told what became of a value.
#[cfg(not(loom))]
type Call = Box<dyn FnOnce(Result<()>) + Send>;

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
    /// The largest value that somebody may wait for before it is signalled. [`NEVER`] while the
    /// timeline is no host timeline's.
    expected: AtomicU64,
    waiters: AtomicU32,
    external: AtomicBool,
    id: TimelineId,
    /// The owner's name.
    name: NameCell,
    known: [AtomicU64; KNOWN],
    /// For each place of `known`: the value from which its timepoint was known.
    known_from: [AtomicU64; KNOWN],
    known_besides: Mutex<Besides>,
    failures: Mutex<Failures>,
    sleep: Mutex<()>,
    wake: Condvar,
    #[cfg(not(loom))]
    publisher: Mutex<Option<Publisher>>,
    /// Calls of a host timeline's values that are not over.
    #[cfg(not(loom))]
    calls: Mutex<Vec<(u64, Call)>>,
}

impl Timeline {
    fn new(id: u16) -> Self {
        Self {
            submitted: CachePadded::new(AtomicU64::new(0)),
            completed: CachePadded::new(AtomicU64::new(0)),
            first_failed: AtomicU64::new(NEVER),
            expected: AtomicU64::new(NEVER),
            waiters: AtomicU32::new(0),
            external: AtomicBool::new(false),
            id: TimelineId(id),
            name: NameCell::default(),
            known: std::array::from_fn(|_| AtomicU64::new(0)),
            known_from: std::array::from_fn(|_| AtomicU64::new(0)),
            known_besides: Mutex::default(),
            failures: Mutex::new(Failures::default()),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            #[cfg(not(loom))]
            publisher: Mutex::new(None),
            #[cfg(not(loom))]
            calls: Mutex::default(),
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
        self.name.name()
    }

    /// Names the timeline in reports until another stream owns it. A label only: any thread may
    /// write it, and the last one counts.
    pub fn set_name(&self, name: Option<Name>) {
        self.name.set_name(name);
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

    /// Notes that somebody may wait for `value`. If its host timeline ends without having signalled
    /// it, the value fails. Returns whether the value was submitted or may still come: only a host
    /// timeline has values to come.
    #[inline]
    pub fn expect(&self, value: u64) -> bool {
        let last = value.min(VALUE_LIMIT - 1);
        value <= self.submitted() || self.expected.fetch_max(last, Ordering::AcqRel) != NEVER
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

    /// The first value of this timeline that is ordered after `point` or a later value of its
    /// timeline, if there is one. Waits for values that had passed may be left out.
    ///
    /// A wait that is submitted meanwhile may be left out too, unless the caller has the
    /// submitter's turn, or had it after `point` failed.
    #[must_use]
    pub fn first_after(&self, point: Timepoint) -> Option<u64> {
        let mut first: Option<u64> = None;
        let mut one = |(known, from): (PackedTimepoint, u64)| {
            let later = |p: Timepoint| p.timeline == point.timeline && p.value >= point.value;
            if known.timepoint().is_some_and(later) {
                first = Some(first.map_or(from, |first| first.min(from)));
            }
        };
        let places = self.known.iter().zip(&self.known_from);
        places
            .map(|(known, from)| {
                (PackedTimepoint(known.load(Ordering::Acquire)), from.load(Ordering::Acquire))
            })
            .for_each(&mut one);
        self.known_besides.lock().points.iter().copied().for_each(one);
        first
    }

    /// A pending timepoint that `value` waits for, as far as this timeline knows: an earlier value
    /// of it, or one of another timeline. `None` for a value that nothing holds up any more. For
    /// reports and time limits: the answer may lag behind the device.
    #[must_use]
    pub fn waits_for(&self, value: u64) -> Option<Timepoint> {
        let mut found = None;
        self.each_known(value, |p| {
            let pending = !matches!(p.timeline().check(p.value), Ok(true) | Err(_));
            if pending && p.timeline != self.id {
                found = Some(p);
            }
            found.is_none()
        });
        let before = value.saturating_sub(1);
        found.or_else(|| (self.completed() < before).then(|| self.at(before)))
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
        k.timeline_id() == timepoint.timeline_id() && k.value() >= timepoint.value()
    }

    #[cold]
    fn knows_own_slow(&self, value: u64) -> bool {
        self.failures.lock().former_cause(value).is_none()
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
static CHUNKS: [OnceLock<Box<[Timeline]>>; TIMELINES / TIMELINES_PER_CHUNK] =
    [const { OnceLock::new() }; TIMELINES / TIMELINES_PER_CHUNK];

/// The timeline that `id` names.
#[inline]
fn timeline(id: TimelineId) -> &'static Timeline {
    let i = usize::from(id.0);
    let chunk = CHUNKS[i / TIMELINES_PER_CHUNK].get_or_init(|| {
        let base = i / TIMELINES_PER_CHUNK * TIMELINES_PER_CHUNK;
        (base..base + TIMELINES_PER_CHUNK).map(|n| Timeline::new(n as u16)).collect()
    });
    &chunk[i % TIMELINES_PER_CHUNK]
}
