//! Contexts: a device's primary context, and owned contexts beside it.
//!
//! A context's payload holds the managers of its streams, timestamps, host timelines, modules,
//! functions and graphs. All contexts of a device share its memory: one context may use memory that
//! another one allocated.
//!
//! Streams, graphs and functions hold the engine's part of their context (`Core`), never the
//! payload. So no pool lies inside a payload that its own entries keep alive. The driver's context
//! is released with the last reference to the engine's part.
//!
//! This module must not know backings.

use super::buffer::BufferManager;
use super::event::EventManager;
use super::external::ExternalManager;
use super::function::{self, FunctionManager};
use super::graph::GraphManager;
use super::host_timeline::HostTimelineManager;
use super::module::ModuleManager;
use super::stream::StreamManager;
use crate::allocator::Memory;
use crate::driver::ops::{NativeContext, NativePartition};
use crate::engine::core::{Core, Streams};
use crate::engine::driver_context::DriverContext;
use leasehold_core::sync::Arc;
use leasehold_core::{
    ContextHandle, Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource,
    Result, Tagged, tags,
};
use leasehold_hal::engine::partitions::Partitions;
use leasehold_hal::engine::retired::{Ending, LeftBehind, Retired, Retiring, StreamOwner};
use leasehold_hal::{MemoryKind, Partition, PartitionSize};
use std::fmt;
use std::marker::PhantomPinned;

/// The name of the thread that ends contexts.
pub(crate) const RETIRING: &str = "lh-cuda-end";

/// A context and the resources that it owns.
pub struct ContextState {
    pub(crate) streams: StreamManager,
    // After the streams, which hold them.
    pub(crate) partitions: Partitions,
    pub(crate) events: EventManager,
    pub(crate) host_timelines: HostTimelineManager,
    pub(crate) functions: FunctionManager,
    pub(crate) modules: ModuleManager,
    pub(crate) graphs: GraphManager,
    pub(crate) externals: Arc<ExternalManager>,
    buffers: BufferManager,
    pinned: BufferManager,
    pub(crate) memory: Arc<Memory>,
    pub(crate) core: Arc<Streams>,
    /// Whether the context is the device's primary one. The primary context ends after the device's
    /// memory is given back.
    primary: bool,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl Tagged for ContextState {
    type Tag = tags::Context;
}

impl ContextState {
    fn new(context: Arc<DriverContext>, memory: Arc<Memory>, primary: bool) -> Result<Self> {
        let shared = memory.shared.clone();
        let range = context.within(|ops| ops.priority_range())?;
        let events = EventManager::new(context.clone())?;
        let core = Core::new(
            context,
            shared.clone(),
            memory.properties.clone(),
            events.event_pool().clone(),
        )?;
        let of = memory.clone();
        core.staging.set_source(Box::new(move || of.of(MemoryKind::Pinned).cloned()));
        let core = core.streams();
        Ok(Self {
            _place: PhantomPinned,
            streams: StreamManager::new(&core, range)?,
            partitions: Partitions::new(memory.context.id())?,
            events,
            host_timelines: HostTimelineManager::new(shared.tables.clone())?,
            modules: ModuleManager::new(&core)?,
            functions: function::manager(&core)?,
            graphs: GraphManager::new(&core)?,
            externals: ExternalManager::new(core.device().clone()),
            buffers: BufferManager::new(memory.clone(), MemoryKind::Device),
            pinned: BufferManager::new(memory.clone(), MemoryKind::Pinned),
            memory,
            core,
            primary,
        })
    }

    /// The streams.
    pub fn streams(&self) -> &StreamManager {
        &self.streams
    }

    /// The events and timestamps.
    pub fn events(&self) -> &EventManager {
        &self.events
    }

    /// The host timelines.
    pub fn host_timelines(&self) -> &HostTimelineManager {
        &self.host_timelines
    }

    /// The modules.
    pub fn modules(&self) -> &ModuleManager {
        &self.modules
    }

    /// The functions.
    pub fn functions(&self) -> &FunctionManager {
        &self.functions
    }

    /// The graphs.
    pub fn graphs(&self) -> &GraphManager {
        &self.graphs
    }

    /// The streams of other libraries that use this device's memory.
    pub fn externals(&self) -> &Arc<ExternalManager> {
        &self.externals
    }

    /// The buffers of a kind of memory. All contexts of a device share them.
    ///
    /// # Errors
    /// `Unsupported` for a kind that the device does not have.
    pub fn buffers(&self, kind: MemoryKind) -> Result<&BufferManager> {
        self.memory.check(kind)?;
        Ok(if kind == MemoryKind::Pinned { &self.pinned } else { &self.buffers })
    }

    /// The driver's context, for reports.
    pub fn native(&self) -> NativeContext {
        self.core.context.native()
    }

    /// The context's part of the engine.
    pub(crate) fn core(&self) -> &Arc<Streams> {
        &self.core
    }

    /// Divides the device's multiprocessors; see `hal::Device::partition`. Former partitions may
    /// end here.
    ///
    /// # Errors
    /// As `hal::Device::partition`.
    pub fn divide(&self, sizes: &[PartitionSize], units: u32) -> Result<Vec<Lease<Partition>>> {
        self.streams.collect();
        let context = &self.core.context;
        self.partitions.divide(sizes, units, || {
            let made = context.within(|ops| ops.partitions_create(context.ordinal(), sizes))?;
            let enter = |(native, units): (NativePartition, u32)| {
                let of = context.clone();
                Partition::new(context.id(), units, native.0, move || {
                    // SAFETY: the driver made the partition just now. Streams and graphs keep this
                    // partition, so they are gone.
                    of.release_or_log(|ops| unsafe { ops.partition_destroy(native) });
                })
            };
            Ok(made.into_iter().map(enter).collect())
        })
    }

    /// Reports the statistics of all pools.
    pub fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("stream", self.streams.stats());
        report("event", self.events.stats());
        report("timestamp", self.events.timestamp_stats());
        report("host timeline", self.host_timelines.stats());
        report("pipeline", self.functions.stats());
        report("module", self.modules.stats());
        report("graph", self.graphs.stats());
        report("partition", self.partitions.stats());
        report("mark", self.events.event_pool_stats());
    }

    /// Shuts the managers down, children first.
    fn end(&self) -> Result<()> {
        self.externals.shutdown();
        self.streams.shutdown()?;
        self.graphs.shutdown()?;
        self.partitions.shutdown()?;
        self.events.shutdown()?;
        self.host_timelines.shutdown()?;
        self.functions.shutdown()?;
        self.modules.shutdown()
    }
}

impl StreamOwner for ContextState {
    /// The check only reads. The device's memory counts too, if the context is the primary one.
    fn outstanding(&self) -> Result<()> {
        let mut first = None;
        self.pools(&mut |name, stats| {
            let strong = match name {
                // A stream's work continues after its holder dropped it.
                "stream" => self.streams.in_use().max(self.core.busy_streams()),
                // Each manager holds one lease of its own.
                "event" => self.events.in_use(),
                "pipeline" => self.functions.in_use(),
                // Functions and streams hold these, and are counted.
                "module" | "mark" => return,
                _ => stats.live,
            };
            if (strong != 0 || stats.weak != 0) && first.is_none() {
                first = Some(Error::LeasesOutstanding { resource: name, strong, weak: stats.weak });
            }
        });
        first.map_or(Ok(()), Err)?;
        if self.primary { self.memory.outstanding() } else { Ok(()) }
    }

    fn left_behind(&self) -> LeftBehind {
        LeftBehind::new(self.core.left_behind(&self.streams))
    }
}

impl Retiring for ContextState {
    fn ending(&self) -> Ending {
        self.core.settle_streams();
        let externals_have_work = self.externals.settle();
        if self.outstanding().is_err() {
            return Ending::Later;
        }
        // Streams of other contexts may still hold recorded events of this context.
        match self.events.event_pool_stats().live {
            0 => Ending::Now,
            _ if externals_have_work => Ending::AfterOthers,
            _ => Ending::Later,
        }
    }
}

impl Drop for ContextState {
    fn drop(&mut self) {
        self.core.end(self.end());
    }
}

impl fmt::Debug for ContextState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextState")
            .field("core", &self.core)
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}

/// The requested context.
pub(crate) enum Wanted {
    Primary(Arc<Memory>),
    Owned(Arc<Memory>),
}

struct Contexts {
    retired: Arc<Retired<ContextState>>,
}

impl Resource for Contexts {
    type Payload = ContextState;
    type Request<'a> = Wanted;
    const NAME: &'static str = "context";

    fn create(&self, _: Handle<tags::Context>, wanted: &Wanted) -> Result<ContextState> {
        match wanted {
            Wanted::Primary(memory) => {
                let state = ContextState::new(memory.context.clone(), memory.clone(), true)?;
                memory.shared.add_primary(state.core.device());
                Ok(state)
            }
            Wanted::Owned(memory) => {
                let context = DriverContext::owned(
                    memory.context.driver().clone(),
                    memory.context.ordinal(),
                )?;
                ContextState::new(Arc::new(context), memory.clone(), false)
            }
        }
    }

    fn recycle(&self, _: &mut ContextState) -> Recycle {
        Recycle::Destroy
    }

    fn destroy(&self, context: ContextState) {
        // The end of a context blocks.
        self.retired.retire(context);
    }
}

/// Owns the contexts of a device: the primary one first, owned ones on request.
#[doc(alias = "CudaContextManager")]
pub struct ContextManager {
    manager: PoolManager<Contexts, ()>,
    retired: Arc<Retired<ContextState>>,
    memory: Arc<Memory>,
    #[cfg(feature = "test-hooks")]
    for_test: bool,
}

impl ContextManager {
    pub(crate) fn new(memory: Arc<Memory>, retired: Arc<Retired<ContextState>>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(
            Contexts { retired: retired.clone() },
            PoolConfig { block: 4, ..PoolConfig::default() },
        )?;
        Ok(Self {
            manager,
            retired,
            memory,
            #[cfg(feature = "test-hooks")]
            for_test: false,
        })
    }

    /// A manager of a device's contexts over a driver that a test supplies.
    ///
    /// # Errors
    /// `NotFound` for a device that does not exist, or a driver error.
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "configureForTest")]
    pub fn configure_for_test(
        ops: Arc<dyn crate::driver::ops::CudaSlowOps>,
        device: leasehold_hal::DeviceId,
    ) -> Result<Self> {
        let memory = Memory::for_test(ops, device)?;
        Ok(Self { for_test: true, ..Self::new(memory, Retired::new(RETIRING, true))? })
    }

    /// Whether the manager was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.for_test
    }

    /// The primary context, made at the first call.
    ///
    /// # Errors
    /// `OutOfMemory`, or a driver error.
    pub fn primary(&self) -> Result<Lease<ContextState>> {
        self.manager.get_or_create(&(), &Wanted::Primary(self.memory.clone()))
    }

    /// Makes the primary context unless it is alive, keeps it, and returns its handle.
    ///
    /// # Errors
    /// As [`primary`](Self::primary).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self) -> Result<ContextHandle> {
        self.primary().map(|context| context.handle())
    }

    /// A lease on the handle's context.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "getState")]
    pub fn get_state(&self, context: ContextHandle) -> Result<Lease<ContextState>> {
        self.manager.lease(context)
    }

    /// Drops the manager's own lease on the primary context. Other holders, such as the device,
    /// keep theirs. Never blocks.
    ///
    /// # Errors
    /// `StaleHandle` for a context that the manager does not keep.
    pub fn release(&self, context: ContextHandle) -> Result<()> {
        self.manager.release(context)
    }

    /// Creates an owned context. The context has streams and kernels of its own, and shares the
    /// device's memory. May block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory`, or a driver error.
    pub fn create_owned(&self) -> Result<Lease<ContextState>> {
        self.manager.acquire(&Wanted::Owned(self.memory.clone()))
    }

    /// Ends the backend's contexts that have no lease, no resource in use and no pending work.
    /// Blocks on the driver. Returns the number of ended contexts.
    pub fn collect(&self) -> usize {
        self.retired.reclaim()
    }

    /// Whether the handle's context is alive: one load.
    pub fn is_alive(&self, context: ContextHandle) -> bool {
        self.manager.is_alive(context)
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the manager down.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()?;
        self.retired.reclaim();
        Ok(())
    }
}

impl fmt::Debug for ContextManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextManager")
            .field("contexts", &self.manager)
            .field("retired", &self.retired)
            .finish()
    }
}
