//! The state that all streams of a context share.
//!
//! This module must not know managers.

use super::driver_context::DriverContext;
use super::events::{EventPool, EventState};
use super::shared::Shared;
use super::stream::StreamCore;
use super::watcher::Watch;
use super::words::Words;
use crate::config::CompletionSource;
use crate::driver::ops::{DeviceProperties, EventFlags, NativeGraphExec, NativeStream};
use leasehold_alloc::{Allocator, Buffer, Layout, On};
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use leasehold_core::{
    Error, Lease, Result, Timeline, TimelineOwner, TimelineSource, Timepoint, UniqueLease,
};
use std::fmt;
use std::sync::Weak;
use std::time::Duration;

/// Makes the allocator of pinned memory at its first use.
pub type PinnedSource = Box<dyn Fn() -> Result<Allocator> + Send + Sync>;

/// The state that all streams of a context share.
pub struct Core {
    /// The context.
    pub context: Arc<DriverContext>,
    /// The tables that all devices share.
    pub shared: Arc<Shared>,
    /// Completion words.
    pub words: Arc<Words>,
    /// The context's threads.
    pub watch: Arc<Watch>,
    /// The pool of events that mark positions on streams.
    event_pool: Arc<EventPool>,
    properties: DeviceProperties,
    /// The timeline of an owner that never submits: memory taken for this timeline is ready for
    /// every stream.
    nobody: TimelineOwner,
    pinned: OnceLock<PinnedSource>,
    streams: Mutex<Vec<Weak<StreamCore>>>,
    /// A stream for uploads of graphs and for captures, made at its first use.
    utility: Mutex<Option<NativeStream>>,
}

impl Core {
    /// Makes the shared state of a context.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(
        context: Arc<DriverContext>,
        shared: Arc<Shared>,
        properties: DeviceProperties,
        event_pool: Arc<EventPool>,
    ) -> Result<Arc<Self>> {
        let core = Arc::new(Self {
            words: Arc::new(Words::new(context.clone())),
            event_pool,
            watch: Watch::new(context.id(), shared.config.inline, shared.ops.poll_interval()),
            nobody: TimelineOwner::take()?,
            pinned: OnceLock::new(),
            streams: Mutex::new(Vec::new()),
            utility: Mutex::new(None),
            properties,
            context,
            shared,
        });
        let loss_reporter = Arc::downgrade(&core);
        core.context.set_loss_reporter(Box::new(move || {
            let texts: Vec<_> = loss_reporter
                .upgrade()?
                .streams()
                .iter()
                .filter_map(|s| s.pending_text())
                .take(4)
                .collect();
            (!texts.is_empty()).then(|| texts.join(", "))
        }));
        Ok(core)
    }

    /// The device's properties.
    #[must_use]
    pub fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    /// Whether the device reports completion through words in memory.
    #[must_use]
    pub fn has_words(&self) -> bool {
        self.properties.stream_words && self.shared.config.completion == CompletionSource::Auto
    }

    /// Sets the source of pinned memory. Only the first call has an effect.
    pub fn set_pinned(&self, source: PinnedSource) {
        let _ = self.pinned.set(source);
    }

    /// Allocates pinned memory for bytes on their way to pageable memory.
    ///
    /// No stream uses the memory, not even the one that downloads: while a download is held back,
    /// the stream may have freed memory that work *behind* the download uses. No other thread can
    /// get a lease of it, so neither the device's writes nor the host's reads are marked.
    ///
    /// # Errors
    /// `OutOfMemory`, or a driver error.
    pub(crate) fn staging(&self, bytes: u64) -> Result<UniqueLease<Buffer>> {
        let source =
            self.pinned.get().ok_or_else(|| Error::state("the device has no pinned memory yet"))?;
        let nobody = Nobody(self.nobody.timeline());
        source()?.alloc_unique(Layout::new(bytes), On { timeline: nobody.0, source: &nobody })
    }

    /// Acquires an event for a recorded event.
    pub(crate) fn event(&self) -> Result<Lease<EventState>> {
        self.event_pool.acquire(&EventFlags::default())
    }

    /// Registers a stream.
    pub(crate) fn add_stream(&self, stream: &Arc<StreamCore>) {
        let mut streams = self.streams.lock();
        if streams.len() == streams.capacity() {
            streams.retain(|s| s.strong_count() > 0);
        }
        streams.push(Arc::downgrade(stream));
    }

    /// The streams that exist.
    pub fn streams(&self) -> Vec<Arc<StreamCore>> {
        self.streams.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// The number of streams that have pending work.
    pub(crate) fn busy_streams(&self) -> u64 {
        self.streams().iter().filter(|s| !s.timeline().is_idle()).count() as u64
    }

    /// Uploads an executable graph to the device. Blocks until the upload is done.
    pub(crate) fn upload(&self, exec: NativeGraphExec) -> Result<()> {
        self.on_utility(|ops, stream| {
            // SAFETY: the caller's executable lives, and no other thread has the utility stream
            // meanwhile.
            unsafe { ops.exec_upload(exec, stream) }?;
            // SAFETY: no other thread has the utility stream meanwhile.
            unsafe { ops.stream_synchronize(stream) }
        })
    }

    /// Makes calls with a stream that no other thread uses meanwhile.
    pub(crate) fn on_utility<R>(
        &self,
        calls: impl FnOnce(&dyn crate::driver::ops::CudaSlowOps, NativeStream) -> Result<R>,
    ) -> Result<R> {
        // The stream is taken out instead of locked: the calls may block, and may run user code.
        let taken = self.utility.lock().take();
        let stream = match taken {
            Some(stream) => stream,
            None => self.context.within(|ops| ops.stream_create(0))?,
        };
        let result = self.context.within(|ops| calls(ops, stream));
        let extra = self.utility.lock().replace(stream);
        if let Some(extra) = extra {
            // SAFETY: the utility stream was taken out of its place, so no other thread has it.
            self.context.leave_behind(|ops| unsafe { ops.stream_destroy(extra) });
        }
        result
    }

    /// After a loss, fails every stream and completes its submissions. The caller holds no lock.
    pub(crate) fn settle_loss(&self) {
        let Some(loss) = self.context.loss() else { return };
        for stream in self.streams() {
            stream.lost(&loss);
        }
    }

    /// Settles the loss of this context, if an error reports it. The loss of another device is an
    /// error like others. The caller holds no lock.
    pub(crate) fn settle(&self, error: Error) -> Error {
        match (self.context.loss(), &error) {
            (Some(loss), Error::DeviceLost { .. }) => {
                self.settle_loss();
                loss
            }
            _ => error,
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.watch.close();
        if let Some(stream) = self.utility.get_mut().take() {
            // SAFETY: the utility stream was taken out of its place, so no other thread has it.
            self.context.leave_behind(|ops| unsafe { ops.stream_destroy(stream) });
        }
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("driver", &self.context)
            .field("words", &self.words)
            .finish_non_exhaustive()
    }
}

/// A timeline without submissions.
struct Nobody(&'static Timeline);

// SAFETY: nothing is ever submitted to this timeline.
unsafe impl TimelineSource for Nobody {
    fn timeline(&self) -> &'static Timeline {
        self.0
    }

    fn signal(&self) -> Result<u64> {
        Ok(self.0.submitted())
    }

    fn refresh(&self) -> Result<u64> {
        Ok(self.0.completed())
    }

    fn wait(&self, _: Timepoint) -> Result<()> {
        Err(Error::Unsupported("this memory must be ready for everybody".into()))
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.0.wait(value, timeout)
    }
}
