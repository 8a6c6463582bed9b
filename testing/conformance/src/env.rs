//! The environment of a case: a new backend (wrapped or not), its device, and bounded functions to
//! submit and await work.
//!
//! This module must not know the cases.

use crate::case::{Case, Need, Outcome, Setup, Stop, skipped};
use crate::factory::{Factory, Faults, TestKernel};
use crate::filter::Filter;
use crate::variant::{Mode, Variant, Wrap};
use leasehold::backend::KeepAlive;
use leasehold::backend::sync::Mutex;
use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::backend::{
    Access, Backend, Binding, Device, Dispatch, Download, GraphExec, HostTimeline, KernelDesc,
    MemoryKind, Op, OpList, Pipeline, Plan, Stream, StreamDesc, Upload, Validated,
};
use leasehold::backend::{PoolStats, Timeline};
use leasehold::{Buffer, Context, DeviceId, Error, Layout, Lease, Runtime, Timepoint};
use std::cell::UnsafeCell;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The objects that the runner reports if a case hangs.
#[derive(Default)]
pub(crate) struct Watch {
    timelines: Mutex<Vec<&'static Timeline>>,
    backend: Mutex<Option<Arc<dyn Backend>>>,
    device: Mutex<Option<Lease<dyn Device>>>,
}

impl Watch {
    /// A description of timelines and pools, for human readers.
    pub(crate) fn dump(&self) -> String {
        let mut text = String::new();
        for timeline in self.timelines.lock().iter() {
            let _ = writeln!(text, "  {timeline:?}");
        }
        let mut pool = |name: &'static str, s: PoolStats| {
            let _ = writeln!(
                text,
                "  pool {name}: {} live, {} idle, {} created",
                s.live, s.idle, s.created
            );
        };
        if let Some(backend) = &*self.backend.lock() {
            backend.pools(&mut pool);
        }
        if let Some(device) = &*self.device.lock() {
            device.pools(&mut pool);
        }
        text
    }
}

/// Host memory that a download writes, shared with the submission.
struct HostBuffer(Box<[UnsafeCell<u8>]>);

// SAFETY: one submission writes the bytes, and they are read after its completion.
unsafe impl Sync for HostBuffer {}

/// A device other than the one under test.
pub struct Other {
    /// The device.
    pub device: Lease<dyn Device>,
    /// The device's backend, wrapped if the variant says so.
    pub backend: Arc<dyn Backend>,
    /// Says whether the device belongs to the backend under test, so that the two may be peers.
    pub same_backend: bool,
}

/// The environment of a case. Only cases of this crate get one, because it submits the operations
/// that they pass.
pub struct Env {
    factory: Arc<dyn Factory>,
    backend: Arc<dyn Backend>,
    faults: Option<Arc<dyn Faults>>,
    variant: Variant,
    filter: Filter,
    id: DeviceId,
    watch: Arc<Watch>,
    device: Lease<dyn Device>,
    /// Other devices and backends, shut down together with those under test.
    others: Mutex<Vec<Lease<dyn Device>>>,
    other_backends: Mutex<Vec<Arc<dyn Backend>>>,
    /// Graphs of the replayed mode, kept until the end of the case.
    graphs: Mutex<Vec<Lease<dyn GraphExec>>>,
}

fn or_skip<T>(result: Result<T, Error>, what: &str) -> Outcome<T> {
    match result {
        Err(Error::Unavailable(why)) => skipped(format!("no {what}: {why}")),
        other => Ok(other?),
    }
}

fn wrapped(plain: Arc<dyn Backend>, wrap: Wrap) -> Outcome<Arc<dyn Backend>> {
    Ok(match wrap {
        Wrap::Plain => plain,
        Wrap::Validated => Arc::new(Validated::new(plain)?),
    })
}

impl Env {
    pub(crate) fn new(
        factory: Arc<dyn Factory>,
        case: &Case,
        variant: Variant,
        filter: &Filter,
        watch: Arc<Watch>,
    ) -> Outcome<Env> {
        let (plain, faults) = match case.setup {
            Setup::Ordinary => (or_skip(factory.backend(), "backend")?, None),
            Setup::OneWorker => (or_skip(factory.one_worker(), "backend")?, None),
            Setup::Faulty => match factory.faulty() {
                Some(faulty) => {
                    or_skip(faulty, "backend").map(|(backend, faults)| (backend, Some(faults)))?
                }
                None => (or_skip(factory.backend(), "backend")?, None),
            },
        };
        let backend = wrapped(plain, variant.wrap)?;
        let devices = or_skip(factory.devices(&*backend), "driver")?;
        let id = match (filter.device, devices.first()) {
            (_, None) => return skipped(format!("{} has no devices", backend.kind())),
            (Some(id), Some(_)) => id,
            (None, Some(first)) => *first,
        };
        *watch.backend.lock() = Some(backend.clone());
        let device = backend.open(id)?;
        *watch.device.lock() = Some(device.clone());
        Ok(Env {
            factory,
            backend,
            faults,
            variant,
            filter: filter.clone(),
            id,
            watch,
            device,
            others: Mutex::new(Vec::new()),
            other_backends: Mutex::new(Vec::new()),
            graphs: Mutex::new(Vec::new()),
        })
    }

    pub(crate) fn needs(&self, needs: &[Need]) -> Outcome {
        let caps = self.device.caps();
        let kernel = |k| self.factory.kernel(k).is_some();
        for need in needs {
            if *need == Need::Pooling && !self.pools_memory()? {
                return skipped(format!(
                    "each buffer of {} comes straight from the driver",
                    self.id
                ));
            }
            let there = match *need {
                Need::HostTimelines => caps.host_timelines,
                Need::Timestamps => caps.timestamps,
                Need::Graphs => caps.graphs,
                Need::Conditionals => caps.conditionals,
                Need::HostCalls => caps.host_calls,
                Need::ConcurrentStreams => caps.concurrent_streams,
                Need::Kernel(k) => kernel(k),
                Need::ForeignCalls => caps.foreign_calls,
                Need::Hold => {
                    caps.host_timelines
                        || (caps.concurrent_streams && kernel(TestKernel::SpinUntilFlag))
                }
                Need::Pooling => true,
            };
            if !there {
                return Err(Stop::Skipped(format!("{} has no {need:?}", self.id)));
            }
        }
        if self.variant.mode == Mode::Replayed && !caps.graphs {
            return Err(Stop::Skipped(format!("{} has no graphs", self.id)));
        }
        Ok(())
    }

    /// Checks that no objects are left: the backend shuts down.
    pub(crate) fn finish(self) -> Outcome {
        self.all_over()?;
        let Env { backend, device, filter, graphs, others, other_backends, watch, .. } = self;
        drop((device, graphs, others));
        *watch.device.lock() = None;
        *watch.backend.lock() = None;
        let left =
            |e: Error| Stop::Failed(format!("something was left over at the end of the case: {e}"));
        let others = std::mem::take(&mut *other_backends.lock());
        backend.shutdown().map_err(left)?;
        // A thread of a communicator gives its leases back a moment after the last call.
        let end = Instant::now() + filter.timeout;
        others.into_iter().try_for_each(|other| {
            loop {
                match other.shutdown() {
                    Err(Error::LeasesOutstanding { .. }) if Instant::now() < end => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    ended => return ended.map_err(left),
                }
            }
        })
    }

    /// Cleans up after a case that ended early. Its submissions may still use memory that it
    /// dropped without a mark. This memory stays mapped as long as its device, so the device is
    /// kept until all work is over, without a limit if necessary.
    pub(crate) fn abandon(self) {
        if self.all_over().is_err() {
            std::mem::forget(self);
        }
    }

    fn all_over(&self) -> Outcome {
        // Streams of runtimes are not watched. Their failures are the case's responsibility.
        for device in std::iter::once(&self.device).chain(&*self.others.lock()) {
            let _ = device.synchronize(Some(self.timeout()));
        }
        // A failure is known before its submission is over and has dropped its leases.
        let timelines = self.watch.timelines.lock().clone();
        self.until("all streams are over", || timelines.iter().all(|l| l.is_idle()))
    }

    /// The backend, wrapped if the variant says so.
    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The device.
    pub(crate) fn device(&self) -> &Lease<dyn Device> {
        &self.device
    }

    /// A second device of the same backend.
    pub(crate) fn second(&self) -> Outcome<Lease<dyn Device>> {
        let second = self.factory.devices(&*self.backend)?.into_iter().find(|id| *id != self.id);
        let Some(id) = second else {
            return skipped(format!("{} is the only device of its backend", self.id));
        };
        let device = self.backend.open(id)?;
        self.others.lock().push(device.clone());
        Ok(device)
    }

    /// A device other than the one under test: a second one of the same backend, or the first one
    /// of the factory's peer.
    pub(crate) fn other(&self) -> Outcome<Other> {
        match self.second() {
            Ok(device) => {
                return Ok(Other { device, backend: self.backend.clone(), same_backend: true });
            }
            Err(Stop::Skipped(_)) => {}
            Err(failed) => return Err(failed),
        }
        let Some(peer) = self.factory.peer() else {
            return skipped(format!("there is no device beside {}", self.id));
        };
        let backend = wrapped(or_skip(peer, "peer")?, self.variant.wrap)?;
        let Some(info) = or_skip(backend.devices(), "peer")?.into_iter().next() else {
            return skipped(format!("{} has no devices", backend.kind()));
        };
        let device = backend.open(info.id)?;
        self.others.lock().push(device.clone());
        self.other_backends.lock().push(backend.clone());
        Ok(Other { device, backend, same_backend: false })
    }

    /// Takes a further backend, wrapped if the variant says so, which is shut down with the one
    /// under test, and opens these of its devices.
    pub(crate) fn adopt(
        &self,
        plain: Arc<dyn Backend>,
        devices: impl Iterator<Item = DeviceId>,
    ) -> Outcome<Context> {
        let backend = wrapped(plain, self.variant.wrap)?;
        self.other_backends.lock().push(backend.clone());
        for id in devices {
            let device = backend.open(id)?;
            self.others.lock().push(device);
        }
        Ok(Context::with_backends(vec![backend]))
    }

    /// A runtime of a context with a stream of its own.
    pub(crate) fn runtime_of(&self, context: &Context, id: DeviceId) -> Outcome<Runtime> {
        let stream = context.runtime(id)?.create_stream()?;
        self.watch.timelines.lock().push(stream.raw().timeline());
        Ok(stream.runtime())
    }

    /// The way of a case's work to the device.
    pub(crate) fn mode(&self) -> Mode {
        self.variant.mode
    }

    /// The control of the driver's faults.
    pub(crate) fn faults(&self) -> Outcome<&Arc<dyn Faults>> {
        self.faults.as_ref().map_or_else(
            || skipped(format!("the driver of {} cannot be made to fail", self.id)),
            Ok,
        )
    }

    /// The factory.
    pub(crate) fn factory(&self) -> &dyn Factory {
        &*self.factory
    }

    /// The device's name.
    pub(crate) fn id(&self) -> DeviceId {
        self.id
    }

    /// The time limit of a single wait.
    pub(crate) fn timeout(&self) -> Duration {
        self.filter.timeout
    }

    /// `full` repetitions when thorough, a tenth otherwise.
    pub(crate) fn rounds(&self, full: u64) -> u64 {
        if self.filter.thorough { full } else { full.div_ceil(10) }
    }

    /// A stream.
    pub(crate) fn stream(&self) -> Outcome<Lease<dyn Stream>> {
        self.stream_of(&self.device)
    }

    /// A stream of another device.
    pub(crate) fn stream_of(&self, device: &Lease<dyn Device>) -> Outcome<Lease<dyn Stream>> {
        let stream = device.stream(&StreamDesc::default())?;
        self.watch.timelines.lock().push(stream.timeline());
        Ok(stream)
    }

    /// A host timeline, and its next unsignalled value.
    pub(crate) fn host_timeline(&self) -> Outcome<(Lease<dyn HostTimeline>, u64)> {
        let host_timeline = self.device.host_timeline()?;
        self.watch.timelines.lock().push(host_timeline.timeline());
        let next = host_timeline.timeline().submitted() + 1;
        Ok((host_timeline, next))
    }

    /// Device memory.
    pub(crate) fn buffer(&self, stream: &Lease<dyn Stream>, bytes: u64) -> Outcome<Lease<Buffer>> {
        self.buffer_of(&self.device, stream, bytes)
    }

    /// Memory of another device.
    pub(crate) fn buffer_of(
        &self,
        device: &Lease<dyn Device>,
        stream: &Lease<dyn Stream>,
        bytes: u64,
    ) -> Outcome<Lease<Buffer>> {
        Ok(device.memory(MemoryKind::Device)?.alloc(Layout::new(bytes), leasehold_on(stream))?)
    }

    /// Returns whether freed device memory is kept for reuse; otherwise each buffer comes directly
    /// from the driver.
    pub(crate) fn pools_memory(&self) -> Outcome<bool> {
        Ok(!self.device.memory(MemoryKind::Device)?.config().debug.pass_through)
    }

    /// A test kernel's description.
    pub(crate) fn desc(&self, kernel: TestKernel) -> Outcome<KernelDesc<'static>> {
        self.factory
            .kernel(kernel)
            .ok_or_else(|| Stop::Skipped(format!("{} has no kernel {kernel:?}", self.id)))
    }

    /// A test kernel's pipeline.
    pub(crate) fn kernel(&self, kernel: TestKernel) -> Outcome<Lease<Pipeline>> {
        Ok(self.device.pipeline(&self.desc(kernel)?)?)
    }

    /// Submits operations. In the replayed mode all operations but waits become a graph, which is
    /// launched.
    ///
    /// The case keeps the memory alive until the value is complete: it drops buffers only after it
    /// marked their use.
    pub(crate) fn submit(&self, stream: &Lease<dyn Stream>, ops: &[Op<'_>]) -> Outcome<u64> {
        Ok(self.try_submit(stream, ops)?)
    }

    /// Like [`submit`](Self::submit), with the backend's own error.
    pub(crate) fn try_submit(
        &self,
        stream: &Lease<dyn Stream>,
        ops: &[Op<'_>],
    ) -> Result<u64, Error> {
        if self.variant.mode == Mode::Eager {
            return direct(stream, ops);
        }
        let (waits, rest): (Vec<Op<'_>>, Vec<Op<'_>>) =
            ops.iter().partition(|op| matches!(op, Op::Wait(_)));
        if !waits.is_empty() {
            direct(stream, &waits)?;
        }
        let mut list = OpList::new();
        for op in &rest {
            list.push(op);
        }
        // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
        // outlives the launches.
        let graph = unsafe { self.device.instantiate(Plan::new(list)) }?;
        let value = direct(stream, &[Op::Graph(&graph)]);
        self.graphs.lock().push(graph);
        value
    }

    /// Submits one launch.
    pub(crate) fn dispatch(
        &self,
        stream: &Lease<dyn Stream>,
        kernel: &Lease<Pipeline>,
        blocks: u32,
        bindings: &[Binding],
        params: &[u8],
    ) -> Outcome<u64> {
        let block = [TestKernel::BLOCK.min(kernel.block_threads), 1, 1];
        let op = Op::Dispatch(Dispatch {
            pipeline: kernel,
            grid: [blocks, 1, 1],
            block,
            shared: 0,
            bindings,
            params,
        });
        self.submit(stream, &[op])
    }

    /// Fills a buffer of `u32`s with the test kernel.
    pub(crate) fn kernel_fill(
        &self,
        stream: &Lease<dyn Stream>,
        kernel: &Lease<Pipeline>,
        buffer: &Lease<Buffer>,
        value: u32,
    ) -> Outcome<u64> {
        let blocks = (buffer.len() / 4).div_ceil(u64::from(TestKernel::BLOCK)) as u32;
        self.dispatch(stream, kernel, blocks, &[bind(buffer, Access::Write)], &value.to_le_bytes())
    }

    /// Blocks until a value is over, with a time limit.
    pub(crate) fn wait(&self, stream: &Lease<dyn Stream>, value: u64) -> Outcome {
        Ok(self.try_wait(stream, value)?)
    }

    /// Like [`wait`](Self::wait), with the backend's own error.
    pub(crate) fn try_wait(&self, stream: &Lease<dyn Stream>, value: u64) -> Result<(), Error> {
        stream.wait_host(value, Some(self.timeout()))
    }

    /// Blocks until all work that was submitted to a stream is over.
    pub(crate) fn drain(&self, stream: &Lease<dyn Stream>) -> Outcome {
        self.wait(stream, stream.timeline().submitted())
    }

    /// Lets a device in stepped time make progress, and publish completed work. Never waits.
    pub(crate) fn nudge(&self) {
        // The result is some stream's failure, or says that work is pending; callers that need
        // either ask for it.
        let _ = self.device.synchronize(Some(Duration::ZERO));
        for device in &*self.others.lock() {
            let _ = device.synchronize(Some(Duration::ZERO));
        }
    }

    /// Gives work that should be waiting the time to run, in case it does not wait.
    pub(crate) fn linger(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.nudge();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Blocks until a condition holds, by polling.
    pub(crate) fn until(&self, what: &str, mut condition: impl FnMut() -> bool) -> Outcome {
        let start = Instant::now();
        while !condition() {
            if start.elapsed() > self.timeout() {
                return Err(Stop::Failed(format!("{what}: not after {:?}", self.timeout())));
            }
            self.nudge();
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Blocks until a timepoint is over, whichever stream it belongs to.
    pub(crate) fn reached(&self, point: Timepoint) -> Outcome {
        let start = Instant::now();
        loop {
            self.nudge();
            match point.timeline().wait(point.value(), Some(Duration::from_millis(2))) {
                Err(Error::Timeout(_)) if start.elapsed() < self.timeout() => {}
                other => return Ok(other?),
            }
        }
    }

    /// The shortest of several tries: the duration without disturbance.
    pub(crate) fn best_of(
        &self,
        tries: u32,
        mut attempt: impl FnMut() -> Outcome,
    ) -> Outcome<Duration> {
        let mut best = Duration::MAX;
        for _ in 0..tries {
            let start = Instant::now();
            attempt()?;
            best = best.min(start.elapsed());
        }
        Ok(best)
    }

    /// Writes bytes to a buffer and waits.
    pub(crate) fn write(
        &self,
        stream: &Lease<dyn Stream>,
        buffer: &Lease<Buffer>,
        bytes: &[u8],
    ) -> Outcome {
        let keep: KeepAlive = Arc::new(bytes.to_vec());
        let Some(source) = keep.downcast_ref::<Vec<u8>>() else {
            return Err(Stop::Failed("the host memory has another type".to_owned()));
        };
        let upload = Upload {
            src: source.as_ptr(),
            dst: buffer.addr(),
            native: buffer.native(),
            bytes: bytes.len() as u64,
            keep: Some(&keep),
        };
        let value = direct(stream, &[Op::Upload(upload)])?;
        self.wait(stream, value)
    }

    /// Reads a buffer in stream order, and waits.
    pub(crate) fn read(
        &self,
        stream: &Lease<dyn Stream>,
        buffer: &Lease<Buffer>,
    ) -> Outcome<Vec<u8>> {
        let copied =
            Arc::new(HostBuffer((0..buffer.len()).map(|_| UnsafeCell::new(0xa5)).collect()));
        let keep: KeepAlive = copied.clone();
        let download = Download {
            src: buffer.addr(),
            native: buffer.native(),
            dst: copied.0.as_ptr().cast_mut().cast(),
            bytes: buffer.len(),
            keep: Some(&keep),
        };
        let value = direct(stream, &[Op::Download(download)])?;
        self.wait(stream, value)?;
        // SAFETY: the submission that wrote them is complete.
        Ok(copied.0.iter().map(|b| unsafe { *b.get() }).collect())
    }

    /// Like [`read`](Self::read), as `u32`s.
    pub(crate) fn read_u32(
        &self,
        stream: &Lease<dyn Stream>,
        buffer: &Lease<Buffer>,
    ) -> Outcome<Vec<u32>> {
        let bytes = self.read(stream, buffer)?;
        Ok(bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
    }

    /// Delays a stream: later submissions do not run until the hold is released (or dropped).
    pub(crate) fn hold(&self, stream: &Lease<dyn Stream>) -> Outcome<Hold> {
        if self.device.caps().host_timelines {
            let (host_timeline, value) = self.host_timeline()?;
            direct(stream, &[Op::Wait(host_timeline.timeline().at(value))])?;
            return Ok(Hold(Holding::HostTimeline(host_timeline, value)));
        }
        let kernel = self.kernel(TestKernel::SpinUntilFlag)?;
        self.spin(stream, &kernel)
    }

    /// Like [`hold`](Self::hold), by a running kernel if the device has it. Such a hold does not
    /// rely on waits, so it works on a backend whose waits do nothing. A stream that ignores a wait
    /// also gets the time to run ahead, before [`Hold::release_late`].
    pub(crate) fn hold_running(&self, stream: &Lease<dyn Stream>) -> Outcome<Hold> {
        match self.kernel(TestKernel::SpinUntilFlag) {
            Ok(kernel) => self.spin(stream, &kernel),
            Err(_) => self.hold(stream),
        }
    }

    fn spin(&self, stream: &Lease<dyn Stream>, kernel: &Lease<Pipeline>) -> Outcome<Hold> {
        let memory = self.device.memory(MemoryKind::Pinned)?;
        let shared = memory.alloc(Layout::new(8), leasehold_on(stream))?;
        flag(&shared).store(0, Ordering::Release);
        let binding = |at: u64, access| Binding {
            addr: shared.addr() + at,
            len: 4,
            native: shared.native(),
            access,
        };
        let limit = u32::try_from(self.timeout().as_millis()).unwrap_or(u32::MAX).to_le_bytes();
        let bindings = [binding(0, Access::Read), binding(4, Access::Write)];
        let op = Dispatch {
            pipeline: kernel,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            bindings: &bindings,
            params: &limit,
        };
        let value = direct(stream, &[Op::Dispatch(op)])?;
        // SAFETY: the timepoint is that of a submission to this stream that uses the buffer, made
        // in order.
        unsafe { shared.mark_write(stream.timeline().at(value)) };
        stream.flush()?;
        Ok(Hold(Holding::Flag(shared)))
    }

    /// A context with only the backend.
    pub(crate) fn context(&self) -> Context {
        Context::with_backends(vec![self.backend.clone()])
    }

    /// A runtime on the device, in a separate context.
    pub(crate) fn runtime(&self) -> Outcome<Runtime> {
        let runtime = self.context().runtime(self.id)?;
        self.watch.timelines.lock().push(runtime.stream().raw().timeline());
        Ok(runtime)
    }

    /// Delays a runtime's stream.
    pub(crate) fn hold_runtime(&self, stream: &leasehold::Stream) -> Outcome<Hold> {
        self.hold(stream.raw())
    }
}

/// A delayed stream.
#[must_use = "a hold that is dropped is released"]
pub struct Hold(Holding);

enum Holding {
    HostTimeline(Lease<dyn HostTimeline>, u64),
    Flag(Lease<Buffer>),
    Released,
}

impl Hold {
    /// Like [`release`](Self::release), a few milliseconds later: by then, work that ignores its
    /// wait has run.
    pub fn release_late(self, env: &Env) -> Outcome {
        env.linger(Duration::from_millis(3));
        self.release()
    }

    /// Releases the stream.
    pub fn release(mut self) -> Outcome {
        Ok(self.0.release()?)
    }
}

impl Holding {
    fn release(&mut self) -> Result<(), Error> {
        match std::mem::replace(self, Holding::Released) {
            Holding::HostTimeline(host_timeline, value) => host_timeline.signal_host(value),
            Holding::Flag(shared) => {
                flag(&shared).store(1, Ordering::Release);
                Ok(())
            }
            Holding::Released => Ok(()),
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A case that ended early must leave no stream waiting. The case has already reported an
        // error of this call.
        let _ = self.0.release();
    }
}

/// The flag at the beginning of pinned memory.
fn flag(shared: &Lease<Buffer>) -> &AtomicU32 {
    // SAFETY: pinned memory is host memory at its address, aligned to 256, as long as its lease
    // lives.
    unsafe { &*(shared.addr() as *const AtomicU32) }
}

/// A buffer as a binding.
pub(crate) fn bind(buffer: &Lease<Buffer>, access: Access) -> Binding {
    Binding { addr: buffer.addr(), len: buffer.len(), native: buffer.native(), access }
}

/// The stream in the allocator's form.
pub(crate) fn leasehold_on(stream: &Lease<dyn Stream>) -> leasehold::backend::On<'_> {
    leasehold::backend::On { timeline: stream.timeline(), source: &**stream }
}

/// Submits without recording.
pub(crate) fn direct(stream: &Lease<dyn Stream>, ops: &[Op<'_>]) -> Result<u64, Error> {
    // SAFETY: pipelines, timepoints and graphs belong to the stream's device. Cases keep buffers
    // until their last use is complete, or mark it before they drop them. The submission keeps host
    // memory. The bindings' accesses are those of the test kernels.
    unsafe { stream.submit(ops) }
}
