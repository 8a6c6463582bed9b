//! Contexts: a device's primary one, and owned ones beside it.
//!
//! A context's payload holds the managers of its streams, time stamps, gates, modules, functions and graphs. The device's memory is shared by
//! all of them: what one allocates the others may use.
//!
//! Streams, graphs and functions hold the engine's part of their context ([`Core`]), never the payload, so that no pool lies inside a payload
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
use crate::driver::ops::DeviceProperties;
use crate::engine::core::Core;
use crate::engine::door::Door;
use crate::engine::shared::Shared;
use leasehold_alloc::AllocatorCell;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Fate, Handle, Lease, PoolConfig, PoolManager, PoolStats, Resource, Result, Tagged, tags};
use leasehold_hal::MemoryKind;
use std::fmt;

/// A device's memory, whichever context uses it: the cells that `allocator/` fills.
pub(crate) struct Memory {
    /// The primary context.
    pub(crate) door: Arc<Door>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) properties: DeviceProperties,
    pub(crate) device: AllocatorCell,
    pub(crate) pinned: AllocatorCell,
}

impl Memory {
    /// What somebody holds of it.
    pub(crate) fn outstanding(&self) -> Result<()> {
        for (resource, cell) in [("buffer", &self.device), ("pinned buffer", &self.pinned)] {
            let strong = cell.get().map_or(0, |a| a.stats().live);
            if strong != 0 {
                return Err(Error::LeasesOutstanding { resource, strong, weak: 0 });
            }
        }
        Ok(())
    }
}

/// A context and what it owns.
pub struct ContextState {
    pub(crate) streams: StreamManager,
    pub(crate) events: EventManager,
    pub(crate) gates: GateManager,
    pub(crate) functions: FunctionManager,
    pub(crate) modules: ModuleManager,
    pub(crate) graphs: GraphManager,
    pub(crate) memory: Arc<Memory>,
    pub(crate) core: Arc<Core>,
    /// It is the device's primary one: it ends after the device's memory is given back.
    primary: bool,
}

impl Tagged for ContextState {
    type Tag = tags::Context;
}

impl ContextState {
    fn new(door: Arc<Door>, memory: Arc<Memory>, primary: bool) -> Result<Self> {
        let shared = memory.shared.clone();
        let range = door.within(|ops| ops.priority_range())?;
        let core = Core::new(door, shared.clone(), memory.properties.clone())?;
        Ok(Self {
            streams: StreamManager::new(&core, range)?,
            events: EventManager::new(&core)?,
            gates: GateManager::new(shared)?,
            modules: ModuleManager::new(&core)?,
            functions: FunctionManager::new(&core)?,
            graphs: GraphManager::new(&core)?,
            memory,
            core,
            primary,
        })
    }

    /// The streams.
    pub fn streams(&self) -> &StreamManager {
        &self.streams
    }

    /// The time stamps.
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

    /// The buffers of a kind of memory, as far as it is in use.
    pub fn buffers(&self, kind: MemoryKind) -> Option<BufferManager<'_>> {
        let cell = match kind {
            MemoryKind::Device => &self.memory.device,
            MemoryKind::Pinned => &self.memory.pinned,
            _ => return None,
        };
        cell.get().map(BufferManager::new)
    }

    /// The engine's part.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// The statistics of all pools.
    pub fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("stream", self.streams.stats());
        report("timestamp", self.events.stats());
        report("gate", self.gates.stats());
        report("pipeline", self.functions.stats());
        report("module", self.modules.stats());
        report("graph", self.graphs.stats());
        report("mark", self.core.mark_stats());
    }

    /// What somebody holds of this context beside itself, and what dropped streams have pending. Reads only.
    pub(crate) fn outstanding(&self) -> Result<()> {
        let mut first = None;
        self.pools(&mut |name, stats| {
            let strong = match name {
                "stream" => stats.live + self.streams.pending(),
                // Their own manager holds each of them once.
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
        self.retired_outstanding().is_ok() && self.core.mark_stats().live == 0
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
}

impl ContextManager {
    pub(crate) fn new(memory: Arc<Memory>, retired: Arc<Retired>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Contexts { retired: retired.clone() }, PoolConfig { block: 4, ..PoolConfig::default() })?;
        Ok(Self { manager, retired, memory })
    }

    /// The primary context, made when first asked for.
    ///
    /// # Errors
    /// `OutOfMemory`; the driver's.
    pub fn primary(&self) -> Result<Lease<ContextState>> {
        self.manager.get_or_create(&(), &Wanted::Primary(self.memory.clone()))
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
    pub fn is_alive(&self, context: Handle<tags::Context>) -> bool {
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
        self.manager.shutdown()
    }
}

impl fmt::Debug for ContextManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextManager").field("contexts", &self.manager).field("retired", &self.retired).finish()
    }
}
