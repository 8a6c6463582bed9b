//! Blocks of shareable pools that go to other processes.
//!
//! A block goes to another process in three steps. The owner [exports](crate::Pool::export) it, and
//! [sends](Export::send) the export over a Unix socket. The other process
//! [receives](receive) it, and has a buffer over the same memory.
//!
//! # Order across processes
//! - [`Export::send`] waits until the work that was submitted with the block is over. So everything
//!   that the owner wrote before is there as [`receive`] returns.
//! - What both sides do afterwards is ordered by nobody. The programs order it, by messages of
//!   their own after a wait on the host: that is the promise that makes
//!   [`export`](crate::Pool::export) and [`receive`] `unsafe`.
//! - The owner keeps the [`Export`] until the other side is done. Otherwise the block may be lent
//!   again, and the other side sees the bytes of others.
//!
//! The memory itself outlives its owner: a process that has received a block may use it after the
//! owner has ended.
//!
//! ```
//! use leasehold::pool::{Pool, PoolKind};
//! use leasehold::prelude::*;
//! use leasehold::{Protection, share};
//! use std::os::unix::net::UnixStream;
//! # fn main() -> Result<()> {
//! # if !cfg!(target_os = "linux") { return Ok(()) }
//! let runtime = Runtime::open(DeviceId::cpu(0))?;
//! let pool = Pool::new(&runtime, "shared", PoolKind::Shareable)?;
//! let block = pool.alloc(12)?;
//! runtime.stream().upload(block.view(), &[1u32, 2, 3])?;
//! let (here, there) = UnixStream::pair()?;
//!
//! // SAFETY: the other side only reads, and nobody writes the block until it is done.
//! let export = unsafe { pool.export(block.view()) }?;
//! export.send(&here)?; // waits for the upload
//!
//! // Another process, as a rule:
//! // SAFETY: nobody uses the block between here and the end of `received`.
//! let received = unsafe { share::receive(&runtime, &there, Protection::ReadOnly) }?;
//! assert_eq!(runtime.to_vec::<u32>(&received)?, [1, 2, 3]);
//! # Ok(())
//! # }
//! ```

mod message;

pub use message::SharedBlock;

use crate::runtime::{Runtime, RuntimeInner, pending};
use leasehold_alloc::{Buffer, Protection};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::SharedSegment;
use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

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
    /// A block of the runtime that its caller vouches for.
    pub(crate) fn new(
        runtime: Arc<RuntimeInner>,
        buffer: Lease<Buffer>,
        segment: Arc<dyn SharedSegment>,
        block: SharedBlock,
    ) -> Self {
        Self { buffer, segment, block, runtime }
    }

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
        message::send(socket, &self.block, &self.descriptor()?)
    }

    /// Blocks until the work that was submitted with the buffer is over.
    fn wait(&self) -> Result<()> {
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

    /// A new descriptor of the block's segment, for a way of one's own to the other process. It
    /// keeps the memory alive until it is closed. Blocks as [`send`](Self::send) for the work that
    /// was submitted with the buffer.
    ///
    /// # Errors
    /// The cause of the buffer's last write, if it has failed; the system's, such as too many open
    /// files; the driver's.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        self.wait()?;
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
/// - As [`receive`].
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

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?}, {:?})", self.buffer, self.block)
    }
}
