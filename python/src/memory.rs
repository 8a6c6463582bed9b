//! The memory of buffers: who keeps it, who uses it outside, and when it goes.
//!
//! A block keeps the memory; buffers, exports and operations under way share the block. So memory
//! goes with the last of them, in whatever order they end.
//!
//! # Host memory
//! Host memory is touched by a thread that is attached to the interpreter alone, and by exports.
//! So it is as Python's own memory: no two threads of Python touch it at once through this package.
//!
//! # Device memory
//! Operations run on the device's own stream, and the runtime orders them by the buffer's record. A
//! consumer of DLPack names its stream. That stream waits for what was submitted before, each later
//! operation waits for the stream and the stream for it, and the memory is reused only after the
//! work that the stream had when the consumer let go.
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

use crate::allocator::Pool;
use crate::device::State;
use leasehold::cuda::ExternalStream;
use leasehold::{Buffer, Error, Lease, Protection, Result, View};
use leasehold_core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{PackedTimepoint, TimelineSource, Timepoint};
use pyo3::prelude::*;
use std::any::Any;

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
type Foreign = Box<dyn Any + Send + Sync>;

/// Memory of a device.
pub(crate) struct Block {
    pub(crate) device: Arc<State>,
    address: u64,
    pub(crate) read_only: bool,
    /// The memory as a buffer of the runtime, for its streams. None for host memory and for no
    /// bytes.
    buffer: Option<Lease<Buffer>>,
    /// The allocator's lease, for memory that is ours.
    own: Option<Lease<Buffer>>,
    /// The keeper of foreign host memory. The runtime's buffer has that of device memory.
    _foreign: Option<Foreign>,
    /// Requests of the buffer protocol and tensors of DLPack that live.
    exports: AtomicUsize,
    /// The address was given away for as long as the block lives.
    lent: AtomicBool,
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
        let buffer = if device.host || bytes == 0 {
            None
        } else {
            // SAFETY: the block keeps the allocator's lease as long as this one. When both go, the
            // allocator is told of all uses, so the memory outlasts them.
            let imported = unsafe {
                device.runtime.allocator().import(
                    address,
                    bytes,
                    0,
                    Protection::ReadWrite,
                    Box::new(()),
                )
            };
            let imported = imported?;
            // The stream's earlier work may still use the memory, which others must wait for.
            imported.used_on(device.runtime.stream().now());
            Some(imported)
        };
        Ok(Arc::new(Self::with(device, address, false, (buffer, Some(own), None))))
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
        let (buffer, foreign) = if device.host || bytes == 0 {
            (None, Some(keeper))
        } else {
            let protection = if read_only { Protection::ReadOnly } else { Protection::ReadWrite };
            // SAFETY: the caller vouches for the range and for the order of uses.
            let imported =
                unsafe { device.runtime.allocator().import(address, bytes, 0, protection, keeper) };
            (Some(imported?), None)
        };
        Ok(Arc::new(Self::with(device, address, read_only, (buffer, None, foreign))))
    }

    fn with(
        device: Arc<State>,
        address: u64,
        read_only: bool,
        (buffer, own, foreign): (Option<Lease<Buffer>>, Option<Lease<Buffer>>, Option<Foreign>),
    ) -> Self {
        Self {
            device,
            address,
            read_only,
            buffer,
            own,
            _foreign: foreign,
            exports: AtomicUsize::new(0),
            lent: AtomicBool::new(false),
            consumers: Mutex::default(),
            ended: Mutex::default(),
        }
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
        let Some(buffer) = &self.buffer else { return Ok(None) };
        self.device.check_process()?;
        let mut before = self.uses(buffer);
        if self.is_imported() {
            // The owner's work so far comes before what the stream that it knows gets.
            before.push(self.device.told()?.now());
        }
        let stream = self.device.admit(handle, &before)?;
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
            let _ = self.device.told().and_then(|told| self.device.order_one_before(&told, now));
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
        self.own.is_none() && self.buffer.is_some()
    }

    /// The streams that use the memory outside of operations of a device: those of consumers, and
    /// the stream that the owner of an import knows, unless the operations run there.
    fn outside(&self, device: &State) -> Result<Vec<Arc<ExternalStream>>> {
        let streams = self.consumers.lock().iter().map(|c| c.stream.clone()).collect();
        if !self.is_imported() || std::ptr::eq(&*self.device, device) {
            return Ok(streams);
        }
        let told = self.device.told()?;
        Ok([streams, vec![told]].concat())
    }

    /// Runs operations on the device's stream, after what streams outside have now, and before what
    /// they get later. Blocks until they are done if one of them cannot be ordered on the device.
    fn ordered<R>(
        py: Python<'_>,
        blocks: &[&Block],
        device: &State,
        run: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        for point in blocks.iter().flat_map(|block| block.ended.lock().clone()) {
            device.order_after(py, point)?;
        }
        let mut outside = Vec::new();
        for block in blocks {
            outside.append(&mut block.outside(device)?);
        }
        for other in &outside {
            device.order_after(py, other.now())?;
        }
        let result = run()?;
        if !outside.is_empty() {
            py.detach(|| outside.iter().try_for_each(|other| device.order_before(other)))?;
        }
        Ok(result)
    }

    /// The timepoints of all uses: of operations, and of consumers that let go.
    fn uses(&self, buffer: &Lease<Buffer>) -> Vec<Timepoint> {
        let mut uses = vec![buffer.write_timepoint()];
        buffer.for_each_read(|point| uses.push(point));
        let own = uses.into_iter().filter_map(PackedTimepoint::timepoint);
        own.chain(self.ended.lock().iter().copied()).collect()
    }

    /// Waits until nothing of this package uses the memory.
    pub(crate) fn wait(&self) -> Result<()> {
        self.buffer.as_ref().map_or(Ok(()), |buffer| {
            self.device.check_process()?;
            self.device.runtime.wait_for(self.uses(buffer))
        })
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
        let Some(buffer) = &self.buffer else {
            let to = self.host_address(at);
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
        Self::ordered(py, &[self], &self.device, || match *pattern {
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
        let Some(buffer) = &self.buffer else {
            // SAFETY: the range lies in the memory, and the caller vouches for the source. Both may
            // overlap.
            unsafe { self.host_address(at).copy_from(from, bytes as usize) };
            return Ok(());
        };
        self.device.check_process()?;
        let stream = self.device.runtime.stream();
        Self::ordered(py, &[self], &self.device, || {
            let mut done = 0;
            while done < bytes {
                if done > 0 {
                    // So that no more than a piece is staged.
                    py.detach(|| stream.synchronize())?;
                }
                let piece = PIECE.min(bytes - done);
                // SAFETY: the caller vouches for the source, and this thread is attached while the
                // slice lives.
                let from =
                    unsafe { std::slice::from_raw_parts(from.add(done as usize), piece as usize) };
                stream.upload(buffer.view().narrowed(at + done, piece), from)?;
                done += piece;
            }
            Ok(())
        })
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
        let Some(buffer) = &self.buffer else {
            // SAFETY: the range lies in the memory, and the caller vouches for the target. Both may
            // overlap.
            unsafe { to.copy_from(self.host_address(at), bytes as usize) };
            return Ok(());
        };
        self.device.check_process()?;
        let runtime = &self.device.runtime;
        Self::ordered(py, &[self], &self.device, || {
            let piece = PIECE.min(bytes);
            let mut staging = runtime.alloc_pinned_array::<u8>(piece as usize)?;
            let mut done = 0;
            while done < bytes {
                let piece = PIECE.min(bytes - done);
                let part = staging.view().narrowed(0, piece);
                runtime.stream().copy(part, buffer.view().narrowed(at + done, piece))?;
                py.detach(|| runtime.stream().synchronize())?;
                let values = staging.map()?;
                // SAFETY: the target has room for all bytes, and this thread is attached.
                unsafe { to.add(done as usize).copy_from(values.as_ptr(), piece as usize) };
                done += piece;
            }
            Ok(())
        })
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
        match (&self.buffer, &from.buffer) {
            _ if bytes == 0 => Ok(()),
            // SAFETY: the ranges lie in their memory, which the blocks keep.
            (_, None) => unsafe { self.write(py, (at, bytes), from.host_address(from_at)) },
            // SAFETY: as for the other direction.
            (None, Some(_)) => unsafe { from.read(py, (from_at, bytes), self.host_address(at)) },
            (Some(to), Some(source)) => {
                self.device.check_process()?;
                let (to, source) =
                    (to.view().narrowed(at, bytes), source.view().narrowed(from_at, bytes));
                let copy = || self.device.runtime.stream().copy(to, source);
                Self::ordered(py, &[self, from], &self.device, copy)
            }
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if self.device.is_forked() {
            // The driver's state is the parent's, and so is the memory.
            std::mem::forget((buffer, self.own.take()));
            return;
        }
        let mut points = self.uses(&buffer);
        if self.lent.load(Ordering::Relaxed) {
            // The address is known to streams that are unknown here.
            match self.device.whole() {
                Ok(whole) => points.push(whole.now()),
                Err(_) if self.device.synchronize_all().is_ok() => {}
                Err(_) => {
                    // Nobody can say when they are done, so the memory stays.
                    std::mem::forget((buffer, self.own.take()));
                    return;
                }
            }
        }
        match &self.own {
            Some(own) => points.into_iter().for_each(|point| own.used_on(point)),
            // The owner gets its memory back at once, not with a later call. If that cannot be, the
            // runtime's allocator keeps the memory until the uses are over.
            None => points.into_iter().for_each(|point| {
                if self.device.runtime.wait_for(point).is_err() {
                    buffer.used_on(point);
                }
            }),
        }
    }
}
