//! The part of a stream that its clones, the runtime and handles share: its turn, its room and its
//! submissions.
//!
//! # Room
//! A backend may block a submitter while its queue is full. Nobody may be blocked so while holding
//! the submission lock: a host call on the same stream that submits would wait for the submission
//! lock, and the queue for the host call. So callers pause *before* they take the submission lock,
//! as soon as about 8,192 operations are pending ([`StreamInner::submit_guard`]); host calls never
//! pause. A pause in which nothing completes ends with an error: the thread that pauses may be the
//! one that the stream waits for.
//!
//! This module must not know streams, runtimes or operations beyond `hal`'s.

use super::callback_depth::in_host_call;
use super::records::{Use, push_waits};
use super::submit_lock::{Scratch, SubmitGuard, SubmitLock};
use crate::trace::track::Track;
use crate::trace::tracks::Tracks;
use leasehold_core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Result, Timeline, TimelineSource, Timepoint};
use leasehold_hal::Op;
use std::any::Any;
use std::sync::Weak;
use std::time::Duration;

/// Operations after which submitters see to it that the ones before are over.
const SEGMENT: u32 = 4096;
/// How long a submitter waits for room while nothing completes, unless the stream is told
/// otherwise.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// The part of a stream that the runtime and its handles share.
pub(crate) struct StreamInner {
    pub(crate) raw: Lease<dyn leasehold_hal::Stream>,
    pub(crate) timeline: &'static Timeline,
    submit_lock: SubmitLock,
    /// Operations since `mark`. Written in the submission lock.
    since: AtomicU32,
    /// The submitted value when `since` began. Written in the submission lock.
    mark: AtomicU64,
    /// How long a submitter waits for room while nothing completes, and an allocation for memory,
    /// in milliseconds.
    timeout: AtomicU64,
    /// Streams of other devices that work for this one, used in its submission lock alone.
    companions: Mutex<Vec<Companion>>,
}

/// A stream of another device that works for one of this device's: what it is given waits for
/// nobody else's.
struct Companion {
    /// The device that it is of.
    owner: Weak<dyn Any + Send + Sync>,
    core: Arc<StreamInner>,
}

// SAFETY: each call is the stream's own, whose timeline this is.
unsafe impl TimelineSource for StreamInner {
    fn timeline(&self) -> &'static Timeline {
        self.timeline
    }

    fn signal(&self) -> Result<u64> {
        self.raw.signal()
    }

    fn refresh(&self) -> Result<u64> {
        self.raw.refresh()
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        self.raw.wait(on)
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.raw.wait_host(value, timeout)
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout.load(Ordering::Relaxed))
    }
}

impl StreamInner {
    pub(crate) fn new(raw: Lease<dyn leasehold_hal::Stream>) -> Self {
        let timeline = raw.timeline();
        // A pooled stream has the name of its former user.
        timeline.set_name(None);
        let timeout = AtomicU64::new(SUBMIT_TIMEOUT.as_millis() as u64);
        Self {
            raw,
            timeline,
            submit_lock: SubmitLock::new(),
            since: AtomicU32::new(0),
            mark: AtomicU64::new(0),
            timeout,
            companions: Mutex::default(),
        }
    }

    /// The stream of `owner`, another device, that works for this one: made by `make` when first
    /// asked for, and again after it failed. May block on the driver.
    ///
    /// # Errors
    /// The error of `make`.
    pub(crate) fn companion(
        &self,
        owner: Arc<dyn Any + Send + Sync>,
        make: impl FnOnce() -> Result<Arc<StreamInner>>,
    ) -> Result<Arc<StreamInner>> {
        let is_of_owner = |c: &Companion| std::ptr::addr_eq(c.owner.as_ptr(), Arc::as_ptr(&owner));
        let sound = |c: &&Companion| {
            is_of_owner(c) && !c.core.timeline.failed(c.core.timeline.submitted() + 1)
        };
        if let Some(found) = self.companions.lock().iter().find(sound) {
            return Ok(found.core.clone());
        }
        let core = make()?;
        let mut companions = self.companions.lock();
        // Another thread may have made one meanwhile: that one stays.
        let core = companions.iter().find(sound).map_or(core, |c| c.core.clone());
        let is_of_use = |c: &Companion| c.owner.strong_count() > 0 && !is_of_owner(c);
        let (stay, go): (Vec<_>, Vec<_>) =
            std::mem::take(&mut *companions).into_iter().partition(is_of_use);
        *companions = stay;
        companions.push(Companion { owner: Arc::downgrade(&owner), core: core.clone() });
        drop(companions);
        // Not under the lock: a stream that ends may run what is left of it.
        drop(go);
        Ok(core)
    }

    /// Sets how long a submitter waits for room while nothing completes.
    pub(crate) fn set_timeout(&self, timeout: Duration) {
        let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.timeout.store(millis, Ordering::Relaxed);
    }

    /// The cold half of the stream's timeline.
    #[inline]
    pub(crate) fn source(&self) -> &dyn TimelineSource {
        self
    }

    /// Takes the submission lock, once there is room.
    ///
    /// # Errors
    /// `Occupied` when this thread has a session open on the stream.
    #[inline]
    pub(crate) fn submit_guard(&self) -> Result<SubmitGuard<'_>> {
        self.wait_for_room()?;
        self.submit_lock.submit_guard()
    }

    /// Takes the submission lock for a caller that waited for room before it took a lock.
    ///
    /// # Errors
    /// `Occupied` when this thread has a session open on the stream.
    #[inline]
    pub(crate) fn submit_guard_now(&self) -> Result<SubmitGuard<'_>> {
        self.submit_lock.submit_guard()
    }

    /// Takes the submission lock if it is free, once there is room.
    ///
    /// # Errors
    /// `Occupied` when anybody holds it.
    pub(crate) fn try_submit_guard(&self) -> Result<SubmitGuard<'_>> {
        // Before and after: the wait for room takes turns of its own.
        drop(self.submit_lock.try_submit_guard()?);
        self.wait_for_room()?;
        self.submit_lock.try_submit_guard()
    }

    /// Waits until there is room for another submission. Called without any lock.
    #[inline]
    pub(crate) fn wait_for_room(&self) -> Result<()> {
        if self.since.load(Ordering::Relaxed) < SEGMENT {
            Ok(())
        } else {
            self.wait_for_room_slow()
        }
    }

    #[cold]
    fn wait_for_room_slow(&self) -> Result<()> {
        if in_host_call() {
            return Ok(());
        }
        // Waited once, or the stream failed. Host calls may go on submitting without room.
        let mut waited = false;
        loop {
            let target = {
                let _turn = self.submit_lock.submit_guard()?;
                let since = self.since.load(Ordering::Relaxed);
                if since < SEGMENT {
                    return Ok(());
                }
                // One segment may be pending while the next one is filled; after a giant submission
                // none.
                let huge = since > 4 * SEGMENT;
                let target = if huge {
                    self.timeline.submitted()
                } else {
                    self.mark.load(Ordering::Relaxed)
                };
                if waited || self.timeline.completed() >= target || self.timeline.failed(target) {
                    self.mark.store(self.timeline.submitted(), Ordering::Relaxed);
                    self.since.store(0, Ordering::Relaxed);
                    return Ok(());
                }
                target
            };
            let before = self.timeline.completed();
            let timeout = self.timeout();
            match self.raw.wait_host(target, Some(timeout)) {
                Err(Error::Timeout(_)) if self.timeline.completed() == before => {
                    return Err(self.stuck(timeout));
                }
                Err(Error::Timeout(_)) => {}
                // A failure is the business of the submission that follows.
                Ok(()) | Err(_) => waited = true,
            }
        }
    }

    #[cold]
    fn stuck(&self, timeout: Duration) -> Error {
        Error::Timeout(
            format!(
                "no room for another operation: {} submissions are pending on {:?} and none completed within {timeout:?}. What they \
                 wait for (a host timeline, a host call) must not come from the thread that submits more of them. Nothing was submitted; the \
                 call may be repeated",
                self.timeline.submitted() - self.timeline.completed().min(self.timeline.submitted()),
                self.timeline.id()
            )
            .into(),
        )
    }

    /// Submits one operation after the scratch's waits, and remembers what the stream knows from
    /// then on. `uses` is what a trace notes of its operands.
    ///
    /// # Safety
    /// - As [`leasehold_hal::Stream::submit`].
    #[inline]
    pub(crate) unsafe fn submit<U: Use>(
        &self,
        scratch: &mut Scratch,
        op: &Op<'_>,
        uses: &[U],
    ) -> Result<u64> {
        let value = if scratch.goes_straight() {
            // SAFETY: by the caller's contract.
            unsafe { self.raw.submit(std::slice::from_ref(op)) }?
        } else {
            // SAFETY: as above.
            unsafe { self.submit_after(scratch, op, uses) }?
        };
        self.count(1 + scratch.waits.len());
        Ok(value)
    }

    /// # Safety
    /// - As [`submit`](Self::submit).
    #[cold]
    unsafe fn submit_after<U: Use>(
        &self,
        scratch: &mut Scratch,
        op: &Op<'_>,
        uses: &[U],
    ) -> Result<u64> {
        let Scratch { waits, ops, trace, .. } = scratch;
        ops.clear();
        push_waits(waits, ops)?;
        // SAFETY: the list is cleared before the operation's borrows end.
        ops.push(unsafe { std::mem::transmute::<Op<'_>, Op<'static>>(*op) });
        // SAFETY: by the caller's contract.
        let result = unsafe { self.submit_list(trace, ops, uses) };
        ops.clear();
        result
    }

    /// Submits operations, which the caller counts. `uses` is what a trace notes of their operands,
    /// in the operations' order.
    ///
    /// # Safety
    /// - As [`leasehold_hal::Stream::submit`]. The caller has the submission lock, and `trace` is
    ///   of its scratch.
    #[inline]
    pub(crate) unsafe fn submit_list<U: Use>(
        &self,
        trace: &mut Option<Arc<Track>>,
        ops: &[Op<'_>],
        uses: &[U],
    ) -> Result<u64> {
        if trace.is_none() {
            // SAFETY: by the caller's contract.
            unsafe { self.raw.submit(ops) }
        } else {
            // SAFETY: by the caller's contract.
            unsafe { self.submit_traced(trace, ops, uses) }
        }
    }

    /// # Safety
    /// - As [`submit_list`](Self::submit_list).
    #[cold]
    #[inline(never)]
    unsafe fn submit_traced<U: Use>(
        &self,
        trace: &mut Option<Arc<Track>>,
        ops: &[Op<'_>],
        uses: &[U],
    ) -> Result<u64> {
        match trace {
            Some(track) if track.is_on() => {
                let operands = &mut uses.iter().map(U::operand);
                // SAFETY: by the caller's contract; the track is of this stream.
                let (value, added) = unsafe { track.submit(&*self.raw, ops, operands) }?;
                self.count(added);
                Ok(value)
            }
            _ => {
                *trace = None;
                // SAFETY: by the caller's contract.
                unsafe { self.raw.submit(ops) }
            }
        }
    }

    /// Has a trace note the submissions from now on.
    ///
    /// # Errors
    /// `Occupied` when this thread has a session open on the stream.
    pub(crate) fn trace_by(&self, tracks: &Tracks) -> Result<()> {
        let track = tracks.track(self.timeline);
        self.submit_lock.submit_guard()?.scratch().trace = track;
        Ok(())
    }

    /// Forgets a trace that has ended, unless the stream is in use: then its next submission does.
    pub(crate) fn forget_trace(&self) {
        if let Ok(mut submit_guard) = self.submit_lock.try_submit_guard() {
            let trace = &mut submit_guard.scratch().trace;
            if trace.as_ref().is_some_and(|track| !track.is_on()) {
                *trace = None;
            }
        }
    }

    /// Counts operations that were submitted. In the submission lock.
    #[inline]
    pub(crate) fn count(&self, ops: usize) {
        // No submission has 2^31 operations, and none is made while a quarter of that is pending.
        self.since
            .store(self.since.load(Ordering::Relaxed).wrapping_add(ops as u32), Ordering::Relaxed);
    }
}
