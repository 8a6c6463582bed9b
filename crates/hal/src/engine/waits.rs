//! Waits: of a stream for a timepoint, and of a thread for all streams of a device.
//!
//! This module must not know how a stream waits natively.

use crate::engine::stream_pool::{PooledStream, StreamPool};
use crate::{Op, Stream};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result, Timeline, Timepoint, VALUE_LIMIT};
use std::time::{Duration, Instant};

/// Returns the cause of a poisoned timeline as an error.
///
/// # Errors
/// The cause.
#[inline]
pub fn healthy(timeline: &Timeline) -> Result<()> {
    timeline.check(VALUE_LIMIT).map(drop)
}

/// Makes later submissions of a stream start after a timepoint; the implementation of
/// [`TimelineSource::wait`](leasehold_core::TimelineSource::wait) by an [`Op::Wait`].
///
/// # Errors
/// See [`TimelineSource::wait`](leasehold_core::TimelineSource::wait).
pub fn wait<S: Stream>(stream: &S, on: Timepoint) -> Result<()> {
    let timeline = stream.timeline();
    healthy(timeline)?;
    let own = on.timeline_id() == timeline.id() && on.value() <= timeline.submitted();
    if on.is_settled() || own && timeline.knows(on.into()) {
        return Ok(());
    }
    // SAFETY: a wait touches no memory.
    unsafe { stream.submit(&[Op::Wait(on)]) }.map(drop)
}

/// A stream whose work a thread waits for.
pub trait Awaited {
    /// The stream's timeline.
    fn timeline(&self) -> &'static Timeline;

    /// Blocks until a value is over.
    ///
    /// # Errors
    /// As [`TimelineSource::wait_host`](leasehold_core::TimelineSource::wait_host).
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()>;

    /// Updates the timeline, and returns its completed value. Does not block.
    ///
    /// # Errors
    /// As [`TimelineSource::refresh`](leasehold_core::TimelineSource::refresh).
    fn refresh(&self) -> Result<u64>;
}

impl<A: Awaited + ?Sized> Awaited for Arc<A> {
    fn timeline(&self) -> &'static Timeline {
        (**self).timeline()
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        (**self).wait_host(value, timeout)
    }

    fn refresh(&self) -> Result<u64> {
        (**self).refresh()
    }
}

/// Blocks until the work that a pool's streams have now is over; see
/// [`Device::synchronize`](crate::Device::synchronize). `streams` are all streams of the
/// pool.
///
/// # Errors
/// `Timeout`; the first failure of a stream with a holder; the loss of the device.
pub fn synchronize<T: PooledStream, A: Awaited>(
    pool: &StreamPool<T>,
    streams: impl IntoIterator<Item = A>,
    timeout: Option<Duration>,
) -> Result<()> {
    pool.collect();
    let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
    // Later submissions are not waited for.
    let streams: Vec<(A, u64)> =
        streams.into_iter().map(|s| (s.timeline().submitted(), s)).map(|(v, s)| (s, v)).collect();
    let mut first = Ok(());
    for (stream, value) in streams {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let timeline = stream.timeline();
        match stream.wait_host(value, if deadline.is_some() { left } else { timeout }) {
            Ok(()) => {}
            Err(e @ Error::Timeout(_)) => return Err(e),
            Err(e) => {
                // The stream reports the failure before the failed work is over.
                if timeline.failed(value) {
                    timeline.drain(value, deadline, || stream.refresh());
                }
                // A failure of a stream without a holder is reported to no caller.
                if pool.is_held(timeline) || matches!(e, Error::DeviceLost { .. }) {
                    first = first.and(Err(e));
                }
            }
        }
    }
    first
}
