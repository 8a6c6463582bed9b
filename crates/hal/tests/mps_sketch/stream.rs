//! Streams, host timelines and graphs of the sketch: the mapping of operations to encoders.
//!
//! # Protocol
//! A lock, which is a leaf, guards a stream's encoding state. Calls that may reach another stream
//! (flushing the source of a wait, staging memory) come before this lock is taken. An encoder stays
//! open across submissions, until a blit, a wait, a signal or a commit needs the command buffer
//! between encoders. Values are taken at submission; a command buffer signals the last value that
//! it contains.

use crate::mtl::*;
use leasehold_alloc::{Allocator, Buffer, Layout, On};
use leasehold_core::sync::{Arc, Mutex, OnceLock};
use leasehold_core::{
    AnyLease, Error, Fault, Handle, Lease, Recycle, Resource, Result, Tagged, Timeline, TimelineId,
    TimelineOwner, TimelineSource, Timepoint, tags,
};
use leasehold_hal::hazard::Tracker;
use leasehold_hal::*;
use std::any::Any;
use std::collections::HashMap;
use std::sync::Weak;
use std::time::Duration;

/// The number of dispatches after which a command buffer is committed (candle's number).
pub const DISPATCHES_PER_BUFFER: u32 = 50;

/// The part of the device that streams need.
pub struct Core {
    pub device: Arc<MTLDevice>,
    pub queue: Retained<MTLCommandQueue>,
    pub staging: Allocator,
    pub timelines: TimelineTable,
    /// The kernel for fills of more than a byte, which Metal does not have.
    pub fill: OnceLock<Retained<MTLComputePipelineState>>,
}

/// From a timeline to the native event: a timepoint names only the timeline.
#[derive(Default)]
pub struct TimelineTable(Mutex<HashMap<TimelineId, Entry>>);

struct Entry {
    event: Retained<MTLSharedEvent>,
    host_timeline: bool,
    /// `None` once the stream is destroyed; its timepoints stay valid.
    stream: Weak<State>,
}

impl TimelineTable {
    fn find(&self, id: TimelineId) -> Option<(Retained<MTLSharedEvent>, bool, Option<Arc<State>>)> {
        self.0.lock().get(&id).map(|e| (e.event.clone(), e.host_timeline, e.stream.upgrade()))
    }

    pub fn streams(&self) -> Vec<Arc<State>> {
        self.0.lock().values().filter_map(|e| e.stream.upgrade()).collect()
    }
}

/// The state of a stream.
pub struct State {
    core: Arc<Core>,
    timeline: Arc<TimelineOwner>,
    event: Retained<MTLSharedEvent>,
    /// Orders encoders: the queue does not order untracked resources.
    fence: Retained<MTLFence>,
    encoding: Mutex<Encoding>,
}

/// An open command buffer and its encoder, with the objects that must live until it completes.
#[derive(Default)]
struct Encoding {
    buffer: Option<Retained<MTLCommandBuffer>>,
    encoder: Option<Encoder>,
    tracker: Tracker,
    node: u32,
    dispatches: u32,
    /// The last value that a committed buffer signals.
    signalled: u64,
    /// A host timeline's timepoint that must come before the buffer may be committed. On a shared
    /// queue a wait for the host would delay other streams too.
    held: Option<Timepoint>,
    retained: Retain,
}

// SAFETY: command buffers and encoders are not thread-safe, but not bound to a thread either. Only
// `State::encoding`'s lock leads to them, so uses by several threads happen one after the other.
unsafe impl Send for Encoding {}

enum Encoder {
    Compute(Retained<MTLComputeCommandEncoder>),
    Blit(Retained<MTLBlitCommandEncoder>),
}

/// The objects that a command buffer without retained references needs, and the work of its
/// completion.
#[derive(Default)]
struct Retain {
    objects: Vec<AnyLease>,
    keeps: Vec<op::KeepAlive>,
    timestamps: Vec<Lease<TimestampQuery>>,
    waits: Vec<Timepoint>,
    downloads: Vec<(Lease<Buffer>, HostAddress, usize, Option<op::KeepAlive>)>,
}

/// The host address of a download.
struct HostAddress(*mut u8);

// SAFETY: the submitter promised that the memory stays valid and unused until the submission
// completes. Only its completion handler writes to it.
unsafe impl Send for HostAddress {}

impl State {
    fn now(&self) -> &'static Timeline {
        self.timeline.timeline()
    }

    /// Commits the open buffer, unless a host timeline delays it, and signals the last submitted
    /// value.
    fn commit(&self, e: &mut Encoding) {
        e.end(&self.fence);
        if e.held.is_some_and(|p| !p.is_settled() && !p.timeline().failed(p.value())) {
            return;
        }
        let value = self.now().submitted();
        if value == e.signalled {
            return;
        }
        let Some(buffer) =
            e.buffer.take().or_else(|| self.core.queue.commandBufferWithUnretainedReferences())
        else {
            return;
        };
        buffer.encodeSignalEvent_value(&self.event, value);
        let (owner, event, first, retained) = (
            self.timeline.clone(),
            self.event.clone(),
            e.signalled + 1,
            std::mem::take(&mut e.retained),
        );
        buffer.addCompletedHandler(Box::new(move |done| {
            complete(&owner, &event, first..=value, done, retained)
        }));
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

    /// Encodes a wait, which delays the buffer while a host timeline is not signalled.
    fn encode_wait(&self, e: &mut Encoding, on: Timepoint) -> Result<()> {
        if on.timeline_id() == self.now().id() || on.is_settled() {
            return Ok(());
        }
        on.timeline().check(on.value())?;
        let Some((event, host_timeline, _)) = self.core.timelines.find(on.timeline_id()) else {
            return Err(Error::Unsupported(format!("{on:?} is no timeline of this device").into()));
        };
        if host_timeline {
            // Earlier work must not be delayed.
            self.commit(e);
        }
        self.between(e)?.encodeWaitForEvent_value(&event, on.value());
        e.retained.waits.push(on);
        if host_timeline {
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
                // SAFETY: the pipeline belongs to this device, and its lease was just retained.
                let state = unsafe { &*(d.pipeline.native as *const MTLComputePipelineState) };
                self.dispatch(e, state, d.grid, d.block, d.shared, d.bindings, d.params)?;
            }
            Op::Copy(c) => {
                let blit = self.blit(e)?;
                let ((from, src), (to, dst)) =
                    (place(c.src_native, c.src), place(c.dst_native, c.dst));
                for row in 0..c.rows {
                    let at = |offset: usize, pitch: u64| offset + (row * pitch) as usize;
                    blit.copyFromBuffer(
                        from,
                        at(src, c.src_pitch),
                        to,
                        at(dst, c.dst_pitch),
                        c.width as usize,
                    );
                }
            }
            Op::Fill(f) if f.width == 1 => {
                let (buffer, at) = place(f.native, f.dst);
                self.blit(e)?.fillBuffer_range_value(
                    buffer,
                    at..at + f.bytes as usize,
                    f.pattern as u8,
                );
            }
            Op::Fill(f) => {
                let make = || {
                    self.core
                        .device
                        .newComputePipelineState("fill")
                        .map_err(|e| Error::Compile { log: e.into() })
                };
                let state = match self.core.fill.get() {
                    Some(state) => state.clone(),
                    None => self
                        .core
                        .fill
                        .get_or_init(|| make().unwrap_or_else(|_| unreachable!("built in")))
                        .clone(),
                };
                let binding =
                    Binding { addr: f.dst, len: f.bytes, native: f.native, access: Access::Write };
                let n = (f.bytes / u64::from(f.width)) as u32;
                self.dispatch(
                    e,
                    &state,
                    [n, 1, 1],
                    [1; 3],
                    0,
                    &[binding],
                    &f.pattern.to_le_bytes(),
                )?;
            }
            Op::Upload(u) => {
                let stage = staged.next()?;
                // SAFETY: the caller keeps the source readable; the staging buffer was allocated
                // with this many bytes of host memory.
                unsafe {
                    std::ptr::copy_nonoverlapping(u.src, stage.addr() as *mut u8, u.bytes as usize)
                };
                let ((from, src), (to, dst)) =
                    (place(stage.native(), stage.addr()), place(u.native, u.dst));
                self.blit(e)?.copyFromBuffer(from, src, to, dst, u.bytes as usize);
                e.retained.objects.push(stage.into_any());
                e.retained.keeps.extend(u.keep.cloned());
            }
            Op::Download(d) => {
                let stage = staged.next()?;
                let ((from, src), (to, dst)) =
                    (place(d.native, d.src), place(stage.native(), stage.addr()));
                self.blit(e)?.copyFromBuffer(from, src, to, dst, d.bytes as usize);
                e.retained.downloads.push((
                    stage,
                    HostAddress(d.dst),
                    d.bytes as usize,
                    d.keep.cloned(),
                ));
            }
            Op::WriteTimestamp(timestamp) => {
                let none = || Error::state("Metal gave no encoder");
                let encoder = self
                    .between(e)?
                    .computeCommandEncoderSampling(timestamp.native())
                    .ok_or_else(none)?;
                encoder.endEncoding();
                e.retained.timestamps.push((*timestamp).clone());
            }
            Op::Foreign(call) => {
                // A Metal library encodes into a command buffer, so this is the native word here.
                let buffer = std::ptr::from_ref(self.between(e)?) as u64;
                call.run(buffer)?;
            }
            Op::Graph(graph) => {
                // SAFETY: the word belongs to a graph of this device, which the lease (a wrapper's
                // or our own) keeps alive.
                let exec = unsafe { &*(graph.native() as *const Exec) };
                e.retained.objects.push((*graph).clone().into_any());
                let plan = exec.plan.lock();
                plan.ops.iter().try_for_each(|op| self.encode(e, &op, staged))?;
            }
            other => {
                return Err(Error::Unsupported(format!("Metal has no {}", other.kind()).into()));
            }
        }
        Ok(())
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of a dispatch, also for the built-in fill"
    )]
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
            // The barrier orders everything before it; accesses of this dispatch start anew.
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
    // SAFETY: the word came with an address from the allocator. The allocator's backing keeps the
    // spanning buffer as long as it lends from it.
    let buffer = unsafe { &*(native as *const MTLBuffer) };
    (buffer, (addr - buffer.contents() as u64) as usize)
}

impl Encoding {
    /// Ends the open encoder. From here on the fence orders hazards.
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

/// The completion handler runs on a thread of Metal, so it submits nothing and drops no queue.
fn complete(
    owner: &TimelineOwner,
    event: &MTLSharedEvent,
    values: std::ops::RangeInclusive<u64>,
    done: &Completed,
    retained: Retain,
) {
    match &done.error {
        None => {
            for (stage, to, bytes, _keep) in &retained.downloads {
                // SAFETY: the staging buffer holds the bytes since the buffer completed; the
                // submitter keeps the host end.
                unsafe { std::ptr::copy_nonoverlapping(stage.addr() as *const u8, to.0, *bytes) };
            }
            retained.timestamps.iter().for_each(|s| s.set(1_000 * (s.native() + 1)));
        }
        Some(error) => {
            let fault = Fault::new(
                "command buffer",
                format!("{:?}", owner.timeline()),
                *values.start(),
                error.clone(),
            );
            owner.poison(*values.start(), fault.into());
            // Metal omitted the signal; waits on the device must not hang.
            event.setSignaledValue(*values.end());
        }
    }
    // The signal above released a wait for a failed source; the work after it did not run on the
    // right data.
    for on in &retained.waits {
        if let Err(cause) = on.timeline().check(on.value()) {
            owner.poison(*values.start(), cause);
        }
    }
    drop(retained);
    owner.complete(*values.end());
}

/// Staging memory, taken before the stream's lock, because an allocation may ask a timeline to
/// signal.
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
            // SAFETY: the word belongs to a graph of this device, which the operation's lease keeps
            // alive.
            let exec = unsafe { &*(graph.native() as *const Exec) };
            let plan = exec.plan.lock();
            plan.ops.iter().try_for_each(|op| stage(&op, core, on, into))?;
        }
        _ => {}
    }
    Ok(())
}

// SAFETY: the completion handler publishes a value after Metal has completed its command buffer. A
// wait is encoded before later work.
unsafe impl TimelineSource for State {
    fn timeline(&self) -> &'static Timeline {
        self.now()
    }

    fn signal(&self) -> Result<u64> {
        self.commit(&mut self.encoding.lock());
        Ok(self.now().submitted())
    }

    fn refresh(&self) -> Result<u64> {
        // Not the event's value, because the handler copies downloads before it publishes.
        Ok(self.now().completed())
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        self.flush_source(on);
        self.encode_wait(&mut self.encoding.lock(), on).inspect_err(|e| self.poison_by(e))
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.commit(&mut self.encoding.lock());
        self.now().wait(value, timeout)
    }
}

impl State {
    /// Flushes the stream that still batches a value. Before the own lock, because two locks in a
    /// cycle would deadlock.
    fn flush_source(&self, on: Timepoint) {
        if let Some((_, false, Some(source))) = self.core.timelines.find(on.timeline_id())
            && source.timeline().id() != self.now().id()
        {
            source.commit(&mut source.encoding.lock());
        }
    }

    fn poison_by(&self, cause: &Error) {
        if matches!(cause, Error::Fault(_)) {
            self.timeline.poison(self.now().submitted() + 1, cause.clone());
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
        let value = self.timeline.advance()?;
        if e.dispatches >= DISPATCHES_PER_BUFFER {
            self.commit(&mut e);
        }
        Ok(value)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // An encoder must be ended, and submitted work must run.
        self.commit(&mut self.encoding.lock());
    }
}

/// A stream.
pub struct MpsStream(Arc<State>);

impl Tagged for MpsStream {
    type Tag = tags::Stream;
}

// SAFETY: every method calls the state's.
unsafe impl TimelineSource for MpsStream {
    fn timeline(&self) -> &'static Timeline {
        self.0.now()
    }
    fn signal(&self) -> Result<u64> {
        self.0.signal()
    }
    fn refresh(&self) -> Result<u64> {
        self.0.refresh()
    }
    fn wait(&self, on: Timepoint) -> Result<()> {
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

/// The resource type of streams.
pub struct Streams;

impl Resource for Streams {
    type Payload = MpsStream;
    type Request<'a> = &'a Arc<Core>;
    const NAME: &'static str = "stream";

    fn create(&self, _: Handle<tags::Stream>, core: &&Arc<Core>) -> Result<MpsStream> {
        let timeline = Arc::new(TimelineOwner::take()?);
        let nil = || Error::Unavailable("Metal gave no event or fence".into());
        let event = core.device.newSharedEvent().ok_or_else(nil)?;
        let fence = core.device.newFence().ok_or_else(nil)?;
        // A reused timeline continues from its last value.
        let signalled = timeline.timeline().submitted();
        event.setSignaledValue(signalled);
        let encoding = Mutex::new(Encoding { signalled, ..Encoding::default() });
        let state = Arc::new(State {
            core: (*core).clone(),
            timeline,
            event: event.clone(),
            fence,
            encoding,
        });
        let entry = Entry { event, host_timeline: false, stream: Arc::downgrade(&state) };
        core.timelines.0.lock().insert(state.now().id(), entry);
        Ok(MpsStream(state))
    }

    fn recycle(&self, _: &mut MpsStream) -> Recycle {
        Recycle::Destroy
    }
}

/// A host timeline.
pub struct MpsHostTimeline {
    core: Arc<Core>,
    timeline: Arc<TimelineOwner>,
    event: Retained<MTLSharedEvent>,
}

impl Tagged for MpsHostTimeline {
    type Tag = tags::HostTimeline;
}

// SAFETY: a host timeline accepts no submissions.
unsafe impl TimelineSource for MpsHostTimeline {
    fn timeline(&self) -> &'static Timeline {
        self.timeline.timeline()
    }
    fn signal(&self) -> Result<u64> {
        Ok(self.timeline().submitted())
    }
    fn refresh(&self) -> Result<u64> {
        Ok(self.timeline().completed())
    }
    fn wait(&self, _: Timepoint) -> Result<()> {
        Err(Error::Unsupported(
            "a host timeline is signalled by the host; it waits for nothing".into(),
        ))
    }
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.timeline().wait(value, timeout)
    }
}

impl MpsHostTimeline {
    /// Releases the buffers that streams hold back for this host timeline.
    fn release(&self) {
        for stream in self.core.timelines.streams() {
            let mut e = stream.encoding.lock();
            if e.held.is_some_and(|p| p.timeline_id() == self.timeline().id()) {
                stream.commit(&mut e);
            }
        }
    }
}

impl HostTimeline for MpsHostTimeline {
    fn signal_host(&self, value: u64) -> Result<()> {
        self.timeline.advance_to(value)?;
        self.timeline.complete(value);
        self.event.setSignaledValue(value);
        self.release();
        Ok(())
    }

    fn fail(&self, cause: Error) {
        self.timeline.poison(self.timeline().completed() + 1, cause);
        self.event.setSignaledValue(u64::MAX);
        self.release();
    }
}

/// The resource type of host timelines.
pub struct HostTimelines;

impl Resource for HostTimelines {
    type Payload = MpsHostTimeline;
    type Request<'a> = &'a Arc<Core>;
    const NAME: &'static str = "host timeline";

    fn create(&self, _: Handle<tags::HostTimeline>, core: &&Arc<Core>) -> Result<MpsHostTimeline> {
        let timeline = Arc::new(TimelineOwner::take()?);
        let nil = || Error::Unavailable("Metal gave no event".into());
        let event = core.device.newSharedEvent().ok_or_else(nil)?;
        event.setSignaledValue(timeline.timeline().submitted());
        let entry = Entry { event: event.clone(), host_timeline: true, stream: Weak::new() };
        core.timelines.0.lock().insert(timeline.timeline().id(), entry);
        Ok(MpsHostTimeline { core: (*core).clone(), timeline, event })
    }

    fn recycle(&self, _: &mut MpsHostTimeline) -> Recycle {
        Recycle::Destroy
    }
}

/// A graph: the plan, encoded again at each launch.
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

// SAFETY: a launch encodes the plan's operations in their order. The word is the graph's own
// address.
unsafe impl GraphExec for Exec {
    fn nodes(&self) -> usize {
        self.plan.lock().len()
    }

    fn bytes(&self) -> u64 {
        0
    }

    unsafe fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        let mut plan = self.plan.lock();
        patches
            .iter()
            .try_for_each(|p| plan.ops.patch(p.node as usize, p.bindings, p.params, p.grid))
    }

    fn native(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }
}

/// The resource type of graphs.
pub struct Graphs;

impl Resource for Graphs {
    type Payload = Exec;
    type Request<'a> = &'a Mutex<Option<Exec>>;
    const NAME: &'static str = "graph";

    fn create(&self, _: Handle<tags::Graph>, made: &Self::Request<'_>) -> Result<Exec> {
        made.lock().take().ok_or_else(|| Error::state("a graph was made twice"))
    }

    fn recycle(&self, _: &mut Exec) -> Recycle {
        Recycle::Destroy
    }
}

/// All objects that the runtime shares between threads are `Send + Sync`.
const _: () = {
    const fn shared<T: Any + Send + Sync>() {}
    shared::<MpsStream>();
    shared::<MpsHostTimeline>();
    shared::<Exec>();
    shared::<crate::device::MpsDevice>();
};
