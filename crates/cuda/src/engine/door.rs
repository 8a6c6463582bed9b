//! A context and the way into it.
//!
//! Whoever calls the driver enters first: the context is made current, and what was current before is restored when the entry is dropped.
//! The first error that says that the context is dead is kept here; from then on nobody enters any more.
//!
//! This module must not know streams.

use crate::driver::ops::{CudaSlowOps, NativeContext};
use leasehold_core::sync::{Arc, OnceLock};
use leasehold_core::{Error, Result};
use leasehold_hal::DeviceId;
use std::fmt;
use std::ops::Deref;

/// A context, given back when the last who uses it is gone.
pub struct Door {
    ops: Arc<dyn CudaSlowOps>,
    native: NativeContext,
    ordinal: u32,
    owned: bool,
    lost: OnceLock<Arc<str>>,
    witness: OnceLock<Witness>,
}

/// Says what was pending when the context was lost.
pub type Witness = Box<dyn Fn() -> Option<String> + Send + Sync>;

impl Door {
    /// The device's primary context.
    ///
    /// # Errors
    /// The driver's.
    pub fn primary(ops: Arc<dyn CudaSlowOps>, ordinal: u32) -> Result<Self> {
        let native = ops.primary_retain(ordinal)?;
        Ok(Self { ops, native, ordinal, owned: false, lost: OnceLock::new(), witness: OnceLock::new() })
    }

    /// A context of one's own.
    ///
    /// # Errors
    /// The driver's.
    pub fn owned(ops: Arc<dyn CudaSlowOps>, ordinal: u32) -> Result<Self> {
        let native = ops.context_create(ordinal)?;
        Ok(Self { ops, native, ordinal, owned: true, lost: OnceLock::new(), witness: OnceLock::new() })
    }

    /// The driver's context.
    #[must_use]
    pub fn native(&self) -> NativeContext {
        self.native
    }

    /// The device's number.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The device's name.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        DeviceId::cuda(self.ordinal)
    }

    /// The driver, for calls that need no context.
    #[must_use]
    pub fn ops(&self) -> &dyn CudaSlowOps {
        &*self.ops
    }

    /// The driver itself.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn CudaSlowOps> {
        &self.ops
    }

    /// Makes the context current until the entry is dropped.
    ///
    /// # Errors
    /// `DeviceLost` once the context is dead; the driver's own.
    #[inline]
    pub fn enter(&self) -> Result<Entry<'_>> {
        if let Some(cause) = self.lost.get() {
            return Err(Error::DeviceLost { cause: cause.clone() });
        }
        self.enter_slow_if_other()
    }

    #[inline]
    fn enter_slow_if_other(&self) -> Result<Entry<'_>> {
        let current = self.ops.current().map_err(|e| self.note(e))?;
        if current == self.native {
            return Ok(Entry { ops: &*self.ops, former: None });
        }
        // SAFETY: the door holds its context until it is dropped.
        unsafe { self.ops.set_current(self.native) }.map_err(|e| self.note(e))?;
        Ok(Entry { ops: &*self.ops, former: Some(current) })
    }

    /// Enters a context that may be dead, and does not give up at the first failure: what is not given back now is lost.
    fn enter_again(&self) -> Result<Entry<'_>> {
        self.enter_slow_if_other().or_else(|_| self.enter_slow_if_other())
    }

    /// Makes the context current to give something back to it, dead or not. What goes wrong then is nobody's concern any more.
    pub fn leave_behind(&self, give_back: impl FnOnce(&dyn CudaSlowOps) -> Result<()>) {
        let outcome = self.enter_again().and_then(|entry| give_back(&*entry));
        if let Err(error) = outcome
            && !matches!(error, Error::DeviceLost { .. })
        {
            tracing::warn!(%error, device = %self.id(), "an object could not be given back to the driver");
        }
    }

    /// As [`leave_behind`](Self::leave_behind), for who can do something about a failure. In a dead context nothing is left to be done.
    ///
    /// # Errors
    /// The driver's, while the context is sound.
    pub fn give_back(&self, calls: impl FnOnce(&dyn CudaSlowOps) -> Result<()>) -> Result<()> {
        let outcome = self.enter_again().and_then(|entry| calls(&*entry));
        match outcome.map_err(|e| self.note(e)) {
            Err(Error::DeviceLost { .. }) => Ok(()),
            other => other,
        }
    }

    /// Makes calls with the context current.
    ///
    /// # Errors
    /// As [`enter`](Self::enter), and what the calls say.
    pub fn within<R>(&self, calls: impl FnOnce(&dyn CudaSlowOps) -> Result<R>) -> Result<R> {
        let entry = self.enter()?;
        calls(&*entry).map_err(|e| self.note(e))
    }

    /// Leaves the context current on this thread.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn make_current(&self) -> Result<()> {
        let mut entry = self.enter()?;
        entry.former = None;
        Ok(())
    }

    /// Who says what was pending at a loss; the first to be named is heard.
    pub fn set_witness(&self, witness: Witness) {
        let _ = self.witness.set(witness);
    }

    /// Keeps the first loss, with what was pending then; a later one becomes the first.
    #[must_use]
    pub fn note(&self, error: Error) -> Error {
        let Error::DeviceLost { cause } = error else { return error };
        if let Some(first) = self.lost.get() {
            return Error::DeviceLost { cause: first.clone() };
        }
        let pending = self.witness.get().and_then(|say| say());
        let text = match pending {
            Some(pending) => format!("{cause}; not over were {pending}").into(),
            None => cause,
        };
        Error::DeviceLost { cause: self.lost.get_or_init(|| text).clone() }
    }

    /// Why the context is dead, if it is.
    #[must_use]
    pub fn loss(&self) -> Option<Error> {
        self.lost.get().map(|cause| Error::DeviceLost { cause: cause.clone() })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let result = if self.owned {
            // SAFETY: made by `context_create` for this door, and this is the last who uses it: all that was made in it
            // holds the door.
            unsafe { self.ops.context_destroy(self.native) }
        } else {
            // SAFETY: counted once when the door was made, and this is the last who uses it: all that was made in it holds
            // the door.
            unsafe { self.ops.primary_release(self.ordinal) }
        };
        if let Err(error) = result
            && self.lost.get().is_none()
        {
            tracing::warn!(%error, device = %self.id(), "a context could not be given back");
        }
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door")
            .field("device", &self.id())
            .field("owned", &self.owned)
            .field("lost", &self.lost.get())
            .finish_non_exhaustive()
    }
}

/// The context is current on this thread.
pub struct Entry<'a> {
    ops: &'a dyn CudaSlowOps,
    /// What was current before, if that was something else.
    former: Option<NativeContext>,
}

impl Deref for Entry<'_> {
    type Target = dyn CudaSlowOps;

    fn deref(&self) -> &(dyn CudaSlowOps + 'static) {
        self.ops
    }
}

impl Drop for Entry<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(former) = self.former else { return };
        // SAFETY: it was current on this thread a moment ago, by somebody who keeps it; the driver refuses one that is gone.
        if let Err(error) = unsafe { self.ops.set_current(former) } {
            tracing::debug!(%error, "the former context could not be restored");
        }
    }
}

impl fmt::Debug for Entry<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").field("former", &self.former).finish()
    }
}
