//! Backend, device, memory and the simple objects of the sketch.

use crate::mtl::*;
use crate::stream::{Core, Exec, Graphs, HostTimelines, MpsStream, Streams, TimelineTable};
use leasehold_alloc::{Allocator, AllocatorConfig, Backing, BackingCaps, Chunk, HostKind};
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use leasehold_core::{
    DeviceHandle, Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource,
    Result, SlotPool, Tagged, TimelineSource, tags,
};
use leasehold_hal::*;
use std::collections::HashMap;
use std::time::Duration;

/// The backend: the devices, by ordinal.
pub struct MpsBackend {
    devices: PoolManager<Devices, u32>,
    pub world: Arc<World>,
    count: u32,
}

struct Devices(Arc<World>);

impl Resource for Devices {
    type Payload = MpsDevice;
    type Request<'a> = u32;
    const NAME: &'static str = "device";

    fn create(&self, _: DeviceHandle, &ordinal: &u32) -> Result<MpsDevice> {
        MpsDevice::new(self.0.clone(), ordinal)
    }

    fn recycle(&self, _: &mut MpsDevice) -> Recycle {
        Recycle::Destroy
    }
}

impl MpsBackend {
    pub fn new(count: u32) -> Self {
        let world = Arc::new(World::default());
        let devices = PoolManager::new();
        devices.configure(Devices(world.clone()), PoolConfig::default()).unwrap();
        Self { devices, world, count }
    }
}

impl Drop for MpsBackend {
    /// Metal completes its accepted work, even without observers.
    fn drop(&mut self) {
        self.world.run();
    }
}

// SAFETY: one device exists, and `open` refuses every other name.
unsafe impl Backend for MpsBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Mps
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok((0..self.count)
            .map(|i| DeviceInfo::new(DeviceId::new(BackendKind::Mps, i), "sketch"))
            .collect())
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        if device.ordinal >= self.count {
            return Err(Error::NotFound(
                format!("{device}: there are {} devices", self.count).into(),
            ));
        }
        Ok(Lease::map(self.devices.get_or_create(&device.ordinal, &device.ordinal)?, |d| {
            d as &dyn Device
        }))
    }

    fn shutdown(&self) -> Result<()> {
        self.devices.shutdown()
    }
}

/// Memory: each segment is a placement heap with one buffer that spans it. Addresses are
/// `contents()`, so the host may use them. An offset is an address minus the spanning buffer's.
struct Heaps {
    device: Arc<MTLDevice>,
    spans: Mutex<HashMap<u64, Span>>,
}

/// A heap and its buffer.
struct Span(#[expect(dead_code, reason = "keeps the heap")] Retained<MTLHeap>, Retained<MTLBuffer>);

// SAFETY: `MTLHeap` and `MTLBuffer` are not declared `Send` because their contents are shared. The
// objects themselves have atomic reference counts. Here they are only created, asked for immutable
// properties and released, under a lock.
unsafe impl Send for Span {}

// SAFETY: a segment is a separate buffer, held until it is returned.
unsafe impl Backing for Heaps {
    fn caps(&self) -> BackingCaps {
        BackingCaps {
            granule: 64 << 10,
            physical: 64 << 20,
            segment: 256 << 10,
            ..BackingCaps::default()
        }
    }

    fn reserve(&self, _: u64) -> Result<u64> {
        Err(Error::Unsupported("Metal has no address reservations".into()))
    }

    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        let none = || Error::from(leasehold_core::OutOfMemory::new("mps:0 heaps", bytes));
        if at.is_some() {
            return Err(Error::Unsupported("Metal places heaps by itself".into()));
        }
        let heap = self.device.newHeapWithDescriptor(bytes as usize).ok_or_else(none)?;
        let buffer = heap.newBufferWithLength_offset(bytes as usize, 0).ok_or_else(none)?;
        let (addr, native) = (buffer.contents() as u64, Arc::as_ptr(&buffer) as u64);
        self.spans.lock().insert(native, Span(heap, buffer));
        Ok(Chunk { addr, bytes, native })
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        let span = self.spans.lock().remove(&chunk.native);
        drop(span.map(|s| s.1));
        Ok(())
    }

    unsafe fn release(&self, _: u64, _: u64) {}
}

/// A device: its permanent objects, and the pools.
pub struct MpsDevice {
    core: Arc<Core>,
    description: Description,
    memory: Allocator,
    streams: SlotPool<Streams>,
    pipelines: PoolManager<Pipelines, String>,
    timestamps: SlotPool<Stamps>,
    graphs: SlotPool<Graphs>,
    host_timelines: SlotPool<HostTimelines>,
}

impl Tagged for MpsDevice {
    type Tag = tags::Device;
}

impl MpsDevice {
    fn new(world: Arc<World>, ordinal: u32) -> Result<Self> {
        let id = DeviceId::new(BackendKind::Mps, ordinal);
        let nil = |what: &str| Error::Unavailable(format!("{id}: no {what}").into());
        let device = Arc::new(MTLDevice(world));
        // One queue for all streams, with space for more buffers than the default of 64.
        let queue =
            device.newCommandQueueWithMaxCommandBufferCount(2048).ok_or_else(|| nil("queue"))?;
        let heaps = |name: &'static str, host_kind| {
            let backing = Heaps { device: device.clone(), spans: Mutex::new(HashMap::new()) };
            let config =
                AllocatorConfig { name: name.into(), host_kind, ..AllocatorConfig::default() };
            Allocator::new(Box::new(backing), config)
        };
        let memory = heaps("mps device memory", HostKind::None)?;
        // Unified memory: pinned memory uses the same kind of heaps, separate for the statistics.
        let staging = heaps("mps staging", HostKind::Pinned)?;
        let core = Arc::new(Core {
            device,
            queue,
            staging,
            timelines: TimelineTable::default(),
            fill: OnceLock::new(),
        });
        let pool = PoolConfig::default;
        let pipelines = PoolManager::new();
        pipelines.configure(Pipelines(core.device.clone()), pool())?;
        let mut description = Description::new(DeviceInfo::new(id, "sketch"));
        let caps = &mut description.caps;
        caps.host_visible = true;
        caps.pinned = true;
        caps.host_timelines = true;
        caps.timestamps = true;
        caps.graphs = true;
        caps.concurrent_streams = true;
        caps.foreign_calls = true;
        caps.unordered_streams = true;
        description.limits.binding_alignment = 4;
        Ok(Self {
            core,
            description,
            memory,
            streams: SlotPool::new(Streams, pool())?,
            pipelines,
            timestamps: SlotPool::new(Stamps, pool())?,
            graphs: SlotPool::new(Graphs, pool())?,
            host_timelines: SlotPool::new(HostTimelines, pool())?,
        })
    }
}

// SAFETY: the recording Metal backs its buffers with host memory. All objects that the device lends
// are its own.
unsafe impl Device for MpsDevice {
    fn description(&self) -> &Description {
        &self.description
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        Ok(MemoryInfo { total: 64 << 20, free: 64 << 20 })
    }

    fn make_current(&self) -> Result<()> {
        Ok(())
    }

    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        match kind {
            MemoryKind::Device => Ok(&self.memory),
            MemoryKind::Pinned => Ok(&self.core.staging),
            _ => Err(Error::Unsupported("no such memory".into())),
        }
    }

    fn stream(&self, _: &StreamDesc) -> Result<Lease<dyn Stream>> {
        let lease = self.streams.acquire(&&self.core)?;
        Ok(Lease::map(lease, |s: &MpsStream| s as &dyn Stream))
    }

    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        self.pipelines.get_or_create(&desc.name.to_string(), desc)
    }

    fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        self.timestamps.acquire(&())
    }

    unsafe fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration> {
        match (start.get(), end.get()) {
            (Some(a), Some(b)) => Ok(Duration::from_nanos(b.saturating_sub(a))),
            _ => Err(Error::state("a timestamp that was not written")),
        }
    }

    unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<dyn GraphExec>> {
        let made = Mutex::new(Some(Exec::new(plan)));
        Ok(Lease::map(self.graphs.acquire(&&made)?, |g: &Exec| g as &dyn GraphExec))
    }

    fn host_timeline(&self) -> Result<Lease<dyn HostTimeline>> {
        Ok(Lease::map(self.host_timelines.acquire(&&self.core)?, |g| g as &dyn HostTimeline))
    }

    fn peer_access(&self, peer: DeviceId) -> Result<bool> {
        Ok(peer == self.info().id)
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        self.core
            .timelines
            .streams()
            .iter()
            .try_for_each(|s| s.wait_host(s.timeline().submitted(), timeout))
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("streams", self.streams.stats());
        report("pipelines", self.pipelines.stats());
    }
}

struct Pipelines(Arc<MTLDevice>);

impl Resource for Pipelines {
    type Payload = Pipeline;
    type Request<'a> = KernelDesc<'a>;
    const NAME: &'static str = "pipeline";

    fn create(&self, _: Handle<tags::Pipeline>, desc: &KernelDesc<'_>) -> Result<Pipeline> {
        if !matches!(desc.source, KernelSource::Msl(_)) {
            return Err(Error::Unsupported(
                format!("Metal does not run {}", desc.source.kind()).into(),
            ));
        }
        let state =
            self.0.newComputePipelineState(&desc.entry).map_err(|e| Error::NotFound(e.into()))?;
        let threads = state.maxTotalThreadsPerThreadgroup() as u32;
        // The word owns a count, which `destroy` drops.
        Ok(Pipeline::new(desc, Arc::into_raw(state) as u64, threads))
    }

    fn destroy(&self, p: Pipeline) {
        // SAFETY: this is the count that `create` made. The pipeline is destroyed, so no code uses
        // the word any more.
        drop(unsafe { Arc::from_raw(p.native as *const MTLComputePipelineState) });
    }
}

struct Stamps;

impl Resource for Stamps {
    type Payload = TimestampQuery;
    type Request<'a> = ();
    const NAME: &'static str = "timestamp";

    fn create(&self, handle: Handle<tags::TimestampQuery>, (): &()) -> Result<TimestampQuery> {
        // The index in the counter sample buffer.
        Ok(TimestampQuery::new(u64::from(handle.index())))
    }

    fn recycle(&self, p: &mut TimestampQuery) -> Recycle {
        p.clear();
        Recycle::Keep
    }
}
