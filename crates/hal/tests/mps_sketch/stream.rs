//! Streams, gates and graphs of the sketch: the mapping of operations to encoders.
//!
//! # Protocol
//! A stream's encoding state is behind its lock, which is a leaf: what may call another stream (flushing the source of a wait,
//! staging memory) happens before it is taken. An encoder stays open across submissions, until a blit, a wait, a signal or a commit
//! needs the command buffer between encoders. Values are taken at submission; a command buffer signals the last one it holds.

use crate::mtl::*;
use leasehold_alloc::{Allocator, Buffer, Layout, On};
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use leasehold_core::{
    AnyLease, Error, Fate, Fault, Handle, Lease, Line, LineId, LineOwner, Point, Resource, Result, Tagged, Timeline,
    tags,
};
use leasehold_hal::hazard::Tracker;
use leasehold_hal::*;
use std::any::Any;
use std::collections::HashMap;
use std::sync::Weak;
use std::time::Duration;

/// A command buffer is committed after so many dispatches (candle's number).
pub const DISPATCHES_PER_BUFFER: u32 = 50;

/// What streams need of their device.
pub struct Core {
    pub device: Arc<MTLDevice>,
    pub queue: Retained<MTLCommandQueue>,
    pub staging: Allocator,
    pub lines: LineTable,
    /// Fills of more than a byte: Metal has none.
    pub fill: OnceLock<Retained<MTLComputePipelineState>>,
}

/// From a line to the native event: a point names only the line.
#[derive(Default)]
pub struct LineTable(Mutex<HashMap<LineId, Entry>>);

struct Entry {
    event: Retained<MTLSharedEvent>,
    gate: bool,
    /// None once the stream is gone; its points stay good.
    stream: Weak<State>,
}

impl LineTable {
    fn find(&self, id: LineId) -> Option<(Retained<MTLSharedEvent>, bool, Option<Arc<State>>)> {
        self.0.lock().get(&id).map(|e| (e.event.clone(), e.gate, e.stream.upgrade()))
    }

    pub fn streams(&self) -> Vec<Arc<State>> {
        self.0.lock().values().filter_map(|e| e.stream.upgrade()).collect()
    }
}

/// What a stream is.
pub struct State {
    core: Arc<Core>,
    line: Arc<LineOwner>,
    event: Retained<MTLSharedEvent>,
    /// Orders encoders: untracked resources are not ordered by the queue.
    fence: Retained<MTLFence>,
    encoding: Mutex<Encoding>,
}

/// An open command buffer and its encoder, with what must live until it completes.
#[derive(Default)]
struct Encoding {
    buffer: Option<Retained<MTLCommandBuffer>>,
    encoder: Option<Encoder>,
    tracker: Tracker,
    node: u32,
    dispatches: u32,
    /// The last value that was signalled by a committed buffer.
    signalled: u64,
    /// A gate's point that must come before the buffer may be committed: on a queue that others share, a wait for the host would
    /// hold them up too.
    held: Option<Point>,
    retained: Retain,
}

// SAFETY: command buffers and encoders are not thread-safe, but they are not bound to a thread either. They are only reached through
// `State::encoding`'s lock, which makes uses by several threads happen one after the other.
unsafe impl Send for Encoding {}

enum Encoder {
    Compute(Retained<MTLComputeCommandEncoder>),
    Blit(Retained<MTLBlitCommandEncoder>),
}

/// What a command buffer without retained references needs kept alive, and what its completion does.
#[derive(Default)]
struct Retain {
    objects: Vec<AnyLease>,
    keeps: Vec<op::Keep>,
    stamps: Vec<Lease<Timestamp>>,
    waits: Vec<Point>,
    downloads: Vec<(Lease<Buffer>, HostAddress, usize, Option<op::Keep>)>,
}

/// The host end of a download.
struct HostAddress(*mut u8);

// SAFETY: the submitter promised that the memory stays valid and untouched until the submission completes; only its completion
// handler writes to it.
unsafe impl Send for HostAddress {}

impl State {
    fn now(&self) -> &'static Line {
        self.line.line()
    }

    /// Commits what is open, unless a gate holds it back, and signals the last value that was submitted.
    fn commit(&self, e: &mut Encoding) {
        e.end(&self.fence);
        if e.held.is_some_and(|p| !p.is_settled() && !p.line().failed(p.value())) {
            return;
        }
        let value = self.now().submitted();
        if value == e.signalled {
            return;
        }
        let Some(buffer) = e.buffer.take().or_else(|| self.core.queue.commandBufferWithUnretainedReferences()) else {
            return;
        };
        buffer.encodeSignalEvent_value(&self.event, value);
        let (owner, event, first, retained) =
            (self.line.clone(), self.event.clone(), e.signalled + 1, std::mem::take(&mut e.retained));
        buffer.addCompletedHandler(Box::new(move |done| complete(&owner, &event, first..=value, done, retained)));
        buffer.commit();
        e.signalled = value;
        e.held = None;
        e.dispatches = 0;
    }

    /// The buffer between encoders.
    fn between<'e>(&self, e: &'e mut Encoding) -> Result<&'e MTLCommandBuffer> {
        e.end(&self.fence);
        if e.buffer.is_none() {
            e.buffer = self.core.queue.commandBufferWithUnretainedReferences();
        }
        e.buffer.as_deref().ok_or_else(|| Error::state("Metal gave no command buffer"))
    }

    fn compute<'e>(&self, e: &'e mut Encoding) -> Result<&'e MTLComputeCommandEncoder> {
        if !matches!(e.encoder, Some(Encoder::Compute(_))) {
            let none = || Error::state("Metal gave no encoder");
            let encoder = self.between(e)?.computeCommandEncoderConcurrent().ok_or_else(none)?;
            encoder.waitForFence(&self.fence);
            e.encoder = Some(Encoder::Compute(encoder));
        }
        match &e.encoder {
            Some(Encoder::Compute(c)) => Ok(c),
            _ => Err(Error::state("no compute encoder")),
        }
    }

    fn blit<'e>(&self, e: &'e mut Encoding) -> Result<&'e MTLBlitCommandEncoder> {
        if !matches!(e.encoder, Some(Encoder::Blit(_))) {
            let none = || Error::state("Metal gave no encoder");
            let encoder = self.between(e)?.blitCommandEncoder().ok_or_else(none)?;
            encoder.waitForFence(&self.fence);
            e.encoder = Some(Encoder::Blit(encoder));
        }
        match &e.encoder {
            Some(Encoder::Blit(b)) => Ok(b),
            _ => Err(Error::state("no blit encoder")),
        }
    }

    /// Encodes a wait, which holds the buffer back while a gate is not signalled.
    fn encode_wait(&self, e: &mut Encoding, on: Point) -> Result<()> {
        if on.line_id() == self.now().id() || on.is_settled() {
            return Ok(());
        }
        on.line().check(on.value())?;
        let Some((event, gate, _)) = self.core.lines.find(on.line_id()) else {
            return Err(Error::Unsupported(format!("{on:?} is no line of this device").into()));
        };
        if gate {
            // What came before must not be held up.
            self.commit(e);
        }
        self.between(e)?.encodeWaitForEvent_value(&event, on.value());
        e.retained.waits.push(on);
        if gate {
            e.held = Some(on);
        }
        Ok(())
    }

    fn encode(&self, e: &mut Encoding, op: &Op<'_>, staged: &mut Staged) -> Result<()> {
        match op {
            Op::Wait(on) => self.encode_wait(e, *on)?,
            Op::Dispatch(d) if d.grid.contains(&0) => {}
            Op::Dispatch(d) => {
                e.retained.objects.push(d.pipeline.clone().into_any());
                // SAFETY: the pipeline belongs to this device and its lease was just retained.
                let state = unsafe { &*(d.pipeline.native as *const MTLComputePipelineState) };
                self.dispatch(e, state, d.grid, d.block, d.shared, d.bindings, d.params)?;
            }
            Op::Copy(c) => {
                let blit = self.blit(e)?;
                let ((from, src), (to, dst)) = (place(c.src_native, c.src), place(c.dst_native, c.dst));
                for row in 0..c.rows {
                    let at = |offset: usize, pitch: u64| offset + (row * pitch) as usize;
                    blit.copyFromBuffer(from, at(src, c.src_pitch), to, at(dst, c.dst_pitch), c.width as usize);
                }
            }
            Op::Fill(f) if f.width == 1 => {
                let (buffer, at) = place(f.native, f.dst);
                self.blit(e)?.fillBuffer_range_value(buffer, at..at + f.bytes as usize, f.pattern as u8);
            }
            Op::Fill(f) => {
                let make =
                    || self.core.device.newComputePipelineState("fill").map_err(|e| Error::Compile { log: e.into() });
                let state = match self.core.fill.get() {
                    Some(state) => state.clone(),
                    None => self.core.fill.get_or_init(|| make().unwrap_or_else(|_| unreachable!("built in"))).clone(),
                };
                let binding = Binding { addr: f.dst, len: f.bytes, native: f.native, access: Access::Write };
                let n = (f.bytes / u64::from(f.width)) as u32;
                self.dispatch(e, &state, [n, 1, 1], [1; 3], 0, &[binding], &f.pattern.to_le_bytes())?;
            }
            Op::Upload(u) => {
                let stage = staged.next()?;
                // SAFETY: the caller keeps the source readable; the staging buffer was allocated with this many bytes of host memory.
                unsafe { std::ptr::copy_nonoverlapping(u.src, stage.addr() as *mut u8, u.bytes as usize) };
                let ((from, src), (to, dst)) = (place(stage.native(), stage.addr()), place(u.native, u.dst));
                self.blit(e)?.copyFromBuffer(from, src, to, dst, u.bytes as usize);
                e.retained.objects.push(stage.into_any());
                e.retained.keeps.extend(u.keep.cloned());
            }
            Op::Download(d) => {
                let stage = staged.next()?;
                let ((from, src), (to, dst)) = (place(d.native, d.src), place(stage.native(), stage.addr()));
                self.blit(e)?.copyFromBuffer(from, src, to, dst, d.bytes as usize);
                e.retained.downloads.push((stage, HostAddress(d.dst), d.bytes as usize, d.keep.cloned()));
            }
            Op::Stamp(stamp) => {
                let none = || Error::state("Metal gave no encoder");
                let encoder = self.between(e)?.computeCommandEncoderSampling(stamp.native()).ok_or_else(none)?;
                encoder.endEncoding();
                e.retained.stamps.push((*stamp).clone());
            }
            Op::Foreign(call) => {
                // A library of Metal's encodes into a command buffer: that is the native word here.
                let buffer = std::ptr::from_ref(self.between(e)?) as u64;
                call.run(buffer)?;
            }
            Op::Graph(graph) => {
                // SAFETY: the word of a graph of this device, which the lease (a wrapper's or our own) keeps alive.
                let exec = unsafe { &*(graph.native() as *const Exec) };
                e.retained.objects.push((*graph).clone().into_any());
                let plan = exec.plan.lock();
                plan.ops.iter().try_for_each(|op| self.encode(e, &op, staged))?;
            }
            other => return Err(Error::Unsupported(format!("Metal has no {}", other.kind()).into())),
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of a dispatch, also for the built-in fill")]
    fn dispatch(
        &self,
        e: &mut Encoding,
        state: &MTLComputePipelineState,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        bindings: &[Binding],
        params: &[u8],
    ) -> Result<()> {
        self.compute(e)?;
        e.node += 1;
        let (node, mut hazard) = (e.node, false);
        for b in bindings {
            e.tracker.access(node, b.addr, b.len, b.access, |_| hazard = true);
        }
        if hazard {
            // Everything before the barrier is ordered by it; what this dispatch touches counts anew.
            e.tracker.clear();
            bindings.iter().for_each(|b| e.tracker.access(node, b.addr, b.len, b.access, |_| {}));
        }
        let encoder = self.compute(e)?;
        if hazard {
            encoder.memoryBarrierWithScopeBuffers();
        }
        encoder.setComputePipelineState(state);
        for (i, b) in bindings.iter().enumerate().filter(|(_, b)| b.len != 0) {
            let (buffer, offset) = place(b.native, b.addr);
            encoder.setBuffer_offset_atIndex(buffer, offset, i);
        }
        if !params.is_empty() {
            encoder.setBytes_atIndex(params, bindings.len());
        }
        if shared != 0 {
            encoder.setThreadgroupMemoryLength_atIndex(shared as usize, 0);
        }
        encoder.dispatchThreadgroups_threadsPerThreadgroup(grid, block);
        e.dispatches += 1;
        Ok(())
    }
}

/// The spanning buffer of a native word, and the offset of an address in it.
fn place<'a>(native: u64, addr: u64) -> (&'a MTLBuffer, usize) {
    // SAFETY: the word came with an address from the allocator, whose backing keeps the spanning buffer as long as it lends from it.
    let buffer = unsafe { &*(native as *const MTLBuffer) };
    (buffer, (addr - buffer.contents() as u64) as usize)
}

impl Encoding {
    /// Ends the open encoder. Hazards are the fence's from here on.
    fn end(&mut self, fence: &MTLFence) {
        match self.encoder.take() {
            Some(Encoder::Compute(c)) => {
                c.updateFence(fence);
                c.endEncoding();
            }
            Some(Encoder::Blit(b)) => {
                b.updateFence(fence);
                b.endEncoding();
            }
            None => {}
        }
        self.tracker.clear();
    }
}

/// The completion handler: on a thread of Metal's, so it submits nothing and drops no queue.
fn complete(
    owner: &LineOwner,
    event: &MTLSharedEvent,
    values: std::ops::RangeInclusive<u64>,
    done: &Completed,
    retained: Retain,
) {
    match &done.error {
        None => {
            for (stage, to, bytes, _keep) in &retained.downloads {
                // SAFETY: the staging buffer holds the bytes since the buffer completed; the submitter keeps the host end.
                unsafe { std::ptr::copy_nonoverlapping(stage.addr() as *const u8, to.0, *bytes) };
            }
            retained.stamps.iter().for_each(|s| s.set(1_000 * (s.native() + 1)));
        }
        Some(error) => {
            let fault = Fault::new("command buffer", format!("{:?}", owner.line()), *values.start(), error.clone());
            owner.poison(*values.start(), fault.into());
            // Metal left the signal out; whoever waits on the device must not hang.
            event.setSignaledValue(*values.end());
        }
    }
    // A source that failed was let go by the bump above; what ran after it did not run on what it should have.
    for on in &retained.waits {
        if let Err(cause) = on.line().check(on.value()) {
            owner.poison(*values.start(), cause);
        }
    }
    drop(retained);
    owner.complete(*values.end());
}

/// Staging memory, taken before the stream's lock: allocating may ask a timeline to signal.
struct Staged(std::vec::IntoIter<Lease<Buffer>>);

impl Staged {
    fn next(&mut self) -> Result<Lease<Buffer>> {
        self.0.next().ok_or_else(|| Error::state("staging memory was not taken"))
    }
}

fn stage(op: &Op<'_>, core: &Core, on: On<'_>, into: &mut Vec<Lease<Buffer>>) -> Result<()> {
    match op {
        Op::Upload(Upload { bytes, .. }) | Op::Download(Download { bytes, .. }) => {
            into.push(core.staging.alloc(Layout::new(*bytes), on)?);
        }
        Op::Graph(graph) => {
            // SAFETY: as in `encode`.
            let exec = unsafe { &*(graph.native() as *const Exec) };
            let plan = exec.plan.lock();
            plan.ops.iter().try_for_each(|op| stage(&op, core, on, into))?;
        }
        _ => {}
    }
    Ok(())
}

// SAFETY: the completion handler publishes a value once Metal is done with its command buffer, and a wait is encoded before what comes later.
unsafe impl Timeline for State {
    fn line(&self) -> &'static Line {
        self.now()
    }

    fn signal(&self) -> Result<u64> {
        self.commit(&mut self.encoding.lock());
        Ok(self.now().submitted())
    }

    fn refresh(&self) -> Result<u64> {
        // Not the event's value: the handler copies downloads before it publishes.
        Ok(self.now().completed())
    }

    fn wait(&self, on: Point) -> Result<()> {
        self.flush_source(on);
        self.encode_wait(&mut self.encoding.lock(), on).inspect_err(|e| self.poison_by(e))
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.commit(&mut self.encoding.lock());
        self.now().wait(value, timeout)
    }
}

impl State {
    /// Makes a value that another stream still batches happen. Before one's own lock: two locks in a circle would never open.
    fn flush_source(&self, on: Point) {
        if let Some((_, false, Some(source))) = self.core.lines.find(on.line_id())
            && source.line().id() != self.now().id()
        {
            source.commit(&mut source.encoding.lock());
        }
    }

    fn poison_by(&self, cause: &Error) {
        if matches!(cause, Error::Fault(_)) {
            self.line.poison(self.now().submitted() + 1, cause.clone());
        }
    }

    fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        if let Some((_, cause)) = self.now().failure() {
            return Err(cause);
        }
        let mut staged = Vec::new();
        for op in ops {
            if let Op::Wait(on) = op {
                self.flush_source(*on);
            }
            stage(op, &self.core, On::new(self), &mut staged)?;
        }
        let mut staged = Staged(staged.into_iter());
        let mut e = self.encoding.lock();
        for op in ops {
            self.encode(&mut e, op, &mut staged).inspect_err(|e| self.poison_by(e))?;
        }
        let value = self.line.advance()?;
        if e.dispatches >= DISPATCHES_PER_BUFFER {
            self.commit(&mut e);
        }
        Ok(value)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // An encoder must see its end, and submitted work must run.
        self.commit(&mut self.encoding.lock());
    }
}

/// A stream.
pub struct MpsStream(Arc<State>);

impl Tagged for MpsStream {
    type Tag = tags::Stream;
}

// SAFETY: every call is the state's.
unsafe impl Timeline for MpsStream {
    fn line(&self) -> &'static Line {
        self.0.now()
    }
    fn signal(&self) -> Result<u64> {
        self.0.signal()
    }
    fn refresh(&self) -> Result<u64> {
        self.0.refresh()
    }
    fn wait(&self, on: Point) -> Result<()> {
        self.0.wait(on)
    }
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.0.wait_host(value, timeout)
    }
}

// SAFETY: a submission is encoded in order and retained until its command buffer completed.
unsafe impl Stream for MpsStream {
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        self.0.submit(ops)
    }

    fn flush(&self) -> Result<()> {
        self.0.commit(&mut self.0.encoding.lock());
        Ok(())
    }

    fn native(&self) -> u64 {
        Arc::as_ptr(&self.0.core.queue) as u64
    }
}

/// The traits type of streams.
pub struct Streams;

impl Resource for Streams {
    type Payload = MpsStream;
    type Request<'a> = &'a Arc<Core>;
    const NAME: &'static str = "stream";

    fn create(&self, _: Handle<tags::Stream>, core: &&Arc<Core>) -> Result<MpsStream> {
        let line = Arc::new(LineOwner::take()?);
        let nil = || Error::Unavailable("Metal gave no event or fence".into());
        let event = core.device.newSharedEvent().ok_or_else(nil)?;
        let fence = core.device.newFence().ok_or_else(nil)?;
        // A line that was lent before goes on from where it stood.
        let signalled = line.line().submitted();
        event.setSignaledValue(signalled);
        let encoding = Mutex::new(Encoding { signalled, ..Encoding::default() });
        let state = Arc::new(State { core: (*core).clone(), line, event: event.clone(), fence, encoding });
        let entry = Entry { event, gate: false, stream: Arc::downgrade(&state) };
        core.lines.0.lock().insert(state.now().id(), entry);
        Ok(MpsStream(state))
    }

    fn recycle(&self, _: &mut MpsStream) -> Fate {
        Fate::Destroy
    }
}

/// A timeline that the host signals.
pub struct MpsGate {
    core: Arc<Core>,
    line: Arc<LineOwner>,
    event: Retained<MTLSharedEvent>,
}

impl Tagged for MpsGate {
    type Tag = tags::Gate;
}

// SAFETY: nothing is submitted to a gate.
unsafe impl Timeline for MpsGate {
    fn line(&self) -> &'static Line {
        self.line.line()
    }
    fn signal(&self) -> Result<u64> {
        Ok(self.line().submitted())
    }
    fn refresh(&self) -> Result<u64> {
        Ok(self.line().completed())
    }
    fn wait(&self, _: Point) -> Result<()> {
        Err(Error::Unsupported("a gate is signalled by the host; it waits for nothing".into()))
    }
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.line().wait(value, timeout)
    }
}

impl MpsGate {
    /// Lets go what streams held back for this gate.
    fn release(&self) {
        for stream in self.core.lines.streams() {
            let mut e = stream.encoding.lock();
            if e.held.is_some_and(|p| p.line_id() == self.line().id()) {
                stream.commit(&mut e);
            }
        }
    }
}

impl Gate for MpsGate {
    fn signal_host(&self, value: u64) -> Result<()> {
        self.line.advance_to(value)?;
        self.line.complete(value);
        self.event.setSignaledValue(value);
        self.release();
        Ok(())
    }

    fn fail(&self, cause: Error) {
        self.line.poison(self.line().completed() + 1, cause);
        self.event.setSignaledValue(u64::MAX);
        self.release();
    }
}

/// The traits type of gates.
pub struct Gates;

impl Resource for Gates {
    type Payload = MpsGate;
    type Request<'a> = &'a Arc<Core>;
    const NAME: &'static str = "gate";

    fn create(&self, _: Handle<tags::Gate>, core: &&Arc<Core>) -> Result<MpsGate> {
        let line = Arc::new(LineOwner::take()?);
        let nil = || Error::Unavailable("Metal gave no event".into());
        let event = core.device.newSharedEvent().ok_or_else(nil)?;
        event.setSignaledValue(line.line().submitted());
        let entry = Entry { event: event.clone(), gate: true, stream: Weak::new() };
        core.lines.0.lock().insert(line.line().id(), entry);
        Ok(MpsGate { core: (*core).clone(), line, event })
    }

    fn recycle(&self, _: &mut MpsGate) -> Fate {
        Fate::Destroy
    }
}

/// A graph: the plan, encoded anew at each launch.
pub struct Exec {
    plan: Mutex<Plan>,
}

impl Exec {
    pub fn new(plan: Plan) -> Self {
        Self { plan: Mutex::new(plan) }
    }
}

impl Tagged for Exec {
    type Tag = tags::Graph;
}

// SAFETY: a launch encodes the plan's operations in their order; the word is the exec's own address.
unsafe impl GraphExec for Exec {
    fn nodes(&self) -> usize {
        self.plan.lock().len()
    }

    fn bytes(&self) -> u64 {
        0
    }

    unsafe fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        let mut plan = self.plan.lock();
        patches.iter().try_for_each(|p| plan.ops.patch(p.node as usize, p.bindings, p.params, p.grid))
    }

    fn native(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }
}

/// The traits type of graphs.
pub struct Graphs;

impl Resource for Graphs {
    type Payload = Exec;
    type Request<'a> = &'a Mutex<Option<Exec>>;
    const NAME: &'static str = "graph";

    fn create(&self, _: Handle<tags::Graph>, made: &Self::Request<'_>) -> Result<Exec> {
        made.lock().take().ok_or_else(|| Error::state("a graph was made twice"))
    }

    fn recycle(&self, _: &mut Exec) -> Fate {
        Fate::Destroy
    }
}

/// Everything that the runtime shares between threads may be shared.
const _: () = {
    const fn shared<T: Any + Send + Sync>() {}
    shared::<MpsStream>();
    shared::<MpsGate>();
    shared::<Exec>();
    shared::<crate::device::MpsDevice>();
};
