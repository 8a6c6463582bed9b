//! The state that all streams of a device share with the engine.
//!
//! This module must not know how streams run.

use crate::driver::{DriverDevice, DriverStream};
use crate::payload::StreamState;
use crate::stream::StreamCore;
use crate::stream_pool::StreamPool;
use crate::tables::Tables;
use crate::watcher::Watch;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result, Timepoint};
use std::fmt;
use std::ops::Deref;
use std::sync::Weak;

/// The settings of the engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// No threads: the thread that waits, queries or synchronises does the work of the engine's
    /// threads.
    pub inline: bool,
    /// The most submissions before the driver is told to signal.
    pub signal_every: u32,
    /// A planted defect that tests must find.
    #[cfg(feature = "planted-defects")]
    pub defect: Option<crate::defects::Defect>,
}

impl EngineConfig {
    /// A configuration without a defect. This crate may have the feature `planted-defects` where
    /// the backend has not.
    #[must_use]
    pub fn new(inline: bool, signal_every: u32) -> Self {
        Self {
            inline,
            signal_every,
            #[cfg(feature = "planted-defects")]
            defect: None,
        }
    }

    /// Whether this defect was planted.
    #[cfg(feature = "planted-defects")]
    #[inline]
    pub(crate) fn has(&self, defect: crate::defects::Defect) -> bool {
        self.defect == Some(defect)
    }
}

/// A device's streams, and the threads that serve them. Dereferences to the driver's device.
pub struct Engine<N: DriverStream> {
    pub(crate) device: Arc<N::Device>,
    pub(crate) tables: Arc<Tables<N>>,
    pub(crate) config: EngineConfig,
    pub(crate) watch: Arc<Watch<N>>,
    streams: Mutex<Vec<Weak<StreamCore<N>>>>,
}

impl<N: DriverStream> Engine<N> {
    /// An engine without streams. `tables` are those of the whole backend.
    #[must_use]
    pub fn new(device: Arc<N::Device>, tables: Arc<Tables<N>>, config: EngineConfig) -> Arc<Self> {
        let watch = Watch::new(device.id(), config.inline, device.poll_interval());
        Arc::new(Self { device, tables, config, watch, streams: Mutex::new(Vec::new()) })
    }

    /// The driver's device.
    pub fn device(&self) -> &Arc<N::Device> {
        &self.device
    }

    /// Makes a stream with a timeline of its own. May block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory` without timelines or memory, or a driver error.
    pub fn stream(self: &Arc<Self>, priority: i32) -> Result<Arc<StreamCore<N>>> {
        StreamCore::new(self.clone(), priority)
    }

    /// Registers a stream.
    pub(crate) fn add_stream(&self, stream: &Arc<StreamCore<N>>) {
        let mut streams = self.streams.lock();
        if streams.len() == streams.capacity() {
            streams.retain(|s| s.strong_count() > 0);
        }
        streams.push(Arc::downgrade(stream));
    }

    /// The streams that exist.
    pub fn streams(&self) -> Vec<Arc<StreamCore<N>>> {
        self.streams.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// The streams that exist, if no stream of their pool has a holder. Their work is the work that
    /// dropped streams left behind.
    pub fn left_behind(&self, pool: &StreamPool<StreamState<N>>) -> Vec<Arc<StreamCore<N>>> {
        if pool.in_use() == 0 { self.streams() } else { Vec::new() }
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

    /// After a loss, fails every stream and completes its submissions. The caller holds no lock.
    pub(crate) fn settle_loss(&self) {
        let Some(loss) = self.device.loss() else { return };
        for stream in self.streams() {
            stream.lost(&loss);
        }
    }

    /// Settles the loss of this device, if an error reports it. The loss of another device is an
    /// error like others. The caller holds no lock.
    pub fn settle(&self, error: Error) -> Error {
        match (self.device.loss(), &error) {
            (Some(loss), Error::DeviceLost { .. }) => {
                self.settle_loss();
                loss
            }
            _ => error,
        }
    }

    /// Tells the engine's threads to end when they have no more work. Does not block.
    pub fn close(&self) {
        self.watch.close();
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
        self.watch.join();
    }
}

impl<N: DriverStream> Deref for Engine<N> {
    type Target = N::Device;

    fn deref(&self) -> &N::Device {
        &self.device
    }
}

impl<N: DriverStream> Drop for Engine<N> {
    fn drop(&mut self) {
        self.watch.close();
    }
}

impl<N: DriverStream> fmt::Debug for Engine<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("device", &self.device.id())
            .field("watch", &self.watch)
            .finish_non_exhaustive()
    }
}
