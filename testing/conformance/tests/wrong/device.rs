//! A backend around the CPU's, with one defect. It can have two devices, a driver that fails on
//! demand, kernels by name, and a driver's current device.

use crate::defects::Defect;
use crate::stream::{HostTimelines, Streams};
use leasehold::backend::sync::Mutex;
use leasehold::backend::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold::backend::*;
use leasehold::backend::{
    DeviceHandle, PoolConfig, PoolManager, PoolStats, Recycle, Resource, SlotPool, Tagged, tags,
};
use leasehold::{Allocator, Error, Lease, Result};
use leasehold_conformance::{Faults, Injected, TestKernel};
use leasehold_cpu::CpuBackend;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

thread_local! {
    /// The driver's current device.
    static CURRENT: Cell<Option<DeviceId>> = const { Cell::new(None) };
}

pub(crate) fn current_device() -> Option<DeviceId> {
    CURRENT.get()
}

/// The library call that violates capture rules.
pub(crate) const FORK: &str = "forks and does not join";

/// The state that the devices of a backend share.
#[derive(Default)]
pub(crate) struct Rig {
    /// The number of submissions that really run, regardless of the timelines: their memory must
    /// stay.
    pub(crate) running: AtomicU64,
    /// The fault of the next call.
    armed: Mutex<Option<Injected>>,
    pub(crate) lost: AtomicBool,
    /// Failed names, for `RemembersFailures`.
    failures: Mutex<HashSet<String>>,
    /// The one stream, for `SameStream`.
    only: Mutex<Option<Lease<dyn Stream>>>,
    /// The written addresses, each with the device that wrote it first, for `ReadsWritten` and
    /// `SkipsPeers`.
    pub(crate) written: Mutex<HashMap<u64, u32>>,
    peers_asked: AtomicU64,
}

impl Rig {
    pub(crate) fn strikes(&self, fault: Injected) -> bool {
        self.armed.lock().take_if(|f| *f == fault).is_some()
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.lost.load(Ordering::Acquire) {
            return Err(Error::DeviceLost { cause: "it was meant to be lost".into() });
        }
        Ok(())
    }
}

/// The fault control of the driver.
struct Switch(Arc<Rig>);

impl Faults for Switch {
    fn next(&self, fault: Injected) -> bool {
        let can = matches!(fault, Injected::Submission | Injected::Creation | Injected::DeviceLost);
        if can {
            *self.0.armed.lock() = Some(fault);
        }
        can
    }
}

pub(crate) struct Wrong {
    inner: Vec<Arc<CpuBackend>>,
    defect: Defect,
    devices: PoolManager<Devices, u64>,
    count: AtomicU64,
    rig: Arc<Rig>,
    busy: Option<Arc<AtomicBool>>,
}

impl Wrong {
    pub(crate) fn new(defect: Defect) -> Self {
        Self::with_devices(defect, 1)
    }

    pub(crate) fn with_devices(defect: Defect, count: usize) -> Self {
        let inner: Vec<_> = (0..count).map(|_| Arc::new(CpuBackend::new())).collect();
        let devices = PoolManager::new();
        let rig = Arc::new(Rig::default());
        let resource = Devices { inner: inner.clone(), defect, rig: rig.clone() };
        devices.configure(resource, PoolConfig::default()).expect("a default configuration");
        let busy = (defect == Defect::Busy).then(|| {
            let stop = Arc::new(AtomicBool::new(false));
            let seen = stop.clone();
            std::thread::spawn(move || {
                while !seen.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            stop
        });
        Self { inner, defect, devices, count: AtomicU64::new(0), rig, busy }
    }

    pub(crate) fn switchboard(&self) -> Arc<dyn Faults> {
        Arc::new(Switch(self.rig.clone()))
    }

    fn settle(&self) {
        while self.rig.running.load(Ordering::Acquire) != 0 {
            std::thread::yield_now();
        }
    }

    fn next(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed)
    }
}

impl Drop for Wrong {
    fn drop(&mut self) {
        self.settle();
        // The stream holds this state, so the cycle is broken here.
        *self.rig.only.lock() = None;
        if let Some(stop) = &self.busy {
            stop.store(true, Ordering::Relaxed);
        }
    }
}

// SAFETY: an opened device is the inner backend's device of that name, changed on purpose.
unsafe impl Backend for Wrong {
    fn kind(&self) -> BackendKind {
        BackendKind::Cpu
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let mut devices = Vec::new();
        for (i, inner) in self.inner.iter().enumerate() {
            devices.extend(inner.devices()?.into_iter().map(|d| named(d, i as u32)));
        }
        if self.defect == Defect::Renames {
            devices[0].name = format!("device {}", self.next());
        }
        Ok(devices)
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        let ordinal = (0..self.inner.len() as u32).find(|&i| device == DeviceId::cpu(i));
        assert!(ordinal.is_some() || self.defect != Defect::PanicsOnUnknown, "no such device");
        let Some(ordinal) = ordinal else {
            return self.inner[0].open(DeviceId::new(device.backend, u32::MAX));
        };
        let key =
            if self.defect == Defect::OpensAnew { 1000 + self.next() } else { u64::from(ordinal) };
        Ok(Lease::map(self.devices.get_or_create(&key, &ordinal)?, |d| d as &dyn Device))
    }

    fn shutdown(&self) -> Result<()> {
        if self.defect == Defect::IgnoresLeases {
            return Ok(());
        }
        self.settle();
        *self.rig.only.lock() = None;
        self.devices.shutdown()?;
        self.inner.iter().try_for_each(|b| b.shutdown())
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.inner[0].pools(report);
    }
}

fn named(mut info: DeviceInfo, ordinal: u32) -> DeviceInfo {
    info.id = DeviceId::cpu(ordinal);
    info
}

struct Devices {
    inner: Vec<Arc<CpuBackend>>,
    defect: Defect,
    rig: Arc<Rig>,
}

impl Resource for Devices {
    type Payload = WrongDevice;
    type Request<'a> = u32;
    const NAME: &'static str = "device";

    fn create(&self, _: DeviceHandle, ordinal: &u32) -> Result<WrongDevice> {
        let (defect, rig) = (self.defect, self.rig.clone());
        let inner = self.inner[*ordinal as usize].open(DeviceId::cpu(0))?;
        let mut description = inner.description().clone();
        description.info = named(description.info, *ordinal);
        Ok(WrongDevice {
            description,
            inner,
            defect,
            streams: SlotPool::new(
                Streams { defect, rig: rig.clone(), ordinal: *ordinal },
                PoolConfig::default(),
            )?,
            host_timelines: SlotPool::new(HostTimelines(defect), PoolConfig::default())?,
            kernels: AtomicU64::new(0),
            own: OnceLock::new(),
            refused: Arc::default(),
            rig,
        })
    }

    fn recycle(&self, _: &mut WrongDevice) -> Recycle {
        Recycle::Destroy
    }
}

struct WrongDevice {
    inner: Lease<dyn Device>,
    description: Description,
    defect: Defect,
    streams: SlotPool<Streams>,
    host_timelines: SlotPool<HostTimelines>,
    kernels: AtomicU64,
    /// A separate allocator, if the defect concerns it.
    own: OnceLock<Allocator>,
    refused: Arc<AtomicBool>,
    rig: Arc<Rig>,
}

impl Tagged for WrongDevice {
    type Tag = tags::Device;
}

/// Streams that a defect leaks, in a place where a leak checker can see them.
pub(crate) static KEPT: Mutex<Vec<Lease<dyn Stream>>> = Mutex::new(Vec::new());

// SAFETY: memory, pipelines and timepoints are the inner device's. A defect changes only behaviour
// that the cases check.
unsafe impl Device for WrongDevice {
    fn description(&self) -> &Description {
        &self.description
    }
    fn memory_info(&self) -> Result<MemoryInfo> {
        self.inner.memory_info()
    }
    fn make_current(&self) -> Result<()> {
        CURRENT.set(Some(self.info().id));
        self.inner.make_current()
    }

    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        if kind == MemoryKind::Device
            && matches!(self.defect, Defect::StaysEmpty | Defect::Wasteful)
        {
            if self.refused.load(Ordering::Acquire) {
                return Err(leasehold::OutOfMemory::new("the dry well", 0).into());
            }
            let dry = self.defect == Defect::StaysEmpty;
            let depth = if dry { 40 << 20 } else { 1 << 34 };
            let well = DryWell { taken: AtomicU64::new(0), depth, refused: self.refused.clone() };
            let debug = leasehold::backend::DebugOptions {
                red_zone: if dry { 0 } else { 4 << 10 },
                ..Default::default()
            };
            let config = leasehold::backend::AllocatorConfig { debug, ..Default::default() };
            return Ok(self
                .own
                .get_or_init(|| Allocator::new(Box::new(well), config).expect("an allocator")));
        }
        self.inner.memory(kind)
    }

    fn stream(&self, desc: &StreamDesc) -> Result<Lease<dyn Stream>> {
        self.rig.check()?;
        if self.defect == Defect::SwitchesCurrent {
            CURRENT.set(Some(self.info().id));
        }
        let make = || -> Result<Lease<dyn Stream>> {
            Ok(Lease::map(self.streams.acquire(&self.inner.stream(desc)?)?, |s| s as &dyn Stream))
        };
        if self.defect == Defect::SameStream {
            let mut only = self.rig.only.lock();
            if only.is_none() {
                *only = Some(make()?);
            }
            return Ok(only.clone().expect("just made"));
        }
        let lease = make()?;
        if self.defect == Defect::LeaksStreams {
            KEPT.lock().push(lease.clone());
        }
        Ok(lease)
    }

    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        let mut desc = desc.clone();
        if self.rig.strikes(Injected::Creation) {
            return Err(Error::Driver { api: "make", code: 1, name: "on request".into() });
        }
        if self.defect == Defect::CompilesAgain {
            desc.name =
                format!("{}{}", desc.name, self.kernels.fetch_add(1, Ordering::Relaxed)).into();
        }
        if let KernelSource::Registered(name) = &desc.source {
            let known = TestKernel::registrations().find(|k| k.name == &**name);
            let any = (self.defect == Defect::AnyEntry)
                .then(|| TestKernel::registrations().next())
                .flatten();
            let Some(kernel) = known.or(any) else {
                return Err(Error::NotFound(format!("entry {name}").into()));
            };
            desc.source = KernelSource::Cpu(kernel.function);
        }
        let name = desc.name.clone().into_owned();
        let remembers = self.defect == Defect::RemembersFailures;
        if remembers && self.rig.failures.lock().contains(&name) {
            return Err(Error::state("it failed before"));
        }
        self.inner.pipeline(&desc).inspect_err(|_| {
            if remembers {
                self.rig.failures.lock().insert(name);
            }
        })
    }

    fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        self.inner.timestamp()
    }

    unsafe fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration> {
        // SAFETY: the timepoints are of this backend.
        let time = unsafe { self.inner.elapsed(start, end) }?;
        Ok(if self.defect == Defect::StopsTheClock { Duration::ZERO } else { time })
    }

    /// Library calls run when a graph captures them, as with a capturing driver.
    unsafe fn instantiate(&self, mut plan: Plan) -> Result<Lease<dyn GraphExec>> {
        if self.defect == Defect::CutsGraphs && !plan.is_empty() {
            plan.ops.truncate(plan.len() - 1);
            plan = Plan::new(plan.ops);
        }
        let forks = plan.ops.iter().any(|op| matches!(op, Op::Foreign(call) if call.name == FORK));
        if forks && self.defect != Defect::TakesForks {
            return Err(Error::recording(format!("{FORK}: its work was not joined")));
        }
        // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
        // outlives the launches.
        unsafe { self.inner.instantiate(plan) }
    }

    fn host_timeline(&self) -> Result<Lease<dyn HostTimeline>> {
        Ok(Lease::map(self.host_timelines.acquire(&self.inner.host_timeline()?)?, |g| {
            g as &dyn HostTimeline
        }))
    }

    fn peer_access(&self, peer: DeviceId) -> Result<bool> {
        if peer.backend != BackendKind::Cpu || peer.ordinal > 1 {
            return Err(Error::NotFound(format!("{peer}").into()));
        }
        if self.defect == Defect::PeersOnce
            && self.rig.peers_asked.fetch_add(1, Ordering::Relaxed) > 2
        {
            return Err(Error::Driver {
                api: "enable_peer_access",
                code: 704,
                name: "already enabled".into(),
            });
        }
        Ok(true)
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        self.inner.synchronize(timeout)
    }
    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.inner.pools(report);
    }
}

/// The unit and the alignment of the well's pieces.
const GRANULE: usize = 64 << 10;

/// Provides memory up to its depth, until it must refuse once; afterwards its device has no memory.
struct DryWell {
    taken: AtomicU64,
    depth: u64,
    refused: Arc<AtomicBool>,
}

// SAFETY: each commitment is a separate block of the process's heap.
unsafe impl leasehold::backend::Backing for DryWell {
    fn caps(&self) -> leasehold::backend::BackingCaps {
        let (granule, physical, segment) = (GRANULE as u64, 1 << 30, 1 << 20);
        leasehold::backend::BackingCaps {
            granule,
            physical,
            segment,
            ..leasehold::backend::BackingCaps::default()
        }
    }

    fn reserve(&self, _: u64) -> Result<u64> {
        Err(Error::Unsupported("no reservations".into()))
    }

    unsafe fn commit(&self, _: Option<u64>, bytes: u64) -> Result<leasehold::backend::Chunk> {
        let out = || Err(leasehold::OutOfMemory::new("the dry well", bytes).into());
        if self.taken.load(Ordering::Relaxed) + bytes > self.depth {
            self.refused.store(true, Ordering::Release);
            return out();
        }
        let layout = std::alloc::Layout::from_size_align(bytes as usize, GRANULE)
            .map_err(|_| Error::invalid("size"))?;
        // SAFETY: the size is not zero.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        self.taken.fetch_add(bytes, Ordering::Relaxed);
        if memory.is_null() {
            out()
        } else {
            Ok(leasehold::backend::Chunk { addr: memory as u64, bytes, native: 0 })
        }
    }

    unsafe fn decommit(&self, chunk: leasehold::backend::Chunk) -> Result<()> {
        let layout = std::alloc::Layout::from_size_align(chunk.bytes as usize, GRANULE)
            .map_err(|_| Error::invalid("size"))?;
        self.taken.fetch_sub(chunk.bytes, Ordering::Relaxed);
        // SAFETY: the caller vouches that the chunk came from `commit`, so with this layout, and
        // that no code uses it.
        unsafe { std::alloc::dealloc(chunk.addr as *mut u8, layout) };
        Ok(())
    }

    unsafe fn release(&self, _: u64, _: u64) {}

    unsafe fn fill(&self, at: u64, bytes: u64, byte: u8) -> Result<()> {
        // SAFETY: the caller names memory from `commit` that no other code uses, or no bytes.
        unsafe { std::ptr::write_bytes(at as *mut u8, byte, bytes as usize) };
        Ok(())
    }

    unsafe fn verify(&self, _: u64, _: u64, _: u8) -> Result<Option<u64>> {
        Ok(None)
    }
}
