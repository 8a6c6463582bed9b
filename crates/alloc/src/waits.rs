//! Waits of the host for a timepoint.
//!
//! The lock is not held meanwhile.

use crate::ring::EventKind;
use crate::state::{Inner, On};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, PackedTimepoint, Result, Timepoint};
use std::time::{Duration, Instant};

impl Inner {
    /// Blocks until a timepoint is over.
    pub(crate) fn wait_point(
        &self,
        point: Timepoint,
        on: On<'_>,
        timeout: Option<Duration>,
    ) -> Result<()> {
        if PackedTimepoint::from(point).has_passed() {
            return Ok(());
        }
        self.counters.host_waits.fetch_add(1, Ordering::Relaxed);
        let begin = Instant::now();
        let waited = self.wait_point_counted(point, on, timeout);
        let us = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.trace_wait(EventKind::HostWait, point.timeline_id(), us);
        waited
    }

    fn wait_point_counted(
        &self,
        point: Timepoint,
        on: On<'_>,
        timeout: Option<Duration>,
    ) -> Result<()> {
        if point.timeline_id() == on.timeline.id() {
            on.source.signal()?;
            return on.source.wait_host(point.value(), timeout);
        }
        match point.timeline().wait(point.value(), timeout) {
            // It may be another device's timeline; the work is over either way, and our own driver
            // will tell.
            Err(Error::DeviceLost { .. }) if PackedTimepoint::from(point).has_passed() => Ok(()),
            // Work that only the driver knows of is waited for by its own wait, without a limit.
            Err(Error::InvalidState(_)) if timeout.is_some() => {
                point.timeline().wait(point.value(), None)
            }
            waited => waited,
        }
    }
}
