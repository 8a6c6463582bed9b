//! A backend around the CPU's, with one defect.

use leasehold::core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold::core::{
    DeviceHandle, Fate, Handle, Line, PoolConfig, PoolManager, PoolStats, Resource, SlotPool, Tagged, Timeline, tags,
};
use leasehold::hal::*;
use leasehold::{Allocator, Error, Lease, Point, Result};
use leasehold_cpu::CpuBackend;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    /// Streams wait for nobody.
    DropsWaits,
    /// A submission's operations run in reverse.
    Reorders,
    /// A value is complete as soon as it is submitted.
    CompletesEarly,
    /// Host waits report success whatever happened, and submissions to a poisoned stream too.
    LosesErrors,
    /// Each opening makes a device of its own.
    OpensAnew,
    /// A kernel is made anew each time.
    CompilesAgain,
    /// Graphs leave their last node out.
    CutsGraphs,
    /// Shutdown is always fine.
    IgnoresLeases,
    /// A lease on each stream is forgotten.
    LeaksStreams,
    /// Devices have another name each time.
    Renames,
    /// An unknown device is a panic.
    PanicsOnUnknown,
    /// Patterns are one byte.
    FillsBytes,
    /// Copies leave out the last byte of each row.
    CopiesShort,
    /// All stamps are equal.
    StopsTheClock,
    /// A submission returns when it is complete.
    BlocksInSubmit,
    /// Once memory has run out it is never there again.
    StaysEmpty,
    /// A host wait never returns.
    Hangs,
}

pub(crate) struct Wrong {
    inner: Arc<CpuBackend>,
    defect: Defect,
    devices: PoolManager<Devices, u64>,
    count: AtomicU64,
    running: Running,
}

/// How many submissions really run, whatever the timelines say: no memory goes away under them.
type Running = Arc<AtomicU64>;

impl Wrong {
    pub(crate) fn new(defect: Defect) -> Self {
        let inner = Arc::new(CpuBackend::new());
        let devices = PoolManager::new();
        let running = Running::default();
        let resource = Devices { inner: inner.clone(), defect, running: running.clone() };
        devices.configure(resource, PoolConfig::default()).expect("a default configuration");
        Self { inner, defect, devices, count: AtomicU64::new(0), running }
    }

    fn settle(&self) {
        while self.running.load(Ordering::Acquire) != 0 {
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
    }
}

impl Backend for Wrong {
    fn kind(&self) -> BackendKind {
        self.inner.kind()
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let mut devices = self.inner.devices()?;
        if self.defect == Defect::Renames {
            devices[0].name = format!("device {}", self.next());
        }
        Ok(devices)
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        let known = device == DeviceId::cpu(0);
        assert!(known || self.defect != Defect::PanicsOnUnknown, "no such device");
        let key = if self.defect == Defect::OpensAnew { self.next() } else { 0 };
        if !known {
            return self.inner.open(device);
        }
        Ok(Lease::map(self.devices.get_or_create(&key, &())?, |d| d as &dyn Device))
    }

    fn shutdown(&self) -> Result<()> {
        if self.defect == Defect::IgnoresLeases {
            return Ok(());
        }
        self.settle();
        self.devices.shutdown()?;
        self.inner.shutdown()
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.inner.pools(report);
    }
}

struct Devices {
    inner: Arc<CpuBackend>,
    defect: Defect,
    running: Running,
}

impl Resource for Devices {
    type Payload = WrongDevice;
    type Request<'a> = ();
    const NAME: &'static str = "device";

    fn create(&self, _: DeviceHandle, (): &()) -> Result<WrongDevice> {
        Ok(WrongDevice {
            inner: self.inner.open(DeviceId::cpu(0))?,
            defect: self.defect,
            streams: SlotPool::new(Streams(self.defect, self.running.clone()), PoolConfig::default())?,
            kernels: AtomicU64::new(0),
            empty: OnceLock::new(),
            refused: Arc::default(),
        })
    }

    fn recycle(&self, _: &mut WrongDevice) -> Fate {
        Fate::Destroy
    }
}

struct WrongDevice {
    inner: Lease<dyn Device>,
    defect: Defect,
    streams: SlotPool<Streams>,
    kernels: AtomicU64,
    empty: OnceLock<Allocator>,
    refused: Arc<AtomicBool>,
}

impl Tagged for WrongDevice {
    type Tag = tags::Device;
}

/// Streams that the defect never gives back.
static KEPT: leasehold::core::sync::Mutex<Vec<Lease<WrongStream>>> = leasehold::core::sync::Mutex::new(Vec::new());

impl Device for WrongDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn caps(&self) -> Caps {
        self.inner.caps()
    }
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }
    fn memory_info(&self) -> Result<MemoryInfo> {
        self.inner.memory_info()
    }
    fn make_current(&self) -> Result<()> {
        self.inner.make_current()
    }

    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        if self.defect == Defect::StaysEmpty && kind == MemoryKind::Device {
            if self.refused.load(Ordering::Acquire) {
                return Err(leasehold::OutOfMemory::new("the dry well", 0).into());
            }
            let well = DryWell { taken: AtomicU64::new(0), refused: self.refused.clone() };
            let make = || Allocator::new(Box::new(well), Default::default());
            return Ok(self.empty.get_or_init(|| make().expect("an allocator")));
        }
        self.inner.memory(kind)
    }

    fn stream(&self, desc: &StreamDesc) -> Result<Lease<dyn Stream>> {
        let lease = self.streams.acquire(&self.inner.stream(desc)?)?;
        if self.defect == Defect::LeaksStreams {
            // For ever, but where a leak checker can see it.
            KEPT.lock().push(lease.clone());
        }
        Ok(Lease::map(lease, |s| s as &dyn Stream))
    }

    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        let mut desc = desc.clone();
        if self.defect == Defect::CompilesAgain {
            desc.name = format!("{}{}", desc.name, self.kernels.fetch_add(1, Ordering::Relaxed)).into();
        }
        self.inner.pipeline(&desc)
    }

    fn timestamp(&self) -> Result<Lease<Timestamp>> {
        self.inner.timestamp()
    }

    fn elapsed(&self, start: &Timestamp, end: &Timestamp) -> Result<Duration> {
        let time = self.inner.elapsed(start, end)?;
        Ok(if self.defect == Defect::StopsTheClock { Duration::ZERO } else { time })
    }

    fn instantiate(&self, mut plan: Plan) -> Result<Lease<dyn GraphExec>> {
        if self.defect == Defect::CutsGraphs && !plan.is_empty() {
            plan.ops.truncate(plan.len() - 1);
            plan = Plan::new(plan.ops);
        }
        self.inner.instantiate(plan)
    }

    fn gate(&self) -> Result<Lease<dyn Gate>> {
        self.inner.gate()
    }
    fn peer_access(&self, peer: DeviceId) -> Result<bool> {
        self.inner.peer_access(peer)
    }
    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        self.inner.synchronize(timeout)
    }
    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.inner.pools(report);
    }
}

/// What the well's pieces are multiples of and aligned to.
const GRANULE: usize = 64 << 10;

/// Gives memory until it has to refuse once; its device then has no memory any more.
struct DryWell {
    taken: AtomicU64,
    refused: Arc<AtomicBool>,
}

impl alloc::Backing for DryWell {
    fn caps(&self) -> alloc::BackingCaps {
        alloc::BackingCaps { vmm: false, granule: GRANULE as u64, physical: 1 << 30, reserve: false, segment: 1 << 20 }
    }

    fn reserve(&self, _: u64) -> Result<u64> {
        Err(Error::Unsupported("no reservations".into()))
    }

    fn commit(&self, _: Option<u64>, bytes: u64) -> Result<alloc::Chunk> {
        let out = || Err(leasehold::OutOfMemory::new("the dry well", bytes).into());
        if self.taken.load(Ordering::Relaxed) + bytes > 40 << 20 {
            self.refused.store(true, Ordering::Release);
            return out();
        }
        let layout =
            std::alloc::Layout::from_size_align(bytes as usize, GRANULE).map_err(|_| Error::invalid("size"))?;
        // SAFETY: the size is not zero.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        self.taken.fetch_add(bytes, Ordering::Relaxed);
        if memory.is_null() { out() } else { Ok(alloc::Chunk { addr: memory as u64, bytes, native: 0 }) }
    }

    fn decommit(&self, chunk: alloc::Chunk) -> Result<()> {
        let layout =
            std::alloc::Layout::from_size_align(chunk.bytes as usize, GRANULE).map_err(|_| Error::invalid("size"))?;
        self.taken.fetch_sub(chunk.bytes, Ordering::Relaxed);
        // SAFETY: it came from `commit` with this layout.
        unsafe { std::alloc::dealloc(chunk.addr as *mut u8, layout) };
        Ok(())
    }

    fn release(&self, _: u64, _: u64) {}
}

struct Streams(Defect, Running);

impl Resource for Streams {
    type Payload = WrongStream;
    type Request<'a> = Lease<dyn Stream>;
    const NAME: &'static str = "wrong stream";

    fn create(&self, _: Handle<tags::Stream>, inner: &Lease<dyn Stream>) -> Result<WrongStream> {
        Ok(WrongStream { inner: inner.clone(), defect: self.0, running: self.1.clone() })
    }

    fn recycle(&self, _: &mut WrongStream) -> Fate {
        Fate::Destroy
    }
}

struct WrongStream {
    inner: Lease<dyn Stream>,
    defect: Defect,
    running: Running,
}

impl Tagged for WrongStream {
    type Tag = tags::Stream;
}

impl Timeline for WrongStream {
    fn line(&self) -> &'static Line {
        self.inner.line()
    }
    fn signal(&self) -> Result<u64> {
        self.inner.signal()
    }
    fn refresh(&self) -> Result<u64> {
        self.inner.refresh()
    }

    fn wait(&self, on: Point) -> Result<()> {
        if self.defect == Defect::DropsWaits { Ok(()) } else { self.inner.wait(on) }
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        match self.defect {
            Defect::Hangs => loop {
                std::thread::park();
            },
            Defect::LosesErrors => {
                while self.line().completed() < value.min(self.line().submitted()) {
                    std::thread::yield_now();
                }
                Ok(())
            }
            _ => self.inner.wait_host(value, timeout),
        }
    }
}

impl Stream for WrongStream {
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        let mut ops = ops.to_vec();
        match self.defect {
            Defect::DropsWaits => ops.retain(|op| !matches!(op, Op::Wait(_))),
            Defect::Reorders => ops.reverse(),
            _ => {}
        }
        for op in &mut ops {
            match op {
                Op::Fill(f) if self.defect == Defect::FillsBytes => {
                    f.pattern &= 0xff;
                    f.width = 1;
                }
                Op::Copy(c) if self.defect == Defect::CopiesShort => c.width = c.width.saturating_sub(1),
                _ => {}
            }
        }
        let running = self.running.clone();
        let over = HostCall::new("over", move || {
            running.fetch_sub(1, Ordering::Release);
            Ok(())
        });
        if self.defect == Defect::CompletesEarly {
            self.running.fetch_add(1, Ordering::Relaxed);
            ops.push(Op::Host(&over));
        }
        // SAFETY: the caller's promises hold for these operations too: they touch nothing else.
        let value = match unsafe { self.inner.submit(&ops) } {
            Err(_) if self.defect == Defect::LosesErrors => return Ok(self.line().submitted()),
            other => other?,
        };
        match self.defect {
            Defect::CompletesEarly => self.line().complete(value),
            Defect::BlocksInSubmit => {
                let _ = self.inner.wait_host(value, Some(Duration::from_secs(5)));
            }
            _ => {}
        }
        Ok(value)
    }

    fn flush(&self) -> Result<()> {
        self.inner.flush()
    }
    fn native(&self) -> u64 {
        self.inner.native()
    }
}
