//! The memory of buffers: who keeps it, who uses it outside, and when it goes.
//!
//! A block keeps the memory; buffers, exports and operations under way share the block. Streams use
//! an import of the memory, which keeps the memory too: graphs hold imports. So memory goes with
//! the last of them, in whatever order they end.
//!
//! # Host memory
//! Host memory is touched by a thread that is attached to the interpreter, by exports, and by
//! streams. So it is as Python's own memory: no two threads of Python touch it at once through this
//! package. With the first use on a stream it gets a record. From then on a thread waits for the
//! streams' uses before it touches the memory ([`settle`]). A thread that gives a stream work says
//! so while it is attached ([`Giving`]), so none comes in between.
//!
//! # Device memory
//! Operations of a buffer run on the device's own stream, those of a `Stream` there. The runtime
//! orders them by the buffer's record. A consumer of DLPack names its stream. That stream waits for
//! what was submitted before, each later operation waits for the stream and the stream for it, and
//! the memory is reused only after the work that the stream had when the consumer let go.
//!
//! A handle is a number that nobody can vouch for, and the array API lets a consumer destroy its
//! stream after the export. So the driver gets the handles of default streams and of this package's
//! own stream alone. For the others the export waits for the buffer's work, and the timeline of
//! the whole device stands for theirs: later operations of the buffer wait on the host, and freed
//! memory waits until the device was synchronized, or until it is needed.
//!
//! An import's owner orders its work with the device's own stream, which it was told. So a copy on
//! another device's stream waits for that one, and that one for the copy. The same holds for the
//! streams of an import's further consumers.
//!
//! # Failures
//! The device's own stream is given nothing that may still fail elsewhere: an operation there waits
//! on the host for the uses of other streams. So no failure of a `Stream` reaches it.

use crate::allocator::Pool;
use crate::callbacks;
use crate::device::State;
use crate::waits::{is_interrupt, until};
use leasehold::cuda::ExternalStream;
use leasehold::{
    Access, Buffer, BufferView, Error, Lease, Operand, Protection, Result, Stream, View,
};
use leasehold_core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use leasehold_core::sync::{Arc, Mutex, OnceLock, thread};
use leasehold_core::{PackedTimepoint, TimelineSource, Timepoint};
use pyo3::prelude::*;
use std::any::Any;
use std::time::{Duration, Instant};

/// Bytes that are staged at once.
const PIECE: u64 = 64 << 20;

/// A stream of another library that uses the memory. A handle does not tell streams apart: that of
/// a per-thread default stream means another one in each thread.
struct Consumer {
    /// The timeline source that its work is marked on.
    stream: Arc<ExternalStream>,
    exports: usize,
}

/// The keeper of memory that is somebody else's.
type Foreign = Arc<dyn Any + Send + Sync>;

/// A lease of memory that is ours, for the import of it. The block takes it out if nobody else has
/// the import at its end: the allocator then orders the memory's next use itself.
type Kept = Arc<Mutex<Option<Lease<Buffer>>>>;

/// Memory of a device.
pub(crate) struct Block {
    pub(crate) device: Arc<State>,
    address: u64,
    bytes: u64,
    pub(crate) read_only: bool,
    /// The memory as a buffer of the runtime, for its streams. Device memory has it from the start,
    /// host memory and no bytes with the first use on a stream.
    buffer: OnceLock<Lease<Buffer>>,
    /// The allocator's lease, for memory that is ours.
    own: Option<Lease<Buffer>>,
    /// The same lease, for the import.
    kept: Kept,
    /// The keeper of foreign memory.
    foreign: Option<Foreign>,
    /// The end of what the memory of the host was used for by its former owners.
    born: Option<Timepoint>,
    /// Requests of the buffer protocol and tensors of DLPack that live.
    exports: AtomicUsize,
    /// The address was given away for as long as the block lives.
    lent: AtomicBool,
    /// Threads that give a stream work on the memory right now.
    giving: AtomicUsize,
    /// Whether there ever was one of the consumers below.
    shared: AtomicBool,
    consumers: Mutex<Vec<Consumer>>,
    /// The ends of consumers' work: they may have written. The buffer's record has none of them: a
    /// device cannot wait for each.
    ended: Mutex<Vec<Timepoint>>,
}

/// Whether both are the same stream.
fn same(a: &ExternalStream, b: &ExternalStream) -> bool {
    a.timeline().id() == b.timeline().id()
}

impl Block {
    /// New memory.
    pub(crate) fn allocate(pool: &Arc<Pool>, bytes: u64) -> Result<Arc<Self>> {
        let own = pool.alloc(bytes)?;
        let device = pool.device.clone();
        let address = own.addr();
        // The stream's earlier work may still use the memory, which others must wait for.
        let stream = pool.stream();
        let idle = stream.raw().timeline().is_idle();
        let born = Some(stream.now()).filter(|_| !device.host || !idle);
        let host = device.host;
        let made = Self::with(device, (address, bytes), false, (Some(own), None, born));
        if !host && bytes != 0 {
            made.stream_buffer()?;
        }
        Ok(Arc::new(made))
    }

    /// Somebody else's memory, which `keeper` keeps.
    ///
    /// # Safety
    /// - The range is memory of the device, which may be read, and written unless it is read-only,
    ///   until the keeper is dropped.
    /// - The owner orders its own use of the memory with this block's: on the host by the
    ///   interpreter's lock, on a device by streams.
    pub(crate) unsafe fn import(
        device: Arc<State>,
        (address, bytes): (u64, u64),
        read_only: bool,
        keeper: Foreign,
    ) -> Result<Arc<Self>> {
        device.check_process()?;
        let host = device.host;
        let made = Self::with(device, (address, bytes), read_only, (None, Some(keeper), None));
        if !host && bytes != 0 {
            made.stream_buffer()?;
        }
        Ok(Arc::new(made))
    }

    fn with(
        device: Arc<State>,
        (address, bytes): (u64, u64),
        read_only: bool,
        (own, foreign, born): (Option<Lease<Buffer>>, Option<Foreign>, Option<Timepoint>),
    ) -> Self {
        Self {
            device,
            address,
            bytes,
            read_only,
            buffer: OnceLock::new(),
            kept: Arc::new(Mutex::new(own.clone())),
            own,
            foreign,
            born,
            exports: AtomicUsize::new(0),
            lent: AtomicBool::new(false),
            giving: AtomicUsize::new(0),
            shared: AtomicBool::new(false),
            consumers: Mutex::default(),
            ended: Mutex::default(),
        }
    }

    /// The memory as a buffer of the runtime, for its streams.
    pub(crate) fn stream_buffer(&self) -> Result<&Lease<Buffer>> {
        if let Some(made) = self.buffer.get() {
            return Ok(made);
        }
        let runtime = &self.device.runtime;
        let made = if self.bytes == 0 {
            runtime.alloc(0)?
        } else {
            let protection =
                if self.read_only { Protection::ReadOnly } else { Protection::ReadWrite };
            let keeper = Box::new((self.kept.clone(), self.foreign.clone()));
            let (address, bytes) = (self.address, self.bytes);
            // SAFETY: the import has the keeper of foreign memory, and a lease of own memory. That
            // is taken away only as the import ends, and the allocator is told of all uses then.
            // So the memory outlasts them.
            unsafe { runtime.allocator().import(address, bytes, 0, protection, keeper) }?
        };
        if let Some(born) = self.born {
            made.used_on(born);
        }
        // If another thread was faster, its buffer stays: nobody has used this one.
        Ok(self.buffer.get_or_init(|| made))
    }

    /// The buffer of memory that the host does not touch.
    fn device_buffer(&self) -> Option<&Lease<Buffer>> {
        if self.device.host { None } else { self.buffer.get() }
    }

    /// A range as an operand of an operation.
    pub(crate) fn operand(&self, (at, bytes): (u64, u64), access: Access) -> Result<Operand<'_>> {
        Ok(self.stream_buffer()?.view().narrowed(at, bytes).with(access))
    }

    /// Whether a stream may use the memory, so that its end may wait.
    pub(crate) fn is_on_streams(&self) -> bool {
        self.buffer.get().is_some()
    }

    /// The bytes of the memory.
    pub(crate) fn len(&self) -> u64 {
        self.bytes
    }

    /// The address of a byte of the memory. Null for no memory.
    pub(crate) fn address(&self, offset: u64) -> u64 {
        if self.address == 0 { 0 } else { self.address + offset }
    }

    /// The address of a byte of host memory, which is never null.
    pub(crate) fn host_address(&self, offset: u64) -> *mut u8 {
        match self.address(offset) {
            0 => std::ptr::dangling_mut(),
            address => address as *mut u8,
        }
    }

    pub(crate) fn set_name(&self, name: &str) {
        if let Some(own) = &self.own {
            own.set_name(name);
        }
    }

    pub(crate) fn name(&self) -> Option<String> {
        self.own.as_ref()?.name().map(|name| name.as_str().to_owned())
    }

    fn check_writable(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::invalid("the memory was imported read-only and cannot be written"));
        }
        Ok(())
    }

    // ---- exports

    /// Counts an export of the memory. The thread is attached.
    pub(crate) fn begin_export(&self) {
        self.exports.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes it back, on any thread.
    pub(crate) fn end_export(&self) {
        self.exports.fetch_sub(1, Ordering::Release);
    }

    /// Notes that the address was given away for as long as the block lives.
    pub(crate) fn lend(&self) {
        self.lent.store(true, Ordering::Relaxed);
    }

    /// Why the memory cannot be freed now.
    pub(crate) fn in_use(&self) -> Option<String> {
        match self.exports.load(Ordering::Acquire) {
            0 if self.lent.load(Ordering::Relaxed) => Some(
                "its address was given away without a stream, by __cuda_array_interface__ or DLPack; \
                 it is freed with the last reference to the buffer"
                    .to_owned(),
            ),
            0 => None,
            1 => Some("an export of it lives; delete the array that was made of it".to_owned()),
            n => Some(format!("{n} exports of it live; delete the arrays that were made of it")),
        }
    }

    /// Counts an export for a stream of another library, which waits for what was submitted so far.
    /// Returns what [`end_consumer`](Self::end_consumer) takes; `None` without memory.
    pub(crate) fn begin_consumer(&self, handle: u64) -> Result<Option<Arc<ExternalStream>>> {
        let Some(buffer) = self.device_buffer() else { return Ok(None) };
        self.device.check_process()?;
        let mut before = self.uses(buffer);
        if self.is_imported() {
            // The owner's work so far comes before what the stream that it knows gets.
            before.push(self.device.told()?.now());
        }
        let stream = self.device.admit(handle, &before)?;
        self.shared.store(true, Ordering::Release);
        let mut consumers = self.consumers.lock();
        match consumers.iter_mut().find(|consumer| same(&consumer.stream, &stream)) {
            Some(consumer) => consumer.exports += 1,
            None => consumers.push(Consumer { stream: stream.clone(), exports: 1 }),
        }
        Ok(Some(stream))
    }

    /// Takes it back: the memory is not reused before the work that the stream has now.
    pub(crate) fn end_consumer(&self, stream: &ExternalStream) {
        if self.device.is_forked() {
            return;
        }
        let now = stream.now();
        // If there is an event to record, it is recorded at once, so that nobody waits for later
        // work. In a capture it is recorded later.
        let _ = stream.signal();
        let mut ended = self.ended.lock();
        ended.retain(|point| point.timeline_id() != now.timeline_id() && !point.has_passed());
        ended.push(now);
        drop(ended);
        if self.is_imported() {
            // The owner orders its next work with the stream that it knows. In a capture it cannot.
            let _ = self.device.told().and_then(|told| match told.wait(now) {
                // Nobody would hear of Ctrl-C here.
                Err(Error::Unsupported(_)) => self.device.runtime.wait_for(now),
                other => other,
            });
        }
        let mut consumers = self.consumers.lock();
        let found = consumers.iter().position(|consumer| same(&consumer.stream, stream));
        let Some(at) = found else { return };
        consumers[at].exports -= 1;
        if consumers[at].exports == 0 {
            consumers.swap_remove(at);
        }
    }

    /// Whether the memory of a device is somebody else's, who knows the device's own stream.
    fn is_imported(&self) -> bool {
        self.own.is_none() && self.device_buffer().is_some()
    }

    /// The streams that use the memory outside of the operations of a stream: those of consumers,
    /// and the stream that the owner of an import knows, unless the operations run there.
    fn outside(&self, device: &State, stream: &Stream) -> Result<Vec<Arc<ExternalStream>>> {
        let streams = self.consumers.lock().iter().map(|c| c.stream.clone()).collect();
        let own = std::ptr::eq(&*self.device, device) && device.is_own(stream);
        if !self.is_imported() || own {
            return Ok(streams);
        }
        let told = self.device.told()?;
        Ok([streams, vec![told]].concat())
    }

    /// Waits for the uses of other streams than the device's own, before an operation there.
    /// `overwrites`: the operation writes all of the memory, and reads none. Memory whose writing
    /// failed is sound before it, since several pieces may write it.
    ///
    /// # Errors
    /// The failure of the work that was to write the memory, which the operation would inherit.
    fn await_streams(&self, buffer: &Lease<Buffer>, overwrites: bool) -> Result<()> {
        let own = self.device.runtime.stream().now().timeline_id();
        let other = |point: &Timepoint| point.timeline_id() != own && !point.is_settled();
        for point in record(buffer).into_iter().filter(other) {
            let over = self.device.wait_for([point]);
            let inherits = buffer.write_timepoint().timepoint() == Some(point);
            match over {
                Err(error) if is_interrupt(&error) => return Err(error),
                Err(_) if inherits && overwrites => self.clear(buffer)?,
                Err(error) if inherits => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Overwrites all of the memory by one operation: then it is sound, whatever failed before.
    fn clear(&self, buffer: &Lease<Buffer>) -> Result<()> {
        let stream = self.device.runtime.stream();
        fill(stream, buffer.view(), &[0])?;
        synchronize(stream)
    }

    /// Whether memory of the host has what failed work left. Waits until no stream uses it.
    ///
    /// # Errors
    /// As [`settle`], but for the failure of that work.
    pub(crate) fn is_broken(&self, py: Python<'_>) -> Result<bool> {
        let Err(error) = settle(py, &[self]) else { return Ok(false) };
        self.device.check_process()?;
        let failed = |point: Timepoint| point.timeline().check(point.value()).is_err();
        match self.host_uses().0.is_some_and(failed) && !is_interrupt(&error) {
            true => Ok(true),
            false => Err(error),
        }
    }

    /// Waits until no stream uses memory of the host, before an operation that writes `bytes` of
    /// it. If these are all, the memory is sound then, whatever failed before.
    ///
    /// # Errors
    /// As [`settle`].
    pub(crate) fn settle_to_write(&self, py: Python<'_>, bytes: u64) -> Result<()> {
        if bytes == self.bytes && self.is_broken(py)? {
            py.detach(|| self.clear(self.stream_buffer()?))?;
        }
        settle(py, &[self])
    }

    /// Lets later work of a stream come after what streams outside have now. Returns these: they
    /// must come after that work ([`end_order`](Self::end_order)). May block.
    pub(crate) fn begin_order<B: AsRef<Block>>(
        blocks: &[B],
        device: &State,
        stream: &Stream,
    ) -> Result<Vec<Arc<ExternalStream>>> {
        let mut outside = Vec::new();
        for block in blocks {
            let block = block.as_ref();
            if block.own.is_some() && !block.shared.load(Ordering::Acquire) {
                // Nobody outside knows it.
                continue;
            }
            for point in block.ended.lock().clone() {
                device.order_after(stream, point)?;
            }
            outside.append(&mut block.outside(device, stream)?);
        }
        for other in &outside {
            device.order_after(stream, other.now())?;
        }
        Ok(outside)
    }

    /// Lets later work of streams outside come after a stream's work so far. May block.
    pub(crate) fn end_order(
        outside: &[Arc<ExternalStream>],
        device: &State,
        stream: &Stream,
    ) -> Result<()> {
        outside.iter().try_for_each(|other| device.order_before(stream, other))
    }

    /// Runs operations on a stream, after what streams outside have now, and before what they get
    /// later. Blocks until they are done if one of them cannot be ordered on the device.
    pub(crate) fn ordered<B: AsRef<Block>, R>(
        blocks: &[B],
        device: &State,
        stream: &Stream,
        run: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let outside = Self::begin_order(blocks, device, stream)?;
        let result = run()?;
        Self::end_order(&outside, device, stream)?;
        Ok(result)
    }

    /// The timepoints of all uses: of operations, and of consumers that let go.
    fn uses(&self, buffer: &Buffer) -> Vec<Timepoint> {
        let mut uses = record(buffer);
        uses.extend(self.ended.lock().iter().copied());
        uses
    }

    /// Waits until nothing of this package uses the memory.
    pub(crate) fn wait(&self) -> Result<()> {
        if let Some(buffer) = self.buffer.get() {
            self.device.check_process()?;
            self.device.wait_for(self.uses(buffer))?;
        }
        self.device.wait_for(self.born.as_slice())
    }

    /// Waits until the uses of foreign memory are over, however they end. The end of the memory
    /// waits for them too, but Ctrl-C cannot end that.
    ///
    /// # Errors
    /// The exception of a signal's handler.
    pub(crate) fn wait_for_end(&self) -> Result<()> {
        let Some(buffer) = self.buffer.get().filter(|_| self.foreign.is_some()) else {
            return Ok(());
        };
        let points = if self.device.is_forked() { Vec::new() } else { self.uses(buffer) };
        let interrupted = |point| self.device.wait_for([point]).err().filter(is_interrupt);
        points.into_iter().find_map(interrupted).map_or(Ok(()), Err)
    }

    /// The uses of memory of the host by streams: the last write, and all others.
    fn host_uses(&self) -> (Option<Timepoint>, Vec<Timepoint>) {
        let mut others = Vec::from_iter(self.born);
        let Some(buffer) = self.buffer.get().filter(|_| self.device.host) else {
            return (None, if self.device.host { others } else { Vec::new() });
        };
        buffer.for_each_read(|point| others.extend(point.timepoint()));
        (buffer.write_timepoint().timepoint(), others)
    }

    /// Whether a stream still uses memory of the host, or has failed to write it.
    fn is_unsettled(&self) -> bool {
        if self.giving.load(Ordering::Acquire) != 0 {
            return true;
        }
        if self.buffer.get().is_none() && self.born.is_none() {
            return false;
        }
        let (write, others) = self.host_uses();
        let check = |point: &Timepoint| point.timeline().check(point.value());
        write.is_some_and(|point| !matches!(check(&point), Ok(true)))
            || others.iter().any(|point| matches!(check(point), Ok(false)))
    }

    /// Waits until no stream uses memory of the host.
    ///
    /// # Errors
    /// The failure of the work that was to write it.
    fn wait_for_streams(&self) -> Result<()> {
        self.device.check_process()?;
        until(None, |limit| {
            let begin = Instant::now();
            while self.giving.load(Ordering::Acquire) != 0 {
                if begin.elapsed() > limit {
                    return Err(Error::Timeout("a thread gives a stream work".into()));
                }
                thread::sleep(Duration::from_micros(50));
            }
            Ok(())
        })?;
        let (write, others) = self.host_uses();
        for point in others {
            // Work that only read the memory has left it as it was, once it is over.
            if let Err(error) = self.device.wait_for([point])
                && matches!(point.timeline().check(point.value()), Ok(false))
            {
                return Err(error);
            }
        }
        self.device.wait_for(write.as_slice())
    }

    // ---- operations; ranges lie in the memory

    /// Fills a range with copies of a pattern.
    pub(crate) fn fill(
        &self,
        py: Python<'_>,
        (at, bytes): (u64, u64),
        pattern: &[u8],
    ) -> Result<()> {
        self.check_writable()?;
        if bytes == 0 {
            return Ok(());
        }
        if pattern.is_empty() || !bytes.is_multiple_of(pattern.len() as u64) {
            return Err(Error::invalid("the range is no whole number of patterns"));
        }
        let Some(buffer) = self.device_buffer() else {
            let to = self.host_address(at);
            self.settle_to_write(py, bytes)?;
            if let [byte] = pattern {
                // SAFETY: the range lies in the memory, which the block keeps; the thread is
                // attached.
                unsafe { to.write_bytes(*byte, bytes as usize) };
                return Ok(());
            }
            for i in (0..bytes as usize).step_by(pattern.len()) {
                // SAFETY: the range lies in the memory and is a whole number of patterns; the
                // thread is attached.
                unsafe { to.add(i).copy_from_nonoverlapping(pattern.as_ptr(), pattern.len()) };
            }
            return Ok(());
        };
        self.device.check_process()?;
        let stream = self.device.runtime.stream();
        let to = buffer.view().narrowed(at, bytes);
        py.detach(|| {
            self.await_streams(buffer, bytes == self.bytes)?;
            Self::ordered(&[self], &self.device, stream, || fill(stream, to, pattern))
        })
    }

    /// Copies host memory to a range. The bytes are taken during the call.
    ///
    /// # Safety
    /// - `from` has as many bytes, which nobody writes meanwhile but threads of Python that are
    ///   attached.
    pub(crate) unsafe fn write(
        &self,
        py: Python<'_>,
        (at, bytes): (u64, u64),
        from: *const u8,
    ) -> Result<()> {
        self.check_writable()?;
        if bytes == 0 {
            return Ok(());
        }
        let Some(buffer) = self.device_buffer() else {
            // SAFETY: the range lies in the memory, and the caller vouches for the source. Both may
            // overlap.
            unsafe { self.host_address(at).copy_from(from, bytes as usize) };
            return Ok(());
        };
        self.device.check_process()?;
        let stream = self.device.runtime.stream();
        let outside = py.detach(|| {
            self.await_streams(buffer, bytes == self.bytes)?;
            Self::begin_order(&[self], &self.device, stream)
        })?;
        let mut done = 0;
        while done < bytes {
            if done > 0 {
                // So that no more than a piece is staged.
                py.detach(|| synchronize(stream))?;
            }
            let piece = PIECE.min(bytes - done);
            let to = buffer.view().narrowed(at + done, piece);
            // SAFETY: the caller vouches for the source, and this thread is attached while the
            // slice lives.
            let from =
                unsafe { std::slice::from_raw_parts(from.add(done as usize), piece as usize) };
            if callbacks::are_used() {
                // Work before the copy may wait for the interpreter.
                let staged = callbacks::staged(from)?;
                py.detach(|| stream.upload_owned(to, staged))?;
            } else {
                stream.upload(to, from)?;
            }
            done += piece;
        }
        py.detach(|| Self::end_order(&outside, &self.device, stream))
    }

    /// Copies a range to host memory.
    ///
    /// # Safety
    /// - `to` has as many bytes, which nobody uses meanwhile but threads of Python that are
    ///   attached.
    pub(crate) unsafe fn read(
        &self,
        py: Python<'_>,
        (at, bytes): (u64, u64),
        to: *mut u8,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let Some(buffer) = self.device_buffer() else {
            // SAFETY: the range lies in the memory, and the caller vouches for the target. Both may
            // overlap.
            unsafe { to.copy_from(self.host_address(at), bytes as usize) };
            return Ok(());
        };
        self.device.check_process()?;
        let (runtime, stream) = (&self.device.runtime, self.device.runtime.stream());
        let outside = py.detach(|| {
            self.await_streams(buffer, false)?;
            Self::begin_order(&[self], &self.device, stream)
        })?;
        let mut staging = runtime.alloc_pinned_array::<u8>(PIECE.min(bytes) as usize)?;
        let mut done = 0;
        while done < bytes {
            let piece = PIECE.min(bytes - done);
            let from = buffer.view().narrowed(at + done, piece);
            py.detach(|| {
                stream.copy(staging.view().narrowed(0, piece), from)?;
                synchronize(stream)
            })?;
            let values = staging.map()?;
            // SAFETY: the target has room for all bytes, and this thread is attached.
            unsafe { to.add(done as usize).copy_from(values.as_ptr(), piece as usize) };
            done += piece;
        }
        py.detach(|| Self::end_order(&outside, &self.device, stream))
    }

    /// Copies a range of another block here.
    pub(crate) fn copy(
        &self,
        py: Python<'_>,
        (at, bytes): (u64, u64),
        from: &Block,
        from_at: u64,
    ) -> Result<()> {
        self.check_writable()?;
        match (self.device_buffer(), from.device_buffer()) {
            _ if bytes == 0 => Ok(()),
            // SAFETY: the ranges lie in their memory, which the blocks keep.
            (_, None) => unsafe { self.write(py, (at, bytes), from.host_address(from_at)) },
            // SAFETY: as for the other direction.
            (None, Some(_)) => unsafe { from.read(py, (from_at, bytes), self.host_address(at)) },
            (Some(to), Some(source)) => {
                self.device.check_process()?;
                let stream = self.device.runtime.stream();
                let copy = || {
                    let part = source.view().narrowed(from_at, bytes);
                    stream.copy(to.view().narrowed(at, bytes), part)
                };
                py.detach(|| {
                    from.await_streams(source, false)?;
                    self.await_streams(to, bytes == self.bytes)?;
                    Self::ordered(&[self, from], &self.device, stream, copy)
                })
            }
        }
    }
}

/// A thread that gives a stream work on blocks. The thread is attached as this begins and ends.
pub(crate) struct Giving<'a>(&'a [Arc<Block>]);

impl<'a> Giving<'a> {
    pub(crate) fn begin(_: Python<'_>, blocks: &'a [Arc<Block>]) -> Self {
        for block in blocks {
            block.giving.fetch_add(1, Ordering::Relaxed);
        }
        Self(blocks)
    }
}

impl Drop for Giving<'_> {
    fn drop(&mut self) {
        for block in self.0 {
            block.giving.fetch_sub(1, Ordering::Release);
        }
    }
}

impl AsRef<Block> for Block {
    fn as_ref(&self) -> &Block {
        self
    }
}

/// Fills memory with copies of a pattern of 1, 2, 4, 8 or 16 bytes.
pub(crate) fn fill(stream: &Stream, to: BufferView<'_>, pattern: &[u8]) -> Result<()> {
    match *pattern {
        [a] => stream.fill_with(to.values::<u8>()?, a),
        [a, b] => stream.fill_with(to.values::<[u8; 2]>()?, [a, b]),
        [a, b, c, d] => stream.fill_with(to.values::<[u8; 4]>()?, [a, b, c, d]),
        _ if pattern.len() == 8 => {
            let value: [u8; 8] = pattern.try_into().map_err(Error::other)?;
            stream.fill_with(to.values::<[u8; 8]>()?, value)
        }
        _ => {
            let value: [u8; 16] = pattern.try_into().map_err(Error::other)?;
            stream.fill_with(to.values::<[u8; 16]>()?, value)
        }
    }
}

/// Waits for all work of a stream.
fn synchronize(stream: &Stream) -> Result<()> {
    until(None, |limit| stream.synchronize_timeout(limit))
}

/// The uses that a buffer's record has.
fn record(buffer: &Buffer) -> Vec<Timepoint> {
    let mut uses = vec![buffer.write_timepoint()];
    buffer.for_each_read(|point| uses.push(point));
    uses.into_iter().filter_map(PackedTimepoint::timepoint).collect()
}

/// Waits until no stream uses any of these blocks of the host, without the interpreter's lock.
/// When it returns, none does while this thread stays attached.
pub(crate) fn settle(py: Python<'_>, blocks: &[&Block]) -> Result<()> {
    // The streams' threads are not in a child, and their locks may be held there.
    let mut used = blocks.iter().filter(|block| block.is_on_streams());
    used.try_for_each(|block| block.device.check_process())?;
    while let Some(block) = blocks.iter().find(|block| block.is_unsettled()) {
        py.detach(|| block.wait_for_streams())?;
    }
    Ok(())
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if self.device.is_forked() {
            // The driver's state is the parent's, and so is the memory.
            std::mem::forget((buffer, self.kept.clone(), self.own.take(), self.foreign.take()));
            return;
        }
        let mut points = std::mem::take(self.ended.get_mut());
        if self.lent.load(Ordering::Relaxed) {
            // The address is known to streams that are unknown here.
            match self.device.whole() {
                Ok(whole) => points.push(whole.now()),
                Err(_) if self.device.synchronize_all().is_ok() => {}
                Err(_) => {
                    // Nobody can say when they are done, so the memory stays: the import keeps it.
                    std::mem::forget(buffer);
                    return;
                }
            }
        }
        if let Some(own) = self.own.take() {
            match buffer.try_unique() {
                Ok(last) => {
                    points.extend(record(&last));
                    points.into_iter().for_each(|point| own.used_on(point));
                    drop(self.kept.lock().take());
                }
                // A graph has the import: the memory goes with it.
                Err(shared) => points.into_iter().for_each(|point| shared.used_on(point)),
            }
            return;
        }
        points.extend(record(&buffer));
        // The owner gets its memory back at once, not with a later call. If that cannot be, the
        // runtime's allocator keeps the memory until the uses are over.
        let wait = || {
            points.iter().filter(|point| !point.has_passed()).for_each(|&point| {
                if self.device.runtime.wait_for(point).is_err() {
                    buffer.used_on(point);
                }
            });
        };
        if points.iter().all(|point| point.has_passed()) {
            return;
        }
        // Work that is waited for may need the interpreter.
        if Python::try_attach(|py| py.detach(wait)).is_none() {
            points.into_iter().for_each(|point| buffer.used_on(point));
        }
    }
}
