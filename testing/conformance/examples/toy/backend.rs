//! `toy:0`: a backend in one file. Memory is the process's, a stream is a thread, a kernel is a
//! Rust function.
//!
//! The guide "Write a backend" explains it. `main.rs` beside it runs the conformance suite on it.

use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::backend::sync::{Arc, Condvar, Mutex};
use leasehold::backend::{
    Allocator, AllocatorConfig, Backend, BackendKind, Backing, BackingCaps, Chunk, CpuArgs, CpuFn,
    Description, Device, DeviceInfo, Dispatch, FixedSlotStore, ForkGuard, GraphExec, Handle,
    HostKind, Index, KernelDesc, KernelSource, MemoryInfo, MemoryKind, Op, OpList, Pipeline, Plan,
    PoolConfig, PoolManager, PoolStats, Recycle, Resource, SlotPool, Stream, StreamDesc, Tagged,
    Timeline, TimelineOwner, TimelineSource, TimestampQuery, panics, tags,
};
use leasehold::{DeviceId, Error, Fault, Lease, OutOfMemory, Result, Timepoint};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::{null_mut, with_exposed_provenance_mut as pointer};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The kind of this backend: its device is `toy:0`.
pub const KIND: BackendKind = BackendKind::Other("toy");
const GRANULE: u64 = 64 << 10;
const MEMORY: u64 = 1 << 30;

fn id() -> DeviceId {
    DeviceId::new(KIND, 0)
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported(format!("{}: {what}", id()).into())
}

// ---- memory -----------------------------------------------------------------------------------

/// The process's allocator, as a source of segments: at most `MEMORY` of both kinds together.
struct Heap {
    used: Arc<AtomicU64>,
}

impl Heap {
    fn layout(bytes: u64) -> Result<Layout> {
        usize::try_from(bytes)
            .ok()
            .and_then(|bytes| Layout::from_size_align(bytes, 4096).ok())
            .ok_or_else(|| OutOfMemory::new("toy", bytes).into())
    }
}

// SAFETY: the process's allocator lends each block once, with as many bytes as the layout says.
unsafe impl Backing for Heap {
    fn caps(&self) -> BackingCaps {
        BackingCaps {
            granule: GRANULE,
            segment: 1 << 20,
            physical: MEMORY,
            ..BackingCaps::default()
        }
    }

    fn reserve(&self, _: u64) -> Result<u64> {
        Err(unsupported("no addresses without memory"))
    }

    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        if at.is_some() || bytes == 0 {
            return Err(unsupported("memory is where the process's allocator has it"));
        }
        let layout = Self::layout(bytes)?;
        let fits = |used: u64| used.checked_add(bytes).filter(|used| *used <= MEMORY);
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        // SAFETY: the layout has bytes.
        let block = if taken { unsafe { alloc_zeroed(layout) } } else { null_mut() };
        if block.is_null() {
            if taken {
                self.used.fetch_sub(bytes, Ordering::Relaxed);
            }
            return Err(OutOfMemory::new("toy", bytes).into());
        }
        Ok(Chunk { addr: block.expose_provenance() as u64, bytes, native: 0 })
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        // SAFETY: the caller gives back what `commit` gave, of this layout.
        unsafe { dealloc(pointer(chunk.addr as usize), Self::layout(chunk.bytes)?) };
        self.used.fetch_sub(chunk.bytes, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn release(&self, _: u64, _: u64) {}
}

fn allocator(used: &Arc<AtomicU64>) -> Result<Allocator> {
    // The host may read and write it, and no driver has pinned it.
    let config = AllocatorConfig { host_kind: HostKind::Pageable, ..AllocatorConfig::default() };
    Allocator::new(Box::new(Heap { used: used.clone() }), config)
}

// ---- streams ----------------------------------------------------------------------------------

/// The timelines whose threads have not ended.
#[derive(Default)]
struct Running {
    timelines: Mutex<Vec<&'static Timeline>>,
    ended: Condvar,
}

/// A stream: a queue, and the thread that works it off.
struct ToyStream {
    timeline: Arc<TimelineOwner>,
    /// The submission lock: values are taken in the order in which the thread gets the work.
    queue: Mutex<mpsc::Sender<(u64, OpList)>>,
    shared: u32,
    process: ForkGuard,
}

impl Tagged for ToyStream {
    type Tag = tags::Stream;
}

impl ToyStream {
    fn new(device: &Streams) -> Result<Self> {
        let timeline = Arc::new(TimelineOwner::take()?);
        let (queue, work) = mpsc::channel::<(u64, OpList)>();
        let (owner, start, running) = (timeline.clone(), device.start, device.running.clone());
        running.timelines.lock().push(owner.timeline());
        thread::spawn(move || {
            // The loop ends when the stream is dropped and its work is done.
            for (value, ops) in work {
                // SAFETY: `submit`'s contract holds until the value is complete.
                let done = unsafe { run_all(&owner, start, value, &ops) };
                if let Err(cause) = done {
                    owner.poison(value, cause);
                }
                drop(ops); // host memory and leases go before the value is complete
                owner.complete(value);
            }
            running.timelines.lock().retain(|t| t.id() != owner.timeline().id());
            running.ended.notify_all();
        });
        Ok(Self {
            timeline,
            queue: Mutex::new(queue),
            shared: device.shared,
            process: ForkGuard::here(),
        })
    }
}

/// Runs the operations of a submission, up to the first failure.
///
/// # Safety
/// - As [`Stream::submit`].
unsafe fn run_all(owner: &TimelineOwner, start: Instant, value: u64, ops: &OpList) -> Result<()> {
    let timeline = owner.timeline();
    if timeline.failed(value) {
        return Ok(()); // poisoned by an earlier submission: nothing runs
    }
    for op in ops.iter() {
        if let Op::Wait(on) = op {
            on.timeline().wait(on.value(), None)?; // the cause of the awaited stream, unchanged
            continue;
        }
        // SAFETY: by the caller's contract. A panic is a failure, whose text is kept.
        let done = panics::caught(|| unsafe { run(timeline, start, value, &op) });
        let cause = match done {
            Ok(Ok(())) => continue,
            Ok(Err(error)) if error.is_external() => return Err(error),
            Ok(Err(error)) => error.to_string(),
            Err(text) => text,
        };
        return Err(Fault::new(op.name(), format!("{} {timeline:?}", id()), value, cause).into());
    }
    Ok(())
}

/// Runs one operation.
///
/// # Safety
/// - As [`Stream::submit`].
unsafe fn run(timeline: &Timeline, start: Instant, value: u64, op: &Op<'_>) -> Result<()> {
    let at = |address: u64| pointer::<u8>(address as usize);
    match op {
        // The address of no bytes may be any number.
        Op::Copy(c) if c.width == 0 => {}
        Op::Upload(u) if u.bytes == 0 => {}
        Op::Download(d) if d.bytes == 0 => {}
        Op::Copies(copies) => {
            for c in copies.pieces().iter().filter(|c| c.bytes != 0) {
                // SAFETY: both sides are valid, and do not overlap: the type says so.
                unsafe { at(c.src).copy_to_nonoverlapping(at(c.dst), c.bytes as usize) }
            }
        }
        Op::Copy(c) => {
            for row in 0..c.rows {
                let (from, to) = (at(c.src + row * c.src_pitch), at(c.dst + row * c.dst_pitch));
                // SAFETY: both rows are valid, and do not overlap: `Op::check`, and the caller for
                // several rows.
                unsafe { from.copy_to_nonoverlapping(to, c.width as usize) }
            }
        }
        // SAFETY: both sides are valid. Host memory and device memory are different memory.
        Op::Upload(u) => unsafe { at(u.dst).copy_from_nonoverlapping(u.src, u.bytes as usize) },
        // SAFETY: as above.
        Op::Download(d) => unsafe { at(d.src).copy_to_nonoverlapping(d.dst, d.bytes as usize) },
        Op::Fill(f) => {
            let (pattern, width) = (f.pattern.to_le_bytes(), u64::from(f.width).min(f.bytes));
            // SAFETY: the destination has these bytes. Each copy doubles the part that is filled.
            unsafe {
                at(f.dst).copy_from_nonoverlapping(pattern.as_ptr(), width as usize);
                let mut filled = width;
                while filled < f.bytes {
                    let more = filled.min(f.bytes - filled);
                    at(f.dst).copy_to_nonoverlapping(at(f.dst + filled), more as usize);
                    filled += more;
                }
            }
        }
        // SAFETY: by the caller's contract.
        Op::Dispatch(d) => unsafe { dispatch(d) },
        Op::WriteTimestamp(t) => t.set(start.elapsed().as_nanos() as u64),
        // A wait of the call for its own stream is an error in there, and no deadlock.
        Op::Host(call) => timeline.run_call(value, || call.run())?,
        other => return Err(unsupported(other.kind())),
    }
    Ok(())
}

/// Runs the tiles of a launch, one after the other.
///
/// # Safety
/// - As [`Stream::submit`].
unsafe fn dispatch(d: &Dispatch<'_>) {
    // SAFETY: a pipeline of this device keeps the function that `pipeline` was given.
    let kernel =
        unsafe { std::mem::transmute::<*const (), CpuFn>(pointer(d.pipeline.native as usize)) };
    let mut shared = vec![0u8; d.shared as usize + 63];
    let aligned = shared.as_ptr().align_offset(64);
    let shared = (shared.as_mut_ptr().wrapping_add(aligned), d.shared);
    // SAFETY: the bindings are valid by the caller's contract, the shared memory is this launch's.
    let mut args = unsafe { CpuArgs::new((d.grid, d.block), d.bindings, d.params, shared) };
    let [xs, ys, zs] = d.grid;
    for z in 0..zs {
        for y in 0..ys {
            for x in 0..xs {
                args.set_tile([x, y, z]);
                // SAFETY: the runtime's check has accepted the launch.
                unsafe { kernel(&args) }
            }
        }
    }
}

// SAFETY: the thread completes a value after its operations are over, one submission after the
// other. A wait is an operation.
unsafe impl TimelineSource for ToyStream {
    fn timeline(&self) -> &'static Timeline {
        self.timeline.timeline()
    }

    fn signal(&self) -> Result<u64> {
        Ok(self.timeline().submitted())
    }

    fn refresh(&self) -> Result<u64> {
        Ok(self.timeline().completed())
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        // SAFETY: a wait names no memory.
        unsafe { self.submit(&[Op::Wait(on)]) }.map(drop)
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.timeline().wait(value, timeout)
    }
}

// SAFETY: as above. An operation touches what it names, before its value is complete.
unsafe impl Stream for ToyStream {
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        // A child of a fork has the stream and not its thread.
        self.process.check(|_| "toy:0 was opened before a fork; open it in the child".into())?;
        let queue = self.queue.lock();
        let timeline = self.timeline();
        timeline.check(timeline.submitted())?; // a poisoned stream takes nothing
        let mut list = OpList::new();
        for op in ops {
            op.check(timeline, self.shared)?;
            if matches!(op, Op::Foreign(_) | Op::Graph(_)) {
                return Err(unsupported(op.kind()));
            }
            list.push(op);
        }
        let value = timeline.submitted() + 1;
        queue.send((value, list)).map_err(|_| Error::state("the stream's thread is gone"))?;
        self.timeline.advance()?;
        for op in ops {
            if let Op::Wait(on) = op {
                self.timeline.learn(*on);
            }
        }
        Ok(value)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn native(&self) -> u64 {
        0
    }
}

struct Streams {
    start: Instant,
    shared: u32,
    running: Arc<Running>,
}

impl Resource for Streams {
    type Payload = ToyStream;
    type Request<'a> = ();
    const NAME: &'static str = "stream";

    fn create(&self, _: Handle<tags::Stream>, (): &()) -> Result<ToyStream> {
        ToyStream::new(self)
    }

    /// A stream is not used again. Its thread ends once its work is done, and no drop waits.
    fn recycle(&self, _: &mut ToyStream) -> Recycle {
        Recycle::Destroy
    }
}

// ---- kernels and timestamps -------------------------------------------------------------------

struct Pipelines;

impl Resource for Pipelines {
    type Payload = Pipeline;
    type Request<'a> = (KernelDesc<'a>, CpuFn);
    const NAME: &'static str = "pipeline";

    fn create(
        &self,
        _: Handle<tags::Pipeline>,
        (desc, function): &Self::Request<'_>,
    ) -> Result<Pipeline> {
        let native = (*function as *const ()).expose_provenance() as u64;
        Ok(Pipeline::new(desc, native, u32::MAX))
    }
}

struct Timestamps;

impl Resource for Timestamps {
    type Payload = TimestampQuery;
    type Request<'a> = ();
    const NAME: &'static str = "timestamp";

    fn create(&self, _: Handle<tags::TimestampQuery>, (): &()) -> Result<TimestampQuery> {
        Ok(TimestampQuery::new(0))
    }

    fn fits(&self, idle: &mut TimestampQuery, (): &()) -> bool {
        idle.clear();
        true
    }
}

// ---- the device -------------------------------------------------------------------------------

struct ToyDevice {
    description: Description,
    used: Arc<AtomicU64>,
    memory: Allocator,
    pinned: Allocator,
    streams: SlotPool<Streams>,
    running: Arc<Running>,
    pipelines: PoolManager<Pipelines, (String, String, usize)>,
    timestamps: SlotPool<Timestamps>,
}

impl Tagged for ToyDevice {
    type Tag = tags::Device;
}

impl ToyDevice {
    fn new(running: Arc<Running>) -> Result<Self> {
        let mut description = Description::new(info());
        description.caps.host_visible = true;
        description.caps.pageable_memory_access = true;
        description.caps.timestamps = true;
        description.caps.host_calls = true;
        description.caps.concurrent_streams = true;
        description.caps.waits_for_any_timeline = true;
        let used = Arc::new(AtomicU64::new(0));
        let limits = &description.limits;
        let streams =
            Streams { start: Instant::now(), shared: limits.shared, running: running.clone() };
        let most = PoolConfig { max_live: Some(limits.streams), ..PoolConfig::default() };
        let pipelines = PoolManager::new();
        pipelines.configure(Pipelines, PoolConfig::default())?;
        Ok(Self {
            memory: allocator(&used)?,
            pinned: allocator(&used)?,
            used,
            streams: SlotPool::new(streams, most)?,
            running,
            pipelines,
            timestamps: SlotPool::new(Timestamps, PoolConfig::default())?,
            description,
        })
    }
}

fn info() -> DeviceInfo {
    DeviceInfo::new(id(), "a toy")
}

// SAFETY: the host may use the memory at its address, and each allocator lends it once. The
// device made all that it lends.
unsafe impl Device for ToyDevice {
    fn description(&self) -> &Description {
        &self.description
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let used = self.used.load(Ordering::Relaxed);
        Ok(MemoryInfo { total: MEMORY, free: MEMORY - used.min(MEMORY) })
    }

    fn make_current(&self) -> Result<()> {
        Ok(())
    }

    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        match kind {
            MemoryKind::Device => Ok(&self.memory),
            MemoryKind::Pinned => Ok(&self.pinned), // ordinary memory: `Caps::pinned` is false
            other => Err(unsupported(&format!("{other:?} memory"))),
        }
    }

    fn stream(&self, desc: &StreamDesc) -> Result<Lease<dyn Stream>> {
        if let Some(partition) = &desc.partition {
            let id = self.info().id;
            return Err(Error::invalid(format!("{partition:?} is not of {id}, which has none")));
        }
        Ok(Lease::map(self.streams.acquire(&())?, |s| s as &dyn Stream))
    }

    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        desc.validate()?;
        let KernelSource::Cpu(function) = desc.source else {
            return Err(unsupported(desc.source.kind()));
        };
        let key = (desc.name.to_string(), desc.entry.to_string(), function as usize);
        let pipeline = self.pipelines.get_or_create(&key, &(desc.clone(), function))?;
        if *pipeline.bindings != *desc.bindings || pipeline.params != desc.params {
            let text = format!("kernel {} was declared otherwise before", desc.name);
            return Err(Error::invalid(text));
        }
        Ok(pipeline)
    }

    fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        self.timestamps.acquire(&())
    }

    unsafe fn elapsed(&self, start: &TimestampQuery, end: &TimestampQuery) -> Result<Duration> {
        match (start.get(), end.get()) {
            (Some(start), Some(end)) => Ok(Duration::from_nanos(end.saturating_sub(start))),
            _ => Err(Error::state("a timestamp is not written yet; wait for its event first")),
        }
    }

    unsafe fn instantiate(&self, _: Plan) -> Result<Lease<dyn GraphExec>> {
        Err(unsupported("no graphs"))
    }

    fn peer_access(&self, peer: DeviceId) -> Result<bool> {
        if peer == id() {
            return Ok(true);
        }
        Err(Error::NotFound(format!("{peer}: {} has no such peer", id()).into()))
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        let end = timeout.and_then(|limit| Instant::now().checked_add(limit));
        let submitted: Vec<_> =
            self.running.timelines.lock().iter().map(|t| (*t, t.submitted())).collect();
        let waits = submitted.into_iter().map(|(timeline, value)| {
            timeline.wait(value, end.map(|end| end.saturating_duration_since(Instant::now())))
        });
        // All of them, whatever one says; then the first error.
        waits.fold(Ok(()), Result::and)
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("stream", self.streams.stats());
        report("pipeline", self.pipelines.stats());
        report("timestamp", self.timestamps.stats());
    }
}

struct Devices {
    running: Arc<Running>,
}

impl Resource for Devices {
    type Payload = ToyDevice;
    type Request<'a> = ();
    const NAME: &'static str = "device";

    fn create(&self, _: Handle<tags::Device>, (): &()) -> Result<ToyDevice> {
        ToyDevice::new(self.running.clone())
    }
}

/// The backend.
pub struct ToyBackend {
    devices: FixedSlotStore<Devices>,
    running: Arc<Running>,
}

impl ToyBackend {
    /// A backend with one device, `toy:0`.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new() -> Result<Self> {
        let running = Arc::new(Running::default());
        let devices = FixedSlotStore::new(Devices { running: running.clone() }, 1)?;
        Ok(Self { devices, running })
    }
}

// SAFETY: there is one device, and the store gives the same resource each time.
unsafe impl Backend for ToyBackend {
    fn kind(&self) -> BackendKind {
        KIND
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![info()])
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        if device != id() {
            return Err(Error::NotFound(format!("{device}: there is 1 device, {}", id()).into()));
        }
        Ok(Lease::map(self.devices.get(Index::new(0), &())?, |d| d as &dyn Device))
    }

    fn shutdown(&self) -> Result<()> {
        self.devices.shutdown()?;
        // The work of dropped streams is finished.
        let mut timelines = self.running.timelines.lock();
        while !timelines.is_empty() {
            self.running.ended.wait(&mut timelines);
        }
        Ok(())
    }

    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("device", self.devices.stats());
    }
}
