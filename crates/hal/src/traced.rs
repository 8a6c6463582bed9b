//! A wrapper that reports every call to `tracing`: the call, its object, its duration and its
//! result.
//!
//! Submissions are events of level `DEBUG`, their operations of level `TRACE`, all other calls
//! `DEBUG`. The target is [`TARGET`]. Without a subscriber a call costs one load and one branch.
//!
//! This module must not know the subscribers.

use crate::backend::{Backend, Device, Stream};
use crate::id::{BackendKind, DeviceId};
use crate::info::DeviceInfo;
use crate::op::Op;
use crate::plan::Plan;
use crate::wrapper::{Layer, Open, Wrapper};
use leasehold_core::panics::quietly;
use leasehold_core::sync::Arc;
use leasehold_core::{Lease, Name, PoolStats, Result};
use std::fmt;
use std::time::Instant;
use tracing::Level;

/// The target of the events.
pub const TARGET: &str = "leasehold::hal";

/// A backend whose calls are traced.
///
/// ```
/// use leasehold_hal::{Backend, NullBackend, Traced};
/// let backend = Traced::new(NullBackend)?;
/// assert!(backend.devices()?.is_empty());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
pub struct Traced<B>(Wrapper<B, Tracing>);

impl<B: Backend> Traced<B> {
    /// Wraps a backend, which may be an `Arc<dyn Backend>`.
    ///
    /// # Errors
    /// `OutOfMemory` for the wrapper's pools.
    pub fn new(inner: B) -> Result<Self> {
        Ok(Self(Wrapper::new(inner, Tracing)?))
    }

    /// The inner backend.
    pub fn inner(&self) -> &B {
        &self.0.inner
    }
}

impl<B: Backend> fmt::Debug for Traced<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Traced({})", self.0.inner.kind())
    }
}

// SAFETY: every method calls the inner backend's.
unsafe impl<B: Backend> Backend for Traced<B> {
    fn kind(&self) -> BackendKind {
        self.0.kind()
    }
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        self.0.devices()
    }
    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        self.0.open(device)
    }
    fn shutdown(&self) -> Result<()> {
        self.0.shutdown()
    }
    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.0.pools(report);
    }
}

/// The layer that traces.
pub(crate) struct Tracing;

impl Layer for Tracing {
    type Device = ();
    type Graph = ();
    const POOLS: [&'static str; 3] = ["traced devices", "traced streams", "traced graphs"];

    fn opened(&self, _: &Lease<dyn Device>) -> Arc<()> {
        Arc::new(())
    }

    fn around<R>(
        what: &'static str,
        on: fmt::Arguments<'_>,
        call: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        if !tracing::enabled!(target: TARGET, Level::DEBUG) {
            return call();
        }
        let start = Instant::now();
        let result = call();
        let us = micros(start);
        tell(|| match &result {
            Ok(_) => tracing::debug!(target: TARGET, call = what, %on, us, "ok"),
            Err(error) => tracing::debug!(target: TARGET, call = what, %on, us, %error, "failed"),
        });
        result
    }

    unsafe fn submit(_: &Open<Self>, inner: &dyn Stream, ops: &[Op<'_>]) -> Result<u64> {
        if !tracing::enabled!(target: TARGET, Level::DEBUG) {
            // SAFETY: the caller keeps the contract of `Stream::submit`.
            return unsafe { inner.submit(ops) };
        }
        let start = Instant::now();
        // SAFETY: the caller keeps the contract of `Stream::submit`.
        let result = unsafe { inner.submit(ops) };
        let us = micros(start);
        let on = inner.timeline();
        let scope = Name::current();
        let scope = scope.as_ref().map(Name::as_str);
        tell(|| {
            match &result {
                Ok(value) => {
                    tracing::debug!(target: TARGET, call = "submit", ?on, scope, ops = ops.len(), value, us, "ok");
                }
                Err(error) => {
                    tracing::debug!(target: TARGET, call = "submit", ?on, scope, ops = ops.len(), us, %error, "failed");
                }
            }
            for (index, op) in ops.iter().enumerate() {
                tracing::trace!(target: TARGET, on = ?on.id(), index, op = op.name(), "operation");
            }
        });
        result
    }

    fn check_plan(_: &Open<Self>, _: &Plan) -> Result<()> {
        Ok(())
    }
}

/// Sends an event to the subscribers. A subscriber's panic is caught here. The panic must not keep
/// the caller from recording the submission, because the record keeps memory alive.
fn tell(event: impl FnOnce()) {
    let _ = quietly(event);
}

fn micros(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}
