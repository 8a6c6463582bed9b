//! Waiting and asking, and words that the host shares with queues.
//!
//! # Protocol
//! A thread that waits looks whether it is over; if not, it steps ([`Stepping::Auto`]). When nothing can run, it sleeps until another thread has
//! enqueued, signalled or stepped, for a bounded time, because a word may also be written without a call. When nothing can run and nobody could help, that is a
//! dead-lock: an error that says who waits for what, never a hang.
//!
//! This module must not know how commands run.

use super::space::Reach;
use super::{EventId, Machine, Monitor, QueueId, SemaphoreId, State, Stepping};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Result};
use std::time::{Duration, Instant};

/// How long a thread sleeps before it looks again whether a word was written behind the machine's back.
const NAP: Duration = Duration::from_micros(200);
/// Steps of a question, at most.
const A_LITTLE: usize = 4;

impl Monitor {
    /// Steps a little, where questions do.
    fn nudge(&self) {
        if self.0.config.stepping == Stepping::Auto {
            let steps = self.lock().rng.below(A_LITTLE);
            for _ in 0..=steps {
                if !self.step() {
                    break;
                }
            }
        }
    }

    /// Blocks until `over` answers.
    fn wait_for(
        &self,
        timeout: Option<Duration>,
        mut over: impl FnMut(&mut State) -> Option<Result<()>>,
    ) -> Result<()> {
        let config = &self.0.config;
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut alone_since: Option<Instant> = None;
        let mut polls = 0;
        loop {
            let mut state = self.lock();
            if let Some(result) = over(&mut state) {
                return result;
            }
            let expired = deadline.is_some_and(|at| Instant::now() >= at);
            if expired && (timeout != Some(Duration::ZERO) || polls >= A_LITTLE) {
                return Err(Error::Timeout(format!("not over in time; {}", state.waiting()).into()));
            }
            polls += 1;
            if config.stepping == Stepping::Auto {
                state.asked.clear();
                drop(state);
                if self.step() {
                    alone_since = None;
                    continue;
                }
                state = self.lock();
                if let Some(result) = over(&mut state) {
                    return result;
                }
                // Functions that this thread itself is in cannot end before it does.
                let called = state.queues.values().filter(|q| q.busy).count() > super::step::depth();
                let since = *alone_since.get_or_insert_with(Instant::now);
                if !called && (config.patience.is_zero() || timeout.is_none() && since.elapsed() >= config.patience) {
                    return Err(Error::state(format!("dead-lock: nothing can run; {}", state.waiting())));
                }
            }
            if expired {
                continue;
            }
            state.waiters += 1;
            let nap = deadline.map_or(NAP, |at| NAP.min(at.saturating_duration_since(Instant::now())));
            let _ = self.0.bell.wait_for(&mut state.guard, nap);
            state.waiters -= 1;
        }
    }

    /// Blocks until a condition of the caller's holds, making things happen meanwhile as any wait does. The condition is asked under the machine's lock and
    /// must not call the machine.
    ///
    /// # Errors
    /// `Timeout`; `InvalidState` for a dead-lock.
    pub fn wait_until(&self, timeout: Option<Duration>, mut over: impl FnMut() -> bool) -> Result<()> {
        self.wait_for(timeout, |_| over().then_some(Ok(())))
    }

    /// Rings for threads that wait on a condition which the host has changed.
    pub fn ring(&self) {
        self.lock().progress();
    }

    /// Steps a little, as questions do; not at all where only [`step`](Self::step) steps.
    pub fn poll(&self) {
        self.nudge();
    }
}

impl Machine {
    /// Whether all that was enqueued is over. Steps a little.
    ///
    /// # Errors
    /// The cause of a queue that has failed; `DeviceLost`; `NotFound`; the fault plan's.
    pub fn queue_query(&self, queue: QueueId) -> Result<bool> {
        drop(self.enter_queue(queue, "queue_query")?);
        self.nudge();
        self.lock().queue_over(queue, u64::MAX)
    }

    /// Blocks until all that was enqueued before the call is over. `None` waits for ever, or until it is a dead-lock; zero polls.
    ///
    /// # Errors
    /// `Timeout`; `InvalidState` for a dead-lock, saying who waits for what, and for a host function that waits for its own queue; as
    /// [`queue_query`](Self::queue_query).
    pub fn queue_synchronize(&self, queue: QueueId, timeout: Option<Duration>) -> Result<()> {
        let target = {
            let mut state = self.enter_queue(queue, "queue_synchronize")?;
            state.queue(queue)?.enqueued
        };
        if self.is_calling(queue) {
            return Err(Error::state("a host function waits for the queue that it runs on"));
        }
        self.wait_for(timeout, |state| match state.queue_over(queue, target) {
            Ok(true) => Some(Ok(())),
            Ok(false) => None,
            Err(e) => Some(Err(e)),
        })
    }

    /// Blocks until all that was enqueued before the call on any queue of the device is over.
    ///
    /// # Errors
    /// As [`queue_synchronize`](Self::queue_synchronize).
    pub fn device_synchronize(&self, device: u32, timeout: Option<Duration>) -> Result<()> {
        let state = self.enter(device, "device_synchronize")?;
        let queues: Vec<(QueueId, u64)> =
            state.queues.iter().filter(|(_, q)| q.device == device).map(|(&id, q)| (id, q.enqueued)).collect();
        drop(state);
        self.wait_for(timeout, |state| {
            if let Err(e) = state.alive(device) {
                return Some(Err(e));
            }
            let mut first = Ok(());
            for &(id, target) in &queues {
                // A queue that is gone had nothing left.
                if !state.queues.contains_key(&id) {
                    continue;
                }
                match state.queue_over_any(id, target) {
                    Ok(true) => {}
                    Ok(false) => return None,
                    Err(e) => first = first.and(Err(e)),
                }
            }
            Some(first)
        })
    }

    fn event_device(&self, event: EventId) -> Result<u32> {
        let device = self.lock().events.get(&event).map(|e| e.device);
        device.ok_or_else(|| Error::NotFound(format!("{event:?} does not exist").into()))
    }

    /// Whether an event's last record is over; one that was never recorded is. Steps a little.
    ///
    /// # Errors
    /// `NotFound`; `DeviceLost`; the fault plan's.
    pub fn event_query(&self, event: EventId) -> Result<bool> {
        drop(self.enter(self.event_device(event)?, "event_query")?);
        self.nudge();
        self.lock().event_over(event)
    }

    /// Blocks until an event's last record is over.
    ///
    /// # Errors
    /// As [`event_query`](Self::event_query) and [`queue_synchronize`](Self::queue_synchronize).
    pub fn event_synchronize(&self, event: EventId, timeout: Option<Duration>) -> Result<()> {
        drop(self.enter(self.event_device(event)?, "event_synchronize")?);
        let bound = self.lock().events.get(&event).and_then(|e| e.last.clone());
        let Some(mark) = bound else { return Ok(()) };
        self.wait_for(timeout, |state| {
            let done = mark.done.get()?;
            state.host_learns(&done.clock, done.nanos);
            Some(Ok(()))
        })
    }

    /// A semaphore's value. Steps a little.
    ///
    /// # Errors
    /// `NotFound`; the cause of a semaphore that has failed.
    pub fn semaphore_value(&self, semaphore: SemaphoreId) -> Result<u64> {
        self.nudge();
        let mut state = self.lock();
        let value = state.semaphores.get(&semaphore).map(|s| s.value);
        let value = value.ok_or_else(|| Error::NotFound(format!("{semaphore:?} does not exist").into()))?;
        match state.semaphore_over(semaphore, value) {
            Some(Err(e)) => Err(e),
            _ => Ok(value),
        }
    }

    /// Blocks until a semaphore has reached a value.
    ///
    /// # Errors
    /// `Timeout`; `InvalidState` for a dead-lock; `NotFound`; the cause of a semaphore that has failed.
    pub fn semaphore_wait(&self, semaphore: SemaphoreId, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.wait_for(timeout, |state| state.semaphore_over(semaphore, value))
    }

    /// Reads a 64-bit word in pinned or device memory as the host sees it, and knows what came before it was written. Steps a little.
    ///
    /// # Errors
    /// `InvalidArgument` where no word is.
    pub fn host_load(&self, addr: u64) -> Result<u64> {
        self.nudge();
        self.host_load_now(addr)
    }

    /// As [`host_load`](Self::host_load), without a step.
    ///
    /// # Errors
    /// As there.
    pub fn host_load_now(&self, addr: u64) -> Result<u64> {
        let mut state = self.lock();
        let (_, key) = state.host_word(addr)?;
        let value = state.word(addr).ok_or_else(|| Error::invalid(format!("no word is at {addr:#x}")))?;
        if let Some(clock) = state.words.get(&key).cloned() {
            let nanos = state.nanos;
            state.host_learns(&clock, nanos);
        }
        Ok(value)
    }

    /// Writes a 64-bit word from the host; queues that wait for it see it.
    ///
    /// # Errors
    /// `InvalidArgument` where no word is.
    pub fn host_store(&self, addr: u64, value: u64) -> Result<()> {
        let mut state = self.lock();
        let (at, key) = state.host_word(addr)?;
        let clock = state.host.clone();
        state.words.entry(key).or_default().join(&clock);
        // What the host does from now on is not covered by this word.
        state.host_clock();
        state.host_acts();
        // SAFETY: eight aligned bytes that are mapped (checked), read by others atomically.
        unsafe { &*at.cast::<AtomicU64>() }.store(value, Ordering::Release);
        state.progress();
        Ok(())
    }
}

impl State {
    /// Whether a queue is over up to a command; the host knows it then.
    fn queue_over(&mut self, queue: QueueId, target: u64) -> Result<bool> {
        let device = self.queue(queue)?.device;
        self.alive(device)?;
        self.queue_over_any(queue, target)
    }

    /// As above, also for queues that were given up.
    fn queue_over_any(&mut self, queue: QueueId, target: u64) -> Result<bool> {
        let Some(q) = self.queues.get(&queue) else { return Ok(true) };
        if q.over < target.min(q.enqueued) {
            return Ok(false);
        }
        let failure = q.failure.as_ref().map(|f| f.cause.clone());
        let (clock, nanos) = (q.clock.clone(), q.nanos);
        self.host_learns(&clock, nanos);
        failure.map_or(Ok(true), Err)
    }

    fn event_over(&mut self, event: EventId) -> Result<bool> {
        let found =
            self.events.get(&event).ok_or_else(|| Error::NotFound(format!("{event:?} does not exist").into()))?;
        let Some(mark) = found.last.clone() else { return Ok(true) };
        let Some(done) = mark.done.get() else { return Ok(false) };
        self.host_learns(&done.clock, done.nanos);
        Ok(true)
    }

    fn semaphore_over(&mut self, semaphore: SemaphoreId, value: u64) -> Option<Result<()>> {
        let Some(s) = self.semaphores.get(&semaphore) else {
            return Some(Err(Error::NotFound(format!("{semaphore:?} does not exist").into())));
        };
        if s.value < value {
            return s.failed.clone().map(Err);
        }
        if let Some((clock, nanos)) = s.known(value).map(|r| (r.clock.clone(), r.nanos)) {
            self.host_learns(&clock, nanos);
        }
        Some(Ok(()))
    }

    /// A word of the host's: where it is, and its memory's identity.
    fn host_word(&self, addr: u64) -> Result<(*mut u8, u64)> {
        if !addr.is_multiple_of(8) {
            return Err(Error::invalid(format!("a word at {addr:#x} is not aligned to 8")));
        }
        let mut parts = Vec::new();
        let at = self.space.resolve(Reach::Engine, addr, 8, &mut parts).map_err(Error::invalid)?;
        Ok((at, parts.first().map_or(addr, |p| p.key)))
    }

    /// Who waits for what, for people.
    fn waiting(&self) -> String {
        let all: Vec<String> = self.queues.values().filter_map(|q| self.waits_for(q)).collect();
        if all.is_empty() { "nothing is pending".to_owned() } else { all.join("; ") }
    }
}
