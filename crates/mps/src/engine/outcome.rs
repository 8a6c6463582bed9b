//! The outcomes of command buffers, and what the host does for those that fail.
//!
//! After an error the driver skips the waits and the signal of a command buffer. Work of other
//! streams stands behind that signal, so the host does both: once the skipped waits are over, it
//! sets the event. The outcome is set then. So a command buffer with an outcome, its waits and its
//! signal are over.
//!
//! Only two events end a skipped wait: the end of another command buffer, and a value that the host
//! sets. So each end of a command buffer looks at the list of skipped signals, and no thread has to
//! wait for one.
//!
//! An event's value must not fall. A later command buffer of the list may signal while the host
//! sets a value. So after an error all later outcomes of the list go through the list too.
//!
//! The driver's completion handler calls these functions, also on a thread that makes a driver
//! call. The locks are leaves, and no driver call is made under them. The functions submit nothing
//! and drop no lease.
//!
//! This module must not know streams.

use super::permit::Permit;
use crate::driver::ops::{Completion, MpsSlowOps, NativeSharedEvent};
use leasehold_core::Result;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use std::fmt;

/// The number and the text of a command buffer's error.
pub(crate) type Failure = (i32, String);

/// The shared event of a list.
pub(crate) struct Signal {
    skipped: Arc<Skipped>,
    pub(crate) event: NativeSharedEvent,
    /// A command buffer of the list failed.
    failed: AtomicBool,
}

impl Signal {
    /// The event of a list without command buffers.
    pub(crate) fn new(skipped: &Arc<Skipped>, event: NativeSharedEvent) -> Arc<Self> {
        Arc::new(Self { skipped: skipped.clone(), event, failed: AtomicBool::new(false) })
    }
}

/// The outcome of a command buffer. The lists of all its events live until it is set.
pub(crate) struct Outcome {
    signal: Arc<Signal>,
    /// The value that the command buffer signals.
    seq: u64,
    /// The events and values that the command buffer waits for, and its place on its own list.
    waits: Vec<(NativeSharedEvent, u64)>,
    permit: Mutex<Option<Permit>>,
    outcome: OnceLock<Option<Failure>>,
}

impl Outcome {
    /// The outcome of a command buffer that is not committed.
    pub(crate) fn new(
        signal: &Arc<Signal>,
        seq: u64,
        waits: Vec<(NativeSharedEvent, u64)>,
        permit: Permit,
    ) -> Arc<Self> {
        let permit = Mutex::new(Some(permit));
        Arc::new(Self { signal: signal.clone(), seq, waits, permit, outcome: OnceLock::new() })
    }

    /// The value that the command buffer signals.
    pub(crate) fn seq(&self) -> u64 {
        self.seq
    }

    /// The driver.
    pub(crate) fn ops(&self) -> &Arc<dyn MpsSlowOps> {
        &self.signal.skipped.ops
    }

    /// The outcome, once it is set.
    pub(crate) fn get(&self) -> Option<&Option<Failure>> {
        self.outcome.get()
    }

    /// Takes note of the end of the command buffer. Only the first call has an effect. The outcome
    /// may be set later, by another thread.
    pub(crate) fn settle(self: &Arc<Self>, completion: &Completion) {
        let Some(permit) = self.permit.lock().take() else { return };
        drop(permit);
        let Signal { skipped, failed, .. } = &*self.signal;
        let failure = completion.error.clone();
        if failure.is_some() {
            failed.store(true, Ordering::Release);
        }
        if failed.load(Ordering::Acquire) {
            skipped.add(self.clone(), failure);
        } else {
            let _ = self.outcome.set(failure);
        }
        skipped.run();
    }

    /// Whether the waits are over. An event that cannot be read holds nothing back.
    fn waits_are_over(&self) -> bool {
        self.waits.iter().all(|&(event, value)| {
            // SAFETY: the event's list lives until the outcome is set, which happens later.
            unsafe { self.ops().signaled_value(event) }.map_or(true, |now| now >= value)
        })
    }

    /// Makes up for the signal, and sets the outcome.
    fn end(&self, failure: Option<Failure>) {
        if let Err(error) = self.ensure() {
            tracing::error!(%error, "a skipped signal could not be made up for");
        }
        let _ = self.outcome.set(failure);
    }

    /// Gives the event the value of the command buffer, unless it has it.
    fn ensure(&self) -> Result<()> {
        let (ops, event) = (self.ops(), self.signal.event);
        // SAFETY: the event's list lives until the outcome is set, which happens later. The work
        // that waits for the value may run: all before it is over, and its stream notices the
        // failure before it publishes a value.
        unsafe {
            match ops.signaled_value(event) {
                Ok(now) if now >= self.seq => Ok(()),
                _ => ops.set_signaled_value(event, self.seq),
            }
        }
    }
}

/// The command buffers whose signals the host makes up for, of all devices.
pub(crate) struct Skipped {
    ops: Arc<dyn MpsSlowOps>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    entries: Vec<(Arc<Outcome>, Option<Failure>)>,
    /// A thread goes through the entries.
    running: bool,
    /// A command buffer has ended since that thread began.
    again: bool,
}

impl Skipped {
    /// An empty list.
    pub(crate) fn new(ops: Arc<dyn MpsSlowOps>) -> Arc<Self> {
        Arc::new(Self { ops, state: Mutex::default() })
    }

    fn add(&self, outcome: Arc<Outcome>, failure: Option<Failure>) {
        self.state.lock().entries.push((outcome, failure));
    }

    /// Makes up for the signals whose waits are over. If another call does so now, that one looks
    /// at all entries again. It may have taken them out, so an empty list says nothing then.
    fn run(&self) {
        let mut state = self.state.lock();
        state.again = true;
        if std::mem::replace(&mut state.running, true) {
            return;
        }
        while std::mem::take(&mut state.again) {
            let entries = std::mem::take(&mut state.entries);
            drop(state);
            let (over, mut open): (Vec<_>, Vec<_>) =
                entries.into_iter().partition(|(outcome, _)| outcome.waits_are_over());
            // The open entries may wait for the events of these.
            let again = !over.is_empty();
            over.into_iter().for_each(|(outcome, failure)| outcome.end(failure));
            state = self.state.lock();
            state.again |= again;
            open.append(&mut state.entries);
            state.entries = open;
        }
        state.running = false;
    }
}

impl fmt::Debug for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Skipped({} signals)", self.state.lock().entries.len())
    }
}
