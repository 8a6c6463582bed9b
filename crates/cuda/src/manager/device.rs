//! Devices: enumeration, and the resources that each device owns.
//!
//! A device's payload holds its context manager and a lease on the primary context. Streams and
//! graphs do not lease their device.
//!
//! This module must not know backings.

use super::context::{ContextManager, ContextState, RETIRING};
use crate::allocator::Memory;
use crate::config::{CudaConfig, MemorySource};
use crate::driver::ops::{CudaSlowOps, DeviceProperties};
use crate::driver::real::RealDriver;
use crate::engine::driver_context::DriverContext;
use crate::engine::shared::Shared;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Handle, Lease, PoolStats, Recycle, Resource, Result, Tagged, tags};
use leasehold_hal::engine::devices::DeviceSource;
use leasehold_hal::engine::retired::{LeftBehind, Retired, StreamOwner};
use leasehold_hal::{BackendKind, Description, DeviceId, DeviceInfo, MemoryInfo};
use std::fmt;
use std::marker::PhantomPinned;

/// The largest count of devices that the backend accepts from a driver.
const DEVICES_MAX: u32 = 1024;

/// An open device.
pub struct DeviceState {
    pub(crate) description: Description,
    /// Declared before the context, so that the memory's end is part of the context's end.
    memory: Arc<Memory>,
    shared: Arc<Shared>,
    /// Declared before its manager, so that the lease is dropped first.
    primary: Lease<ContextState>,
    contexts: ContextManager,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl Tagged for DeviceState {
    type Tag = tags::Device;
}

impl DeviceState {
    fn new(ordinal: u32, devices: &Devices) -> Result<Self> {
        let shared = devices.shared.clone();
        let properties = devices
            .properties
            .get(ordinal as usize)
            .cloned()
            .ok_or_else(|| Error::NotFound(format!("device {ordinal}").into()))?;
        let context = Arc::new(DriverContext::primary(shared.ops.clone(), ordinal)?);
        let memory = Arc::new(Memory::new(context, shared.clone(), properties.clone()));
        let contexts = ContextManager::new(memory.clone(), devices.retired.clone())?;
        let primary = contexts.primary()?;
        let free = primary.core.context.within(|ops| ops.memory_info())?;
        let info = describe(ordinal, &properties, shared.ops.driver_version().ok());
        let mut description = Description::new(info);
        description.info.memory = MemoryInfo { total: free.total, free: free.free };
        let caps = &mut description.caps;
        caps.pinned = true;
        caps.host_timelines = true;
        caps.timestamps = true;
        caps.graphs = true;
        caps.concurrent_streams = true;
        caps.host_calls = true;
        caps.foreign_calls = true;
        caps.conditionals = properties.conditional_nodes;
        caps.vendor_libraries = properties.vendor;
        caps.waits_for_any_timeline = true;
        caps.shareable = properties.vmm && properties.fd_handles;
        let source = shared.config.memory;
        caps.growing = properties.vmm && matches!(source, MemorySource::Auto | MemorySource::Vmm);
        caps.forks = caps.growing;
        caps.partitions = properties.green_contexts;
        caps.priorities = primary.streams.has_priorities();
        let limits = &mut description.limits;
        limits.grid = properties.grid;
        limits.block = properties.block;
        limits.block_threads = properties.block_threads;
        limits.shared = properties.shared_optin.max(properties.shared);
        limits.streams = shared.config.streams;
        limits.buffer = properties.memory.max(1);
        Ok(Self { description, primary, contexts, memory, shared, _place: PhantomPinned })
    }

    /// The properties that the driver reports.
    pub fn properties(&self) -> &DeviceProperties {
        &self.memory.properties
    }

    /// The device's name.
    pub fn id(&self) -> DeviceId {
        self.description.info.id
    }

    pub(crate) fn ordinal(&self) -> u32 {
        self.id().ordinal
    }

    /// The primary context.
    pub fn primary(&self) -> &Lease<ContextState> {
        &self.primary
    }

    /// The contexts.
    pub fn contexts(&self) -> &ContextManager {
        &self.contexts
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Reports the statistics of all pools.
    pub fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.primary.pools(report);
        report("context", self.contexts.stats());
    }
}

impl StreamOwner for DeviceState {
    fn outstanding(&self) -> Result<()> {
        self.primary.core.settle_streams();
        // The primary context counts the device's memory.
        self.primary.outstanding()?;
        let contexts = self.contexts.stats();
        if contexts.live > 1 || contexts.weak != 0 {
            let strong = contexts.live.saturating_sub(1);
            return Err(Error::LeasesOutstanding {
                resource: "context",
                strong,
                weak: contexts.weak,
            });
        }
        Ok(())
    }

    /// The streams of other contexts are their contexts'.
    fn left_behind(&self) -> LeftBehind {
        self.primary.left_behind()
    }
}

impl Drop for DeviceState {
    fn drop(&mut self) {
        self.shared.close(self.ordinal());
    }
}

impl fmt::Debug for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceState")
            .field("id", &self.id())
            .field("primary", &self.primary)
            .finish_non_exhaustive()
    }
}

/// Compute capabilities whose code this device runs, the newest first: first all of its own
/// generation up to its own capability. Earlier generations follow only through their intermediate
/// code.
fn architectures((major, minor): (u32, u32)) -> Vec<String> {
    let mut arch: Vec<String> = (0..=minor).rev().map(|m| format!("cuda/sm_{major}{m}")).collect();
    arch.push("cuda".to_owned());
    arch
}

/// Describes a device, as far as the driver tells without a context.
fn describe(ordinal: u32, p: &DeviceProperties, driver: Option<i32>) -> DeviceInfo {
    let mut info = DeviceInfo::new(DeviceId::cuda(ordinal), p.name.clone());
    let hex = |range: std::ops::Range<usize>| {
        p.uuid[range].iter().map(|b| format!("{b:02x}")).collect::<String>()
    };
    info.uuid =
        format!("GPU-{}-{}-{}-{}-{}", hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16));
    info.arch = architectures(p.compute_capability);
    info.units = p.multiprocessors.max(1);
    info.memory = MemoryInfo { total: p.memory, free: p.memory };
    let mut detail = |label: &str, value: String| info.details.push((label.to_owned(), value));
    detail("compute capability", format!("{}.{}", p.compute_capability.0, p.compute_capability.1));
    if let Some(driver) = driver {
        detail("driver", format!("CUDA {}.{}", driver / 1000, driver % 1000 / 10));
    }
    detail("PCI", p.pci.clone());
    if let Some(node) = p.numa_node {
        detail("NUMA node", node.to_string());
    }
    detail("L2 cache", format!("{} KiB", p.l2 >> 10));
    detail("shared memory per block", format!("{} KiB", p.shared_optin.max(p.shared) >> 10));
    detail("virtual memory management", if p.vmm { "yes" } else { "no" }.to_owned());
    detail("memory pools", if p.memory_pools { "yes" } else { "no" }.to_owned());
    info
}

/// The devices of a driver, as their manager makes them.
pub struct Devices {
    shared: Arc<Shared>,
    properties: Vec<DeviceProperties>,
    /// The names of the devices that each device reaches.
    peers: Vec<String>,
    retired: Arc<Retired<ContextState>>,
}

impl Resource for Devices {
    type Payload = DeviceState;
    type Request<'a> = u32;
    const NAME: &'static str = "device";

    fn create(&self, _: Handle<tags::Device>, ordinal: &u32) -> Result<DeviceState> {
        DeviceState::new(*ordinal, self)
    }

    fn recycle(&self, _: &mut DeviceState) -> Recycle {
        Recycle::Destroy
    }
}

impl DeviceSource for Devices {
    type Driver = dyn CudaSlowOps;
    type Config = CudaConfig;
    type Retiring = ContextState;
    const KIND: BackendKind = BackendKind::Cuda;

    fn load() -> Result<Arc<dyn CudaSlowOps>> {
        Ok(Arc::new(RealDriver::new()))
    }

    unsafe fn enumerate(ops: Arc<dyn CudaSlowOps>, config: CudaConfig) -> Result<Self> {
        config.validate()?;
        ops.init()?;
        let count = ops.device_count()?;
        if count > DEVICES_MAX {
            let why = format!(
                "CUDA: the driver says that there are {count} devices; {DEVICES_MAX} are the most"
            );
            return Err(Error::Unavailable(why.into()));
        }
        let of = |i| ops.device_properties(i).and_then(|p| p.check(i).map(|()| p));
        let properties = (0..count).map(of).collect::<Result<_>>()?;
        let peers = (0..count).map(|i| {
            let reached: Vec<_> = (0..count)
                .filter(|&p| p != i && ops.can_access_peer(i, p).unwrap_or(false))
                .map(|p| DeviceId::cuda(p).to_string())
                .collect();
            if reached.is_empty() { "none".to_owned() } else { reached.join(", ") }
        });
        let peers = peers.collect();
        let retired = Retired::new(RETIRING, config.inline);
        Ok(Self { shared: Arc::new(Shared::new(ops, config)), properties, peers, retired })
    }

    fn count(&self) -> u32 {
        self.properties.len() as u32
    }

    fn describe(&self) -> Vec<DeviceInfo> {
        let driver = self.shared.ops.driver_version().ok();
        let all = (0..).zip(&self.properties).zip(&self.peers);
        all.map(|((ordinal, properties), peers)| {
            let mut info = describe(ordinal, properties, driver);
            info.details.push(("peers".to_owned(), peers.clone()));
            info
        })
        .collect()
    }

    fn retired(&self) -> &Arc<Retired<ContextState>> {
        &self.retired
    }
}

/// Enumerates CUDA's devices and owns their states.
#[doc(alias("CudaDeviceManager", "execution::cuda::DeviceManager"))]
pub type DeviceManager = leasehold_hal::engine::devices::DeviceManager<Devices>;
