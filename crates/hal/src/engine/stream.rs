//! A stream: how it is made and how it ends. The files below have submission, completion, failure
//! and waiting. Submissions that the host holds back are in `deferred`.
//!
//! # Protocol
//! | number | meaning | written |
//! |---|---|---|
//! | `timeline.submitted` | values that were taken | in the lock |
//! | `issued` | all up to this value was given to the driver | in the lock |
//! | `signalled` | the driver was told to signal completion up to this value | in the lock |
//! | `reached` | the device is done up to this value | by the driver |
//! | `timeline.completed` | device and host are done up to this value | by an observing thread |
//! | `wanted` | a waiter that does not poll needs the publication | by any thread, monotone |
//!
//! A submission on a stream that holds nothing back takes the lock, makes the driver's calls and
//! takes the next value. Such a submission allocates nothing. The driver is told to signal every
//! [`signal_every`](crate::engine::EngineConfig::signal_every) submissions, at a signal, at a flush
//! and for a waiter.
//!
//! Resources that need other locks (a recorded mark on another stream, staging memory) are prepared
//! before the lock is taken.
//!
//! # After a failure
//! The stream poisons its timeline from the failed value on, and drops the submissions that it held
//! back. The stream publishes the values once the driver is done with all work that it was given.
//! In a lost context the values are published at once.
//!
//! This module must not know managers.

mod complete;
mod failure;
mod issue;
mod resolve;
mod submit;
mod wait;

use crate::engine::driver::{DriverDevice, DriverStream};
use crate::engine::host_part::HostPart;
use crate::engine::partitions::StreamKey;
use crate::engine::state::{BlockedOn, Engine, PumpState, RECORDED_MARKS, State};
use crate::engine::timelines::Origin;
use crate::engine::waits::Awaited;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result, Timeline, TimelineOwner};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Weak;
use std::time::Duration;

pub use crate::engine::state::StreamCore;

impl<N: DriverStream> StreamCore<N> {
    /// Makes a stream with a timeline of its own. May block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory` without timelines or memory, or a driver error.
    pub(crate) fn new(core: Arc<Engine<N>>, key: &StreamKey) -> Result<Arc<Self>> {
        let owner = TimelineOwner::take()?;
        let start = owner.timeline().submitted();
        let native = N::create(&core.device, key, start).map_err(|e| core.settle(e))?;
        let stream = Arc::new_cyclic(|me: &Weak<Self>| Self {
            owner,
            native,
            priority: key.priority,
            partition: key.partition.clone(),
            pooled: key.partition.is_none(),
            issued: AtomicU64::new(start),
            signalled: AtomicU64::new(start),
            wanted: AtomicU64::new(0),
            listed: AtomicBool::new(false),
            state: Mutex::new(State {
                deferred: VecDeque::new(),
                pump: PumpState::Idle,
                again: false,
                fence: None,
                blocked_on: BlockedOn::Backend,
                dirty: false,
                recorded: VecDeque::with_capacity(RECORDED_MARKS + 1),
            }),
            host: HostPart::default(),
            recent: std::array::from_fn(|_| AtomicU64::new(0)),
            me: me.clone(),
            core,
        });
        let me = stream.me.clone();
        stream.owner.set_publisher(Some(Arc::new(move |value, timeout| {
            if let Some(stream) = me.upgrade() {
                stream.publish_for(value, timeout);
            }
            // The timeline shows the outcome.
            Ok(())
        })));
        stream.core.tables.add_origin(stream.timeline(), Origin::Stream(stream.me.clone()));
        stream.core.add_stream(&stream);
        Ok(stream)
    }
}

impl<N: DriverStream> Drop for StreamCore<N> {
    fn drop(&mut self) {
        let timeline = self.timeline();
        self.core.tables.remove_origin(timeline);
        let pending = !timeline.is_idle();
        if pending {
            // This happens only if the backend was dropped without a shutdown while a host timeline
            // held work back.
            let jobs = std::mem::take(&mut self.state.get_mut().deferred);
            self.owner.poison(
                timeline.completed() + 1,
                Error::state("the backend ended while the stream's work was held back"),
            );
            drop(jobs);
        }
        // All work may be over while the last signal is still on its way to the word. The next
        // owner of the word must not get this write.
        let signalled = self.core.device.loss().is_none()
            && self.reached() < self.signalled.load(Ordering::Acquire);
        match if pending || signalled { self.native.synchronize() } else { Ok(()) } {
            Ok(()) if pending => {
                self.note_failure();
                let end = timeline.submitted();
                // All pending values have failed, so no wait holds an action back.
                let _ = self.run_host_part(end, end);
                self.owner.complete(end);
            }
            Ok(()) => {}
            Err(error) => {
                // The timeline does not say that the work is over. The memory that the work uses
                // leaks.
                tracing::error!(%error, stream = %self.name(), "the driver may still run work of a stream that ends");
                self.host.abandon();
                self.native.abandon();
            }
        }
    }
}

impl<N: DriverStream> fmt::Debug for StreamCore<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamCore")
            .field("timeline", &self.timeline())
            .field("issued", &self.issued.load(Ordering::Relaxed))
            .field("signalled", &self.signalled.load(Ordering::Relaxed))
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

impl<N: DriverStream> Awaited for StreamCore<N> {
    fn timeline(&self) -> &'static Timeline {
        Self::timeline(self)
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        Self::wait_host(self, value, timeout)
    }

    fn refresh(&self) -> Result<u64> {
        Self::refresh(self)
    }
}
