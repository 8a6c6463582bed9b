//! What a case works with: a fresh backend (wrapped or not), its device, and bounded ways to make and await work.
//!
//! This module must not know the cases.

use crate::case::{Need, Outcome, Stop};
use crate::factory::{Factory, TestKernel};
use crate::runner::{Filter, Mode, Variant, Wrap};
use leasehold::core::sync::Mutex;
use leasehold::core::sync::atomic::{AtomicU32, Ordering};
use leasehold::core::{Line, PoolStats};
use leasehold::hal::op::Keep;
use leasehold::hal::{
    Access, Backend, Binding, Device, Dispatch, Download, Gate, GraphExec, KernelDesc, MemoryKind, Op, OpList,
    Pipeline, Plan, Stream, StreamDesc, Upload, Validated,
};
use leasehold::{Buffer, Context, DeviceId, Error, Layout, Lease, Point, Runtime};
use std::cell::UnsafeCell;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the runner looks at when a case hangs.
#[derive(Default)]
pub(crate) struct Watch {
    lines: Mutex<Vec<&'static Line>>,
    backend: Mutex<Option<Arc<dyn Backend>>>,
    device: Mutex<Option<Lease<dyn Device>>>,
}

impl Watch {
    /// Lines and pools, for people.
    pub(crate) fn dump(&self) -> String {
        let mut text = String::new();
        for line in self.lines.lock().iter() {
            let _ = writeln!(text, "  {line:?}");
        }
        let mut pool = |name: &'static str, s: PoolStats| {
            let _ = writeln!(text, "  pool {name}: {} live, {} idle, {} created", s.live, s.idle, s.created);
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

/// Host memory that a copy writes, shared with the submission.
struct Landing(Box<[UnsafeCell<u8>]>);

// SAFETY: the bytes are written by one submission and read after it completed.
unsafe impl Sync for Landing {}

/// What a case works with.
pub struct Env {
    factory: Arc<dyn Factory>,
    backend: Arc<dyn Backend>,
    variant: Variant,
    filter: Filter,
    id: DeviceId,
    watch: Arc<Watch>,
    device: Lease<dyn Device>,
    /// Graphs of the replayed mode, kept to the end of the case.
    graphs: Mutex<Vec<Lease<dyn GraphExec>>>,
}

impl Env {
    pub(crate) fn new(factory: Arc<dyn Factory>, variant: Variant, filter: &Filter, watch: Arc<Watch>) -> Outcome<Env> {
        let plain = match factory.backend() {
            Ok(backend) => backend,
            Err(Error::Unavailable(why)) => return Err(Stop::Skipped(format!("no backend: {why}"))),
            Err(e) => return Err(e.into()),
        };
        let backend: Arc<dyn Backend> = match variant.wrap {
            Wrap::Plain => plain,
            Wrap::Validated => Arc::new(Validated::new(plain)?),
        };
        let id = match backend.devices() {
            Err(Error::Unavailable(why)) => return Err(Stop::Skipped(format!("no driver: {why}"))),
            Err(e) => return Err(e.into()),
            Ok(devices) => match (filter.device, devices.first()) {
                (_, None) => return Err(Stop::Skipped(format!("{} has no devices", backend.kind()))),
                (Some(id), Some(_)) => id,
                (None, Some(first)) => first.id,
            },
        };
        *watch.backend.lock() = Some(backend.clone());
        let device = backend.open(id)?;
        *watch.device.lock() = Some(device.clone());
        Ok(Env { factory, backend, variant, filter: filter.clone(), id, watch, device, graphs: Mutex::new(Vec::new()) })
    }

    pub(crate) fn needs(&self, needs: &[Need]) -> Outcome {
        let caps = self.device.caps();
        let kernel = |k| self.factory.kernel(k).is_some();
        for need in needs {
            let there = match *need {
                Need::Gates => caps.gates,
                Need::Timestamps => caps.timestamps,
                Need::Graphs => caps.graphs,
                Need::HostCalls => caps.host_calls,
                Need::ConcurrentStreams => caps.concurrent_streams,
                Need::Kernel(k) => kernel(k),
                Need::Hold => caps.gates || (caps.concurrent_streams && kernel(TestKernel::SpinUntilFlag)),
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

    /// Nothing may be left over: the backend shuts down.
    pub(crate) fn finish(self) -> Outcome {
        // A failure is known before its submission is over and has given up what it held.
        let lines = self.watch.lines.lock().clone();
        self.until("all streams are over", || lines.iter().all(|l| l.is_idle()))?;
        let Env { backend, device, graphs, watch, .. } = self;
        drop((device, graphs));
        *watch.device.lock() = None;
        *watch.backend.lock() = None;
        backend.shutdown().map_err(|e| Stop::Failed(format!("something was left over at the end of the case: {e}")))
    }

    /// After a case that ended early: what it submitted may still use memory that it has dropped without a mark. That memory stays mapped
    /// as long as its device, so the device stays until all is over, for ever if need be.
    pub(crate) fn abandon(self) {
        let lines = self.watch.lines.lock().clone();
        if self.until("all streams are over", || lines.iter().all(|l| l.is_idle())).is_err() {
            std::mem::forget(self);
        }
    }

    /// The backend, wrapped where the variant says so.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The device.
    pub fn device(&self) -> &Lease<dyn Device> {
        &self.device
    }

    /// The device's name.
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// How long a single wait may take.
    pub fn patience(&self) -> Duration {
        self.filter.patience
    }

    /// `full` repetitions when thorough, a tenth otherwise.
    pub fn rounds(&self, full: u64) -> u64 {
        if self.filter.thorough { full } else { full.div_ceil(10) }
    }

    /// Whether work is replayed.
    pub fn is_replayed(&self) -> bool {
        self.variant.mode == Mode::Replayed
    }

    /// A stream.
    pub fn stream(&self) -> Outcome<Lease<dyn Stream>> {
        let stream = self.device.stream(&StreamDesc::default())?;
        self.watch.lines.lock().push(stream.line());
        Ok(stream)
    }

    /// A gate, and the value that it has not reached yet.
    pub fn gate(&self) -> Outcome<(Lease<dyn Gate>, u64)> {
        let gate = self.device.gate()?;
        self.watch.lines.lock().push(gate.line());
        let next = gate.line().submitted() + 1;
        Ok((gate, next))
    }

    /// Device memory.
    pub fn buffer(&self, stream: &Lease<dyn Stream>, bytes: u64) -> Outcome<Lease<Buffer>> {
        Ok(self.device.memory(MemoryKind::Device)?.alloc(Layout::new(bytes), leasehold_on(stream))?)
    }

    /// A test kernel's description.
    pub fn desc(&self, kernel: TestKernel) -> Outcome<KernelDesc<'static>> {
        self.factory.kernel(kernel).ok_or_else(|| Stop::Skipped(format!("{} has no kernel {kernel:?}", self.id)))
    }

    /// A test kernel, ready.
    pub fn kernel(&self, kernel: TestKernel) -> Outcome<Lease<Pipeline>> {
        Ok(self.device.pipeline(&self.desc(kernel)?)?)
    }

    /// Submits operations; in the replayed mode (waits apart) as a graph that is launched.
    ///
    /// The case keeps the memory alive until the value is complete: buffers are dropped only after their use was marked.
    pub fn submit(&self, stream: &Lease<dyn Stream>, ops: &[Op<'_>]) -> Outcome<u64> {
        Ok(self.try_submit(stream, ops)?)
    }

    /// As [`submit`](Self::submit), with the backend's own error.
    pub fn try_submit(&self, stream: &Lease<dyn Stream>, ops: &[Op<'_>]) -> Result<u64, Error> {
        if self.variant.mode == Mode::Eager {
            return direct(stream, ops);
        }
        let (waits, rest): (Vec<Op<'_>>, Vec<Op<'_>>) = ops.iter().partition(|op| matches!(op, Op::Wait(_)));
        if !waits.is_empty() {
            direct(stream, &waits)?;
        }
        let mut list = OpList::new();
        for op in &rest {
            list.push(op);
        }
        let graph = self.device.instantiate(Plan::new(list))?;
        let value = direct(stream, &[Op::Graph(&graph)]);
        self.graphs.lock().push(graph);
        value
    }

    /// Submits one launch.
    pub fn dispatch(
        &self,
        stream: &Lease<dyn Stream>,
        kernel: &Lease<Pipeline>,
        blocks: u32,
        bindings: &[Binding],
        params: &[u8],
    ) -> Outcome<u64> {
        let block = [TestKernel::BLOCK.min(kernel.block_threads), 1, 1];
        let op = Op::Dispatch(Dispatch { pipeline: kernel, grid: [blocks, 1, 1], block, shared: 0, bindings, params });
        self.submit(stream, &[op])
    }

    /// Fills a buffer of `u32`s with the test kernel.
    pub fn kernel_fill(
        &self,
        stream: &Lease<dyn Stream>,
        kernel: &Lease<Pipeline>,
        buffer: &Lease<Buffer>,
        value: u32,
    ) -> Outcome<u64> {
        let blocks = (buffer.len() / 4).div_ceil(u64::from(TestKernel::BLOCK)) as u32;
        self.dispatch(stream, kernel, blocks, &[bind(buffer, Access::Write)], &value.to_le_bytes())
    }

    /// Blocks until a value is over, for a bounded time.
    pub fn wait(&self, stream: &Lease<dyn Stream>, value: u64) -> Outcome {
        Ok(self.try_wait(stream, value)?)
    }

    /// As [`wait`](Self::wait), with the backend's own error.
    pub fn try_wait(&self, stream: &Lease<dyn Stream>, value: u64) -> Result<(), Error> {
        stream.wait_host(value, Some(self.patience()))
    }

    /// Blocks until everything submitted to a stream is over.
    pub fn drain(&self, stream: &Lease<dyn Stream>) -> Outcome {
        self.wait(stream, stream.line().submitted())
    }

    /// Blocks until a condition holds, by asking.
    pub fn until(&self, what: &str, mut condition: impl FnMut() -> bool) -> Outcome {
        let start = Instant::now();
        while !condition() {
            if start.elapsed() > self.patience() {
                return Err(Stop::Failed(format!("{what}: not after {:?}", self.patience())));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Blocks until a point is over, whoever its stream is.
    pub fn reached(&self, point: Point) -> Outcome {
        Ok(point.line().wait(point.value(), Some(self.patience()))?)
    }

    /// Writes bytes to a buffer and waits.
    pub fn write(&self, stream: &Lease<dyn Stream>, buffer: &Lease<Buffer>, bytes: &[u8]) -> Outcome {
        let keep: Keep = Arc::new(bytes.to_vec());
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
    pub fn read(&self, stream: &Lease<dyn Stream>, buffer: &Lease<Buffer>) -> Outcome<Vec<u8>> {
        let landing = Arc::new(Landing((0..buffer.len()).map(|_| UnsafeCell::new(0xa5)).collect()));
        let keep: Keep = landing.clone();
        let download = Download {
            src: buffer.addr(),
            native: buffer.native(),
            dst: landing.0.as_ptr().cast_mut().cast(),
            bytes: buffer.len(),
            keep: Some(&keep),
        };
        let value = direct(stream, &[Op::Download(download)])?;
        self.wait(stream, value)?;
        // SAFETY: the submission that wrote them is complete.
        Ok(landing.0.iter().map(|b| unsafe { *b.get() }).collect())
    }

    /// As [`read`](Self::read), as `u32`s.
    pub fn read_u32(&self, stream: &Lease<dyn Stream>, buffer: &Lease<Buffer>) -> Outcome<Vec<u32>> {
        let bytes = self.read(stream, buffer)?;
        Ok(bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
    }

    /// Holds a stream back: what is submitted from now on does not run until the hold is released (or dropped).
    pub fn hold(&self, stream: &Lease<dyn Stream>) -> Outcome<Hold> {
        if self.device.caps().gates {
            let (gate, value) = self.gate()?;
            direct(stream, &[Op::Wait(gate.line().at(value))])?;
            return Ok(Hold(Holding::Gate(gate, value)));
        }
        let kernel = self.kernel(TestKernel::SpinUntilFlag)?;
        self.spin(stream, &kernel)
    }

    /// As [`hold`](Self::hold), by a running kernel where there is one: the hold itself then rests on no wait, so that a backend whose
    /// waits do nothing does not escape it. Also gives whoever ignores a wait the time to run ahead, before [`Hold::release_late`].
    pub fn hold_running(&self, stream: &Lease<dyn Stream>) -> Outcome<Hold> {
        match self.kernel(TestKernel::SpinUntilFlag) {
            Ok(kernel) => self.spin(stream, &kernel),
            Err(_) => self.hold(stream),
        }
    }

    fn spin(&self, stream: &Lease<dyn Stream>, kernel: &Lease<Pipeline>) -> Outcome<Hold> {
        let memory = self.device.memory(MemoryKind::Pinned)?;
        let shared = memory.alloc(Layout::new(8), leasehold_on(stream))?;
        flag(&shared).store(0, Ordering::Release);
        let binding = |at: u64, access| Binding { addr: shared.addr() + at, len: 4, native: shared.native(), access };
        let limit = u32::try_from(self.patience().as_millis()).unwrap_or(u32::MAX).to_le_bytes();
        let bindings = [binding(0, Access::Read), binding(4, Access::Write)];
        let op =
            Dispatch { pipeline: kernel, grid: [1; 3], block: [1; 3], shared: 0, bindings: &bindings, params: &limit };
        let value = direct(stream, &[Op::Dispatch(op)])?;
        shared.mark_write(stream.line().at(value));
        stream.flush()?;
        Ok(Hold(Holding::Flag(shared)))
    }

    /// A context with the backend and nothing else.
    pub fn context(&self) -> Context {
        Context::with_backends(vec![self.backend.clone()])
    }

    /// A runtime on the device, in a context of its own.
    pub fn runtime(&self) -> Outcome<Runtime> {
        let runtime = self.context().runtime(self.id)?;
        self.watch.lines.lock().push(runtime.stream().raw().line());
        Ok(runtime)
    }

    /// Does work with a runtime: at once, or by recording it and launching the graph.
    pub fn perform(&self, runtime: &Runtime, work: impl Fn(&Runtime) -> Result<(), Error>) -> Outcome {
        match self.variant.mode {
            Mode::Eager => work(runtime)?,
            Mode::Replayed => {
                runtime.record_graph(work)?.launch()?;
            }
        }
        Ok(())
    }

    /// Holds a runtime's stream back.
    pub fn hold_runtime(&self, stream: &leasehold::Stream) -> Outcome<Hold> {
        self.hold(stream.raw())
    }
}

/// A stream that is held back.
#[must_use = "a hold that is dropped is released"]
pub struct Hold(Holding);

enum Holding {
    Gate(Lease<dyn Gate>, u64),
    Flag(Lease<Buffer>),
    Released,
}

impl Hold {
    /// As [`release`](Self::release), a few milliseconds later: work that should have waited has run by then, if it did not wait.
    pub fn release_late(self) -> Outcome {
        std::thread::sleep(Duration::from_millis(3));
        self.release()
    }

    /// Lets the stream go on.
    pub fn release(mut self) -> Outcome {
        Ok(self.0.release()?)
    }
}

impl Holding {
    fn release(&mut self) -> Result<(), Error> {
        match std::mem::replace(self, Holding::Released) {
            Holding::Gate(gate, value) => gate.signal_host(value),
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
        // A case that ended early must leave nobody waiting; what goes wrong here has gone wrong there already.
        let _ = self.0.release();
    }
}

/// The flag at the beginning of pinned memory.
fn flag(shared: &Lease<Buffer>) -> &AtomicU32 {
    // SAFETY: pinned memory is host memory at its address, aligned to 256, as long as its lease lives.
    unsafe { &*(shared.addr() as *const AtomicU32) }
}

/// A buffer as a binding.
pub(crate) fn bind(buffer: &Lease<Buffer>, access: Access) -> Binding {
    Binding { addr: buffer.addr(), len: buffer.len(), native: buffer.native(), access }
}

/// The stream as the allocator wants it.
pub(crate) fn leasehold_on(stream: &Lease<dyn Stream>) -> leasehold::hal::alloc::On<'_> {
    leasehold::hal::alloc::On { line: stream.line(), timeline: &**stream }
}

/// Submits without recording.
pub(crate) fn direct(stream: &Lease<dyn Stream>, ops: &[Op<'_>]) -> Result<u64, Error> {
    // SAFETY: pipelines, stamps and graphs are of the stream's device. Cases keep buffers until their last use is complete or mark it
    // before they drop them; host memory is kept by the submission. Bindings tell the truth about the test kernels.
    unsafe { stream.submit(ops) }
}
