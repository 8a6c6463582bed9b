//! A device's engine: its start, its streams together, and its end.
//!
//! This module must not know how streams run.

use crate::engine::driver::{DriverDevice, DriverStream};
use crate::engine::partitions::StreamKey;
use crate::engine::state::StreamCore;
use crate::engine::tables::Tables;
use crate::engine::threads::Threads;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Result, Timepoint};
use std::fmt;

pub use crate::engine::state::{Engine, EngineConfig};

impl<N: DriverStream> Engine<N> {
    /// An engine without streams. `tables` are those of the whole backend.
    #[must_use]
    pub fn new(device: Arc<N::Device>, tables: Arc<Tables<N>>, config: EngineConfig) -> Arc<Self> {
        let threads = Threads::new(device.id(), config.inline, device.poll_interval());
        Arc::new(Self { device, tables, config, threads, streams: Mutex::new(Vec::new()) })
    }

    /// Makes a stream with a timeline of its own. May block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory` without timelines or memory, or a driver error.
    pub fn stream(self: &Arc<Self>, key: &StreamKey) -> Result<Arc<StreamCore<N>>> {
        StreamCore::new(self.clone(), key)
    }

    /// Publishes the values that the streams have reached. Queries the driver, and does not block.
    pub fn settle_streams(&self) {
        for stream in self.streams() {
            // The outcome of the stream's work does not matter here.
            let _ = stream.refresh();
            if stream.timeline().is_idle() {
                // Dropping the marks lets their objects serve again.
                stream.let_go();
            }
        }
    }

    /// The ends of the work that the streams have now. Does not block.
    pub fn pending(&self) -> Vec<Timepoint> {
        let busy = |s: &Arc<StreamCore<N>>| (!s.timeline().is_idle()).then(|| s.timeline().now());
        self.streams().iter().filter_map(busy).collect()
    }

    /// The number of streams that have pending work.
    pub fn busy_streams(&self) -> u64 {
        self.streams().iter().filter(|s| !s.timeline().is_idle()).count() as u64
    }

    /// The submissions that are not over, for the report of a loss. Takes no stream's lock.
    pub fn pending_text(&self) -> Option<String> {
        let texts: Vec<_> =
            self.streams().iter().filter_map(|s| s.pending_text()).take(4).collect();
        (!texts.is_empty()).then(|| texts.join(", "))
    }

    /// Tells the engine's threads to end when they have no more work. Does not block.
    pub fn close(&self) {
        self.threads.close();
    }

    /// Ends the engine's threads, after the shutdown of the managers with this outcome.
    pub fn end(&self, managers: Result<()>) {
        if let Err(error) = managers {
            // This happens only if the backend was dropped without a shutdown and has no threads.
            // The resources in use end with their last lease.
            let device = self.device.id();
            tracing::debug!(%error, %device, "a device ended while a resource of it was held");
        }
        self.close();
        self.join();
    }

    /// Waits for the end of the engine's threads after [`close`](Self::close). The threads finish
    /// the work that continues by itself, and leave work that a host timeline or another backend
    /// holds back. The caller may be one of the threads. On other threads, an object that is
    /// dropped by a stream's host part must not call this function: the threads wait for its drop.
    pub fn join(&self) {
        self.threads.join();
    }
}

impl<N: DriverStream> Drop for Engine<N> {
    fn drop(&mut self) {
        self.threads.close();
    }
}

impl<N: DriverStream> fmt::Debug for Engine<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("device", &self.device.id())
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}
