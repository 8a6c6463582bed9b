//! Pools whose blocks other processes and libraries may map.
//!
//! A block goes to another process in three steps. The owner [exports](ShareablePool::export) it,
//! and [sends](Export::send) the export over a Unix socket. The other process
//! [receives](receive) it, and has a buffer over the same memory.
//!
//! # Order across processes
//! - [`Export::send`] waits until the work that was submitted with the block is over. So everything
//!   that the owner wrote before is there as [`receive`] returns.
//! - What both sides do afterwards is ordered by nobody. The programs order it, by messages of
//!   their own after a wait on the host: that is the promise that makes
//!   [`export`](ShareablePool::export) and [`receive`] `unsafe`.
//! - The owner keeps the [`Export`] until the other side is done. Otherwise the block may be lent
//!   again, and the other side sees the bytes of others.
//!
//! The memory itself outlives its owner: a process that has received a block may use it after the
//! owner has ended.

mod backing;
mod message;

pub use backing::ShareableMemory;
pub use message::SharedBlock;

use crate::runtime::{Runtime, RuntimeInner};
use crate::suspend::{pending, with_memory};
use crate::view::BufferView;
use leasehold_alloc::{Allocator, AllocatorConfig, Buffer, Layout, On, Protection, SharedBudget};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::SharedSegment;
use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Device memory that other processes may map, and the libraries of collectives.
///
/// It comes in segments. Each has one native handle, never moves, and goes back to the device only
/// while nobody has exported or registered it. So it is worth its price only for what is shared:
/// ordinary memory is moved to where it is needed, and is never passed on. Its buffers are buffers
/// of the runtime. Clones are the same pool; `Send + Sync`. A pool lives on in its buffers. It
/// cannot be suspended.
///
/// ```
/// use leasehold::prelude::*;
/// use leasehold::Protection;
/// use leasehold::share::{self, ShareablePool};
/// use std::os::unix::net::UnixStream;
/// # fn main() -> Result<()> {
/// # if !cfg!(target_os = "linux") { return Ok(()) }
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let pool = ShareablePool::new(&runtime, "shared")?;
/// let block = pool.alloc(12)?;
/// runtime.stream().upload(block.view(), &[1u32, 2, 3])?;
/// let (here, there) = UnixStream::pair()?;
///
/// // SAFETY: the other side only reads, and nobody writes the block until it is done.
/// let export = unsafe { pool.export(block.view()) }?;
/// export.send(&here)?; // waits for the upload
///
/// // Another process, as a rule:
/// // SAFETY: nobody uses the block between here and the end of `received`.
/// let received = unsafe { share::receive(&runtime, &there, Protection::ReadOnly) }?;
/// assert_eq!(runtime.to_vec::<u32>(&received)?, [1, 2, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ShareablePool(Arc<Inner>);

/// The order of the fields is that of their end.
struct Inner {
    name: Arc<str>,
    allocator: Allocator,
    memory: ShareableMemory,
    budget: SharedBudget,
    runtime: Arc<RuntimeInner>,
}

/// The state of a shareable pool in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShareableStats {
    /// Buffers whose memory is the pool's: those that are held, and dropped ones whose last use was
    /// not known to be over yet.
    pub live: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Bytes of device memory that the pool has now.
    pub reserved: u64,
    /// Segments that the pool has now (count).
    pub segments: u64,
}

impl ShareablePool {
    /// A pool without memory on the runtime's device. The name is for reports and errors.
    ///
    /// # Errors
    /// `Unsupported` on a device whose memory other processes cannot map
    /// ([`Caps::shareable`](crate::backend::Caps::shareable)): Metal's, the host's except on Linux,
    /// and a CUDA driver's without descriptors; the driver's own.
    pub fn new(runtime: &Runtime, name: &str) -> Result<Self> {
        let memory = ShareableMemory::new(runtime)?;
        let budget = SharedBudget::new(u64::MAX);
        let config = AllocatorConfig {
            name: format!("{} {name}", runtime.device()).into(),
            shared_budget: Some(budget.clone()),
            ..AllocatorConfig::default()
        };
        let allocator = Allocator::new(Box::new(memory.clone()), config)?;
        let runtime = runtime.inner.clone();
        Ok(Self(Arc::new(Inner { name: name.into(), allocator, memory, budget, runtime })))
    }

    /// The pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// `bytes` of the pool's memory, aligned to 256: a buffer of the runtime. Its contents are not
    /// specified. Blocks on the driver when the pool must grow.
    ///
    /// # Errors
    /// `OutOfMemory` with a report; `OverBudget`.
    pub fn alloc(&self, bytes: u64) -> Result<Lease<Buffer>> {
        self.alloc_layout(Layout::new(bytes))
    }

    /// As [`alloc`](Self::alloc), with an alignment.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); `InvalidArgument` for an alignment that is no power of two.
    pub fn alloc_layout(&self, layout: Layout) -> Result<Lease<Buffer>> {
        let (inner, runtime) = (&*self.0, self.runtime());
        if layout.size == 0 {
            return runtime.alloc_layout(layout);
        }
        let core = runtime.stream().under();
        let on = On { timeline: core.timeline, source: core.source() };
        let block = with_memory(&runtime, || inner.allocator.alloc(layout, on))?;
        let (addr, native) = (block.addr(), block.native());
        let keep = Box::new(block);
        // SAFETY: the block is this call's, and nobody else's while the import keeps it. It has
        // memory of the runtime's device.
        unsafe {
            runtime.allocator().import(addr, layout.size, native, Protection::ReadWrite, keep)
        }
    }

    /// The most bytes of device memory that the pool may have. At first there is no limit. A limit
    /// below what it has stops growth.
    pub fn set_limit(&self, bytes: u64) {
        self.0.budget.set_limit(bytes);
    }

    /// Gives segments without a buffer back to the device, until at most `keep` bytes lie free.
    /// Returns the bytes that went. A segment that somebody has registered goes once that is over.
    ///
    /// # Errors
    /// `OutOfMemory` for host memory.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        // Buffers that were dropped keep their blocks until somebody looks.
        self.0.runtime.memory.drain();
        self.0.allocator.trim(keep)
    }

    /// The pool in numbers.
    #[must_use]
    pub fn stats(&self) -> ShareableStats {
        let inner = &*self.0;
        let stats = inner.allocator.stats();
        ShareableStats {
            live: stats.live,
            live_bytes: stats.live_bytes,
            reserved: inner.budget.reserved(),
            segments: inner.memory.segments().len() as u64,
        }
    }

    /// The segments that the pool has now, in the order in which they were made, for a library that
    /// maps memory. A segment stays mapped at its address for as long as somebody holds it.
    #[must_use]
    pub fn segments(&self) -> Vec<Arc<dyn SharedSegment>> {
        self.0.memory.segments()
    }

    /// Whether a buffer is of the pool's memory.
    #[must_use]
    pub fn owns(&self, buffer: &Lease<Buffer>) -> bool {
        self.0.runtime.owns(buffer) && self.0.memory.holding(buffer.addr(), buffer.len()).is_some()
    }

    /// Makes a buffer of the pool, or a part of it, ready for another process. The buffer is held
    /// as long as the export is.
    ///
    /// The whole segment of the buffer can be mapped by who gets its descriptor, so it goes to
    /// processes that are trusted with all of the pool.
    ///
    /// # Errors
    /// `InvalidArgument` for a buffer that is not of this pool, and for one without bytes.
    ///
    /// # Safety
    /// - Whoever gets the descriptor, by [`Export::send`] or [`Export::descriptor`], uses the block
    ///   only in an order with the uses of this process, and the rest of the segment not at all.
    pub unsafe fn export(&self, view: BufferView<'_>) -> Result<Export> {
        let inner = &*self.0;
        if view.is_empty() {
            return Err(Error::invalid("a view without bytes has no memory to export"));
        }
        let found = inner
            .runtime
            .owns(view.buffer())
            .then(|| inner.memory.holding(view.addr(), view.len()));
        let Some(segment) = found.flatten() else {
            return Err(Error::invalid(format!(
                "a buffer of {} bytes is not of the shareable pool {}; ordinary memory cannot be \
                 exported: allocate the buffer of the pool, and copy to it",
                view.buffer().len(),
                inner.name
            )));
        };
        let block = SharedBlock::of(&self.runtime(), &*segment, view.addr(), view.len());
        let (buffer, runtime) = (view.buffer().clone(), inner.runtime.clone());
        Ok(Export { buffer, segment, block, runtime })
    }

    /// The runtime, with what is its default stream now.
    #[must_use]
    pub fn runtime(&self) -> Runtime {
        Runtime::from_inner(self.0.runtime.clone())
    }
}

/// The identity of the device among all of the machine.
fn device_key(runtime: &RuntimeInner) -> String {
    let info = runtime.device.info();
    match info.uuid.as_str() {
        "" => info.id.to_string(),
        uuid => format!("{} {uuid}", info.id.backend),
    }
}

impl SharedBlock {
    /// The description of a range of a segment, which is memory of the runtime's device.
    #[must_use]
    pub fn of(runtime: &Runtime, segment: &dyn SharedSegment, addr: u64, bytes: u64) -> Self {
        Self {
            device: device_key(&runtime.inner),
            segment: segment.bytes(),
            offset: addr.wrapping_sub(segment.addr()),
            bytes,
        }
    }
}

/// A block that other processes may map. While it is held, the block is not lent again and its
/// segment stays, even if all else is dropped.
///
/// A drop takes nothing from a process that has mapped the block.
#[must_use = "the block may be lent again once the export is dropped"]
pub struct Export {
    buffer: Lease<Buffer>,
    segment: Arc<dyn SharedSegment>,
    block: SharedBlock,
    runtime: Arc<RuntimeInner>,
}

impl Export {
    /// Sends the block over a socket, for [`receive`] in the process at its other end. May be
    /// repeated, also for several processes.
    ///
    /// Blocks until the work that was submitted with the buffer is over, so that the other process
    /// sees its results. Work that is submitted later has no order with the other process. Blocks
    /// as the socket does.
    ///
    /// # Errors
    /// The cause of the buffer's last write, if it has failed; `Timeout` of the socket;
    /// `Unavailable` if the other end is closed; the system's and the driver's own.
    pub fn send(&self, socket: &UnixStream) -> Result<()> {
        self.wait()?;
        message::send(socket, &self.block, &self.descriptor()?)
    }

    /// Blocks until the work that was submitted with the buffer is over, as
    /// [`send`](Self::send) does: for a way of one's own to the other process.
    ///
    /// # Errors
    /// The cause of the buffer's last write, if it has failed; that its end cannot be waited for.
    pub fn wait(&self) -> Result<()> {
        for point in pending(&self.buffer) {
            self.runtime.wait_over(point)?;
        }
        match self.buffer.write_timepoint().timepoint() {
            Some(write) => write.timeline().check(write.value()).map(drop),
            None => Ok(()),
        }
    }

    /// The description that [`import`] needs beside the descriptor.
    #[must_use]
    pub fn block(&self) -> &SharedBlock {
        &self.block
    }

    /// A new descriptor of the block's segment. It keeps the memory alive until it is closed.
    ///
    /// # Errors
    /// The system's, such as too many open files; the driver's.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        // SAFETY: whoever exported the block vouches for those who get its descriptor.
        unsafe { self.segment.descriptor() }
    }

    /// The buffer.
    pub fn buffer(&self) -> &Lease<Buffer> {
        &self.buffer
    }
}

/// Receives a block that another process [sent](Export::send), as a buffer of the runtime. The
/// memory is the owner's, not a copy. It stays mapped until the buffer's last use is over, also
/// after the owner has ended. Blocks until the block is there: the socket's read timeout is the
/// limit.
///
/// # Errors
/// `Timeout` of the socket; `Unavailable` if the other end was closed before; `InvalidArgument` for
/// a message that is no block, has no descriptor or a wrong one, or is of another device;
/// `Unsupported` on a device whose memory cannot be shared; the driver's own. No descriptor stays
/// open then.
///
/// # Safety
/// - While work with this buffer uses its bytes, nobody else writes them. Nobody else uses bytes
///   that such work writes. Others are other processes, and this one by another buffer. Only the
///   owner's work from before [`Export::send`] is known to be over; the programs order the rest.
/// - The owner keeps its [`Export`] while this process uses the buffer, or has ended.
pub unsafe fn receive(
    runtime: &Runtime,
    socket: &UnixStream,
    protection: Protection,
) -> Result<Lease<Buffer>> {
    let (block, descriptor) = message::receive(socket)?;
    // SAFETY: the caller's; the work from before the message is over.
    unsafe { import(runtime, descriptor, &block, protection) }
}

/// As [`receive`], for a way of one's own between the processes. The descriptor is the one of
/// [`Export::descriptor`], and the block that of [`Export::block`].
///
/// # Errors
/// As [`receive`].
///
/// # Safety
/// - As [`receive`]. The owner has [waited](Export::wait) for its work.
pub unsafe fn import(
    runtime: &Runtime,
    descriptor: OwnedFd,
    block: &SharedBlock,
    protection: Protection,
) -> Result<Lease<Buffer>> {
    let own = device_key(&runtime.inner);
    if block.device != own {
        return Err(Error::invalid(format!(
            "a shared block is memory of {:?}, and this runtime is of {own:?}; receive it on the \
             device of its owner",
            block.device
        )));
    }
    block.check()?;
    let segment = runtime.raw_device().sharing()?.import(descriptor, block.segment)?;
    let addr = segment.addr() + block.offset;
    let keep: Box<dyn Any + Send + Sync> = Box::new(segment);
    // SAFETY: the block lies in the segment, which the import keeps. The caller vouches that other
    // processes do not use it meanwhile.
    unsafe { runtime.allocator().import(addr, block.bytes, 0, protection, keep) }
}

impl fmt::Debug for ShareablePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShareablePool({} on {})", self.0.name, self.0.runtime.id())
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?}, {:?})", self.buffer, self.block)
    }
}
