//! Owners of timelines, which alone may write them: [`LineOwner`] for streams, [`HostLine`] for
//! host timelines.
//!
//! This module must not know streams or devices.

use super::*;

/// Timelines without an owner.
struct FreeLines {
    made: usize,
    /// Timelines that are idle and never failed.
    ready: Vec<u16>,
    /// Timelines that are idle and failed under a former owner. They are used only if no other is
    /// free, since each check of their new values takes a lock.
    failed: VecDeque<u16>,
}

fn free_lines() -> &'static Mutex<FreeLines> {
    static FREE: OnceLock<Mutex<FreeLines>> = OnceLock::new();
    FREE.get_or_init(|| Mutex::new(FreeLines { made: 1, ready: Vec::new(), failed: VecDeque::new() }))
}

/// Exclusive ownership of a timeline: the only way to write it. A stream or host timeline owns it
/// for its whole life.
///
/// The submitter takes values with [`advance`](Self::advance). The thread that learns of completion
/// publishes it with [`complete`](Self::complete). If these are two threads, they share an
/// `Arc<LineOwner>`, which keeps the timeline until the last work is over. The example of
/// [`Timeline`] is a whole stream.
///
/// If the owner is dropped while work is pending, the owner fails this work, since its end stays
/// unknown. No other stream gets the timeline then.
///
/// ```
/// use leasehold_core::LineOwner;
/// let owner = LineOwner::take()?;
/// let value = owner.advance()?;
/// let point = owner.line().at(value);
/// assert!(!point.is_settled());
/// owner.complete(value);
/// assert!(point.is_settled());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct LineOwner {
    line: &'static Line,
    /// The last value of the timeline's former owners.
    base: u64,
}

impl LineOwner {
    /// Takes a free timeline. Does not block.
    ///
    /// # Errors
    /// `OutOfMemory` if all 65,535 timelines are in use.
    pub fn take() -> Result<Self> {
        let mut free = free_lines().lock();
        let passed = |&id: &u16| line(LineId(id)).obstacle(VALUE_LIMIT).is_none();
        let (id, failed) = if let Some(id) = free.ready.pop() {
            (id, false)
        } else if free.made < LINES {
            free.made += 1;
            ((free.made - 1) as u16, false)
        } else if let Some(id) = free.failed.iter().position(passed).and_then(|at| free.failed.remove(at)) {
            (id, true)
        } else {
            return Err(OutOfMemory::new("timelines", 1)
                .note("65,535 streams and gates are in use; drop some, or restart the process")
                .into());
        };
        drop(free);
        let line = line(LineId(id));
        if failed {
            line.begin_anew();
        }
        // The next owner's stream has not waited for the last owner's dependencies.
        for known in &line.known {
            known.store(0, Ordering::Relaxed);
        }
        *line.known_besides.lock() = Besides::default();
        Ok(Self { line, base: line.submitted() })
    }

    /// A timeline outside the table, for models. Its timepoints cannot be resolved.
    #[cfg(loom)]
    #[doc(hidden)]
    pub fn for_model(number: u16) -> Self {
        Self { line: Box::leak(Box::new(Line::new(number))), base: 0 }
    }

    /// The next owner of a failed timeline, for models.
    #[cfg(loom)]
    #[doc(hidden)]
    pub fn lend_again(&self) -> Self {
        self.line.begin_anew();
        Self { line: self.line, base: self.line.submitted() }
    }

    /// The timeline, to read and to wait for.
    #[inline]
    pub fn line(&self) -> &'static Line {
        self.line
    }

    /// Takes the next value, after the driver accepted the submission. Only the submitter may call
    /// it, in its turn on the stream.
    ///
    /// # Errors
    /// `InvalidState` if the timeline's 2^48 values are used up; the stream must then be replaced.
    #[inline]
    pub fn advance(&self) -> Result<u64> {
        self.advance_to(self.line.submitted.load(Ordering::Relaxed) + 1)
    }

    /// Sets the submitted value, for host timelines, whose values jump. Only the submitter may call
    /// it, in its turn.
    ///
    /// # Errors
    /// `InvalidArgument` unless `value` grows; `InvalidState` beyond 2^48.
    #[inline]
    pub fn advance_to(&self, value: u64) -> Result<u64> {
        if value >= VALUE_LIMIT {
            return Err(Error::state("a line's 2^48 values are used up; replace the stream"));
        }
        if value <= self.line.submitted.load(Ordering::Relaxed) {
            return Err(Error::invalid("a timeline's value must grow"));
        }
        self.line.submitted.store(value, Ordering::Release);
        Ok(value)
    }

    /// Publishes that all work up to `value` is over, and wakes the threads that wait for it. Any
    /// thread; monotone; does not block. The driver must have accepted the work of these values.
    /// The call may come shortly before the timeline has advanced.
    #[inline]
    pub fn complete(&self, value: u64) {
        self.line.completed.fetch_max(value, Ordering::AcqRel);
        self.line.wake();
    }

    /// Marks `first_failed` and all later values as failed.
    ///
    /// The first cause stays. A lower value moves the mark down, but not below the values of this
    /// owner. Any thread. The completion of failed values must still be published, so that no
    /// thread waits for ever on a failed timeline.
    pub fn poison(&self, first_failed: u64, cause: Error) {
        let first = first_failed.max(self.base + 1);
        let mut failures = self.line.failures.lock();
        match &mut failures.current {
            Some((mark, _)) => *mark = first.min(*mark),
            none => *none = Some((first, cause)),
        }
        self.line.first_failed.fetch_min(first, Ordering::AcqRel);
        drop(failures);
        self.line.wake();
    }

    /// Records that later work on this timeline is ordered after `point`. Only the submitter may
    /// call it, in its turn, after the wait was submitted and before further submissions.
    #[inline]
    pub fn learn(&self, point: Point) {
        let stamp = Stamp::from(point);
        if !self.line.knows(stamp) && stamp.line_id() != self.line.id {
            let at = usize::from(point.line.0) % KNOWN;
            let (place, from) = (&self.line.known[at], &self.line.known_from[at]);
            let former = Stamp(place.load(Ordering::Relaxed));
            if former.point().is_some_and(|p| !p.has_passed()) {
                self.note_besides(former, from.load(Ordering::Relaxed));
            }
            from.store(self.line.submitted(), Ordering::Release);
            place.store(stamp.0, Ordering::Release);
        }
    }

    /// Keeps a displaced timepoint: if the timeline fails, the values that waited for it pass only
    /// after it has passed.
    #[cold]
    fn note_besides(&self, former: Stamp, from: u64) {
        let mut besides = self.line.known_besides.lock();
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
            passed.retain(|(s, _)| s.point().is_none_or(Point::has_passed));
            besides = self.line.known_besides.lock();
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
        let old = std::mem::replace(&mut *self.line.publisher.lock(), publisher);
        // Outside the lock: the publisher may hold the last reference to a stream.
        drop(old);
    }
}

impl Line {
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
impl Drop for LineOwner {
    fn drop(&mut self) {
        let line = self.line;
        self.set_publisher(None);
        if !line.is_idle() {
            self.poison(line.completed() + 1, Error::state("the stream's owner went before the work was over"));
            return;
        }
        // A value that was completed and never submitted is used up too.
        line.submitted.fetch_max(line.completed(), Ordering::AcqRel);
        // Half of the values are a margin: a timeline is cheap, but a running stream must not use
        // up its values.
        let used = line.failure().map_or(0, |(first, _)| first).max(line.submitted());
        if used >= VALUE_LIMIT / 2 {
            return;
        }
        let mut free = free_lines().lock();
        if line.first_failed.load(Ordering::Acquire) == NEVER {
            free.ready.push(line.id.0);
        } else {
            free.failed.push_back(line.id.0);
        }
    }
}

/// A timeline that the host signals, on every device. Values jump; one signal or failure runs at a
/// time.
///
/// ```
/// use leasehold_core::{Error, HostLine};
/// let gate = HostLine::take()?;
/// let next = gate.line().submitted() + 1;
/// gate.raise(next)?;
/// assert!(gate.line().is_settled(next));
/// assert!(gate.raise(next).is_err(), "a value must grow");
/// assert!(gate.fail(Error::state("given up")), "the first failure");
/// assert!(!gate.fail(Error::state("again")), "the first cause stays");
/// assert!(gate.raise(next + 1).is_err());
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct HostLine {
    owner: LineOwner,
    /// Held from the check of the signalled value until the new value is published. A leaf, except
    /// for the function that [`raise_with`](Self::raise_with) calls.
    turn: Mutex<()>,
}

impl HostLine {
    /// Takes a free timeline.
    ///
    /// # Errors
    /// As [`LineOwner::take`].
    pub fn take() -> Result<Self> {
        Ok(Self { owner: LineOwner::take()?, turn: Mutex::new(()) })
    }

    /// The timeline.
    #[inline]
    pub fn line(&self) -> &'static Line {
        self.owner.line()
    }

    /// Signals `value` and wakes the threads that wait for it. Any thread; blocks only for another
    /// signal.
    ///
    /// # Errors
    /// The cause once the timeline has failed; `InvalidArgument` unless `value` grows;
    /// `InvalidState` beyond 2^48.
    pub fn raise(&self, value: u64) -> Result<()> {
        self.raise_with(value, || Ok(()))
    }

    /// Like [`raise`](Self::raise), but calls `signal` before the threads wake. `signal` serves a
    /// device's own counter, which must see the values in order; it must not signal or fail this
    /// timeline.
    ///
    /// # Errors
    /// As [`raise`](Self::raise). If `signal` fails, the value is used up and not complete.
    pub fn raise_with(&self, value: u64, signal: impl FnOnce() -> Result<()>) -> Result<()> {
        let _turn = self.turn.lock();
        if let Some((_, cause)) = self.line().failure() {
            return Err(cause);
        }
        self.owner.advance_to(value)?;
        signal()?;
        self.owner.complete(value);
        Ok(())
    }

    /// Fails every value that was not signalled. Returns whether this was the first failure; a
    /// later one changes nothing. Any thread; blocks only for another signal.
    pub fn fail(&self, cause: Error) -> bool {
        let _turn = self.turn.lock();
        if self.line().failure().is_some() {
            return false;
        }
        self.owner.poison(self.line().submitted() + 1, cause);
        true
    }
}
