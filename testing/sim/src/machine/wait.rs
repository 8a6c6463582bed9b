//! Waits and queries, and words that the host shares with queues.
//!
//! # Protocol
//! A waiting thread checks its condition. If the condition does not hold, the thread steps
//! ([`Stepping::Auto`]). If no command can run, the thread sleeps until another thread has
//! enqueued, signalled or stepped. The sleep is bounded, because a word may also be written without
//! a call. If no command can run and no thread could help, the wait is a deadlock. The result is an
//! error that describes all waits, never a hang.
//!
//! This module must not know how commands run.

use super::space::AccessScope;
use super::{EventId, Machine, MachineState, Monitor, QueueId, SemaphoreId, Stepping};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Result};
use std::time::{Duration, Instant};

/// The sleep between two checks for a word that was written without a call.
const NAP: Duration = Duration::from_micros(200);
/// The maximum number of steps of a query.
const A_LITTLE: usize = 4;

impl Monitor {
    /// Makes a few steps, if queries step.
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

    /// Blocks until `over` returns a result.
    pub(super) fn wait_for(
        &self,
        timeout: Option<Duration>,
        mut over: impl FnMut(&mut MachineState) -> Option<Result<()>>,
    ) -> Result<()> {
        let config = &self.0.config;
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        // When nothing could run first, and the number of steps by then.
        let mut idle: Option<(Instant, u64)> = None;
        let mut polls = 0;
        loop {
            let mut state = self.lock();
            if let Some(result) = over(&mut state) {
                return result;
            }
            let expired = deadline.is_some_and(|at| Instant::now() >= at);
            if expired && (timeout != Some(Duration::ZERO) || polls >= A_LITTLE) {
                return Err(Error::Timeout(
                    format!("not over in time; {}", state.waiting()).into(),
                ));
            }
            polls += 1;
            if config.stepping == Stepping::Auto {
                state.asked.clear();
                drop(state);
                if self.step() {
                    idle = None;
                    continue;
                }
                state = self.lock();
                if let Some(result) = over(&mut state) {
                    return result;
                }
                // Host functions that this thread runs cannot end before it returns.
                let called =
                    state.queues.values().filter(|q| q.busy).count() > super::step::depth();
                // Other threads may step too.
                let now = (Instant::now(), state.steps);
                let (since, _) = *idle.insert(idle.filter(|i| i.1 == now.1).unwrap_or(now));
                if !called
                    && (config.timeout.is_zero()
                        || timeout.is_none() && since.elapsed() >= config.timeout)
                {
                    return Err(Error::state(format!(
                        "dead-lock: nothing can run; {}",
                        state.waiting()
                    )));
                }
            }
            if expired {
                continue;
            }
            state.waiters += 1;
            let nap =
                deadline.map_or(NAP, |at| NAP.min(at.saturating_duration_since(Instant::now())));
            let _ = self.0.bell.wait_for(&mut state.guard, nap);
            state.waiters -= 1;
        }
    }

    /// Blocks until the caller's condition holds, and steps meanwhile as any wait does. The
    /// condition runs under the machine's lock and must not call the machine.
    ///
    /// # Errors
    /// `Timeout`; `InvalidState` for a deadlock.
    pub fn wait_until(
        &self,
        timeout: Option<Duration>,
        mut over: impl FnMut() -> bool,
    ) -> Result<()> {
        self.wait_for(timeout, |_| over().then_some(Ok(())))
    }

    /// Wakes threads that wait for a condition which the host has changed.
    pub fn ring(&self) {
        self.lock().progress();
    }

    /// The waits of all queues, in words.
    #[must_use]
    pub fn waits(&self) -> String {
        self.lock().waiting()
    }

    /// Makes a few steps, as queries do; none if only [`step`](Self::step) steps.
    pub fn poll(&self) {
        self.nudge();
    }
}

impl Machine {
    /// Returns whether all enqueued work is over. Makes a few steps.
    ///
    /// # Errors
    /// The cause of a failed queue; `DeviceLost`; `NotFound`; an error of the fault plan.
    pub fn queue_query(&self, queue: QueueId) -> Result<bool> {
        drop(self.enter_queue(queue, "queue_query")?);
        self.nudge();
        self.lock().queue_over(queue, u64::MAX)
    }

    /// Blocks until all work that was enqueued before the call is over. `None` waits without a
    /// limit, or until a deadlock; zero polls.
    ///
    /// # Errors
    /// `Timeout`. `InvalidState` for a deadlock, with a description of the waits, and for a host
    /// function that waits for its own queue. As [`queue_query`](Self::queue_query).
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

    /// Blocks until all work that was enqueued before the call on any queue of the device is over.
    ///
    /// # Errors
    /// As [`queue_synchronize`](Self::queue_synchronize).
    pub fn device_synchronize(&self, device: u32, timeout: Option<Duration>) -> Result<()> {
        let state = self.enter(device, "device_synchronize")?;
        let queues: Vec<(QueueId, u64)> = state
            .queues
            .iter()
            .filter(|(_, q)| q.device == device)
            .map(|(&id, q)| (id, q.enqueued))
            .collect();
        drop(state);
        self.wait_for(timeout, |state| {
            if let Err(e) = state.alive(device) {
                return Some(Err(e));
            }
            let mut first = Ok(());
            for &(id, target) in &queues {
                // A removed queue has no work left.
                if !state.queues.contains_key(&id) {
                    continue;
                }
                match state.queue_over_any(id, target) {
                    Ok(true) => {}
                    Ok(false) => return None,
                    Err(e) => first = first.and(Err(e)),
                }
            }
            let (clock, nanos) = state.gone[device as usize].clone();
            state.host_learns(&clock, nanos);
            Some(first)
        })
    }

    fn event_device(&self, event: EventId) -> Result<u32> {
        let device = self.lock().events.get(&event).map(|e| e.device);
        device.ok_or_else(|| Error::NotFound(format!("{event:?} does not exist").into()))
    }

    /// Returns whether an event's last record is over, or the event was never recorded. Makes a few
    /// steps.
    ///
    /// # Errors
    /// `NotFound`; `DeviceLost`; an error of the fault plan.
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

    /// A semaphore's value. Makes a few steps.
    ///
    /// # Errors
    /// `NotFound`; the cause of a failed semaphore.
    pub fn semaphore_value(&self, semaphore: SemaphoreId) -> Result<u64> {
        self.nudge();
        let mut state = self.lock();
        let value = state.semaphores.get(&semaphore).map(|s| s.value);
        let value =
            value.ok_or_else(|| Error::NotFound(format!("{semaphore:?} does not exist").into()))?;
        match state.semaphore_over(semaphore, value) {
            Some(Err(e)) => Err(e),
            _ => Ok(value),
        }
    }

    /// Blocks until a semaphore has reached a value.
    ///
    /// # Errors
    /// `Timeout`; `InvalidState` for a deadlock; `NotFound`; the cause of a failed semaphore.
    pub fn semaphore_wait(
        &self,
        semaphore: SemaphoreId,
        value: u64,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.wait_for(timeout, |state| state.semaphore_over(semaphore, value))
    }

    /// Reads a 64-bit word in pinned or device memory as the host sees it. The host learns the work
    /// before the write. Makes a few steps.
    ///
    /// # Errors
    /// `InvalidArgument` for an address without a word.
    pub fn host_load(&self, addr: u64) -> Result<u64> {
        self.nudge();
        self.host_load_now(addr)
    }

    /// Like [`host_load`](Self::host_load), without a step.
    ///
    /// # Errors
    /// As [`host_load`](Self::host_load).
    pub fn host_load_now(&self, addr: u64) -> Result<u64> {
        let mut state = self.lock();
        let (_, key) = state.host_word(addr)?;
        let value =
            state.word(addr).ok_or_else(|| Error::invalid(format!("no word is at {addr:#x}")))?;
        if let Some(clock) = state.words.get(&key).cloned() {
            let nanos = state.nanos;
            state.host_learns(&clock, nanos);
        }
        Ok(value)
    }

    /// Writes a 64-bit word from the host. Queues that wait for it see the value.
    ///
    /// # Errors
    /// `InvalidArgument` for an address without a word.
    pub fn host_store(&self, addr: u64, value: u64) -> Result<()> {
        let mut state = self.lock();
        let (at, key) = state.host_word(addr)?;
        let clock = state.host.clone();
        state.words.entry(key).or_default().join(&clock);
        // The word does not cover later actions of the host.
        state.host_clock();
        state.host_acts();
        // SAFETY: eight aligned bytes that are mapped (checked). Other threads read them
        // atomically.
        unsafe { &*at.cast::<AtomicU64>() }.store(value, Ordering::Release);
        state.progress();
        Ok(())
    }
}

impl MachineState {
    /// Returns whether a queue is over up to a command. If so, the host learns the queue's clock.
    fn queue_over(&mut self, queue: QueueId, target: u64) -> Result<bool> {
        let device = self.queue(queue)?.device;
        self.alive(device)?;
        self.queue_over_any(queue, target)
    }

    /// Like [`queue_over`](Self::queue_over), also for destroyed queues.
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
        let found = self
            .events
            .get(&event)
            .ok_or_else(|| Error::NotFound(format!("{event:?} does not exist").into()))?;
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

    /// The host address of a word, and its memory's identity.
    fn host_word(&self, addr: u64) -> Result<(*mut u8, u64)> {
        if !addr.is_multiple_of(8) {
            return Err(Error::invalid(format!("a word at {addr:#x} is not aligned to 8")));
        }
        let mut parts = Vec::new();
        let at =
            self.space.resolve(AccessScope::Engine, addr, 8, &mut parts).map_err(Error::invalid)?;
        Ok((at, parts.first().map_or(addr, |p| p.key)))
    }

    /// A description of all waits, for human readers.
    fn waiting(&self) -> String {
        let waits = self.queues.iter().filter_map(|(&id, q)| self.waits_for(id, q));
        let all: Vec<String> = self.meetings.dead_lock().into_iter().chain(waits).collect();
        if all.is_empty() { "nothing is pending".to_owned() } else { all.join("; ") }
    }
}
