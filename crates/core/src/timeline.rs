//! Lines, points and stamps: how the runtime talks about "after".
//!
//! A [`Line`] is the progress of one stream: how much was submitted, how much is known to be complete, and the first value that
//! failed. A [`Point`] is a value on a line; a [`Stamp`] is a point in one word. Points hold no count and never dangle: lines
//! live for ever, a line is lent to another stream only when it is idle, and its counter never restarts.
//!
//! A [`Line`] is for looking and waiting. Only its [`LineOwner`] (or [`HostLine`]) writes it, so a point gives nobody
//! a way to say that work is over.
//!
//! # Protocol
//! All writes go through the line's owner, which may be shared (`Arc<LineOwner>`) between a submitter and a worker.
//!
//! | field | written by | read by |
//! |---|---|---|
//! | `submitted` | the stream's submitter, under the stream's own turn; a release store after the driver accepted | anyone |
//! | `completed` | whoever learns of completion (a worker, a host wait, a completion word), monotone | anyone |
//! | `first_failed`, the failures | the first who learns of a failure; the cause before the value | anyone |
//! | `known`, `known_besides` | the submitter, under the stream's turn | the submitter: a stale read only costs a wait; who asks what has passed |
//!
//! # Lines that change hands
//! A point has no count, so old points outlive the owner of their time. What they say must stay true:
//! * A line is lent again only when all that it was given is over. Its next owner goes on with higher values, so an old
//!   point that was complete stays complete.
//! * A failed line is lent again when no other is left. The values from its first failure up to the next owner's first
//!   one stay failed for ever, with their cause; the line keeps a list of such ranges. Points beyond what was submitted
//!   (a gate's, which streams may wait for) fail too: the next owner begins at least 2^36 values later.
//! * `first_failed` is the lowest failure that the line ever had. Below it a value needs no further look, at or above it
//!   the list decides under its lock. So lines that never failed pay nothing.
//! * An owner that is dropped while work is pending cannot know when that is over. The pending values fail, never
//!   complete, and the line is lent to nobody.
//!
//! # What a failure cuts short
//! Work that fails does not wait any more for what it was to wait for. So it may be over while that still runs. Who comes
//! after it relies on more: a buffer's record drops the uses that the next one was ordered after. A point has
//! *passed* when its line has completed it and, if it failed, all that its line knew by then has passed too. Whoever lends
//! memory again, or overwrites what a failure left, asks that.
//!
//! A waiter adds itself to `waiters`, then reads `completed`; a completer writes `completed`, then reads `waiters`; a full fence
//! between the two on either side, so that one of them sees the other.
//!
//! A line whose backend publishes only when somebody asks has a [`Publisher`]: whoever is about to sleep calls it first. So any thread can
//! wait for any line, also one of another backend or of a stream that is gone.
//!
//! This module must not know streams or devices.

mod owner;

pub use owner::{HostLine, LineOwner};

use crate::defects::{Defect, planted};
use crate::error::{Error, OutOfMemory, Result};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{CachePadded, Condvar, Mutex, OnceLock};
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::time::Duration;
#[cfg(not(loom))]
use std::{cell::Cell, sync::Arc, time::Instant};

/// Values of a line end here; beyond it a line is retired.
pub const VALUE_LIMIT: u64 = 1 << 48;
const LINES: usize = 1 << 16;
const LINES_PER_CHUNK: usize = 256;
const KNOWN: usize = 8;
/// Room for points that had to leave their place among these.
const BESIDES: usize = 256;
/// The next owner of a failed line begins at a multiple of this: an owner's points beyond what it submitted reach less far.
const LEASE_STRIDE: u64 = 1 << 36;
/// How long a synchronisation waits, at most, for the rest of a failed line to end.
#[cfg(not(loom))]
const LAST_BREATH: Duration = Duration::from_secs(1);

const NEVER: u64 = u64::MAX;

/// Names a line. 0 names none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LineId(u16);

impl LineId {
    /// The number, for reports.
    #[must_use]
    pub fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Debug for LineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line{}", self.0)
    }
}

/// A value on a line: everything that the stream was given up to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Point {
    line: LineId,
    value: u64,
}

impl Point {
    /// The line's name.
    #[inline]
    #[must_use]
    pub fn line_id(self) -> LineId {
        self.line
    }

    /// The value on the line.
    #[inline]
    #[must_use]
    pub fn value(self) -> u64 {
        self.value
    }

    /// The line. Never dangles.
    #[inline]
    #[must_use]
    pub fn line(self) -> &'static Line {
        line(self.line)
    }

    /// Whether the point is complete and did not fail: plain loads, may lag behind the device.
    #[inline]
    #[must_use]
    pub fn is_settled(self) -> bool {
        self.line().is_settled(self.value)
    }

    /// Whether the point has [passed](Line::has_passed).
    #[inline]
    #[must_use]
    pub fn has_passed(self) -> bool {
        self.line().has_passed(self.value)
    }
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}@{}", self.line, self.value)
    }
}

/// A point in one word: 16 bits of line, 48 of value. All zero is "never".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct Stamp(u64);

impl Stamp {
    /// No point at all: ordered before everything.
    pub const NEVER: Stamp = Stamp(0);

    /// The word.
    #[inline]
    #[must_use]
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// From the word.
    #[inline]
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Whether this is [`Stamp::NEVER`].
    #[inline]
    #[must_use]
    pub fn is_never(self) -> bool {
        self.0 == 0
    }

    /// The line's name; 0 for never.
    #[inline]
    #[must_use]
    pub fn line_id(self) -> LineId {
        LineId((self.0 >> 48) as u16)
    }

    /// The value on the line.
    #[inline]
    #[must_use]
    pub fn value(self) -> u64 {
        self.0 & (VALUE_LIMIT - 1)
    }

    /// The point, or `None` for never.
    #[inline]
    #[must_use]
    pub fn point(self) -> Option<Point> {
        (self.0 != 0).then(|| Point { line: self.line_id(), value: self.value() })
    }

    /// Whether the stamp is never, or complete and not failed.
    #[inline]
    #[must_use]
    pub fn is_settled(self) -> bool {
        self.point().is_none_or(Point::is_settled)
    }
}

impl From<Point> for Stamp {
    #[inline]
    fn from(p: Point) -> Self {
        debug_assert!(p.value < VALUE_LIMIT);
        Stamp((u64::from(p.line.0) << 48) | (p.value & (VALUE_LIMIT - 1)))
    }
}

impl fmt::Debug for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.point() {
            Some(p) => p.fmt(f),
            None => f.write_str("never"),
        }
    }
}

/// Sees to it that the completion of a value will be published without further calls. Called by a thread that is about to sleep for that
/// value; where nobody else would publish it, the call may do so itself and block, for the given time at most. An error is the wait's.
#[cfg(not(loom))]
pub type Publisher = Arc<dyn Fn(u64, Option<Duration>) -> Result<()> + Send + Sync>;

#[cfg(not(loom))]
thread_local! {
    /// The line whose host call this thread runs, and the call's value.
    static CALL: Cell<Option<(LineId, u64)>> = const { Cell::new(None) };
}

/// What failed on a line.
#[derive(Default)]
struct Failures {
    /// The present owner's first failed value, and why.
    current: Option<(u64, Error)>,
    /// Of former owners: from the first failed value up to the next owner's values, in order.
    former: Vec<(Range<u64>, Error)>,
}

impl Failures {
    /// Why `value` failed, if it did.
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

/// What had to leave its place among what a line knows, for a later point.
#[derive(Default)]
struct Besides {
    /// What had not passed then, and from which value on it was known.
    points: Vec<(Stamp, u64)>,
    /// When there are so many, those go that have passed.
    full: usize,
    /// Room for looking at them without the lock.
    room: Vec<(Stamp, u64)>,
}

/// The progress of one stream (or gate), to look at and to wait for. Its [`LineOwner`] writes it.
pub struct Line {
    submitted: CachePadded<AtomicU64>,
    completed: CachePadded<AtomicU64>,
    /// The lowest value that ever failed.
    first_failed: AtomicU64,
    waiters: AtomicU32,
    id: LineId,
    known: [AtomicU64; KNOWN],
    /// From which value on what is in the same place of `known` was known.
    known_from: [AtomicU64; KNOWN],
    known_besides: Mutex<Besides>,
    failures: Mutex<Failures>,
    sleep: Mutex<()>,
    wake: Condvar,
    #[cfg(not(loom))]
    publisher: Mutex<Option<Publisher>>,
}

impl Line {
    fn new(id: u16) -> Self {
        Self {
            submitted: CachePadded::new(AtomicU64::new(0)),
            completed: CachePadded::new(AtomicU64::new(0)),
            first_failed: AtomicU64::new(NEVER),
            waiters: AtomicU32::new(0),
            id: LineId(id),
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

    /// The line's name.
    #[inline]
    pub fn id(&self) -> LineId {
        self.id
    }

    /// The last value that was submitted.
    #[inline]
    pub fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    /// The last value known to be complete (or over, after a failure). A plain load; may lag behind the device.
    #[inline]
    pub fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// The point of everything submitted so far.
    #[inline]
    pub fn now(&self) -> Point {
        Point { line: self.id, value: self.submitted() }
    }

    /// A point on this line. It need not have been submitted: a stream may wait for what a gate will reach. A wait for a
    /// point that never comes never ends. Values beyond [`VALUE_LIMIT`] are never reached and mean the last one below it.
    #[inline]
    pub fn at(&self, value: u64) -> Point {
        Point { line: self.id, value: value.min(VALUE_LIMIT - 1) }
    }

    /// Whether all that was submitted is over.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.completed() >= self.submitted()
    }

    /// Whether `value` is complete and did not fail.
    #[inline]
    pub fn is_settled(&self, value: u64) -> bool {
        self.completed() >= value && !self.failed(value)
    }

    /// What is known about `value`: `Ok(true)` complete, `Ok(false)` pending.
    ///
    /// # Errors
    /// The cause, when `value` failed. Reported as soon as it is known, even before the value is over.
    #[inline]
    pub fn check(&self, value: u64) -> Result<bool> {
        // In this order: a failure is published before the completion of what failed.
        let complete = self.completed() >= value;
        if value >= self.first_failed.load(Ordering::Acquire)
            && let Some(cause) = self.cause_slow(value)
        {
            return Err(cause);
        }
        Ok(complete)
    }

    /// The failure of the stream that has the line, if there was one: its first failed value and the cause.
    #[inline]
    pub fn failure(&self) -> Option<(u64, Error)> {
        if self.first_failed.load(Ordering::Acquire) == NEVER { None } else { self.failures.lock().current.clone() }
    }

    /// Whether neither what was submitted up to `value` is at work any more, nor anything that it was ordered after. For
    /// what completed that is one question. What failed may be over before that which it was to wait for.
    ///
    /// Memory may be lent again when its uses have passed. Plain loads unless the line has failed; may lag behind the device.
    #[inline]
    pub fn has_passed(&self, value: u64) -> bool {
        // In this order: a failure is published before the completion of what failed.
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
        let first = self.failures.lock().current.as_ref().map_or(done, |(first, _)| first.saturating_sub(1));
        first.min(done)
    }

    /// A point at work that keeps `value` from having [passed](Self::has_passed): its own, or one that failed work was to
    /// wait for. `None` once it has passed.
    #[cold]
    pub fn obstacle(&self, value: u64) -> Option<Point> {
        // Lines wait for each other in turn, so each failed one is looked at once.
        let mut behind: Vec<Point> = Vec::new();
        let mut point = self.at(value);
        let mut next = 0;
        loop {
            let line = if point.line == self.id { self } else { point.line() };
            // Beyond what was submitted nothing can be at work.
            if line.completed() < point.value.min(line.submitted()) {
                return Some(point);
            }
            let fails = |(first, _): &(u64, Error)| point.value >= *first;
            if line.failures.lock().current.as_ref().is_some_and(fails) {
                // Without host memory to look further nothing has passed for now.
                let looked = line.each_known(point.value, |known| {
                    let seen =
                        known.line == self.id || behind.iter().any(|p| p.line == known.line && p.value >= known.value);
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

    /// Calls `f` with the points that the line knew at `value`, and may have not passed, until it says no.
    fn each_known(&self, value: u64, mut f: impl FnMut(Point) -> bool) -> bool {
        let mut one = |(stamp, from): (Stamp, u64)| from > value || stamp.point().is_none_or(&mut f);
        // In this order: what leaves its place is noted besides before the place is written.
        let places = self.known.iter().zip(&self.known_from);
        places.map(|(known, from)| (Stamp(known.load(Ordering::Acquire)), from.load(Ordering::Acquire))).all(&mut one)
            && self.known_besides.lock().points.iter().copied().all(one)
    }

    /// Whether `value` failed: at or beyond the first failure of the stream that the value is of.
    #[inline]
    pub fn failed(&self, value: u64) -> bool {
        value >= self.first_failed.load(Ordering::Acquire) && self.cause_slow(value).is_some()
    }

    #[cold]
    fn cause_slow(&self, value: u64) -> Option<Error> {
        self.failures.lock().cause(value).cloned()
    }

    /// Wakes who sleeps, after a write that ends waits.
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

    /// Whether everything that this line will be given is already ordered after `stamp`. What failed under a former owner
    /// of the line is not known: who uses what it left must see the failure.
    #[inline]
    pub fn knows(&self, stamp: Stamp) -> bool {
        // The value, if the stamp is of this line; beyond all values otherwise.
        let own = stamp.0 ^ u64::from(self.id.0) << 48;
        if stamp.is_never() || own < VALUE_LIMIT && own < self.first_failed.load(Ordering::Relaxed) {
            return true;
        }
        self.knows_other(stamp)
    }

    #[inline(never)]
    fn knows_other(&self, stamp: Stamp) -> bool {
        if stamp.line_id() == self.id {
            return self.knows_own_slow(stamp.value());
        }
        let k = Stamp(self.known[usize::from(stamp.line_id().0) % KNOWN].load(Ordering::Relaxed));
        k.line_id() == stamp.line_id() && (k.value() >= stamp.value() || planted(Defect::KnowsTooMuch))
    }

    #[cold]
    fn knows_own_slow(&self, value: u64) -> bool {
        self.failures.lock().former_cause(value).is_none()
    }

    /// Runs a host call of this line's `value`. A wait of this thread for that value or a later one would
    /// never end; it is an error until `call` returns.
    #[cfg(not(loom))]
    pub fn run_call<R>(&self, value: u64, call: impl FnOnce() -> R) -> R {
        struct Former(Option<(LineId, u64)>);
        impl Drop for Former {
            fn drop(&mut self) {
                CALL.set(self.0);
            }
        }
        let _former = Former(CALL.replace(Some((self.id, value))));
        call()
    }

    /// Whether this thread may wait for `value`: no [host call](Self::run_call) that it runs has to end first.
    ///
    /// # Errors
    /// `InvalidState`: it may not.
    #[cfg(not(loom))]
    pub fn check_caller(&self, value: u64) -> Result<()> {
        match CALL.get() {
            Some((line, running)) if line == self.id && value >= running => {
                Err(Error::state("a host call waits for the stream that it runs on"))
            }
            _ => Ok(()),
        }
    }

    /// Blocks until `value` is over or known to have failed, whichever backend's line it is.
    ///
    /// # Errors
    /// The cause, when `value` failed; `Timeout`; `InvalidState` in a [host call](Self::run_call) that must
    /// end first. A timeout of zero polls.
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

    /// As [`wait`](Self::wait), for a backend that knows that another thread publishes completion: the publisher is not asked.
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

    /// Of a failed line: waits until `value` has [passed](Self::has_passed), so that nothing of it runs any more. Gives up at `deadline`,
    /// and after a second: a cause that is known is not kept back for ever. `refresh` asks what is over, for lines that publish only then.
    /// For backends, between a failure and its report.
    #[cold]
    #[cfg(not(loom))]
    pub fn see_off(&self, value: u64, deadline: Option<Instant>, refresh: impl Fn() -> Result<u64>) {
        let last = Instant::now() + LAST_BREATH;
        let deadline = deadline.map_or(last, |at| at.min(last));
        let mut looks = 0u32;
        while !self.has_passed(value) {
            if self.completed() >= value {
                self.ask(value);
            } else if refresh().is_err() {
                // What the driver says of a lost device is known already.
                return;
            }
            if Instant::now() >= deadline {
                return;
            }
            looks += 1;
            if looks < 100 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(50)) }
        }
    }

    /// Has another line's work published that keeps a failed `value` from having [passed](Self::has_passed). Does not block.
    #[cold]
    #[cfg(not(loom))]
    pub fn ask(&self, value: u64) {
        if let Some(point) = self.obstacle(value).filter(|p| p.line != self.id) {
            // What it says shows in the line.
            let _ = point.line().wait(point.value, Some(Duration::ZERO));
        }
    }

    /// Blocks until `value` is over or failed. Without a deadline: loom has no clock.
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

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({}/{}", self.id, self.completed(), self.submitted())?;
        match self.failure() {
            Some((v, _)) => write!(f, ", failed from {v})"),
            None => f.write_str(")"),
        }
    }
}

/// All lines, made a chunk at a time, never moved or freed.
static CHUNKS: [OnceLock<Box<[Line]>>; LINES / LINES_PER_CHUNK] = [const { OnceLock::new() }; LINES / LINES_PER_CHUNK];

/// The line that `id` names.
#[inline]
fn line(id: LineId) -> &'static Line {
    let i = usize::from(id.0);
    let chunk = CHUNKS[i / LINES_PER_CHUNK].get_or_init(|| {
        let base = i / LINES_PER_CHUNK * LINES_PER_CHUNK;
        (base..base + LINES_PER_CHUNK).map(|n| Line::new(n as u16)).collect()
    });
    &chunk[i % LINES_PER_CHUNK]
}

/// The cold half of a timeline: what needs the backend. The hot half is loads of its [`Line`].
///
/// A stream that runs closures on a worker of its own:
///
/// ```
/// use leasehold_core::{Error, Line, LineOwner, Point, Result, Timeline};
/// use std::sync::{Arc, Mutex, mpsc};
/// use std::time::Duration;
///
/// type Job = Box<dyn FnOnce() -> Result<()> + Send>;
/// struct WorkerStream {
///     line: Arc<LineOwner>,
///     /// The turn: values are taken in the order in which the worker gets them.
///     jobs: Mutex<mpsc::Sender<(u64, Job)>>,
/// }
///
/// impl WorkerStream {
///     fn new() -> Result<Self> {
///         let line = Arc::new(LineOwner::take()?);
///         let (jobs, todo) = mpsc::channel::<(u64, Job)>();
///         let worker = line.clone();
///         std::thread::spawn(move || {
///             for (value, job) in todo {
///                 // After a failure nothing runs, and everything completes all the same.
///                 if !worker.line().failed(value)
///                     && let Err(cause) = job()
///                 {
///                     worker.poison(value, cause);
///                 }
///                 worker.complete(value);
///             }
///         });
///         Ok(Self { line, jobs: Mutex::new(jobs) })
///     }
///
///     fn submit(&self, job: Job) -> Result<Point> {
///         let jobs = self.jobs.lock().unwrap();
///         let value = self.line().submitted() + 1;
///         jobs.send((value, job)).map_err(|_| Error::state("the worker is gone"))?;
///         Ok(self.line().at(self.line.advance()?))
///     }
/// }
///
/// // SAFETY: the worker completes a value after its job returned, jobs run one after the other, and a wait is a job.
/// unsafe impl Timeline for WorkerStream {
///     fn line(&self) -> &'static Line {
///         self.line.line()
///     }
///     fn signal(&self) -> Result<u64> {
///         Ok(self.line().submitted())
///     }
///     fn refresh(&self) -> Result<u64> {
///         Ok(self.line().completed())
///     }
///     fn wait(&self, on: Point) -> Result<()> {
///         self.submit(Box::new(move || on.line().wait(on.value(), None)))?;
///         self.line.learn(on);
///         Ok(())
///     }
///     fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
///         self.line().wait(value, timeout)
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
/// Allocators lend memory again, and runtimes run the next work on it, by what a timeline says. Its author vouches:
/// - `line` is the same line on every call, its owner is this timeline's, and nobody else submits to it.
/// - `completed` reaches a value only when all work that was submitted up to it is over: no device and no thread touches
///   memory for its sake any more. That holds for failed work too, which need not wait for what it was to wait for: the
///   line [has passed](Line::has_passed) the value once that is over as well.
/// - Work that is submitted after another starts once that is over, or behaves so.
/// - After `wait(on)` returned `Ok`, all that is submitted later starts after `on` is over, or does not run. The owner
///   [`learn`](LineOwner::learn)s a point only then.
pub unsafe trait Timeline: Send + Sync {
    /// The line that this timeline advances.
    fn line(&self) -> &'static Line;

    /// Makes the completion of all that was submitted so far observable without further calls, and returns its value.
    /// Does not block.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `DeviceLost`.
    fn signal(&self) -> Result<u64>;

    /// Asks the driver how far the timeline is, updates the line and returns the completed value. Does not block.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    fn refresh(&self) -> Result<u64>;

    /// Makes later submissions of this timeline start after `on`, on the device, and learns of it. Does not block the host.
    ///
    /// # Errors
    /// `Unsupported` when the device cannot wait for that line; the stream's cause when it is poisoned. Waiting for a failed
    /// point poisons this timeline.
    fn wait(&self, on: Point) -> Result<()>;

    /// Blocks the calling thread until `value` is over. `None` waits for ever; zero polls.
    ///
    /// # Errors
    /// `Timeout`; the cause, when `value` failed; `Recording` on a recorder.
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()>;
}
