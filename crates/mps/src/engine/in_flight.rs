//! The committed command buffers of a stream, in their order.
//!
//! # Protocol
//! - sequence number. Meaning: the value of the list's shared event that a command buffer signals.
//!   Written: at the commit.
//! - `completed`. Meaning: command buffers up to this number, and their waits, are over. Written:
//!   by observers.
//! - `reached`. Meaning: the stream's submissions up to this value are over. Written: by observers.
//!
//! A command buffer that waited for another list is over for its observers once the other list's
//! outcome is known. So a failure of the other list is noticed before a value behind it is
//! published.
//!
//! Threads that observe the list drop the objects that a command buffer kept.
//!
//! This module must not know operations.

use super::outcome::{Outcome, Signal, Skipped};
use super::permit::Permit;
use crate::driver::ops::{AnyEvent, Completion, NativeCommandBuffer, NativeSharedEvent, code};
use crate::manager::event::EventState;
use crate::manager::opened::{Held, Owned};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, thread};
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::Pipeline;
use std::collections::VecDeque;
use std::fmt;

/// A committed command buffer.
pub(crate) struct Flight {
    command: Owned<NativeCommandBuffer>,
    outcome: Arc<Outcome>,
}

impl Flight {
    /// Whether the outcome is known. No driver call.
    pub(crate) fn is_over(&self) -> bool {
        self.outcome.get().is_some()
    }

    /// Asks the driver for the outcome. Does not block.
    pub(crate) fn poll(&self) -> Result<bool> {
        if self.is_over() {
            return Ok(true);
        }
        let (ops, native) = (self.outcome.ops(), self.command.native);
        // SAFETY: this value keeps the command buffer live.
        unsafe {
            if !ops.status(native)?.is_over() {
                return Ok(false);
            }
            self.outcome.settle(&ops.completion(native)?);
        }
        // Another thread may set the outcome later.
        Ok(self.is_over())
    }

    /// Blocks until the driver is done with the command buffer. If it failed, its outcome may not
    /// be known yet.
    ///
    /// # Errors
    /// A driver error.
    pub(crate) fn wait(&self) -> Result<()> {
        if !self.is_over() {
            // SAFETY: this value keeps the command buffer live. A list adds the value after the
            // commit. No handler calls this function.
            unsafe { self.outcome.ops().wait_completed(self.command.native)? };
            if !self.poll()? {
                thread::yield_now();
            }
        }
        Ok(())
    }
}

/// The objects that a command buffer needs until it is over. The driver retains none of them.
#[derive(Default)]
pub(crate) struct Kept {
    pub(crate) pipelines: Vec<Lease<Pipeline>>,
    /// The lists that the command buffer waits for, with their sequence numbers.
    pub(crate) waits: Vec<Mark>,
}

/// A position on a list: its event and a value of it.
#[derive(Clone)]
pub struct Mark {
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) seq: u64,
}

impl Mark {
    /// Whether the list is known to be done up to the mark.
    pub(crate) fn is_over(&self) -> bool {
        self.in_flight.completed.load(Ordering::Acquire) >= self.seq
    }
}

/// A command buffer in the order of a list.
struct Pending {
    flight: Arc<Flight>,
    /// The first value of a submission with work in the command buffer.
    first: u64,
    kept: Kept,
}

struct State {
    pending: VecDeque<Pending>,
    /// Values of the stream, by the sequence numbers that they need.
    values: VecDeque<(u64, u64)>,
    /// The first value that failed, and the cause.
    failure: Option<(u64, Error)>,
}

/// The committed command buffers of a stream.
pub(crate) struct InFlight {
    signal: Arc<Signal>,
    event: Lease<EventState>,
    _held: Held,
    /// The sequence number before the first command buffer.
    start: u64,
    /// The last committed sequence number.
    committed: AtomicU64,
    completed: AtomicU64,
    reached: AtomicU64,
    state: Mutex<State>,
}

impl InFlight {
    /// A list over a shared event, which no command buffer will signal any more, of a stream whose
    /// values up to `start` are over.
    ///
    /// # Errors
    /// `InvalidState` for an event of another kind.
    pub(crate) fn new(
        skipped: &Arc<Skipped>,
        (event, held): (Lease<EventState>, Held),
        start: u64,
    ) -> Result<Arc<Self>> {
        let AnyEvent::Shared(native) = event.native() else {
            return Err(Error::state("a list of command buffers needs a shared event"));
        };
        let last = event.issued();
        Ok(Arc::new(Self {
            signal: Signal::new(skipped, native),
            event,
            _held: held,
            start: last,
            committed: AtomicU64::new(last),
            completed: AtomicU64::new(last),
            reached: AtomicU64::new(start),
            state: Mutex::new(State {
                pending: VecDeque::new(),
                values: VecDeque::new(),
                failure: None,
            }),
        }))
    }

    /// The event, which the list keeps live.
    pub(crate) fn event(&self) -> NativeSharedEvent {
        self.signal.event
    }

    /// The last committed sequence number.
    pub(crate) fn last(&self) -> u64 {
        self.committed.load(Ordering::Acquire)
    }

    /// Whether all committed command buffers are over, as far as the list was observed.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().pending.is_empty()
    }

    /// The stream's submissions up to this value are over, as far as the list was observed.
    pub(crate) fn reached(&self) -> u64 {
        self.reached.load(Ordering::Acquire)
    }

    /// The first value that failed, and the cause.
    pub(crate) fn failure(&self) -> Option<(u64, Error)> {
        self.state.lock().failure.clone()
    }

    /// Commits a command buffer without an open encoder, whose first work belongs to the submission
    /// `first`. One thread at a time calls this function. Returns the committed command buffer.
    ///
    /// # Safety
    /// - The command buffer is live and not committed. The memory that its work touches may be used
    ///   until the list has seen its end. `kept` has all other objects that it uses.
    pub(crate) unsafe fn commit(
        &self,
        command: Owned<NativeCommandBuffer>,
        permit: Permit,
        first: u64,
        kept: Kept,
    ) -> Arc<Flight> {
        let seq = self.event.next_value();
        let before = self.committed.swap(seq, Ordering::AcqRel);
        let mut waits: Vec<_> = kept.waits.iter().map(|w| (w.in_flight.event(), w.seq)).collect();
        if before != self.start {
            waits.push((self.event(), before));
        }
        let outcome = Outcome::new(&self.signal, seq, waits, permit);
        let flight = Arc::new(Flight { command, outcome: outcome.clone() });
        let native = flight.command.native;
        let (ops, handled) = (outcome.ops(), outcome.clone());
        // SAFETY: the command buffer is live, has no open encoder and is not committed (the
        // caller's promise). The list keeps the event until the outcome is known.
        let committed = unsafe {
            ops.encode_signal(native, self.signal.event.into(), seq)
                .and_then(|()| ops.on_completed(native, Box::new(move |c| handled.settle(c))))
                .and_then(|()| ops.commit(native))
        };
        if let Err(error) = committed {
            // The command buffer does not run.
            let error = Some((code::INTERNAL, error.to_string()));
            outcome.settle(&Completion { error, ..Completion::default() });
        }
        self.state.lock().pending.push_back(Pending { flight: flight.clone(), first, kept });
        flight
    }

    /// Notes that the stream's submissions up to `value` are over once the command buffers up to
    /// `seq` are.
    pub(crate) fn note(&self, seq: u64, value: u64) {
        let mut state = self.state.lock();
        match state.values.back_mut() {
            Some(back) if back.0 == seq => back.1 = back.1.max(value),
            Some(back) if back.1 >= value => {}
            _ => state.values.push_back((seq, value)),
        }
        self.publish(&mut state);
    }

    fn publish(&self, state: &mut State) {
        let completed = self.completed.load(Ordering::Acquire);
        while let Some(&(seq, value)) = state.values.front()
            && seq <= completed
        {
            state.values.pop_front();
            self.reached.fetch_max(value, Ordering::AcqRel);
        }
    }

    /// Asks the driver which command buffers are over. The caller holds no lock of a list.
    ///
    /// # Errors
    /// A driver error.
    pub(crate) fn observe(&self) -> Result<()> {
        let mut over = Vec::new();
        loop {
            let Some((flight, wait)) = self.front() else { break };
            if !flight.poll()? {
                break;
            }
            if let Some(wait) = wait {
                wait.in_flight.observe()?;
                if !wait.is_over() {
                    break;
                }
                continue;
            }
            over.extend(self.pop(&flight));
        }
        drop(over);
        Ok(())
    }

    /// The first command buffer, and an open wait of it.
    fn front(&self) -> Option<(Arc<Flight>, Option<Mark>)> {
        let state = self.state.lock();
        let front = state.pending.front()?;
        let wait = front.kept.waits.iter().find(|wait| !wait.is_over());
        Some((front.flight.clone(), wait.cloned()))
    }

    /// Removes the first command buffer, if it is `flight`, which is over.
    fn pop(&self, flight: &Arc<Flight>) -> Option<Pending> {
        let mut state = self.state.lock();
        if !state.pending.front().is_some_and(|p| Arc::ptr_eq(&p.flight, flight)) {
            return None;
        }
        let pending = state.pending.pop_front()?;
        if let Some(Some((number, text))) = flight.outcome.get()
            && state.failure.is_none()
        {
            state.failure = Some((pending.first, error_of(*number, text)));
        }
        self.completed.store(flight.outcome.seq(), Ordering::Release);
        self.publish(&mut state);
        Some(pending)
    }

    /// Blocks until all committed command buffers are over.
    ///
    /// # Errors
    /// A driver error. The work may still run.
    pub(crate) fn wait(&self) -> Result<()> {
        loop {
            self.observe()?;
            let Some((flight, wait)) = self.front() else { return Ok(()) };
            flight.wait()?;
            if let Some(wait) = wait {
                let other = wait.in_flight.front();
                other.map_or(Ok(()), |(flight, _)| flight.wait())?;
                thread::yield_now();
            }
        }
    }
}

/// The error of a command buffer.
fn error_of(number: i32, text: &str) -> Error {
    if number == code::DEVICE_REMOVED {
        return Error::DeviceLost { cause: text.into() };
    }
    let name = format!("{}: {text}", code::name(number)).into_boxed_str();
    Error::Driver { api: "MTLCommandBuffer", code: number, name }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let completed = self.completed.load(Ordering::Relaxed);
        write!(f, "InFlight({completed} of {})", self.last())
    }
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mark({} of {:?})", self.seq, self.in_flight)
    }
}
