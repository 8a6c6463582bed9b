//! The state that all streams of a context share.
//!
//! This module must not know managers.

use super::condition::ConditionSetter;
use super::driver_context::DriverContext;
use super::events::{EventPool, EventState};
use super::shared::Shared;
use super::stream::CudaStream;
use super::words::Words;
use crate::config::CompletionSource;
use crate::driver::ops::{
    DeviceProperties, EventFlags, NativeGraphExec, NativePartition, NativeStream,
};
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::engine::driver::DriverDevice;
use leasehold_hal::engine::partitions::StreamKey;
use leasehold_hal::engine::staging::Staging;
use leasehold_hal::engine::{Engine, EngineConfig};
use leasehold_hal::{DeviceId, Partition};
use std::fmt;
use std::time::Duration;

/// The streams of a context. Dereferences to [`Core`].
pub type Streams = Engine<CudaStream>;

/// The state that all streams of a context share.
pub struct Core {
    /// The context.
    pub context: Arc<DriverContext>,
    /// The tables that all devices share.
    pub shared: Arc<Shared>,
    /// Completion words.
    pub words: Arc<Words>,
    /// The pool of events that mark positions on streams.
    event_pool: Arc<EventPool>,
    properties: DeviceProperties,
    /// Pinned memory for bytes on their way to pageable memory.
    pub(crate) staging: Staging,
    /// A stream for uploads of graphs and for captures, made at its first use.
    utility: Mutex<Option<NativeStream>>,
    /// The kernel that sets conditions of graphs, loaded at its first use.
    condition_setter: OnceLock<Arc<ConditionSetter>>,
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
            staging: Staging::new()?,
            utility: Mutex::new(None),
            condition_setter: OnceLock::new(),
            properties,
            context,
            shared,
        });
        Ok(core)
    }

    /// The streams of a context, which do not exist yet, and their threads.
    pub fn streams(self: &Arc<Self>) -> Arc<Streams> {
        let own = &self.shared.config;
        let config = EngineConfig::new(own.inline, own.signal_every);
        let streams = Engine::new(self.clone(), self.shared.tables.clone(), config);
        let loss_reporter = Arc::downgrade(&streams);
        self.context.set_loss_reporter(Box::new(move || loss_reporter.upgrade()?.pending_text()));
        streams
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

    /// Acquires an event for a recorded event.
    pub(crate) fn event(&self) -> Result<Lease<EventState>> {
        self.event_pool.acquire(&EventFlags::default())
    }

    /// A stream of the driver. The caller keeps the key's partition longer than the stream.
    pub(crate) fn native_stream(&self, key: &StreamKey) -> Result<NativeStream> {
        self.context.within(|ops| match &key.partition {
            // SAFETY: this device made the partition, and the caller keeps it.
            Some(partition) => unsafe {
                ops.partition_stream(NativePartition(partition.native()), key.priority)
            },
            None => ops.stream_create(key.priority),
        })
    }

    /// The kernel that sets conditions of graphs. The first call blocks while the driver compiles
    /// it.
    pub(crate) fn condition_setter(&self) -> Result<&Arc<ConditionSetter>> {
        if let Some(setter) = self.condition_setter.get() {
            return Ok(setter);
        }
        let loaded =
            Arc::new(ConditionSetter::load(&self.context, self.properties.compute_capability)?);
        // Another thread may have been faster. Then this kernel is unloaded.
        Ok(self.condition_setter.get_or_init(|| loaded))
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

    /// Makes calls with a stream on a partition that no other thread uses meanwhile; as
    /// [`on_utility`](Self::on_utility) without one.
    pub(crate) fn on_stream_of<R>(
        &self,
        partition: Option<&Lease<Partition>>,
        calls: impl FnOnce(&dyn crate::driver::ops::CudaSlowOps, NativeStream) -> Result<R>,
    ) -> Result<R> {
        if partition.is_none() {
            return self.on_utility(calls);
        }
        let stream =
            self.native_stream(&StreamKey { priority: 0, partition: partition.cloned() })?;
        let result = self.context.within(|ops| calls(ops, stream));
        // SAFETY: the stream was made here, and nobody else has it.
        self.context.release_or_log(|ops| unsafe { ops.stream_destroy(stream) });
        result
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
            self.context.release_or_log(|ops| unsafe { ops.stream_destroy(extra) });
        }
        result
    }
}

impl DriverDevice for Core {
    fn id(&self) -> DeviceId {
        self.context.id()
    }

    #[inline]
    fn loss(&self) -> Option<Error> {
        self.context.loss()
    }

    fn note(&self, error: Error) -> Error {
        self.context.note(error)
    }

    fn poll_interval(&self) -> Duration {
        self.context.ops().poll_interval()
    }

    fn kernel_name(&self, native: u64) -> Option<String> {
        self.shared.function_name(native)
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Some(stream) = self.utility.get_mut().take() {
            // SAFETY: the utility stream was taken out of its place, so no other thread has it.
            self.context.release_or_log(|ops| unsafe { ops.stream_destroy(stream) });
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
