//! Host timelines: semaphores that the host signals.
//!
//! This module must not know which streams wait.

use super::device::Common;
use crate::machine::SemaphoreId;
use leasehold_core::{Error, Result, Timeline};
use leasehold_hal::engine::host_timeline as shared;
use std::time::Duration;

impl shared::HostSignals for Common {
    type Native = SemaphoreId;

    fn create(&self, timeline: &'static Timeline) -> Result<SemaphoreId> {
        self.semaphore(timeline)
    }

    fn destroy(&self, timeline: &'static Timeline, semaphore: &SemaphoreId) {
        self.forget(timeline, *semaphore);
    }

    fn signal(&self, semaphore: &SemaphoreId, value: u64) -> Result<()> {
        self.machine.semaphore_signal(*semaphore, value)
    }

    fn fail(&self, semaphore: &SemaphoreId, cause: &Error) {
        // The semaphore exists as long as the host timeline, and no further signal comes.
        let _ = self.machine.semaphore_fail(*semaphore, cause.clone());
    }

    fn resume(&self, _: &'static Timeline, _: u64) {
        self.go_on();
    }

    fn wait_host(
        &self,
        timeline: &'static Timeline,
        value: u64,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.await_timeline(timeline, value, timeout)
    }
}

/// A host timeline.
pub type HostTimelineState = shared::HostTimelineState<Common>;

/// Owns the host timelines of a device.
pub type HostTimelineManager = shared::HostTimelineManager<Common>;
