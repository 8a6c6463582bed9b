//! Owners of timelines, which alone may write them: [`TimelineOwner`] for streams,
//! [`HostTimelineOwner`] for host timelines.
//!
//! This module must not know streams or devices.

use super::*;

/// Timelines without an owner.
struct FreeTimelines {
    made: usize,
    /// Timelines that are idle and never failed.
    ready: Vec<u16>,
    /// Timelines that are idle and failed under a former owner. They are used only if no other is
    /// free, since each check of their new values takes a lock.
    failed: VecDeque<u16>,
}

fn free_timelines() -> &'static Mutex<FreeTimelines> {
    static FREE: OnceLock<Mutex<FreeTimelines>> = OnceLock::new();
    FREE.get_or_init(|| {
        Mutex::new(FreeTimelines { made: 1, ready: Vec::new(), failed: VecDeque::new() })
    })
}

/// Exclusive ownership of a timeline: the only way to write it. A stream or host timeline owns it
/// for its whole life.
///
/// The submitter takes values with [`advance`](Self::advance). The thread that learns of completion
/// publishes it with [`complete`](Self::complete). If these are two threads, they share an
/// `Arc<TimelineOwner>`, which keeps the timeline until the last work is over. The example of
/// [`TimelineSource`] is a whole stream.
///
/// If the owner is dropped while work is pending, the owner fails this work, since its end stays
/// unknown. No other stream gets the timeline then.
///
/// ```
/// use leasehold_core::TimelineOwner;
/// let owner = TimelineOwner::take()?;
/// let value = owner.advance()?;
/// let point = owner.timeline().at(value);
/// assert!(!point.is_settled());
/// owner.complete(value);
/// assert!(point.is_settled());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct TimelineOwner {
    timeline: &'static Timeline,
    /// The last value of the timeline's former owners.
    base: u64,
}

impl TimelineOwner {
    /// Takes a free timeline. Does not block.
    ///
    /// # Errors
    /// `OutOfMemory` if all 65,535 timelines are in use.
    pub fn take() -> Result<Self> {
        let mut free = free_timelines().lock();
        let passed = |&id: &u16| timeline(TimelineId(id)).obstacle(VALUE_LIMIT).is_none();
        let (id, failed) = if let Some(id) = free.ready.pop() {
            (id, false)
        } else if free.made < TIMELINES {
            free.made += 1;
            ((free.made - 1) as u16, false)
        } else if let Some(id) =
            free.failed.iter().position(passed).and_then(|at| free.failed.remove(at))
        {
            (id, true)
        } else {
            return Err(OutOfMemory::new("timelines", 1)
                .note("65,535 streams and host timelines are in use; drop some, or restart the process")
                .into());
        };
        drop(free);
        let timeline = timeline(TimelineId(id));
        if failed {
            timeline.begin_anew();
        }
        timeline.set_name(None);
        // The next owner's stream has not waited for the last owner's dependencies.
        for known in &timeline.known {
            known.store(0, Ordering::Relaxed);
        }
        *timeline.known_besides.lock() = Besides::default();
        Ok(Self { timeline, base: timeline.submitted() })
    }

    /// A timeline outside the table, for models. Its timepoints cannot be resolved.
    #[cfg(loom)]
    #[doc(hidden)]
    pub fn for_model(number: u16) -> Self {
        Self { timeline: Box::leak(Box::new(Timeline::new(number))), base: 0 }
    }

    /// The next owner of a failed timeline, for models.
    #[cfg(loom)]
    #[doc(hidden)]
    pub fn lend_again(&self) -> Self {
        self.timeline.begin_anew();
        Self { timeline: self.timeline, base: self.timeline.submitted() }
    }

    /// The timeline, to read and to wait for.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.timeline
    }

    /// Makes the timeline that of an external stream: another library submits work there, and this
    /// owner does not see it.
    ///
    /// The last submitted value of such a timeline is an open *epoch*: it stands for all work that
    /// was submitted before the epoch is closed. The owner closes an epoch by taking the next value
    /// and then recording an event on the stream, in this order. So a thread that submitted work
    /// and then read the open epoch is covered by the event of the epoch that it read. The owner
    /// closes the open epoch if a thread asks for its completion, by the
    /// [publisher](Self::set_publisher). An allocator asks before it takes new memory.
    #[cfg(not(loom))]
    pub fn set_external(&self) {
        if !self.timeline.external.swap(true, Ordering::Relaxed) {
            EXTERNAL.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes the next value, after the driver accepted the submission. Only the submitter may call
    /// it, in its turn on the stream.
    ///
    /// # Errors
    /// `InvalidState` if the timeline's 2^48 values are used up; the stream must then be replaced.
    #[inline]
    pub fn advance(&self) -> Result<u64> {
        self.advance_to(self.timeline.submitted.load(Ordering::Relaxed) + 1)
    }

    /// Sets the submitted value, for host timelines, whose values jump. Only the submitter may call
    /// it, in its turn.
    ///
    /// # Errors
    /// `InvalidArgument` unless `value` grows; `InvalidState` beyond 2^48.
    #[inline]
    pub fn advance_to(&self, value: u64) -> Result<u64> {
        if value >= VALUE_LIMIT {
            return Err(Error::state("a timeline's 2^48 values are used up; replace the stream"));
        }
        if value <= self.timeline.submitted.load(Ordering::Relaxed) {
            return Err(Error::invalid("a timeline's value must grow"));
        }
        self.timeline.submitted.store(value, Ordering::Release);
        Ok(value)
    }

    /// Publishes that all work up to `value` is over, and wakes the threads that wait for it. Any
    /// thread; monotone; does not block. The driver must have accepted the work of these values.
    /// The call may come shortly before the timeline has advanced.
    #[inline]
    pub fn complete(&self, value: u64) {
        self.timeline.completed.fetch_max(value, Ordering::AcqRel);
        self.timeline.wake();
    }

    /// Marks `first_failed` and all later values as failed.
    ///
    /// The first cause stays. A lower value moves the mark down, but not below the values of this
    /// owner. Any thread. The completion of failed values must still be published, so that no
    /// thread waits for ever on a failed timeline.
    pub fn poison(&self, first_failed: u64, cause: Error) {
        let first = first_failed.max(self.base + 1);
        let mut failures = self.timeline.failures.lock();
        match &mut failures.current {
            Some((mark, _)) => *mark = first.min(*mark),
            none => *none = Some((first, cause)),
        }
        self.timeline.first_failed.fetch_min(first, Ordering::AcqRel);
        drop(failures);
        self.timeline.wake();
    }

    /// Records that later work on this timeline is ordered after `point`. Only the submitter may
    /// call it, in its turn, after the wait was submitted and before further submissions.
    #[inline]
    pub fn learn(&self, point: Timepoint) {
        // Timelines of models are in no table.
        #[cfg(not(loom))]
        point.timeline().expect(point.value());
        let timepoint = PackedTimepoint::from(point);
        if !self.timeline.knows(timepoint) && timepoint.timeline_id() != self.timeline.id {
            let at = usize::from(point.timeline.0) % KNOWN;
            let (place, from) = (&self.timeline.known[at], &self.timeline.known_from[at]);
            let former = PackedTimepoint(place.load(Ordering::Relaxed));
            if former.timepoint().is_some_and(|p| !p.has_passed()) {
                self.note_besides(former, from.load(Ordering::Relaxed));
            }
            from.store(self.timeline.submitted(), Ordering::Release);
            place.store(timepoint.0, Ordering::Release);
        }
    }

    /// Keeps a displaced timepoint: if the timeline fails, the values that waited for it pass only
    /// after it has passed.
    #[cold]
    fn note_besides(&self, former: PackedTimepoint, from: u64) {
        let mut besides = self.timeline.known_besides.lock();
        if besides.points.capacity() == 0 {
            // Reserved once for the usual number of pending streams, so that a launch allocates no
            // memory.
            besides.full = BESIDES / 2;
            besides.points.reserve(BESIDES);
            besides.room.reserve(BESIDES);
        }
        if besides.points.len() >= besides.full {
            let Besides { points, room, .. } = &mut *besides;
            room.extend_from_slice(points);
            let mut passed = std::mem::take(room);
            drop(besides);
            // Outside the lock: the check reads other timelines, and perhaps this one.
            passed.retain(|(s, _)| s.timepoint().is_none_or(Timepoint::has_passed));
            besides = self.timeline.known_besides.lock();
            besides.points.retain(|known| !passed.contains(known));
            besides.full = (2 * besides.points.len()).max(BESIDES / 2);
            passed.clear();
            besides.room = passed;
        }
        besides.points.push((former, from));
    }

    /// Sets the function that publishes completion before a thread sleeps, for backends that
    /// publish only on request. The drop of the owner removes the publisher, so the publisher must
    /// not keep the owner alive.
    #[cfg(not(loom))]
    pub fn set_publisher(&self, publisher: Option<Publisher>) {
        let old = std::mem::replace(&mut *self.timeline.publisher.lock(), publisher);
        // Outside the lock: the publisher may hold the last reference to a stream.
        drop(old);
    }
}

impl Timeline {
    /// Prepares a failed and idle timeline for its next owner: failed values stay failed, and new
    /// values lie beyond every old timepoint.
    fn begin_anew(&self) {
        let mut failures = self.failures.lock();
        if let Some((first, cause)) = failures.current.take() {
            let last = self.submitted().max(first);
            let base = (last + 1).next_multiple_of(LEASE_STRIDE);
            failures.former.push((first..base, cause));
            self.submitted.store(base, Ordering::Release);
            self.completed.fetch_max(base, Ordering::AcqRel);
        }
    }
}

#[cfg(not(loom))]
impl Drop for TimelineOwner {
    fn drop(&mut self) {
        let timeline = self.timeline;
        self.set_publisher(None);
        if timeline.external.swap(false, Ordering::Relaxed) {
            EXTERNAL.fetch_sub(1, Ordering::Relaxed);
        }
        if !timeline.is_idle() {
            self.poison(
                timeline.completed() + 1,
                Error::state("the stream's owner went before the work was over"),
            );
            return;
        }
        // A value that was completed and never submitted is used up too.
        timeline.submitted.fetch_max(timeline.completed(), Ordering::AcqRel);
        // Half of the values are a margin: a timeline is cheap, but a running stream must not use
        // up its values.
        let used = timeline.failure().map_or(0, |(first, _)| first).max(timeline.submitted());
        if used >= VALUE_LIMIT / 2 {
            return;
        }
        let mut free = free_timelines().lock();
        if timeline.first_failed.load(Ordering::Acquire) == NEVER {
            free.ready.push(timeline.id.0);
        } else {
            free.failed.push_back(timeline.id.0);
        }
    }
}

/// A timeline that the host signals, on every device. Values jump; one signal or failure runs at a
/// time.
///
/// ```
/// use leasehold_core::{Error, HostTimelineOwner};
/// let host_timeline = HostTimelineOwner::take()?;
/// let next = host_timeline.timeline().submitted() + 1;
/// host_timeline.signal(next)?;
/// assert!(host_timeline.timeline().is_settled(next));
/// assert!(host_timeline.signal(next).is_err(), "a value must grow");
/// assert!(host_timeline.fail(Error::state("given up")), "the first failure");
/// assert!(!host_timeline.fail(Error::state("again")), "the first cause stays");
/// assert!(host_timeline.signal(next + 1).is_err());
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct HostTimelineOwner {
    owner: TimelineOwner,
    /// Held from the check of the signalled value until the new value is published. A leaf, except
    /// for the function that [`signal_with`](Self::signal_with) calls.
    turn: Mutex<()>,
}

impl HostTimelineOwner {
    /// Takes a free timeline.
    ///
    /// # Errors
    /// As [`TimelineOwner::take`].
    pub fn take() -> Result<Self> {
        let owner = TimelineOwner::take()?;
        owner.timeline.expected.store(0, Ordering::Release);
        Ok(Self { owner, turn: Mutex::new(()) })
    }

    /// The timeline.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.owner.timeline()
    }

    /// Signals `value` and wakes the threads that wait for it. Any thread; blocks only for another
    /// signal.
    ///
    /// # Errors
    /// The cause once the timeline has failed; `InvalidArgument` unless `value` grows;
    /// `InvalidState` beyond 2^48.
    pub fn signal(&self, value: u64) -> Result<()> {
        self.signal_with(value, || Ok(()))
    }

    /// Like [`signal`](Self::signal), but calls `signal` before the threads wake. `signal` serves a
    /// device's own counter, which must see the values in order; it must not signal or fail this
    /// timeline.
    ///
    /// # Errors
    /// As [`signal`](Self::signal). If `signal` fails, the value is used up and not complete.
    pub fn signal_with(&self, value: u64, signal: impl FnOnce() -> Result<()>) -> Result<()> {
        let turn = self.turn.lock();
        if let Some((_, cause)) = self.timeline().failure() {
            return Err(cause);
        }
        self.owner.advance_to(value)?;
        signal()?;
        self.owner.complete(value);
        drop(turn);
        self.make_calls();
        Ok(())
    }

    /// Makes the calls of values that are over, without the turn.
    fn make_calls(&self) {
        #[cfg(not(loom))]
        self.timeline().make_calls();
    }

    /// Fails every value that was not signalled. Returns whether this was the first failure; a
    /// later one changes nothing. Any thread; blocks only for another signal.
    pub fn fail(&self, cause: Error) -> bool {
        let turn = self.turn.lock();
        if self.timeline().failure().is_some() {
            return false;
        }
        self.owner.poison(self.timeline().submitted() + 1, cause);
        drop(turn);
        self.make_calls();
        true
    }

    /// Ends the host timeline: fails the values that somebody may [wait for](Timeline::expect) and
    /// that were not signalled. No further value is signalled. Returns whether this was the first
    /// failure. The drop does the same.
    pub fn end(&self, cause: Error) -> bool {
        let turn = self.turn.lock();
        let timeline = self.timeline();
        let expected = timeline.expected.swap(NEVER, Ordering::AcqRel);
        if expected == NEVER || expected <= timeline.submitted() {
            return false;
        }
        let first = timeline.failure().is_none();
        if first {
            self.owner.poison(timeline.submitted() + 1, cause);
        }
        // The values are over, and the next owner's lie beyond them.
        timeline.submitted.store(expected, Ordering::Release);
        self.owner.complete(expected);
        drop(turn);
        self.make_calls();
        first
    }
}

#[cfg(not(loom))]
impl Drop for HostTimelineOwner {
    fn drop(&mut self) {
        self.end(Error::state("the host timeline's owner went before the value was signalled"));
    }
}
