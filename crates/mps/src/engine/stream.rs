//! Streams over command queues, as the engine uses them.
//!
//! # Order
//! The queue orders no accesses to untracked memory. A stream has one fence: each compute pass
//! waits for the fence at its start and updates it at its end. Dispatches of one pass run one after
//! the other. So the work of a stream runs in order, with one fence for any number of passes. Work
//! of other streams is ordered by shared events. Copies and fills are dispatches of the backend's
//! own kernels, so they go into the open pass.
//!
//! # Command buffers
//! A command buffer and its pass stay open across submissions. The stream commits them after a
//! number of dispatches or of bytes, for each observer (a signal, a query, a mark, a host
//! function), and if the queue's room is used up. Each command buffer signals the stream's event as
//! its last command. So a signal or a mark needs no command buffer of its own.
//!
//! # The queue's turn
//! Streams share a queue, and one stream at a time encodes and commits: the stream that has the
//! queue's claim. A submission takes the claim with its room, before it encodes, and gives it back
//! at its end. An observer that commits takes the claim meanwhile. Open command buffers of other
//! streams keep no claim. A thread takes the claim after the lock of `encoding`. No holder waits
//! for another stream, so the claim is free again soon. A claim that another holder keeps is
//! `Occupied` after [`TIMEOUT`].
//!
//! This module must not know what holds work back.

use super::core::Core;
use super::host::{self, HostAction};
use super::in_flight::{InFlight, Kept, Mark};
use super::permit::Permit;
use super::program::Program;
use super::room::Room;
use crate::driver::ops::{
    CommandBufferDesc, ComputeDesc, Dispatch as Launch, MpsSlowOps, NativeBuffer,
    NativeCommandBuffer, NativeComputeEncoder, NativePipeline, NativeSampleBuffer,
};
use crate::manager::command_queue::CommandQueueState;
use crate::manager::event::EventKind;
use crate::manager::fence::FenceState;
use crate::manager::opened::{Held, Owned};
use crate::transfer::Transfer;
use leasehold_alloc::Buffer;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::sync::{Arc, Mutex, MutexGuard, spin_loop, thread};
use leasehold_core::{Claim, Error, Lease, Result, Timeline, UniqueLease};
use leasehold_hal::engine::driver::{DriverDevice, DriverStream, Sink};
use leasehold_hal::engine::partitions::StreamKey;
use leasehold_hal::engine::payload::graph_of;
use leasehold_hal::engine::staging::HostAddress;
use leasehold_hal::{Copy2d, Dispatch, ForeignCall, GraphExec, Limits, Op, Pipeline};
use std::fmt;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// The unit of threadgroup memory.
const SHARED_UNIT: u32 = 16;
/// The last pipelines of a command buffer that are searched before one is kept again.
const RECENT: usize = 8;

/// The longest wait for the queue's claim.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Looks at the queue's claim before a waiting thread yields, and before it sleeps.
const SPINS: u32 = 64;
const YIELDS: u32 = 256;

/// A stream of a command queue.
pub struct MpsStream {
    core: Arc<Core>,
    queue: Lease<CommandQueueState>,
    room: Arc<Room>,
    fence: Lease<FenceState>,
    _held: Held,
    in_flight: Arc<InFlight>,
    /// The stream has updated the fence. Before that, the fence may have another queue's update.
    fenced: AtomicBool,
    encoding: Mutex<Encoding>,
    abandoned: bool,
}

/// The command buffer that a stream encodes.
#[derive(Default)]
pub struct Encoding {
    /// The permit for the next command buffer of a submission.
    permit: Option<Permit>,
    /// A submission has room, and may count on the open command buffer.
    reserved: bool,
    /// The queue's claim, from the reservation to the end of the submission.
    claim: Option<Claim<CommandQueueState>>,
    open: Option<Open>,
    /// The last wait for each list. The stream's own list is one of them around a library's passes,
    /// which know no fence. A command buffer that fails skips its waits, so each later one waits
    /// again. A list that is gone was over.
    waits: Vec<(Weak<InFlight>, u64)>,
    /// The last committed sequence number, and the last submission with work in that command
    /// buffer. A later command buffer may have more work of the submission.
    last: Option<(u64, u64)>,
}

impl Encoding {
    /// Makes later command buffers wait for a list.
    fn wait_for(&mut self, in_flight: &Arc<InFlight>, seq: u64) {
        let in_flight = Arc::downgrade(in_flight);
        self.waits.retain(|(other, _)| !other.ptr_eq(&in_flight));
        self.waits.push((in_flight, seq));
    }
}

/// An open command buffer.
struct Open {
    /// Declared first: a pass ends before its command buffer is given back.
    pass: Option<Pass>,
    command: Owned<NativeCommandBuffer>,
    permit: Permit,
    /// Whether the command buffer has a command.
    used: bool,
    /// The first and the last submission with work in the command buffer.
    values: Option<(u64, u64)>,
    dispatches: u32,
    bytes: u64,
    kept: Kept,
}

/// An open compute pass. The drop ends it.
struct Pass {
    encoder: Owned<NativeComputeEncoder>,
    /// The pipeline and the bytes of threadgroup memory that are set.
    pipeline: Option<NativePipeline>,
    shared: u32,
}

impl Drop for Pass {
    fn drop(&mut self) {
        // SAFETY: this value keeps the encoder live, and only this drop ends it.
        let ended = unsafe { self.encoder.device.ops.end_encoding(self.encoder.native.into()) };
        if let Err(error) = ended {
            tracing::error!(%error, "a compute pass could not be ended");
        }
    }
}

impl Open {
    /// Notes work of a submission.
    fn note(&mut self, value: u64, dispatches: u32, bytes: u64) {
        self.used = true;
        let first = self.values.map_or(value, |(first, _)| first);
        self.values = Some((first, value));
        self.dispatches = self.dispatches.saturating_add(dispatches);
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Keeps a pipeline until the command buffer is over.
    fn keep(&mut self, pipeline: &Lease<Pipeline>) {
        let kept = &mut self.kept.pipelines;
        if !kept.iter().rev().take(RECENT).any(|k| k.native == pipeline.native) {
            kept.push(pipeline.clone());
        }
    }
}

impl MpsStream {
    fn ops(&self) -> &dyn MpsSlowOps {
        &*self.core.device.ops
    }

    /// Takes note of an error of a driver call.
    fn noted<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| self.core.note(error))
    }

    /// The open command buffer; a new one unless there is one.
    fn open<'e>(&self, e: &'e mut Encoding) -> Result<&'e mut Open> {
        if e.open.is_none() {
            let permit = e.permit.take();
            let permit =
                permit.ok_or_else(|| Error::state("a command buffer without room in its queue"))?;
            let desc =
                CommandBufferDesc { retained: false, encoder_status: cfg!(debug_assertions) };
            // SAFETY: the lease keeps the queue live.
            let native = unsafe { self.ops().command_buffer(self.queue.native(), desc)? };
            let command = Owned::new(&self.core.device, native);
            let mut waits = Vec::new();
            e.waits.retain(|(in_flight, seq)| {
                let mark = in_flight.upgrade().map(|in_flight| Mark { in_flight, seq: *seq });
                let open = mark.filter(|mark| !mark.is_over());
                waits.extend(open.clone());
                open.is_some()
            });
            for mark in &waits {
                // SAFETY: `command` is live and new. `kept` has the event's list, and the stream's
                // own list keeps its event until the command buffer is over.
                unsafe { self.ops().encode_wait(native, mark.in_flight.event().into(), mark.seq)? };
            }
            // The list takes its command buffers in order anyway.
            waits.retain(|mark| !Arc::ptr_eq(&mark.in_flight, &self.in_flight));
            e.open = Some(Open {
                pass: None,
                command,
                permit,
                used: false,
                values: None,
                dispatches: 0,
                bytes: 0,
                kept: Kept { waits, ..Kept::default() },
            });
        }
        e.open.as_mut().ok_or_else(|| Error::state("no command buffer is open"))
    }

    /// Begins a pass behind all earlier ones of the stream.
    fn begin_pass(
        &self,
        command: NativeCommandBuffer,
        samples: Option<(NativeSampleBuffer, u32, u32)>,
    ) -> Result<Pass> {
        let desc = ComputeDesc { concurrent: false, samples };
        // SAFETY: the caller's command buffer is open and has no pass. The device keeps the sample
        // buffer.
        let native = unsafe { self.ops().compute_encoder(command, &desc)? };
        let encoder = Owned::new(&self.core.device, native);
        let pass = Pass { encoder, pipeline: None, shared: 0 };
        if self.fenced.load(Ordering::Acquire) {
            // SAFETY: the pass is open. The stream keeps the fence until its command buffers are
            // over.
            unsafe { self.ops().wait_fence(native.into(), self.fence.native())? };
        }
        Ok(pass)
    }

    /// Ends a pass: later ones come after it.
    fn end_pass(&self, pass: Option<Pass>) {
        let Some(pass) = pass else { return };
        let encoder = pass.encoder.native.into();
        self.fenced.store(true, Ordering::Release);
        // SAFETY: the pass is open. The stream keeps the fence until its command buffers are over.
        if let Err(error) = unsafe { self.ops().update_fence(encoder, self.fence.native()) } {
            tracing::error!(%error, "a fence could not be updated");
        }
    }

    /// The open pass, and its command buffer; new ones unless there are some.
    fn pass<'e>(&self, e: &'e mut Encoding) -> Result<(&'e mut Open, NativeComputeEncoder)> {
        let open = self.open(e)?;
        let pass = match open.pass.take() {
            Some(pass) => pass,
            None => self.begin_pass(open.command.native, None)?,
        };
        let encoder = open.pass.insert(pass).encoder.native;
        Ok((open, encoder))
    }

    /// The queue's claim. Waits while another stream encodes or commits.
    ///
    /// # Errors
    /// `Occupied` if another holder keeps the claim.
    fn claim(&self) -> Result<Claim<CommandQueueState>> {
        let (mut looks, mut begun) = (0_u32, None);
        loop {
            let refused = match self.queue.claim() {
                Ok(claim) => return Ok(claim),
                Err(refused) => refused,
            };
            looks = looks.saturating_add(1);
            if looks < SPINS {
                spin_loop();
            } else if looks < YIELDS {
                thread::yield_now();
            } else if begun.get_or_insert_with(Instant::now).elapsed() < TIMEOUT {
                thread::sleep(Duration::from_micros(50));
            } else {
                return Err(refused);
            }
        }
    }

    /// The claim for a thread that has the lock of `e`. `None` if the stream has the claim.
    fn claim_for(&self, e: &Encoding) -> Result<Option<Claim<CommandQueueState>>> {
        if e.claim.is_some() { Ok(None) } else { self.claim().map(Some) }
    }

    /// Commits the open command buffer in the queue's turn.
    ///
    /// # Errors
    /// `Occupied` if another holder keeps the queue's claim. Nothing was committed.
    fn commit_in_turn(&self, e: &mut Encoding) -> Result<()> {
        if e.open.is_some() {
            let _claim = self.claim_for(e)?;
            self.commit(e);
        }
        Ok(())
    }

    /// Commits the open command buffer, if it has a command. The stream has the queue's turn.
    fn commit(&self, e: &mut Encoding) {
        let Some(mut open) = e.open.take() else { return };
        if !open.used {
            return;
        }
        self.end_pass(open.pass.take());
        let Open { command, permit, values, kept, .. } = open;
        let first = values.map_or_else(|| self.in_flight.reached() + 1, |(first, _)| first);
        // SAFETY: the command buffer is live, has no pass and is not committed. The submitters
        // vouch for the memory until their values are over. `kept` and this stream have all other
        // objects.
        let flight = unsafe { self.in_flight.commit(command, permit, first, kept) };
        self.room.add(&flight);
        if let Some((first, last)) = values {
            if let Some((seq, value)) = e.last.filter(|(_, value)| *value < first) {
                self.in_flight.note(seq, value);
            }
            // Only a part of the last submission may be in the command buffer.
            self.in_flight.note(self.in_flight.last(), last - 1);
            e.last = Some((self.in_flight.last(), last));
        }
    }

    /// Learns which command buffers are over.
    fn observe(&self) -> Result<()> {
        self.noted(self.in_flight.observe())?;
        if let Some((_, lost @ Error::DeviceLost { .. })) = self.in_flight.failure() {
            self.core.note(lost);
        }
        Ok(())
    }

    /// Encodes an operation, with staging memory if it needs some. Returns whether there was
    /// anything to encode.
    ///
    /// # Safety
    /// - The memory that the operation names, and the staging memory, may be used until the
    ///   submission `value` is over.
    pub(super) unsafe fn give(
        &self,
        e: &mut Encoding,
        op: &Op<'_>,
        staging: Option<&Buffer>,
        value: u64,
    ) -> Result<bool> {
        let staged = staging.map(|buffer| (buffer.addr(), buffer.native()));
        let transfers = &self.core.transfers;
        let (transfer, bytes) = match op {
            // SAFETY: the caller vouches for the bindings' memory.
            Op::Dispatch(d) => return unsafe { self.dispatch(e, d, value) },
            Op::WriteTimestamp(timestamp) => {
                timestamp.clear();
                return self.timestamp(e, timestamp.native(), value).map(|()| true);
            }
            Op::Copy(c) => (transfers.copy(c)?, c.width.saturating_mul(c.rows)),
            Op::Copies(copies) => {
                let mut any = false;
                for piece in copies.pieces() {
                    if let Some(transfer) = transfers.copy(&piece.alone())? {
                        // SAFETY: the caller vouches for both sides of the piece.
                        unsafe { self.transfer(e, &transfer, piece.bytes, value) }?;
                        any = true;
                    }
                }
                return Ok(any);
            }
            Op::Fill(f) => (transfers.fill(f)?, f.bytes),
            Op::Upload(u) => {
                let from = staged.unwrap_or((u.src as u64, 0));
                (transfers.copy(&Copy2d::linear(from, (u.dst, u.native), u.bytes))?, u.bytes)
            }
            Op::Download(d) => {
                let to = staged.unwrap_or((d.dst as u64, 0));
                (transfers.copy(&Copy2d::linear((d.src, d.native), to, d.bytes))?, d.bytes)
            }
            Op::Graph(exec) => {
                // SAFETY: graphs of a submission belong to this device (the submitter's promise).
                let program = unsafe { graph_of::<Self>(exec) };
                // SAFETY: the caller vouches for the graph's memory.
                return unsafe { program.launch(self, e, 0, value) };
            }
            other => {
                let text = format!("a {} is not given to the driver", other.kind());
                return Err(Error::state(text));
            }
        };
        let Some(transfer) = transfer else { return Ok(false) };
        // SAFETY: the caller vouches for both sides of the transfer.
        unsafe { self.transfer(e, &transfer, bytes, value) }.map(|()| true)
    }

    /// # Safety
    /// - As [`give`](Self::give).
    #[inline]
    unsafe fn dispatch(&self, e: &mut Encoding, d: &Dispatch<'_>, value: u64) -> Result<bool> {
        if d.grid.contains(&0) {
            return Ok(false);
        }
        let mut places = [(NativeBuffer::default(), 0); Limits::BINDINGS as usize];
        let mut bytes = 0_u64;
        for (place, b) in places.iter_mut().zip(d.bindings).filter(|(_, b)| b.len != 0) {
            *place = self.core.device.reach(b.native, b.addr, b.len)?;
            bytes = bytes.saturating_add(b.len);
        }
        let (open, encoder) = self.pass(e)?;
        open.keep(d.pipeline);
        let Some(pass) = &mut open.pass else { return Err(Error::state("no pass is open")) };
        let (ops, pipeline) = (self.ops(), NativePipeline(d.pipeline.native));
        let shared = d.shared.next_multiple_of(SHARED_UNIT);
        let launch = Launch { groups: d.grid, threads: d.block, bindings: d.bindings };
        // SAFETY: the pass is open. The command buffer keeps the pipeline, which is of this device
        // (the submitter's promise). The caller vouches for the bindings' memory, whose places lie
        // in their buffers. Numbers and sizes were checked against the pipeline.
        unsafe {
            if pass.pipeline != Some(pipeline) {
                ops.set_pipeline(encoder, pipeline)?;
                pass.pipeline = Some(pipeline);
            }
            // Metal's validation wants a buffer for each argument, also for one that the kernel
            // does not read.
            let spare = places.iter().find(|place| place.0 != NativeBuffer::default());
            for (i, (b, place)) in (0_u32..).zip(d.bindings.iter().zip(&places)) {
                if let Some((buffer, offset)) = if b.len == 0 { spare } else { Some(place) } {
                    ops.set_buffer(encoder, *buffer, *offset, i)?;
                }
            }
            if !d.params.is_empty() {
                ops.set_bytes(encoder, d.params, d.bindings.len() as u32)?;
            }
            if pass.shared != shared {
                ops.set_threadgroup_memory(encoder, shared, 0)?;
                pass.shared = shared;
            }
            ops.dispatch(encoder, &launch)?;
        }
        open.note(value, 1, bytes);
        Ok(true)
    }

    /// # Safety
    /// - As [`give`](Self::give).
    unsafe fn transfer(
        &self,
        e: &mut Encoding,
        transfer: &Transfer,
        bytes: u64,
        value: u64,
    ) -> Result<()> {
        let (open, encoder) = self.pass(e)?;
        if let Some(pass) = &mut open.pass {
            // The transfer sets pipelines of its own.
            pass.pipeline = None;
        }
        open.note(value, 1, bytes);
        // SAFETY: the pass is open and serial. The caller vouches for the memory.
        unsafe { transfer.encode(self.ops(), encoder) }
    }

    /// Encodes a pass of its own that samples the time at its end.
    fn timestamp(&self, e: &mut Encoding, slot: u64, value: u64) -> Result<()> {
        let samples = self.core.samples.of(slot)?;
        let open = self.open(e)?;
        self.end_pass(open.pass.take());
        let pass = self.begin_pass(open.command.native, Some(samples))?;
        self.end_pass(Some(pass));
        open.note(value, 1, 0);
        Ok(())
    }
}

/// Whether an upload or download needs staging memory.
pub(super) fn needs_staging(core: &Core, op: &Op<'_>) -> bool {
    let reaches =
        |addr: u64, bytes: u64| bytes == 0 || core.device.shared.spans.of(0, addr, bytes).is_some();
    match op {
        Op::Upload(u) => !reaches(u.src as u64, u.bytes),
        Op::Download(d) => !reaches(d.dst as u64, d.bytes),
        _ => false,
    }
}

// SAFETY: a fence orders the passes of a stream, and dispatches of a pass are serial. A value is
// noted for the last command buffer with work up to it, and reached once that one is over. A mark
// is a value that this command buffer signals, or that is made up for after its error.
unsafe impl DriverStream for MpsStream {
    type Device = Core;
    type Mark = Mark;
    type Preparation = UniqueLease<Buffer>;
    type Action = HostAction;
    type Graph = Program;
    type Entry<'a> = MutexGuard<'a, Encoding>;

    fn create(core: &Arc<Core>, _: &StreamKey, start: u64) -> Result<Self> {
        let (queue, room) = core.queue()?;
        let event = core.sources.events.acquire(EventKind::Shared)?;
        Ok(Self {
            in_flight: InFlight::new(&core.common.skipped, (event, core.in_flight.hold()), start)?,
            fence: core.sources.fences.acquire()?,
            _held: core.live.hold(),
            core: core.clone(),
            queue,
            room,
            fenced: AtomicBool::new(false),
            encoding: Mutex::default(),
            abandoned: false,
        })
    }

    /// The queue, which other streams share.
    fn handle(&self) -> u64 {
        self.queue.native().0
    }

    #[inline]
    fn check(&self, op: &Op<'_>, timeline: &Timeline) -> Result<()> {
        op.check(timeline, self.core.device.properties.max_threadgroup_memory)
    }

    #[inline]
    fn is_plain(&self, op: &Op<'_>) -> bool {
        match op {
            Op::Dispatch(_) | Op::Copy(_) | Op::Copies(_) | Op::Fill(_) | Op::WriteTimestamp(_) => {
                true
            }
            Op::Upload(_) | Op::Download(_) => !needs_staging(&self.core, op),
            _ => false,
        }
    }

    fn prepare(&self, op: &Op<'_>) -> Result<Option<UniqueLease<Buffer>>> {
        match op {
            Op::Upload(u) => {
                let staging = self.core.staging.take(u.bytes)?;
                // SAFETY: the submitter vouches for the source until its value is over. No work
                // uses the new memory.
                unsafe { host::stage(u.src, &staging, u.bytes) };
                Ok(Some(staging))
            }
            Op::Download(d) => self.core.staging.take(d.bytes).map(Some),
            _ => Ok(None),
        }
    }

    fn reserve(&self) -> bool {
        let mut e = self.encoding.lock();
        if e.open.is_none() && e.permit.is_none() {
            e.permit = self.room.take();
            if e.permit.is_none() {
                self.room.poll();
                e.permit = self.room.take();
            }
        }
        if e.open.is_some() || e.permit.is_some() {
            if e.claim.is_none() {
                e.claim = self.queue.claim().ok();
            }
            e.reserved = e.claim.is_some();
            if !e.reserved {
                e.permit = None;
            }
        }
        e.reserved
    }

    fn wait_room(&self) -> Result<()> {
        self.noted(self.room.wait())?;
        // Without the lock: the next reservation tries to take the claim.
        self.claim().map(drop)
    }

    #[inline]
    fn enter(&self) -> Result<MutexGuard<'_, Encoding>> {
        let mut e = self.encoding.lock();
        match self.core.loss() {
            Some(loss) => {
                (e.permit, e.reserved, e.claim) = (None, false, None);
                Err(loss)
            }
            None => Ok(e),
        }
    }

    #[inline]
    unsafe fn encode(
        &self,
        entry: &mut MutexGuard<'_, Encoding>,
        op: &Op<'_>,
        staging: Option<UniqueLease<Buffer>>,
        sink: &mut Sink<'_, Self>,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the operation. The action below keeps the staging memory.
        let given = unsafe { self.give(entry, op, staging.as_deref(), sink.value()) };
        if !self.noted(given)? {
            return Ok(());
        }
        sink.took(Ok(()))?;
        match (op, staging) {
            (Op::Upload(u), staging) => {
                if let Some(staging) = staging {
                    sink.leave(HostAction::Uploaded(staging));
                }
                if let Some(keep) = u.keep {
                    sink.keep(keep.clone());
                }
            }
            (Op::Download(d), Some(staging)) => {
                let (dst, keep) = (HostAddress(d.dst), d.keep.cloned());
                sink.leave(HostAction::CopyOut { staging, dst, bytes: d.bytes, keep });
            }
            (Op::Download(d), None) => {
                if let Some(keep) = d.keep {
                    sink.keep(keep.clone());
                }
            }
            (Op::WriteTimestamp(timestamp), _) => {
                sink.leave(HostAction::Timestamp((*timestamp).clone()));
            }
            (Op::Graph(exec), _) => {
                sink.leave(HostAction::Graph { exec: (*exec).clone(), segment: 0 });
            }
            _ => {}
        }
        Ok(())
    }

    fn encode_wait(&self, entry: &mut MutexGuard<'_, Encoding>, mark: &Mark) -> Result<()> {
        if mark.is_over() {
            // The host has seen the end, which orders all later commits.
            return Ok(());
        }
        let open = self.noted(self.open(entry))?;
        self.end_pass(open.pass.take());
        open.kept.waits.push(mark.clone());
        let (command, event) = (open.command.native, mark.in_flight.event().into());
        // SAFETY: the command buffer is open and has no pass. `kept` has the event's list.
        unsafe { self.ops().encode_wait(command, event, mark.seq)? };
        open.used = true;
        entry.wait_for(&mark.in_flight, mark.seq);
        Ok(())
    }

    unsafe fn launch(
        &self,
        entry: &mut MutexGuard<'_, Encoding>,
        exec: &Lease<dyn GraphExec>,
        segment: u32,
        sink: &mut Sink<'_, Self>,
    ) -> Result<()> {
        // SAFETY: graphs of a submission belong to this device (the submitter's promise).
        let program = unsafe { graph_of::<Self>(exec) };
        // SAFETY: the graph's memory may be used (the contract of this function). The action below
        // keeps the graph.
        let given = unsafe { program.launch(self, entry, segment, sink.value()) };
        sink.took(self.noted(given).map(drop))?;
        sink.leave(HostAction::Graph { exec: exec.clone(), segment });
        Ok(())
    }

    fn leave(&self, mut e: MutexGuard<'_, Encoding>) -> Result<()> {
        (e.permit, e.reserved) = (None, false);
        let claim = e.claim.take();
        let Some(open) = &e.open else { return Ok(()) };
        let config = self.core.config();
        if !open.used {
            e.open = None;
        } else if open.dispatches >= config.dispatches_per_buffer
            || open.bytes >= config.bytes_per_buffer
            || self.room.is_full()
        {
            self.commit(&mut e);
            drop((claim, e));
            // Command buffers that are over go back to the driver, also if nobody waits.
            if let Err(error) = self.observe() {
                // The next submission, or a thread that waits, meets a lasting error.
                tracing::debug!(%error, "{self:?} could not be observed");
            }
        }
        Ok(())
    }

    /// The library gets a command buffer of its own, because its passes know no fence. Events order
    /// the command buffer behind the earlier work, and the later work behind it.
    fn run_foreign(&self, call: &ForeignCall, value: u64) -> Result<()> {
        let mut open = loop {
            let mut e = self.encoding.lock();
            let claim = self.claim_for(&e)?;
            self.commit(&mut e);
            e.permit = self.room.take();
            if e.permit.is_some() {
                e.wait_for(&self.in_flight, self.in_flight.last());
                self.noted(self.open(&mut e).map(drop))?;
                if let Some(open) = e.open.take() {
                    break open;
                }
            }
            drop((claim, e));
            self.wait_room()?;
        };
        call.run(open.command.native.0)?;
        open.note(value, 1, 0);
        let mut e = self.encoding.lock();
        e.open = Some(open);
        self.commit_in_turn(&mut e)?;
        e.wait_for(&self.in_flight, self.in_flight.last());
        Ok(())
    }

    unsafe fn graph(exec: &Lease<dyn GraphExec>) -> &Program {
        // SAFETY: the exec is of this backend (the contract of this function).
        unsafe { graph_of::<Self>(exec) }
    }

    fn signal(&self, value: u64) -> Result<()> {
        let mut e = self.encoding.lock();
        e.reserved = false;
        self.commit_in_turn(&mut e)?;
        self.in_flight.note(self.in_flight.last(), value);
        Ok(())
    }

    fn reached(&self) -> u64 {
        if let Err(error) = self.observe() {
            tracing::debug!(%error, "{self:?} could not be observed");
        }
        self.in_flight.reached()
    }

    fn failure(&self) -> Option<(u64, Error)> {
        self.in_flight.failure()
    }

    fn query(&self) -> Result<bool> {
        let mut e = self.encoding.lock();
        if e.reserved {
            // A submission of another thread is about to begin.
            return Ok(false);
        }
        if e.open.is_some() {
            // While another stream has its turn, this stream's open work is not over.
            let Ok(_claim) = self.queue.claim() else { return Ok(false) };
            self.commit(&mut e);
        }
        drop(e);
        self.observe()?;
        Ok(self.in_flight.is_idle())
    }

    fn mark(&self) -> Result<Mark> {
        Ok(Mark { in_flight: self.in_flight.clone(), seq: self.in_flight.last() })
    }

    fn record(&self, mark: &mut Mark, _: u64) -> Result<()> {
        self.commit_in_turn(&mut self.encoding.lock())?;
        mark.seq = self.in_flight.last();
        Ok(())
    }

    /// A command buffer that was not committed on a lost device never runs.
    fn rest(&self) {
        if self.core.loss().is_none() {
            return;
        }
        let open = std::mem::take(&mut *self.encoding.lock());
        drop(open);
        if let Err(error) = self.observe() {
            tracing::debug!(%error, "{self:?} could not be observed");
        }
    }

    fn host_function(&self, call: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.commit_in_turn(&mut self.encoding.lock())?;
        let (event, last) = (self.in_flight.event(), self.in_flight.last());
        // SAFETY: the list keeps the event live.
        self.noted(unsafe { self.ops().on_signaled(event, last, Box::new(move |_| call())) })
    }

    /// The event says nothing about an error of an earlier command buffer.
    fn is_done_at_call(&self) -> Result<bool> {
        self.query()
    }

    fn synchronize(&self) -> Result<()> {
        self.commit_in_turn(&mut self.encoding.lock())?;
        self.noted(self.in_flight.wait())?;
        self.observe()
    }

    fn abandon(&mut self) {
        self.abandoned = true;
        std::mem::forget((self.in_flight.clone(), self.fence.clone(), self.queue.clone()));
    }

    fn run_action(core: &Core, action: HostAction, sound: bool) {
        action.run(core, sound);
    }
}

impl Drop for MpsStream {
    fn drop(&mut self) {
        // A command buffer that was not committed never runs.
        *self.encoding.get_mut() = Encoding::default();
        if !self.abandoned
            && !self.in_flight.is_idle()
            && let Err(error) = self.in_flight.wait()
        {
            tracing::error!(%error, "{self:?} may still run work as it ends");
            self.abandon();
        }
    }
}

impl fmt::Debug for MpsStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MpsStream({:?} on queue {:?})", self.in_flight, self.queue.index())
    }
}

impl fmt::Debug for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Encoding(open: {})", self.open.is_some())
    }
}
