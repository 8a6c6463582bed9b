//! A context and the entry into it.
//!
//! A caller enters the context before it calls the driver. The entry makes the context current.
//! Dropping the entry restores the context that was current before. The driver context keeps the
//! first error that says that the context is lost. After such an error every entry fails.
//!
//! This module must not know streams.

use crate::driver::ops::{CaptureMode, CudaSlowOps, NativeContext};
use leasehold_core::sync::{Arc, OnceLock};
use leasehold_core::{Error, Result, Timeline};
use leasehold_hal::DeviceId;
use std::fmt;
use std::ops::Deref;

/// A context. Dropping the last reference gives the context back to the driver.
pub struct DriverContext {
    ops: Arc<dyn CudaSlowOps>,
    native: NativeContext,
    ordinal: u32,
    owned: bool,
    lost: OnceLock<Arc<str>>,
    loss_reporter: OnceLock<LossReporter>,
}

/// Returns a text about the work that was pending when the context was lost.
pub type LossReporter = Box<dyn Fn() -> Option<String> + Send + Sync>;

impl DriverContext {
    /// Retains the device's primary context.
    ///
    /// # Errors
    /// A driver error.
    pub fn primary(ops: Arc<dyn CudaSlowOps>, ordinal: u32) -> Result<Self> {
        let native = ops.primary_retain(ordinal)?;
        Ok(Self {
            ops,
            native,
            ordinal,
            owned: false,
            lost: OnceLock::new(),
            loss_reporter: OnceLock::new(),
        })
    }

    /// Creates a context that this driver context owns.
    ///
    /// # Errors
    /// A driver error.
    pub fn owned(ops: Arc<dyn CudaSlowOps>, ordinal: u32) -> Result<Self> {
        let native = ops.context_create(ordinal)?;
        Ok(Self {
            ops,
            native,
            ordinal,
            owned: true,
            lost: OnceLock::new(),
            loss_reporter: OnceLock::new(),
        })
    }

    /// The driver's context.
    #[must_use]
    pub fn native(&self) -> NativeContext {
        self.native
    }

    /// The device's ordinal.
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

    /// A reference-counted handle of the driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn CudaSlowOps> {
        &self.ops
    }

    /// Makes the context current until the entry is dropped.
    ///
    /// # Errors
    /// `DeviceLost` once the context is lost, or a driver error.
    #[inline(always)]
    pub fn enter(&self) -> Result<ScopedContext<'_>> {
        if let Some(cause) = self.lost.get() {
            return Err(Error::DeviceLost { cause: cause.clone() });
        }
        self.enter_slow_if_other()
    }

    #[inline(always)]
    fn enter_slow_if_other(&self) -> Result<ScopedContext<'_>> {
        let current = self.ops.current().map_err(|e| self.note(e))?;
        if current == self.native {
            return Ok(ScopedContext { ops: &*self.ops, former: None });
        }
        // SAFETY: the driver context holds its context until it is dropped.
        unsafe { self.ops.set_current(self.native) }.map_err(|e| self.note(e))?;
        Ok(ScopedContext { ops: &*self.ops, former: Some(current) })
    }

    /// Enters a context that may be lost. The call tries twice: an object that is not given back
    /// now leaks.
    fn enter_again(&self) -> Result<ScopedContext<'_>> {
        self.enter_slow_if_other().or_else(|_| self.enter_slow_if_other())
    }

    /// Makes the context current to give an object back to the driver, even if the context is lost.
    /// An error is only logged.
    pub fn release_or_log(&self, release: impl FnOnce(&dyn CudaSlowOps) -> Result<()>) {
        let outcome = self.enter_again().and_then(|entry| release(&*entry));
        if let Err(error) = outcome
            && !matches!(error, Error::DeviceLost { .. })
        {
            tracing::warn!(%error, device = %self.id(), "an object could not be given back to the driver");
        }
    }

    /// As [`release_or_log`](Self::release_or_log), for callers that can handle a failure. The call
    /// succeeds in a lost context.
    ///
    /// # Errors
    /// A driver error, while the context is not lost.
    pub fn release(&self, calls: impl FnOnce(&dyn CudaSlowOps) -> Result<()>) -> Result<()> {
        let outcome = self.enter_again().and_then(|entry| {
            let _relaxed = Timeline::any_external().then(|| Relaxed::enter(&*entry));
            calls(&*entry)
        });
        match outcome.map_err(|e| self.note(e)) {
            Err(Error::DeviceLost { .. }) => Ok(()),
            other => other,
        }
    }

    /// Makes calls with the context current.
    ///
    /// # Errors
    /// As [`enter`](Self::enter), or an error of the calls.
    pub fn within<R>(&self, calls: impl FnOnce(&dyn CudaSlowOps) -> Result<R>) -> Result<R> {
        let entry = self.enter()?;
        calls(&*entry).map_err(|e| self.note(e))
    }

    /// Makes calls with the context current that streams in capture do not forbid: for calls on
    /// behalf of another library, which may be capturing.
    ///
    /// # Errors
    /// As [`within`](Self::within).
    pub fn relaxed<R>(&self, calls: impl FnOnce(&dyn CudaSlowOps) -> Result<R>) -> Result<R> {
        if !Timeline::any_external() {
            return self.within(calls);
        }
        self.within(|ops| {
            let _relaxed = Relaxed::enter(ops);
            calls(ops)
        })
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

    /// Sets the source of the text about work pending at a loss. Only the first call has an effect.
    pub fn set_loss_reporter(&self, loss_reporter: LossReporter) {
        let _ = self.loss_reporter.set(loss_reporter);
    }

    /// Keeps the first loss, with the work that was pending then. A later loss is replaced by the
    /// first. The error comes from a driver call with this context current: another driver context
    /// or a library may report the loss of another device.
    #[must_use]
    pub fn note(&self, error: Error) -> Error {
        let Error::DeviceLost { cause } = error else { return error };
        if let Some(first) = self.lost.get() {
            return Error::DeviceLost { cause: first.clone() };
        }
        let pending = self.loss_reporter.get().and_then(|say| say());
        let text = match pending {
            Some(pending) => format!("{cause}; not over were {pending}").into(),
            None => cause,
        };
        Error::DeviceLost { cause: self.lost.get_or_init(|| text).clone() }
    }

    /// The cause of the loss, if the context is lost.
    #[must_use]
    pub fn loss(&self) -> Option<Error> {
        self.lost.get().map(|cause| Error::DeviceLost { cause: cause.clone() })
    }
}

impl Drop for DriverContext {
    fn drop(&mut self) {
        let result = if self.owned {
            // SAFETY: `context_create` made the context for this driver context. All objects made
            // in the context hold the driver context, so this drop is the last user.
            unsafe { self.ops.context_destroy(self.native) }
        } else {
            // SAFETY: the driver context was counted once when it was made. All objects made in the
            // context hold the driver context, so this drop is the last user.
            unsafe { self.ops.primary_release(self.ordinal) }
        };
        if let Err(error) = result
            && self.lost.get().is_none()
        {
            tracing::warn!(%error, device = %self.id(), "a context could not be given back");
        }
    }
}

impl fmt::Debug for DriverContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverContext")
            .field("device", &self.id())
            .field("owned", &self.owned)
            .field("lost", &self.lost.get())
            .finish_non_exhaustive()
    }
}

/// The thread may make calls that a capture forbids, until the value is dropped.
struct Relaxed<'a> {
    ops: &'a dyn CudaSlowOps,
    former: Option<CaptureMode>,
}

impl<'a> Relaxed<'a> {
    /// If the driver refuses the mode, the calls are made all the same: it refuses them itself.
    fn enter(ops: &'a dyn CudaSlowOps) -> Self {
        Self { ops, former: ops.exchange_capture_mode(CaptureMode::Relaxed).ok() }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Some(former) = self.former
            && let Err(error) = self.ops.exchange_capture_mode(former)
        {
            tracing::debug!(%error, "the former capture mode could not be restored");
        }
    }
}

/// Proof that the context is current on this thread.
pub struct ScopedContext<'a> {
    ops: &'a dyn CudaSlowOps,
    /// The context that was current before, if it was a different one.
    former: Option<NativeContext>,
}

impl Deref for ScopedContext<'_> {
    type Target = dyn CudaSlowOps;

    fn deref(&self) -> &(dyn CudaSlowOps + 'static) {
        self.ops
    }
}

impl Drop for ScopedContext<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(former) = self.former {
            self.restore(former);
        }
    }
}

impl ScopedContext<'_> {
    #[cold]
    fn restore(&self, former: NativeContext) {
        // SAFETY: the former context was current on this thread at the entry, and its owner keeps
        // it. The driver refuses a context that is gone.
        if let Err(error) = unsafe { self.ops.set_current(former) } {
            tracing::debug!(%error, "the former context could not be restored");
        }
    }
}

impl fmt::Debug for ScopedContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").field("former", &self.former).finish()
    }
}
