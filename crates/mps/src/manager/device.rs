//! Devices: enumeration, their architecture, and the managers that each device owns.
//!
//! This module must not know how its managers own their resources.

use super::buffer::BufferManager;
use super::command_queue::CommandQueueManager;
use super::event::EventManager;
use super::fence::FenceManager;
use super::graph::GraphManager;
use super::heap::HeapManager;
use super::kernel::{self, KernelManager};
use super::library::LibraryManager;
use super::opened::OpenedDevice;
use super::stream::StreamManager;
use super::timestamp::TimestampManager;
use crate::allocator::Memory;
use crate::config::MpsConfig;
use crate::driver::ops::{DeviceProperties, MpsSlowOps, NativeDevice, Storage};
use crate::engine::core::{Common, Core, Sources, Streams};
use crate::engine::stream::MpsStream;
use crate::shared::Shared;
use crate::transfer::Transfers;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Handle, PoolStats, Recycle, Resource, Result, Tagged, tags};
use leasehold_hal::engine::devices::DeviceSource;
use leasehold_hal::engine::host_timeline::HostTimelineManager;
use leasehold_hal::engine::retired::{Ending, LeftBehind, Retired, Retiring, StreamOwner};
use leasehold_hal::engine::tables::Tables;
use leasehold_hal::{BackendKind, Description, DeviceId, DeviceInfo, MemoryInfo, MemoryKind};
use std::marker::PhantomPinned;

/// Describes a device.
fn describe(device: &OpenedDevice, free: Option<u64>) -> DeviceInfo {
    let p = &device.properties;
    let mut info = DeviceInfo::new(device.id, p.name.clone());
    info.uuid = format!("{:016x}", p.registry_id);
    info.arch = p.kernel_architectures();
    let total = p.recommended_working_set;
    info.memory = MemoryInfo { total, free: free.unwrap_or(total) };
    let mut detail = |label: &str, value: String| info.details.push((label.to_owned(), value));
    let yes = |on: bool| if on { "yes" } else { "no" }.to_owned();
    detail("architecture", p.architecture.clone().unwrap_or_else(|| "unknown".to_owned()));
    for (label, family) in [
        ("Apple family", p.apple_family),
        ("Mac family", p.mac_family),
        ("common family", p.common_family),
        ("Metal family", p.metal_family),
    ] {
        if family != 0 {
            detail(label, family.to_string());
        }
    }
    detail("unified memory", yes(p.unified_memory));
    detail("recommended working set", format!("{} MiB", total >> 20));
    detail("largest buffer", format!("{} MiB", p.max_buffer >> 20));
    detail("threadgroup memory", format!("{} KiB", p.max_threadgroup_memory >> 10));
    detail("residency sets", yes(p.residency_sets));
    detail("timestamps of passes", yes(p.stage_counters));
    detail("indirect command buffers", yes(p.has_safe_indirect()));
    info
}

/// Ends a device's aliases of other devices' memory when it closes.
#[derive(Debug)]
struct Aliases(Arc<OpenedDevice>);

impl Drop for Aliases {
    fn drop(&mut self) {
        self.0.shared.spans.close(self.0.id.ordinal);
    }
}

/// An open device. The fields are dropped in their order: what uses other resources comes first.
#[derive(Debug)]
pub struct DeviceState {
    streams: StreamManager,
    graphs: GraphManager,
    timestamps: TimestampManager,
    host_timelines: HostTimelineManager<Tables<MpsStream>>,
    engine: Arc<Streams>,
    kernels: KernelManager,
    transfers: Arc<Transfers>,
    /// Other devices' memory that this one reaches.
    _aliases: Aliases,
    libraries: LibraryManager,
    memory: Arc<Memory>,
    buffers: Arc<BufferManager>,
    heaps: Arc<HeapManager>,
    events: Arc<EventManager>,
    fences: Arc<FenceManager>,
    queues: Arc<CommandQueueManager>,
    pub(crate) description: Description,
    opened: Arc<OpenedDevice>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl Tagged for DeviceState {
    type Tag = tags::Device;
}

impl DeviceState {
    fn new(opened: &Arc<OpenedDevice>, config: &MpsConfig, common: &Common) -> Result<Self> {
        let p = &opened.properties;
        // SAFETY: the device is open.
        let used = unsafe { opened.ops.allocated_size(opened.native)? };
        let heaps = Arc::new(HeapManager::new(opened, config)?);
        let buffers = Arc::new(BufferManager::new(opened, config)?);
        let memory = Arc::new(Memory::new(opened, &heaps, &buffers));
        let free = p.recommended_working_set.saturating_sub(used);
        let mut description = Description::new(describe(opened, Some(free)));
        let caps = &mut description.caps;
        caps.host_visible = memory.storage() == Storage::Shared;
        caps.pinned = true;
        caps.host_timelines = true;
        caps.timestamps = p.stage_counters;
        caps.graphs = true;
        caps.concurrent_streams = true;
        caps.host_calls = true;
        caps.foreign_calls = true;
        caps.waits_for_any_timeline = true;
        let limits = &mut description.limits;
        limits.grid = [u32::MAX; 3];
        limits.block = p.max_threads;
        limits.block_threads = p.max_threads.into_iter().max().unwrap_or(1);
        limits.shared = p.max_threadgroup_memory;
        limits.buffer = p.max_buffer;
        limits.streams = config.streams;
        // Metal copies constants from offsets that are multiples of 4.
        limits.binding_alignment = 4;
        let libraries = LibraryManager::new(opened, config)?;
        let transfers = Arc::new(Transfers::new(opened, &libraries)?);
        let sources = Sources {
            queues: Arc::new(CommandQueueManager::new(opened, config)?),
            events: Arc::new(EventManager::new(opened, config)?),
            fences: Arc::new(FenceManager::new(opened, config)?),
        };
        let core = Core::new(opened, sources.clone(), &transfers, common.clone())?;
        let of = memory.clone();
        core.staging.set_source(Box::new(move || of.of(MemoryKind::Pinned).cloned()));
        let engine = core.streams();
        Ok(Self {
            streams: StreamManager::new(&engine)?,
            graphs: GraphManager::new(&engine)?,
            timestamps: TimestampManager::of(&engine)?,
            host_timelines: HostTimelineManager::new(common.tables.clone())?,
            engine,
            kernels: kernel::manager(opened)?,
            transfers,
            _aliases: Aliases(opened.clone()),
            libraries,
            memory,
            buffers,
            heaps,
            events: sources.events,
            fences: sources.fences,
            queues: sources.queues,
            description,
            opened: opened.clone(),
            _place: PhantomPinned,
        })
    }

    /// The device's name.
    pub fn id(&self) -> DeviceId {
        self.opened.id
    }

    /// The driver's device.
    pub fn native(&self) -> NativeDevice {
        self.opened.native
    }

    /// The device's architecture: families, unified memory, recommended working set, limits.
    pub fn properties(&self) -> &DeviceProperties {
        &self.opened.properties
    }

    /// The command queues.
    pub fn command_queues(&self) -> &CommandQueueManager {
        &self.queues
    }

    /// The kernels.
    pub fn kernels(&self) -> &KernelManager {
        &self.kernels
    }

    /// The built-in kernels.
    pub fn transfers(&self) -> &Arc<Transfers> {
        &self.transfers
    }

    /// The device's memory.
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The number of devices of the driver.
    pub(crate) fn devices(&self) -> u32 {
        self.opened.shared.devices()
    }

    /// The device as its resources hold it.
    pub(crate) fn opened(&self) -> &Arc<OpenedDevice> {
        &self.opened
    }

    /// The libraries and pipelines.
    pub fn libraries(&self) -> &LibraryManager {
        &self.libraries
    }

    /// The heaps.
    pub fn heaps(&self) -> &HeapManager {
        &self.heaps
    }

    /// The buffers.
    pub fn buffers(&self) -> &BufferManager {
        &self.buffers
    }

    /// The events.
    pub fn events(&self) -> &EventManager {
        &self.events
    }

    /// The fences.
    pub fn fences(&self) -> &FenceManager {
        &self.fences
    }

    /// The streams.
    pub fn streams(&self) -> &StreamManager {
        &self.streams
    }

    /// The graphs.
    pub fn graphs(&self) -> &GraphManager {
        &self.graphs
    }

    /// The timestamps.
    pub fn timestamps(&self) -> &TimestampManager {
        &self.timestamps
    }

    /// The host timelines.
    pub fn host_timelines(&self) -> &HostTimelineManager<Tables<MpsStream>> {
        &self.host_timelines
    }

    /// The streams that exist, and their threads.
    pub(crate) fn engine(&self) -> &Arc<Streams> {
        &self.engine
    }

    /// The command queues that the streams hold: each of them takes one, in turn.
    fn stream_queues(&self) -> u64 {
        self.engine.live.count().min(self.queues.count().into())
    }

    /// Reports the statistics of all pools. A resource that the backend's own streams, kernels or
    /// allocators hold counts as idle.
    pub fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("stream", self.streams.stats());
        report("graph", self.graphs.stats());
        report("timestamp", self.timestamps.stats());
        report("host timeline", self.host_timelines.stats());
        let beyond = |mut stats: PoolStats, own: u64| {
            let own = own.min(stats.live);
            (stats.live, stats.idle) = (stats.live - own, stats.idle + own);
            stats
        };
        let (segments, streams) = (self.memory.segments(), self.engine.live.count());
        report("command queue", beyond(self.queues.stats(), self.stream_queues()));
        report("pipeline", self.kernels.stats());
        report("library", self.libraries.stats());
        report("compute pipeline state", self.libraries.pipelines().stats());
        report("heap", beyond(self.heaps.stats(), segments));
        report("buffer", beyond(self.buffers.stats(), segments));
        report("event", beyond(self.events.stats(), self.engine.in_flight.count()));
        report("fence", beyond(self.fences.stats(), streams));
    }

    /// Shuts the managers of execution down.
    fn end(&self) -> Result<()> {
        self.streams.shutdown()?;
        self.graphs.shutdown()?;
        self.timestamps.shutdown()?;
        self.host_timelines.shutdown()
    }
}

impl StreamOwner for DeviceState {
    /// Buffers hold heaps, and pipelines hold libraries, so they are asked first.
    fn outstanding(&self) -> Result<()> {
        self.engine.settle_streams();
        // A stream's work continues after its holder dropped it.
        let busy = self.streams.in_use().max(self.engine.busy_streams());
        for (resource, strong, stats) in [
            ("stream", busy, self.streams.stats()),
            ("graph", self.graphs.stats().live, self.graphs.stats()),
            ("timestamp", self.timestamps.in_use(), self.timestamps.stats()),
            ("host timeline", self.host_timelines.stats().live, self.host_timelines.stats()),
            ("pipeline", self.kernels.in_use(), self.kernels.stats()),
        ] {
            let weak = stats.weak;
            if strong != 0 || weak != 0 {
                return Err(Error::LeasesOutstanding { resource, strong, weak });
            }
        }
        self.libraries.outstanding_beyond(self.kernels.stats().live + Transfers::PIPELINES)?;
        self.memory.outstanding()?;
        // The allocators hold a heap and a buffer for each segment.
        self.buffers.outstanding_beyond(self.memory.segments())?;
        self.heaps.outstanding_beyond(self.memory.segments())?;
        // Idle streams, and those that a thread of the engine still looks at, hold these.
        self.events.outstanding_beyond(self.engine.in_flight.count())?;
        self.fences.outstanding_beyond(self.engine.live.count())?;
        self.queues.outstanding_beyond(self.stream_queues())
    }

    fn left_behind(&self) -> LeftBehind {
        LeftBehind::new(self.engine.left_behind(&self.streams))
    }
}

impl Retiring for DeviceState {
    fn ending(&self) -> Ending {
        if self.outstanding().is_ok() { Ending::Now } else { Ending::Later }
    }
}

impl Drop for DeviceState {
    fn drop(&mut self) {
        self.engine.end(self.end());
    }
}

/// The devices of a driver, as their manager makes them.
#[derive(Debug)]
pub struct Devices {
    retired: Arc<Retired<DeviceState>>,
    count: u32,
    /// The devices; empty after a shutdown.
    opened: Mutex<Vec<Arc<OpenedDevice>>>,
    config: MpsConfig,
    common: Common,
}

impl Resource for Devices {
    type Payload = DeviceState;
    type Request<'a> = u32;
    const NAME: &'static str = "device";

    fn create(&self, _: Handle<tags::Device>, ordinal: &u32) -> Result<DeviceState> {
        let opened = self.opened.lock().get(*ordinal as usize).cloned();
        let opened = opened.ok_or_else(|| Error::NotFound(format!("device {ordinal}").into()))?;
        DeviceState::new(&opened, &self.config, &self.common)
    }

    fn recycle(&self, _: &mut DeviceState) -> Recycle {
        Recycle::Destroy
    }

    fn destroy(&self, device: DeviceState) {
        // The end of a device blocks.
        self.retired.retire(device);
    }
}

impl DeviceSource for Devices {
    type Driver = dyn MpsSlowOps;
    type Config = MpsConfig;
    type Retiring = DeviceState;
    const KIND: BackendKind = BackendKind::Mps;

    #[cfg(target_vendor = "apple")]
    fn load() -> Result<Arc<dyn MpsSlowOps>> {
        Ok(Arc::new(crate::driver::real::RealDriver::new()))
    }

    #[cfg(not(target_vendor = "apple"))]
    fn load() -> Result<Arc<dyn MpsSlowOps>> {
        Err(Error::Unavailable("Metal exists on Apple's systems only".into()))
    }

    unsafe fn enumerate(ops: Arc<dyn MpsSlowOps>, config: MpsConfig) -> Result<Self> {
        config.validate()?;
        let common = Common::new(ops.clone());
        let opened = OpenedDevice::all(&Arc::new(Shared::new(ops, config.clone())))?;
        let count = u32::try_from(opened.len()).unwrap_or(u32::MAX);
        let retired = Retired::new("lh-mps-end", config.inline);
        Ok(Self { retired, count, opened: Mutex::new(opened), config, common })
    }

    fn count(&self) -> u32 {
        self.count
    }

    fn describe(&self) -> Vec<DeviceInfo> {
        self.opened.lock().iter().map(|device| describe(device, None)).collect()
    }

    fn retired(&self) -> &Arc<Retired<DeviceState>> {
        &self.retired
    }

    fn close(&self) {
        let opened = std::mem::take(&mut *self.opened.lock());
        // Outside the lock: the drop calls the driver.
        drop(opened);
    }
}

/// Enumerates Metal's devices and owns their states. After a shutdown their description is empty.
#[doc(alias = "MpsDeviceManager")]
pub type DeviceManager = leasehold_hal::engine::devices::DeviceManager<Devices>;
