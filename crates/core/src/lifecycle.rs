//! The life of something that is configured once and shut down once, where both may take long.
//!
//! unconfigured → configured → shut down, and never back: what was handed out before a shutdown
//! must not be mistaken for what came after. The lock is held to look at the phase only, never
//! while the caller's function runs. A thread that comes while another configures or shuts down
//! waits for that one's outcome.
//!
//! This module must not know what lives.

use crate::error::{Error, Result};
use crate::sync::{Condvar, Mutex};
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Unconfigured,
    /// A thread configures or shuts down.
    Changing,
    Configured,
    ShutDown,
}

/// Where something is in its life.
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
    /// Not configured yet.
    pub fn new() -> Self {
        Self { phase: Mutex::new(Phase::Unconfigured), changed: Condvar::new() }
    }

    /// Runs `make`, which makes it ready. All-or-nothing: after a failure it may be tried again.
    /// `what` is its name, for the error. Waits while another thread is at it.
    ///
    /// # Errors
    /// `InvalidState` when it is configured or shut down already; what `make` says.
    pub fn configure(&self, what: &str, make: impl FnOnce() -> Result<()>) -> Result<()> {
        let refused = |why| Err(Error::state(format!("the {what} {why}")));
        let change = match self.change(|phase| phase == Phase::Unconfigured) {
            Ok(change) => change,
            Err(Phase::ShutDown) => return refused("was shut down; what it managed needs a new one"),
            Err(_) => return refused("is configured already"),
        };
        make()?;
        change.to(Phase::Configured);
        Ok(())
    }

    /// Runs `end` if it is configured. `Ok` the second time and for what was never configured,
    /// which stays down from then on. Waits while another thread is at it.
    ///
    /// # Errors
    /// What `end` says; nothing has changed then.
    pub fn shutdown(&self, end: impl FnOnce() -> Result<()>) -> Result<()> {
        let Ok(change) = self.change(|phase| phase != Phase::ShutDown) else { return Ok(()) };
        if change.former == Phase::Configured {
            end()?;
        }
        change.to(Phase::ShutDown);
        Ok(())
    }

    /// Whether it is configured, and not being shut down.
    pub fn is_configured(&self) -> bool {
        *self.phase.lock() == Phase::Configured
    }

    /// Takes the turn to change a phase that is `due`; else says what the phase is.
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

/// The turn to change the phase. Dropped without [`to`](Self::to), also by a panic, it changes
/// nothing.
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
