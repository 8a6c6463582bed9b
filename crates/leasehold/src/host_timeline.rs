//! Host timelines: timelines that the host signals.
//!
//! The one place where a stream may wait for something that has not been submitted.

use crate::runtime::RuntimeInner;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Name, Result, Timepoint};
use std::fmt;

/// A timeline that the host signals: streams may wait for values that nobody has signalled yet.
/// Clones are the same host timeline; any thread.
///
/// Dropping the last clone fails the values that were not signalled: nobody could signal them any
/// more. Streams that wait for one are poisoned, and later waits for one fail at once, also those
/// of graphs.
///
/// About 8,192 operations may be pending behind a value that is not signalled. A thread that
/// submits more waits for room, and gets [`Error::Timeout`] if nothing completes meanwhile: see
/// [`Stream`](crate::Stream#room).
///
/// ```
/// use leasehold::{DeviceId, Runtime, View};
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let (host_timeline, x) = (runtime.create_host_timeline()?, runtime.alloc(4)?);
/// let go = host_timeline.next();
/// runtime.stream().wait(go)?; // before the signal
/// runtime.stream().fill(x.view(), 7u32)?;
/// assert!(!runtime.stream().query()?);
/// host_timeline.signal(go.value())?;
/// assert_eq!(runtime.to_vec::<u32>(&x)?, [7]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct HostTimeline {
    pub(crate) raw: Lease<dyn leasehold_hal::HostTimeline>,
    /// Keeps the device and its backend.
    pub(crate) runtime: Arc<RuntimeInner>,
}

impl HostTimeline {
    /// The value that it stands at. A fresh host timeline stands anywhere: values only grow from
    /// there.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.raw.timeline().submitted()
    }

    /// Names the host timeline in error messages, traces and `Debug`.
    pub fn set_name(&self, name: impl Into<Name>) {
        self.raw.timeline().set_name(Some(name.into()));
    }

    /// The timepoint of a value, for a stream ([`Stream::wait`](crate::Stream::wait)) or the host
    /// ([`Runtime::wait_for`](crate::Runtime::wait_for)) to wait for.
    #[must_use]
    pub fn at(&self, value: u64) -> Timepoint {
        let timeline = self.raw.timeline();
        timeline.expect(value);
        timeline.at(value)
    }

    /// The timepoint of the value after the present one.
    #[must_use]
    pub fn next(&self) -> Timepoint {
        self.at(self.value() + 1)
    }

    /// Raises the host timeline to `value`: whoever waits for it or less goes on. Does not block;
    /// any thread, also in a host call.
    ///
    /// # Errors
    /// `InvalidArgument` unless the value grows; the cause after [`fail`](Self::fail).
    #[doc(alias("signal_host", "set_event"))]
    pub fn signal(&self, value: u64) -> Result<()> {
        self.raw.signal_host(value)
    }

    /// Fails the host timeline: whoever waits for a value that was not signalled gets the error,
    /// now or later, and streams that wait for one are poisoned. The first cause stays. Does not
    /// block.
    pub fn fail(&self, cause: Error) {
        self.raw.fail(cause);
    }
}

impl fmt::Debug for HostTimeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTimeline({}, {:?})", self.runtime.id(), self.raw.timeline())
    }
}
