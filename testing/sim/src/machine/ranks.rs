//! The ranks of communicators, as a communication library makes, aborts and destroys them, and the
//! threads' turns in that library.
//!
//! This module must not know what ranks call.

use super::comm::CommJoin;
use super::detect::{Operation, ReportKind};
use super::ids::CommId;
use super::{Locked, Monitor};
use leasehold_core::sync::thread;
use leasehold_core::{Error, Name, Result, Text};
use std::fmt;
use std::time::Duration;

/// A thread's turn in the communication library for a device. It ends with the drop.
#[must_use]
pub struct LibraryTurn {
    machine: Monitor,
    device: u32,
}

impl Drop for LibraryTurn {
    fn drop(&mut self) {
        self.machine.lock().meetings.library.remove(&self.device);
    }
}

impl fmt::Debug for LibraryTurn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LibraryTurn").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Monitor {
    /// A key for a new communicator, which no other one has.
    #[must_use]
    pub fn comm_key(&self) -> u64 {
        self.lock().id()
    }

    /// Joins a communicator. Returns before the other ranks have joined.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank that joined already, that is not below the size, whose device
    /// has another rank, or for which the communicator has another size or name; `NotFound` for a
    /// device that does not exist; `DeviceLost`; an error of the fault plan.
    pub fn comm_join(&self, join: &CommJoin<'_>) -> Result<CommId> {
        let mut state = self.enter(join.device, "comm_join")?;
        let id = CommId(state.id());
        state.meetings.join(id, join)?;
        state.progress();
        Ok(id)
    }

    /// Blocks until all ranks of a communicator have joined, or the waiting rank was aborted.
    ///
    /// # Errors
    /// `Timeout` with the ranks that are missing; `InvalidState` for an aborted rank, and for a
    /// deadlock; `NotFound`; `DeviceLost`; an error of the fault plan.
    pub fn comm_wait(&self, comm: CommId, timeout: Option<Duration>) -> Result<()> {
        let state = self.enter_comm(comm, "comm_wait")?;
        state.alive(state.meetings.device(comm)?)?;
        let of = state.meetings.rank(comm)?;
        drop(state);
        let mut absent = Vec::new();
        let waited = self.wait_for(timeout, |state| match state.meetings.absent(of) {
            Ok(ranks) if ranks.is_empty() => Some(Ok(())),
            Ok(ranks) => {
                absent = ranks;
                None
            }
            Err(e) => Some(Err(e)),
        });
        waited.map_err(|e| match e {
            Error::Timeout(text) => {
                let shown = self.lock().meetings.shown(of);
                let ranks: Vec<String> = absent.iter().map(u32::to_string).collect();
                let ranks = ranks.join(", ");
                Error::Timeout(format!("{shown} waits for ranks {ranks} to join; {text}").into())
            }
            other => other,
        })
    }

    /// Ends a rank's pending calls and refuses new ones. Pending calls end without an error, and
    /// the bytes that they should have written are garbage. Other ranks are not told. A second call
    /// does nothing.
    ///
    /// # Errors
    /// `NotFound`; an error of the fault plan. A lost device is none.
    pub fn comm_abort(&self, comm: CommId) -> Result<()> {
        let mut state = self.enter_comm(comm, "comm_abort")?;
        let of = state.meetings.rank(comm)?;
        state.meetings.abort(of);
        state.progress();
        Ok(())
    }

    /// Destroys a rank whose calls are over.
    ///
    /// # Errors
    /// `InvalidState` while a queue has calls of the rank: wait for them, or abort the rank and
    /// then wait. `NotFound`; an error of the fault plan. A lost device is none.
    pub fn comm_destroy(&self, comm: CommId) -> Result<()> {
        let mut state = self.enter_comm(comm, "comm_destroy")?;
        let of = state.meetings.rank(comm)?;
        let mut pending = state.queues.values().flat_map(|q| &q.entries);
        if pending.any(|entry| entry.action.meets(comm)) {
            return Err(Error::state(format!(
                "{} has pending calls; wait for them, or abort it first",
                state.meetings.shown(of)
            )));
        }
        state.meetings.destroy(comm);
        Ok(())
    }

    /// The error of a rank, without a wait. Calls that do not fit each other are no error here.
    ///
    /// # Errors
    /// `InvalidState` for an aborted rank; `DeviceLost`; `NotFound`; an error of the fault plan,
    /// which stands for one that the library finds by itself.
    pub fn comm_status(&self, comm: CommId) -> Result<()> {
        let state = self.enter_comm(comm, "comm_status")?;
        state.alive(state.meetings.device(comm)?)?;
        state.meetings.usable(comm).map(drop)
    }

    /// Takes the calling thread's turn in the communication library for a device. The library
    /// serves one thread at a time, for which its caller is responsible.
    ///
    /// # Errors
    /// `InvalidState` while a thread has the turn, which is also reported
    /// ([`ReportKind::Misuse`]); `NotFound` for a device that does not exist.
    pub fn library_enter(&self, device: u32, call: impl Into<Text>) -> Result<LibraryTurn> {
        let (call, me, scope) = (call.into(), thread::current().id(), Name::current());
        let mut state = self.lock();
        let shown = state.meetings.device_name(device)?;
        if let Some((thread, other, its)) = state.meetings.library.get(&device).cloned() {
            let first = Operation::of_host(&other, its);
            let second = Operation::of_host(&call, scope);
            state.detector.report(ReportKind::Misuse, Some(first), second, 0, 0);
            return Err(Error::state(format!(
                "two calls in the library for {shown} at once: {call} on {me:?}, and {other} on {thread:?}, which has not returned; give them turns"
            )));
        }
        state.meetings.library.insert(device, (me, call, scope));
        Ok(LibraryTurn { machine: self.clone(), device })
    }

    /// Reports the misuse of a library of collectives ([`ReportKind::Misuse`]).
    pub fn misused(&self, why: impl Into<String>) {
        self.lock().detector.misused(why.into());
    }

    /// Sets a device's name in reports of meetings: `cuda:0` instead of `device 0`.
    ///
    /// # Errors
    /// `NotFound` for a device that does not exist.
    pub fn device_set_name(&self, device: u32, name: &str) -> Result<()> {
        let mut state = self.lock();
        state.meetings.device_name(device)?;
        state.meetings.devices[device as usize] = name.into();
        Ok(())
    }

    /// Begins a call about a rank, whose device may be lost.
    fn enter_comm(&self, comm: CommId, name: &str) -> Result<Locked<'_>> {
        let mut state = self.lock();
        let device = state.meetings.device(comm)?;
        if self.config().count_calls {
            match state.call(device, name) {
                Ok(()) | Err(Error::DeviceLost { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        self.hang(state)
    }
}
