//! Contexts: a device's primary one, and owned ones beside it.
//!
//! A context's payload holds the managers of its streams, time stamps, gates, modules, functions and graphs. The device's memory is shared by
//! all of them: what one allocates the others may use.
//!
//! Streams, graphs and functions hold the engine's part of their context (`Core`), never the payload, so that no pool lies inside a payload
//! that its own entries keep alive. The driver's context goes when the last of them goes.
//!
//! This module must not know backings.

use super::buffer::BufferManager;
use super::event::EventManager;
use super::function::FunctionManager;
use super::gate::GateManager;
use super::graph::GraphManager;
use super::module::ModuleManager;
use super::retired::Retired;
use super::stream::StreamManager;
use crate::allocator::{Memory, pinned_host};
use crate::driver::ops::NativeContext;
use crate::engine::core::Core;
use crate::engine::door::Door;
#[cfg(feature = "test-hooks")]
use crate::engine::shared::Shared;
use leasehold_core::sync::Arc;
use leasehold_core::{
    ContextHandle, Error, Fate, Handle, Lease, PoolConfig, PoolManager, PoolStats, Resource, Result, Tagged, tags,
};
use leasehold_hal::MemoryKind;
use std::fmt;
use std::marker::PhantomPinned;

/// A device's memory over a driver of the test's.
#[cfg(feature = "test-hooks")]
pub(crate) fn memory_for_test(
    ops: Arc<dyn crate::driver::ops::CudaSlowOps>,
    device: leasehold_hal::DeviceId,
) -> Result<Arc<Memory>> {
    let ordinal = super::device::ordinal_of(device)?;
    ops.init()?;
    let properties = ops.device_properties(ordinal)?;
    let shared = Arc::new(Shared::new(ops.clone(), crate::CudaConfig::default().inline(true)));
    Ok(Arc::new(Memory::new(Arc::new(Door::primary(ops, ordinal)?), shared, properties)))
}

/// A context and what it owns.
pub struct ContextState {
    pub(crate) streams: StreamManager,
    pub(crate) events: EventManager,
    pub(crate) gates: GateManager,
    pub(crate) functions: FunctionManager,
    pub(crate) modules: ModuleManager,
    pub(crate) graphs: GraphManager,
    buffers: BufferManager,
    pinned: BufferManager,
    pub(crate) memory: Arc<Memory>,
    pub(crate) core: Arc<Core>,
    /// It is the device's primary one: it ends after the device's memory is given back.
    primary: bool,
    /// Its manager's: nobody swaps it with another one.
    _place: PhantomPinned,
}

impl Tagged for ContextState {
    type Tag = tags::Context;
}

impl ContextState {
    fn new(door: Arc<Door>, memory: Arc<Memory>, primary: bool) -> Result<Self> {
        let shared = memory.shared.clone();
        let range = door.within(|ops| ops.priority_range())?;
        let events = EventManager::new(door.clone())?;
        let core = Core::new(door, shared.clone(), memory.properties.clone(), events.marks().clone())?;
        let of = memory.clone();
        core.set_pinned(Box::new(move || pinned_host::of(&of).cloned()));
        Ok(Self {
            _place: PhantomPinned,
            streams: StreamManager::new(&core, range)?,
            events,
            gates: GateManager::new(shared)?,
            modules: ModuleManager::new(&core)?,
            functions: FunctionManager::new(&core)?,
            graphs: GraphManager::new(&core)?,
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

    /// The events and time stamps.
    pub fn events(&self) -> &EventManager {
        &self.events
    }

    /// The gates.
    pub fn gates(&self) -> &GateManager {
        &self.gates
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

    /// The buffers of a kind of memory. All contexts of a device share them.
    ///
    /// # Errors
    /// `Unsupported` for a kind that there is not.
    pub fn buffers(&self, kind: MemoryKind) -> Result<&BufferManager> {
        self.memory.check(kind)?;
        Ok(if kind == MemoryKind::Pinned { &self.pinned } else { &self.buffers })
    }

    /// The driver's context, for reports.
    pub fn native(&self) -> NativeContext {
        self.core.door.native()
    }

    /// The engine's part.
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// The statistics of all pools.
    pub fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("stream", self.streams.stats());
        report("event", self.events.stats());
        report("timestamp", self.events.timestamp_stats());
        report("gate", self.gates.stats());
        report("pipeline", self.functions.stats());
        report("module", self.modules.stats());
        report("graph", self.graphs.stats());
        report("mark", self.events.mark_stats());
    }

    /// What somebody holds of this context beside itself, and what streams that nobody holds have pending. Reads only.
    pub(crate) fn outstanding(&self) -> Result<()> {
        let mut first = None;
        self.pools(&mut |name, stats| {
            let strong = match name {
                // Work goes on without its holder.
                "stream" => self.streams.in_use().max(self.core.busy_streams()),
                // Managers hold their own once.
                "event" => self.events.in_use(),
                "pipeline" => self.functions.in_use(),
                // Held by functions and by streams, which are counted.
                "module" | "mark" => return,
                _ => stats.live,
            };
            if (strong != 0 || stats.weak != 0) && first.is_none() {
                first = Some(Error::LeasesOutstanding { resource: name, strong, weak: stats.weak });
            }
        });
        first.map_or(Ok(()), Err)
    }

    /// As [`outstanding`](Self::outstanding), of a context that nobody leases; its device's memory counts too.
    pub(crate) fn retired_outstanding(&self) -> Result<()> {
        self.outstanding()?;
        if self.primary { self.memory.outstanding() } else { Ok(()) }
    }

    /// Whether a context that nobody leases may end. Asks the driver; waits for nothing.
    pub(crate) fn is_over(&self) -> bool {
        self.streams.settle();
        // Streams of other contexts may still hold marks of this one.
        self.retired_outstanding().is_ok() && self.events.mark_stats().live == 0
    }

    /// Ends the managers, children first.
    fn end(&self) -> Result<()> {
        self.streams.shutdown()?;
        self.graphs.shutdown()?;
        self.events.shutdown()?;
        self.gates.shutdown()?;
        self.functions.shutdown()?;
        self.modules.shutdown()
    }
}

impl Drop for ContextState {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            // Only when the backend was dropped without a shutdown and has no threads: what is out ends with its last lease.
            tracing::debug!(%error, "a context ended while something of it was held");
        }
        self.core.watch.close();
        self.core.watch.join();
    }
}

impl fmt::Debug for ContextState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextState").field("core", &self.core).field("streams", &self.streams).finish_non_exhaustive()
    }
}

/// Which context.
pub(crate) enum Wanted {
    Primary(Arc<Memory>),
    Owned(Arc<Memory>),
}

struct Contexts {
    retired: Arc<Retired>,
}

impl Resource for Contexts {
    type Payload = ContextState;
    type Request<'a> = Wanted;
    const NAME: &'static str = "context";

    fn create(&self, _: Handle<tags::Context>, wanted: &Wanted) -> Result<ContextState> {
        match wanted {
            Wanted::Primary(memory) => {
                let state = ContextState::new(memory.door.clone(), memory.clone(), true)?;
                memory.shared.add_primary(&state.core);
                Ok(state)
            }
            Wanted::Owned(memory) => {
                let door = Door::owned(memory.door.driver().clone(), memory.door.ordinal())?;
                ContextState::new(Arc::new(door), memory.clone(), false)
            }
        }
    }

    fn recycle(&self, _: &mut ContextState) -> Fate {
        Fate::Destroy
    }

    fn destroy(&self, context: ContextState) {
        // Its end blocks.
        self.retired.push(context);
    }
}

/// Owns the contexts of a device: the primary one first, owned ones when asked for.
#[doc(alias = "CudaContextManager")]
pub struct ContextManager {
    manager: PoolManager<Contexts, ()>,
    retired: Arc<Retired>,
    memory: Arc<Memory>,
    #[cfg(feature = "test-hooks")]
    for_test: bool,
}

impl ContextManager {
    pub(crate) fn new(memory: Arc<Memory>, retired: Arc<Retired>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Contexts { retired: retired.clone() }, PoolConfig { block: 4, ..PoolConfig::default() })?;
        Ok(Self {
            manager,
            retired,
            memory,
            #[cfg(feature = "test-hooks")]
            for_test: false,
        })
    }

    /// A manager of a device's contexts over a driver of the test's.
    ///
    /// # Errors
    /// `NotFound` for a device that there is not; the driver's.
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "configureForTest")]
    pub fn configure_for_test(
        ops: Arc<dyn crate::driver::ops::CudaSlowOps>,
        device: leasehold_hal::DeviceId,
    ) -> Result<Self> {
        let memory = memory_for_test(ops, device)?;
        Ok(Self { for_test: true, ..Self::new(memory, Retired::new(true))? })
    }

    /// Whether it was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.for_test
    }

    /// The primary context, made when first asked for.
    ///
    /// # Errors
    /// `OutOfMemory`; the driver's.
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

    /// Gives up the manager's own lease on the primary context; other holders (its device is one) are untouched. Never blocks.
    ///
    /// # Errors
    /// `StaleHandle` for a context that the manager does not keep.
    pub fn release(&self, context: ContextHandle) -> Result<()> {
        self.manager.release(context)
    }

    /// A context of one's own, with streams and kernels of its own, and the device's memory. May block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory`; the driver's.
    pub fn create_owned(&self) -> Result<Lease<ContextState>> {
        self.manager.acquire(&Wanted::Owned(self.memory.clone()))
    }

    /// Ends contexts of the backend that nobody leases, of which nothing is held, and whose work is over. Blocks on the
    /// driver. Says how many ended.
    pub fn collect(&self) -> usize {
        self.retired.reclaim()
    }

    /// Whether the handle's context is alive: one load.
    pub fn is_alive(&self, context: ContextHandle) -> bool {
        self.manager.is_alive(context)
    }

    /// What the pool did so far.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Ends the manager.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()?;
        self.retired.reclaim();
        Ok(())
    }
}

impl fmt::Debug for ContextManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextManager").field("contexts", &self.manager).field("retired", &self.retired).finish()
    }
}
