//! Devices: enumeration, and the resources that each device owns.
//!
//! A device's payload holds its context manager and a lease on the primary context. Streams and
//! graphs do not lease their device.
//!
//! This module must not know backings.

use super::context::{ContextManager, ContextState, RETIRING};
use crate::allocator::Memory;
use crate::config::CudaConfig;
use crate::driver::ops::{CudaSlowOps, DeviceProperties};
use crate::engine::driver_context::DriverContext;
use crate::engine::shared::Shared;
use crate::engine::stream::StreamCore;
#[cfg(feature = "test-hooks")]
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::sync::{Arc, OnceLock};
use leasehold_core::{
    Error, FixedSlotStore, Handle, Index, Lease, PoolStats, Recycle, Resource, Result, Tagged, tags,
};
use leasehold_engine::retired::Retired;
use leasehold_hal::{BackendKind, Caps, DeviceId, DeviceInfo, Limits, MemoryInfo};
use std::fmt;
use std::marker::PhantomPinned;

/// The ordinal of a device of this backend.
pub(crate) fn ordinal_of(device: DeviceId) -> Result<u32> {
    if device.backend == BackendKind::Cuda {
        return Ok(device.ordinal);
    }
    Err(Error::NotFound(format!("{device}: this is the CUDA backend").into()))
}

/// The largest count of devices that the backend accepts from a driver.
const DEVICES_MAX: u32 = 1024;

/// An open device.
pub struct DeviceState {
    info: DeviceInfo,
    caps: Caps,
    limits: Limits,
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
    /// The streams of the primary context that dropped leases left behind.
    fn left_behind(&self) -> Vec<Arc<StreamCore>> {
        self.primary.left_behind()
    }

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
        let mut info = describe(ordinal, &properties, shared.ops.driver_version().ok());
        info.memory = MemoryInfo { total: free.total, free: free.free };
        let mut caps = Caps::default();
        caps.pinned = true;
        caps.host_timelines = true;
        caps.timestamps = true;
        caps.graphs = true;
        caps.concurrent_streams = true;
        caps.host_calls = true;
        caps.foreign_calls = true;
        caps.vendor_libraries = properties.vendor;
        caps.waits_for_any_timeline = true;
        caps.priorities = primary.streams.has_priorities();
        let mut limits = Limits::default();
        limits.grid = properties.grid;
        limits.block = properties.block;
        limits.block_threads = properties.block_threads;
        limits.shared = properties.shared_optin.max(properties.shared);
        limits.streams = shared.config.streams;
        limits.buffer = properties.memory.max(1);
        Ok(Self { info, caps, limits, primary, contexts, memory, shared, _place: PhantomPinned })
    }

    /// The device's description.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The device's capabilities.
    pub fn caps(&self) -> Caps {
        self.caps
    }

    /// The device's limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The properties that the driver reports.
    pub fn properties(&self) -> &DeviceProperties {
        &self.memory.properties
    }

    /// The device's name.
    pub fn id(&self) -> DeviceId {
        self.info.id
    }

    pub(crate) fn ordinal(&self) -> u32 {
        self.info.id.ordinal
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

    /// Checks whether leases on this device's resources are held.
    fn outstanding(&self) -> Result<()> {
        self.primary.core.settle_streams();
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
        self.memory.outstanding()
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
            .field("id", &self.info.id)
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

pub(crate) struct Devices {
    shared: Arc<Shared>,
    properties: Arc<[DeviceProperties]>,
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

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Devices({})", self.properties.len())
    }
}

struct Known {
    store: FixedSlotStore<Devices>,
    shared: Arc<Shared>,
    properties: Arc<[DeviceProperties]>,
    peers: Vec<String>,
    retired: Arc<Retired<ContextState>>,
}

/// Enumerates devices and owns their states.
#[doc(alias("CudaDeviceManager", "execution::cuda::DeviceManager"))]
#[derive(Default)]
pub struct DeviceManager {
    known: OnceLock<Known>,
    #[cfg(feature = "test-hooks")]
    for_test: AtomicBool,
}

leasehold_engine::device_manager_methods!(DeviceManager with Known of DeviceState);

impl DeviceManager {
    /// Enumerates the devices, and opens none. Blocks on the driver.
    ///
    /// # Errors
    /// - As [`CudaConfig::validate`].
    /// - `InvalidState` at the second call.
    /// - `Unavailable` for a driver whose answers are not plausible.
    /// - A driver error.
    #[doc(alias = "initializeDevices")]
    pub fn initialize_devices(&self, ops: Arc<dyn CudaSlowOps>, config: CudaConfig) -> Result<()> {
        config.validate()?;
        let shared = Arc::new(Shared::new(ops, config));
        let ops = &shared.ops;
        let count = ops.device_count()?;
        if count > DEVICES_MAX {
            let why = format!(
                "CUDA: the driver says that there are {count} devices; {DEVICES_MAX} are the most"
            );
            return Err(Error::Unavailable(why.into()));
        }
        let of = |i| ops.device_properties(i).and_then(|p| p.check(i).map(|()| p));
        let properties: Arc<[DeviceProperties]> = (0..count).map(of).collect::<Result<_>>()?;
        let peers = (0..count).map(|i| {
            let reached: Vec<_> = (0..count)
                .filter(|&p| p != i && ops.can_access_peer(i, p).unwrap_or(false))
                .map(|p| DeviceId::cuda(p).to_string())
                .collect();
            if reached.is_empty() { "none".to_owned() } else { reached.join(", ") }
        });
        let peers = peers.collect();
        let retired = Retired::new(RETIRING, shared.config.inline);
        let devices = Devices {
            shared: shared.clone(),
            properties: properties.clone(),
            retired: retired.clone(),
        };
        let store = FixedSlotStore::new(devices, count)?;
        self.known
            .set(Known { store, shared, properties, peers, retired })
            .map_err(|_| Error::state("the device manager is configured already"))
    }

    /// Enumerates the devices of a driver that a test supplies.
    ///
    /// # Errors
    /// As [`initialize_devices`](Self::initialize_devices).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "configureForTest")]
    pub fn configure_for_test(&self, ops: Arc<dyn CudaSlowOps>) -> Result<()> {
        ops.init()?;
        self.initialize_devices(ops, CudaConfig::default())?;
        self.for_test.store(true, Ordering::Release);
        Ok(())
    }

    /// Describes the devices without opening them. The amount of free memory is known of open
    /// devices only.
    ///
    /// # Errors
    /// `InvalidState` before [`initialize_devices`](Self::initialize_devices).
    pub fn describe(&self) -> Result<Vec<DeviceInfo>> {
        let known = self.known()?;
        let driver = known.shared.ops.driver_version().ok();
        let all = known.properties.iter().zip(&known.peers).enumerate().map(|(i, (p, peers))| {
            let mut info = describe(i as u32, p, driver);
            info.details.push(("peers".to_owned(), peers.clone()));
            info
        });
        Ok(all.collect())
    }

    /// Opens the device unless it is open.
    ///
    /// # Errors
    /// As [`ensure_alive`](Self::ensure_alive).
    pub fn open(&self, device: DeviceId) -> Result<Lease<DeviceState>> {
        let known = self.known()?;
        let ordinal = ordinal_of(device)?;
        known.retired.reclaim();
        known.store.get(Index::new(ordinal), &ordinal)
    }

    /// Ends the manager and all contexts. Blocks on the driver. The call waits for no work:
    /// [`Backend::shutdown`](leasehold_hal::Backend) does. A second call is `Ok`, and so is one
    /// before [`initialize_devices`](Self::initialize_devices).
    ///
    /// # Errors
    /// `LeasesOutstanding` while one of these is true:
    /// - A lease on a device is held, or on a resource of a device.
    /// - A lease on a resource of a context without a lease is held.
    /// - A dropped stream has work pending.
    ///
    /// After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        let Some(known) = self.known.get() else { return Ok(()) };
        Self::refuse_outstanding(known)?;
        known.retired.settle()?;
        known.retired.settling(|| known.store.shutdown())
    }
}

impl Drop for DeviceManager {
    fn drop(&mut self) {
        if let Some(known) = self.known.take() {
            drop(known.store);
            // The remaining contexts end with their last holder, or in the background.
            known.retired.reclaim();
        }
    }
}
