//! Devices: enumeration, and the resources that each device owns.
//!
//! A machine is one device, `cpu:0`. Its payload owns the tile pool and the managers of its
//! resources. Once `allocator/` has filled the cells, the payload owns the allocators too. Streams
//! do not lease their device: they hold the pool themselves, so no order of drops leaves a dangling
//! reference. The device's pools hold nothing that refers to the device.
//!
//! This module must not know backings.

use super::buffer::BufferManager;
use super::event::EventManager;
use super::graph::GraphManager;
use super::host_timeline::{HostTimelineManager, Sleepers};
use super::pipeline::{Functions, PipelineManager};
use super::stream::{self, StreamManager};
use crate::config::CpuConfig;
use crate::driver::pool::TilePool;
use crate::driver::queue::SHARED_MAX;
use crate::driver::topology::Topology;
use leasehold_alloc::AllocatorCell;
use leasehold_core::sync::atomic::AtomicU64;
use leasehold_core::sync::{Arc, OnceLock};
use leasehold_core::{
    DeviceHandle, Error, FixedSlotStore, Handle, Index, Lease, PoolStats, Recycle, Resource,
    Result, Tagged, tags,
};
use leasehold_hal::engine::buffers::outstanding;
use leasehold_hal::engine::shared_file::SharedFile;
use leasehold_hal::{BackendKind, Description, DeviceId, DeviceInfo, MemoryKind};
use std::fmt;
use std::marker::PhantomPinned;

/// An open device: its description, and the managers of its resources.
pub struct DeviceState {
    pub(crate) description: Description,
    topology: Arc<Topology>,
    config: CpuConfig,
    pub(crate) pool: Arc<TilePool>,
    pub(crate) streams: StreamManager,
    pub(crate) events: EventManager,
    pub(crate) host_timelines: HostTimelineManager,
    pub(crate) pipelines: PipelineManager,
    pub(crate) graphs: GraphManager,
    pub(crate) device_memory: AllocatorCell,
    pub(crate) pinned_memory: AllocatorCell,
    /// Bytes that both kinds of memory have committed. Both share the machine's memory.
    pub(crate) committed: Arc<AtomicU64>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl Tagged for DeviceState {
    type Tag = tags::Device;
}

impl DeviceState {
    fn new(ordinal: u32, topology: Arc<Topology>, config: CpuConfig) -> Result<Self> {
        let threads = config.threads.map_or(topology.usable, |t| t as u32);
        let mut description = Description::new(describe(ordinal, &topology, threads));
        let pool = Arc::new(TilePool::new(
            description.info.id.to_string(),
            threads,
            topology.usable,
            config.spin,
            config.host_spin,
        ));
        let caps = &mut description.caps;
        caps.host_visible = true;
        caps.pageable_memory_access = true;
        caps.host_timelines = true;
        caps.timestamps = true;
        caps.graphs = true;
        caps.conditionals = true;
        caps.concurrent_streams = true;
        caps.host_calls = true;
        caps.foreign_calls = true;
        caps.waits_for_any_timeline = true;
        caps.shareable = SharedFile::SUPPORTED;
        caps.growing = true;
        let limits = &mut description.limits;
        limits.shared = SHARED_MAX;
        limits.streams = config.streams;
        limits.buffer = topology.memory.max(1);
        Ok(Self {
            _place: PhantomPinned,
            streams: stream::manager(pool.clone(), config.streams)?,
            events: EventManager::new()?,
            host_timelines: HostTimelineManager::new(Arc::new(Sleepers))?,
            pipelines: PipelineManager::new(Functions)?,
            graphs: GraphManager::new()?,
            device_memory: AllocatorCell::default(),
            pinned_memory: AllocatorCell::default(),
            committed: Arc::new(AtomicU64::new(0)),
            description,
            topology,
            config,
            pool,
        })
    }

    /// The device's name.
    pub fn id(&self) -> DeviceId {
        self.description.info.id
    }

    /// The machine's topology.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The configuration that the device was opened with.
    pub fn config(&self) -> &CpuConfig {
        &self.config
    }

    /// The most threads of one kernel.
    pub fn threads(&self) -> u32 {
        self.pool.threads()
    }

    /// The streams.
    pub fn streams(&self) -> &StreamManager {
        &self.streams
    }

    /// The timestamps.
    pub fn events(&self) -> &EventManager {
        &self.events
    }

    /// The host timelines.
    pub fn host_timelines(&self) -> &HostTimelineManager {
        &self.host_timelines
    }

    /// The kernels.
    pub fn pipelines(&self) -> &PipelineManager {
        &self.pipelines
    }

    /// The graphs.
    pub fn graphs(&self) -> &GraphManager {
        &self.graphs
    }

    /// The buffers of a kind of memory. `None` if the kind is not in use.
    pub fn buffers(&self, kind: MemoryKind) -> Option<BufferManager<'_>> {
        let cell = match kind {
            MemoryKind::Device => &self.device_memory,
            MemoryKind::Pinned => &self.pinned_memory,
            _ => return None,
        };
        cell.get().map(BufferManager::new)
    }

    /// Reports the statistics of all pools.
    pub fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("stream", self.streams.stats());
        report("timestamp", self.events.stats());
        report("host timeline", self.host_timelines.stats());
        report("pipeline", self.pipelines.stats());
        report("graph", self.graphs.stats());
    }

    /// Checks whether leases on this device's resources are held.
    fn outstanding(&self) -> Result<()> {
        let mut first = Ok(());
        self.pools(&mut |resource, PoolStats { live: strong, weak, .. }| {
            if first.is_ok() && (strong != 0 || weak != 0) {
                first = Err(Error::LeasesOutstanding { resource, strong, weak });
            }
        });
        first.and_then(|()| outstanding(&self.device_memory, &self.pinned_memory))
    }
}

impl fmt::Debug for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceState")
            .field("id", &self.id())
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

fn describe(ordinal: u32, topology: &Topology, threads: u32) -> DeviceInfo {
    let mut info = DeviceInfo::new(DeviceId::cpu(ordinal), topology.name.clone());
    info.arch.clone_from(&topology.arch);
    info.units = topology.usable;
    info.memory = leasehold_hal::engine::host_memory::info();
    info.details = vec![("threads".into(), format!("{threads} per kernel"))];
    info.details.extend(topology.details());
    info
}

struct Devices {
    topology: Arc<Topology>,
    config: CpuConfig,
}

impl Resource for Devices {
    type Payload = DeviceState;
    type Request<'a> = u32;
    const NAME: &'static str = "device";

    fn create(&self, _: Handle<tags::Device>, ordinal: &u32) -> Result<DeviceState> {
        DeviceState::new(*ordinal, self.topology.clone(), self.config.clone())
    }

    fn recycle(&self, _: &mut DeviceState) -> Recycle {
        Recycle::Destroy
    }
}

/// Enumerates devices and owns their states.
#[doc(alias = "execution::cpu::DeviceManager")]
#[derive(Debug, Default)]
pub struct DeviceManager {
    store: OnceLock<(FixedSlotStore<Devices>, Arc<Topology>, CpuConfig)>,
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Devices")
    }
}

impl DeviceManager {
    /// Makes a manager without devices.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Enumerates the devices, and opens none. The call reads files that describe the machine.
    ///
    /// # Errors
    /// As [`CpuConfig::validate`]; `InvalidState` at the second call.
    #[doc(alias = "initializeDevices")]
    pub fn initialize_devices(&self, config: CpuConfig) -> Result<()> {
        config.validate()?;
        let topology = Arc::new(Topology::detect());
        let store =
            FixedSlotStore::new(Devices { topology: topology.clone(), config: config.clone() }, 1)?;
        self.store
            .set((store, topology, config))
            .map_err(|_| Error::state("the device manager is configured already"))
    }

    fn store(&self) -> Result<&FixedSlotStore<Devices>> {
        self.store
            .get()
            .map(|s| &s.0)
            .ok_or_else(|| Error::state("the device manager is not configured"))
    }

    /// The number of devices. The number is 0 before
    /// [`initialize_devices`](Self::initialize_devices).
    pub fn device_count(&self) -> u32 {
        self.store.get().map_or(0, |s| s.0.len())
    }

    /// Describes the devices without opening them.
    ///
    /// # Errors
    /// `InvalidState` before [`initialize_devices`](Self::initialize_devices).
    pub fn describe(&self) -> Result<Vec<DeviceInfo>> {
        let Some((store, topology, config)) = self.store.get() else {
            return Err(Error::state("the device manager is not configured"));
        };
        let threads = config.threads.map_or(topology.usable, |t| t as u32);
        Ok((0..store.len()).map(|i| describe(i, topology, threads)).collect())
    }

    /// Opens the device unless it is open, and returns its handle.
    ///
    /// # Errors
    /// `NotFound`; `InvalidState` before [`initialize_devices`](Self::initialize_devices) and after
    /// a shutdown.
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, device: DeviceId) -> Result<DeviceHandle> {
        self.open(device).map(|device| device.handle())
    }

    /// Opens the device unless it is open.
    ///
    /// # Errors
    /// As [`ensure_alive`](Self::ensure_alive).
    pub fn open(&self, device: DeviceId) -> Result<Lease<DeviceState>> {
        let ordinal = device.ordinal_on(BackendKind::Cpu)?;
        self.store()?.get(Index::new(ordinal), &ordinal)
    }

    /// A lease on the state of an open device.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "getState")]
    pub fn get_state(&self, device: DeviceHandle) -> Result<Lease<DeviceState>> {
        self.store()?.lease(device)
    }

    /// Whether the handle's device is open: one load.
    pub fn is_alive(&self, device: DeviceHandle) -> bool {
        self.store.get().is_some_and(|s| s.0.is_alive(device))
    }

    /// Drops the manager's own lease. Other holders keep theirs.
    ///
    /// # Errors
    /// `StaleHandle`.
    pub fn release(&self, device: DeviceHandle) -> Result<()> {
        self.store()?.release(device)
    }

    /// The store's statistics.
    pub fn stats(&self) -> PoolStats {
        self.store.get().map(|s| s.0.stats()).unwrap_or_default()
    }

    /// Ends the manager. A second call is `Ok`, and so is one before
    /// [`initialize_devices`](Self::initialize_devices).
    ///
    /// # Errors
    /// `LeasesOutstanding` while a lease on a device or on a resource of a device is held. After
    /// the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        let Some((store, ..)) = self.store.get() else { return Ok(()) };
        for i in 0..store.len() {
            // The lease is dropped before the store decides.
            if let Some(device) = store.existing(Index::new(i)) {
                device.outstanding()?;
            }
        }
        store.shutdown()
    }
}
