//! The life cycle of an object that is configured once and shut down once.
//!
//! unconfigured → configured → shut down, and never back: objects from before a shutdown must
//! not be mistaken for later ones. Both steps may take long. A thread holds the lock only to
//! read or change the phase, never while the caller's function runs. If another thread
//! configures or shuts down, a call waits for that thread's outcome.
//!
//! This module must not know which object it serves.

use crate::error::{Error, Result};
use crate::sync::{Condvar, Mutex};
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Unconfigured,
    /// A thread is configuring or shutting down.
    Changing,
    Configured,
    ShutDown,
}

/// The phase of an object's life, and the turn to change it.
pub struct LifeCycle {
    phase: Mutex<Phase>,
    changed: Condvar,
}

impl Default for LifeCycle {
    fn default() -> Self {
        Self::new()
    }
}

impl LifeCycle {
    /// An unconfigured object.
    pub fn new() -> Self {
        Self { phase: Mutex::new(Phase::Unconfigured), changed: Condvar::new() }
    }

    /// Runs `make`, which configures the object. All-or-nothing: after a failure the caller may try
    /// again. `what` is the object's name in error messages. Blocks while another thread configures
    /// or shuts down.
    ///
    /// # Errors
    /// `InvalidState` if the object is configured or shut down already; the error of `make`.
    pub fn configure(&self, what: &str, make: impl FnOnce() -> Result<()>) -> Result<()> {
        let refused = |why| Err(Error::state(format!("the {what} {why}")));
        let change = match self.change(|phase| phase == Phase::Unconfigured) {
            Ok(change) => change,
            Err(Phase::ShutDown) => {
                return refused("was shut down; what it managed needs a new one");
            }
            Err(_) => return refused("is configured already"),
        };
        make()?;
        change.to(Phase::Configured);
        Ok(())
    }

    /// Runs `end` if the object is configured. A second shutdown returns `Ok`. An object that was
    /// never configured is shut down without a call of `end`. Blocks while another thread
    /// configures or shuts down.
    ///
    /// # Errors
    /// The error of `end`; then nothing has changed.
    pub fn shutdown(&self, end: impl FnOnce() -> Result<()>) -> Result<()> {
        let Ok(change) = self.change(|phase| phase != Phase::ShutDown) else { return Ok(()) };
        if change.former == Phase::Configured {
            end()?;
        }
        change.to(Phase::ShutDown);
        Ok(())
    }

    /// Returns whether the object is configured and not being shut down.
    pub fn is_configured(&self) -> bool {
        *self.phase.lock() == Phase::Configured
    }

    /// Takes the turn to change the phase if `due` accepts it; otherwise returns the phase.
    fn change(&self, due: impl Fn(Phase) -> bool) -> std::result::Result<Change<'_>, Phase> {
        let mut phase = self.phase.lock();
        while *phase == Phase::Changing {
            self.changed.wait(&mut phase);
        }
        if !due(*phase) {
            return Err(*phase);
        }
        let former = std::mem::replace(&mut *phase, Phase::Changing);
        Ok(Change { cycle: self, former, next: former })
    }
}

/// The turn to change the phase. If the turn is dropped without [`to`](Self::to), also by a panic,
/// the phase does not change.
struct Change<'a> {
    cycle: &'a LifeCycle,
    former: Phase,
    next: Phase,
}

impl Change<'_> {
    fn to(mut self, next: Phase) {
        self.next = next;
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        *self.cycle.phase.lock() = self.next;
        self.cycle.changed.notify_all();
    }
}

impl fmt::Debug for LifeCycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = match *self.phase.lock() {
            Phase::Unconfigured => "unconfigured",
            Phase::Changing => "changing",
            Phase::Configured => "configured",
            Phase::ShutDown => "shut down",
        };
        f.write_str(phase)
    }
}
