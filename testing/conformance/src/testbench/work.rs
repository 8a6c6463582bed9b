//! Short names of the calls that tests make.

use crate::TestKernel;
use leasehold_alloc::{Buffer, Layout, On};
use leasehold_core::sync::Arc;
use leasehold_core::{Lease, Result};
use leasehold_hal::{
    Access, Binding, Copy2d, Device, Dispatch, Download, Fill, KeepAlive, MemoryKind, Op, Pipeline,
    Stream, StreamDesc, Upload,
};
use std::time::Duration;

/// A stream.
///
/// # Panics
/// If the device gives none.
pub fn stream(device: &Lease<dyn Device>) -> Lease<dyn Stream> {
    device.stream(&StreamDesc::default()).expect("a stream")
}

/// Device memory.
///
/// # Errors
/// As the allocator's `alloc`.
pub fn try_buffer(
    device: &Lease<dyn Device>,
    stream: &Lease<dyn Stream>,
    bytes: u64,
) -> Result<Lease<Buffer>> {
    let on = On { timeline: stream.timeline(), source: &**stream };
    device.memory(MemoryKind::Device)?.alloc(Layout::new(bytes), on)
}

/// Device memory.
///
/// # Panics
/// If the allocator has none.
pub fn buffer(device: &Lease<dyn Device>, stream: &Lease<dyn Stream>, bytes: u64) -> Lease<Buffer> {
    try_buffer(device, stream, bytes).expect("memory")
}

/// Submits operations of the stream's device. The test keeps each buffer until its last use is
/// over, or marks it. The submission or the test keeps host memory.
///
/// # Errors
/// As [`Stream::submit`].
pub fn submit(stream: &Lease<dyn Stream>, ops: &[Op<'_>]) -> Result<u64> {
    // SAFETY: the operations are of the stream's device, and memory outlives its last use (each
    // test's own part, which this function's documentation states).
    unsafe { stream.submit(ops) }
}

/// Blocks until a value is over.
///
/// # Errors
/// As `wait_host`; `Timeout` after 20 seconds.
pub fn wait(stream: &Lease<dyn Stream>, value: u64) -> Result<()> {
    stream.wait_host(value, Some(Duration::from_secs(20)))
}

/// Fills a buffer with a byte.
#[must_use]
pub fn fill(buffer: &Lease<Buffer>, pattern: u32) -> Op<'static> {
    Op::Fill(Fill {
        dst: buffer.addr(),
        native: buffer.native(),
        bytes: buffer.len(),
        pattern,
        width: 1,
    })
}

/// Copies as much as both buffers have.
#[must_use]
pub fn copy(from: &Lease<Buffer>, to: &Lease<Buffer>) -> Op<'static> {
    Op::Copy(Copy2d::linear((from.addr(), 0), (to.addr(), 0), from.len().min(to.len())))
}

/// A buffer as a binding.
#[must_use]
pub fn bind(buffer: &Lease<Buffer>, access: Access) -> Binding {
    Binding { addr: buffer.addr(), len: buffer.len(), native: 0, access }
}

/// A launch of a test kernel over whole buffers.
#[must_use]
pub fn dispatch<'a>(
    kernel: &'a Lease<Pipeline>,
    bindings: &'a [Binding],
    params: &'a [u8],
) -> Op<'a> {
    let blocks =
        bindings.last().map_or(1, |b| (b.len / 4).div_ceil(u64::from(TestKernel::BLOCK)) as u32);
    Op::Dispatch(Dispatch {
        pipeline: kernel,
        grid: [blocks, 1, 1],
        block: [TestKernel::BLOCK, 1, 1],
        shared: 0,
        bindings,
        params,
    })
}

/// A launch of one thread.
#[must_use]
pub fn one<'a>(kernel: &'a Lease<Pipeline>, bindings: &'a [Binding]) -> Op<'a> {
    Op::Dispatch(Dispatch {
        pipeline: kernel,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        bindings,
        params: &[],
    })
}

/// The bytes of a buffer, after the stream's work.
///
/// # Panics
/// If the download fails.
#[must_use]
pub fn read(stream: &Lease<dyn Stream>, from: &Lease<Buffer>) -> Vec<u8> {
    try_read(stream, from).expect("a download")
}

/// The bytes of a buffer, after the stream's work.
pub(crate) fn try_read(stream: &Lease<dyn Stream>, from: &Lease<Buffer>) -> Result<Vec<u8>> {
    let host = Host::new(vec![0xa5; from.len() as usize]);
    let value = submit(stream, &[host.down(from)])?;
    wait(stream, value)?;
    Ok(host.bytes())
}

/// Host memory that a submission keeps.
pub struct Host {
    /// The owner of the bytes.
    pub keep: KeepAlive,
    at: *mut u8,
    len: usize,
}

impl Host {
    /// Memory with these bytes.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        let mut boxed = bytes.into_boxed_slice();
        let (at, len) = (boxed.as_mut_ptr(), boxed.len());
        Self { keep: Arc::new(Cells(boxed)), at, len }
    }

    /// An upload of all bytes.
    #[must_use]
    pub fn up(&self, to: &Lease<Buffer>) -> Op<'_> {
        Op::Upload(Upload {
            src: self.at,
            dst: to.addr(),
            native: 0,
            bytes: self.len as u64,
            keep: Some(&self.keep),
        })
    }

    /// A download of all bytes.
    #[must_use]
    pub fn down(&self, from: &Lease<Buffer>) -> Op<'_> {
        Op::Download(Download {
            src: from.addr(),
            native: 0,
            dst: self.at,
            bytes: self.len as u64,
            keep: Some(&self.keep),
        })
    }

    /// The bytes. Tests read them after the copies are over, or read bytes that must not have been
    /// touched yet.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: the keep owns the bytes, and no copy writes them now (each test's own part, which
        // this function's documentation states).
        unsafe { std::slice::from_raw_parts(self.at, self.len) }.to_vec()
    }
}

// SAFETY: the pointer is into memory that the keep owns.
unsafe impl Send for Host {}
// SAFETY: tests read the bytes only after the copies are over.
unsafe impl Sync for Host {}

struct Cells(#[expect(dead_code, reason = "it is kept, and used by its address")] Box<[u8]>);
