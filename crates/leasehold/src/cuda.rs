//! The CUDA backend, and the driver's own objects under a runtime, for other libraries on the same
//! device.
//!
//! The words below are the driver's handles. Getting one is safe; what is done with it is not this
//! library's affair. A library that enqueues work on a stream does so best in
//! [`Stream::foreign_call`], which orders the call by its operands and marks their use. Work that
//! is enqueued on [`raw_stream`] by hand is ordered with the stream's own in the driver, but leaves
//! no mark on buffers: nobody else waits for it, and freed memory does not either.
//!
//! A library with streams of its own uses this library's memory through [`external_stream`]: the
//! allocator then orders reuse by what was submitted to that stream, without seeing it.

use crate::runtime::Runtime;
use crate::stream::Stream;
use crate::view::BufferView;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use leasehold_hal::{BackendKind, DeviceId};

pub use leasehold_cuda::manager::device::DeviceState;
pub use leasehold_cuda::manager::external::{External as ExternalStream, ExternalManager};
pub use leasehold_cuda::{CompletionSource, CudaBackend, CudaConfig, MemorySource};

/// Refuses a device of another backend.
fn is_cuda(device: DeviceId) -> Result<()> {
    match device.backend {
        BackendKind::Cuda => Ok(()),
        _ => Err(Error::invalid(format!(
            "{device} is no CUDA device; open a runtime of one, as cuda:0"
        ))),
    }
}

/// The device's state on the CUDA backend, and through it the managers. `None` for a runtime of
/// another backend. A device that is wrapped shows what it wraps.
#[must_use]
pub fn device_state(runtime: &Runtime) -> Option<&DeviceState> {
    runtime.raw_device().state()?.downcast_ref()
}

/// The device's state, or why there is none.
fn known(runtime: &Runtime) -> Result<&DeviceState> {
    is_cuda(runtime.device())?;
    device_state(runtime).ok_or_else(|| {
        Error::invalid(format!(
            "the backend of {} hides its device's state; implement `Device::state` in the wrapper",
            runtime.device()
        ))
    })
}

/// The `CUcontext` of a runtime: the device's primary context, good while the runtime lives.
///
/// # Errors
/// `InvalidArgument` for a runtime of another backend.
pub fn raw_context(runtime: &Runtime) -> Result<u64> {
    let device = known(runtime)?;
    Ok(device.primary().native().0)
}

/// The `CUstream` of a stream, good while a clone of the stream lives.
///
/// # Errors
/// `InvalidArgument` for a stream of another backend; `DeviceLost`; the driver's own.
pub fn raw_stream(stream: &Stream) -> Result<u64> {
    is_cuda(stream.runtime.id())?;
    // Work that is held back for now must not come after the work that the caller enqueues.
    stream.flush()?;
    Ok(stream.native())
}

/// The `CUdeviceptr` of a view's first byte, good while the buffer lives; 0 for an empty one.
///
/// # Errors
/// `InvalidArgument` for memory of another runtime than this one, or of another backend;
/// `Recording` for memory that has no address yet.
pub fn raw_pointer(runtime: &Runtime, view: BufferView<'_>) -> Result<u64> {
    is_cuda(runtime.device())?;
    runtime.inner.check_eager(&[view.read()])?;
    Ok(view.addr())
}

/// The stream of another library, as a source of timepoints for allocations: `On::new(&*stream)`.
///
/// Before a lease is dropped, the library marks its buffer with [`ExternalStream::now`]: on the
/// stream of the allocation by [`Buffer::mark_read`](leasehold_alloc::Buffer::mark_read), on each
/// other stream that used it by [`Buffer::used_on`](leasehold_alloc::Buffer::used_on). No mark
/// makes a driver call, except on a per-thread default stream. An event is recorded once another
/// stream, a trim or a growth needs to know how far the stream is. Memory that is freed and
/// allocated on the same stream needs no event.
///
/// The handles 0 and 1 mean the legacy default stream, and 2 means the calling thread's own default
/// stream. The memory of a stream in capture stays with that stream until the capture is over.
///
/// # Errors
/// `InvalidArgument` for a runtime of another backend; `OutOfMemory` without timelines.
///
/// # Safety
/// - `stream` is a `CUstream` of the device's primary context, or 0, 1 or 2.
/// - Its owner calls [`end_external_stream`] before it destroys the stream. Otherwise nothing of
///   this library is called with memory or timepoints of the stream before
///   [`ExternalStream::synchronize_context`], which uses no handle.
pub unsafe fn external_stream(runtime: &Runtime, stream: u64) -> Result<Arc<ExternalStream>> {
    let device = known(runtime)?;
    // SAFETY: the caller vouches for the handle.
    unsafe { device.primary().externals().get(stream) }
}

/// Ends an external stream, before its owner destroys it. Memory that it used is reused once the
/// stream's work is over. A stream that was never used here is `Ok`.
///
/// # Errors
/// `InvalidArgument` for a runtime of another backend; `InvalidState` for a stream in capture; the
/// driver's own. Then the stream is as it was.
pub fn end_external_stream(runtime: &Runtime, stream: u64) -> Result<()> {
    let device = known(runtime)?;
    device.primary().externals().end(stream)
}
