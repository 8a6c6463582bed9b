//! Calls for streams, the work on them, and events.

use super::{NativeContext, NativeEvent, NativeFunction, NativeStream};
use leasehold_core::Result;
use leasehold_hal::{Binding, Pipeline};

/// One kernel launch, in the driver's form.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The function.
    pub function: NativeFunction,
    /// The number of blocks.
    pub grid: [u32; 3],
    /// The number of threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
    /// The argument buffer: the addresses of all bindings, 8 bytes each, then the parameters. The
    /// driver reads the buffer before the call returns.
    pub args: &'a [u8],
    /// The buffers that the addresses in `args` refer to. Only the simulated driver uses them, for
    /// checks.
    pub bindings: &'a [Binding],
    /// The last word of `args` of a kernel that can read early: the bindings that it may read so.
    /// Only the simulated driver uses it, for checks.
    pub early: Option<u32>,
    /// The kernel if its launches have attributes: its cluster
    /// (`CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`), and whether they are cooperative
    /// (`CU_LAUNCH_ATTRIBUTE_COOPERATIVE`).
    pub attributes: Option<&'a Pipeline>,
}

/// A 1-D or 2-D copy between any two places. The addresses distinguish device, peer and host
/// memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeCopy {
    /// The source address.
    pub src: u64,
    /// Bytes from row to row at the source.
    pub src_pitch: u64,
    /// The destination address.
    pub dst: u64,
    /// Bytes from row to row at the destination.
    pub dst_pitch: u64,
    /// Bytes of a row.
    pub width: u64,
    /// The number of rows; 1 for a 1-D copy.
    pub rows: u64,
    /// The kinds of the two places.
    pub kind: CopyKind,
}

impl NativeCopy {
    /// A 1-D copy.
    #[must_use]
    pub fn linear(kind: CopyKind, dst: u64, src: u64, bytes: u64) -> Self {
        Self { src, src_pitch: bytes, dst, dst_pitch: bytes, width: bytes, rows: 1, kind }
    }
}

/// 1-D copies of one call, which run in any order. The lists have equal lengths.
#[derive(Debug, Clone, Copy)]
pub struct NativeBatch<'a> {
    /// The source addresses.
    pub src: &'a [u64],
    /// The destination addresses.
    pub dst: &'a [u64],
    /// Bytes of each copy; not 0.
    pub bytes: &'a [usize],
    /// The time at which the driver may read the sources.
    pub order: SourceOrder,
}

/// The time at which the driver may read the sources of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceOrder {
    /// In the stream's order.
    Stream,
    /// At any time between the call and the end of the copies.
    Any,
}

/// The kinds of memory at both sides of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopyKind {
    /// Host to device. The driver may stage a copy from pageable memory, and need not have read
    /// all of the source when the call returns. So the source stays as it is until the copy is
    /// over. Such a call may wait for earlier work of the stream.
    HostToDevice,
    /// Device to host. The backend only uses pinned memory here. With pageable memory the call
    /// waits for the copy.
    DeviceToHost,
    /// Within a device, or between devices of one unified address space.
    DeviceToDevice,
}

/// A fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeFill {
    /// The destination address.
    pub dst: u64,
    /// The pattern.
    pub value: u32,
    /// Bytes of the pattern: 1, 2 or 4.
    pub width: u8,
    /// The number of patterns.
    pub count: u64,
}

/// The flags of an event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct EventFlags {
    /// The event records the time.
    pub timing: bool,
    /// A thread that waits for the event sleeps instead of spinning.
    pub blocking: bool,
}

/// The state of submitted work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All work is over.
    Complete,
    /// Some work is not over (the driver's code 600).
    Pending,
}

/// A function that the driver calls when a stream reaches it. The function must not call the driver
/// and must not wait.
pub type HostFunction = Box<dyn FnOnce() + Send>;

/// Calls for streams and the work on them. Unless a method says so, it does not wait for the
/// device.
pub trait StreamOps {
    /// Creates a non-blocking stream: `cuStreamCreateWithPriority`. May block.
    fn stream_create(&self, priority: i32) -> Result<NativeStream>;

    /// Destroys a stream: `cuStreamDestroy`. The stream's work runs to the end. Does not block.
    ///
    /// # Safety
    /// - `stream` came from [`stream_create`](Self::stream_create), is destroyed once, and is not
    ///   used any more.
    unsafe fn stream_destroy(&self, stream: NativeStream) -> Result<()>;

    /// Whether all work of the stream is over: `cuStreamQuery`. Does not block. Reports
    /// asynchronous failures.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not destroyed.
    unsafe fn stream_query(&self, stream: NativeStream) -> Result<Progress>;

    /// Waits for all work of the stream: `cuStreamSynchronize`.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not destroyed.
    unsafe fn stream_synchronize(&self, stream: NativeStream) -> Result<()>;

    /// Whether a number that another library gave may be a stream of this process. The driver is
    /// not asked: it reads through a handle, and a wrong one may end the process. A number that
    /// passes may still be none. Does not block.
    fn may_be_stream(&self, stream: NativeStream) -> bool;

    /// Makes later work wait for the event's last record: `cuStreamWaitEvent`.
    ///
    /// # Safety
    /// - `stream` and `event` are this driver's and were not destroyed.
    unsafe fn stream_wait_event(&self, stream: NativeStream, event: NativeEvent) -> Result<()>;

    /// Writes a word after all earlier work of the stream, visible to the host:
    /// `cuStreamWriteValue64`.
    ///
    /// # Safety
    /// - `stream` was not destroyed. The word is aligned device or pinned memory that lives until
    ///   it is written. All reads of the word are atomic.
    unsafe fn stream_write_word(&self, stream: NativeStream, addr: u64, value: u64) -> Result<()>;

    /// Makes later work wait until the word is at least `value`: `cuStreamWaitValue64`.
    ///
    /// # Safety
    /// - `stream` was not destroyed. The word is aligned device or pinned memory that lives until
    ///   the wait is over.
    unsafe fn stream_wait_word(&self, stream: NativeStream, addr: u64, value: u64) -> Result<()>;

    /// Calls a host function after all earlier work of the stream: `cuLaunchHostFunc`. Later work
    /// waits for its return. A failed context calls no more functions, and leaks what they held.
    /// The call is refused while the stream is captured, because a node could run the function
    /// twice.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not destroyed.
    unsafe fn host_function(&self, stream: NativeStream, call: HostFunction) -> Result<()>;

    /// Launches a kernel: `cuLaunchKernel` with an argument buffer.
    ///
    /// # Safety
    /// - The arguments agree with the function's parameters. The memory that the launch touches
    ///   lives until the launch is over.
    unsafe fn launch(&self, stream: NativeStream, launch: &Launch<'_>) -> Result<()>;

    /// Launches a kernel with its attributes: `cuLaunchKernelEx`. Does not block.
    ///
    /// # Safety
    /// - As [`launch`](Self::launch).
    unsafe fn launch_ex(&self, stream: NativeStream, launch: &Launch<'_>) -> Result<()>;

    /// Copies memory: `cuMemcpy{HtoD,DtoH,DtoD}Async` or `cuMemcpy2DAsync`.
    ///
    /// # Safety
    /// - Both ranges live until the copy is over. `kind` is true.
    unsafe fn copy(&self, stream: NativeStream, copy: &NativeCopy) -> Result<()>;

    /// Copies several ranges: `cuMemcpyBatchAsync`. Only for a driver with
    /// [`copy_batch`](super::DeviceProperties::copy_batch). Refused while the stream is captured.
    ///
    /// # Safety
    /// - As [`copy`](Self::copy), for memory that this context reaches by its address. No copy
    ///   accesses what another one writes.
    /// - With [`SourceOrder::Any`], nobody writes a source between the call and the end.
    unsafe fn copy_batch(&self, stream: NativeStream, batch: &NativeBatch<'_>) -> Result<()>;

    /// Copies between devices that cannot reach each other: `cuMemcpyPeerAsync`.
    ///
    /// # Safety
    /// - As [`copy`](Self::copy). Each range lies in the memory of its context's device.
    unsafe fn copy_peer(
        &self,
        stream: NativeStream,
        dst: (u64, NativeContext),
        src: (u64, NativeContext),
        bytes: u64,
    ) -> Result<()>;

    /// Fills memory: `cuMemsetD{8,16,32}Async`.
    ///
    /// # Safety
    /// - The range lives until the fill is over.
    unsafe fn fill(&self, stream: NativeStream, fill: &NativeFill) -> Result<()>;
}

/// Calls for events.
pub trait EventOps {
    /// Creates an event: `cuEventCreate`. Does not block.
    fn event_create(&self, flags: EventFlags) -> Result<NativeEvent>;

    /// Destroys an event, even a pending one: `cuEventDestroy`. Does not block.
    ///
    /// # Safety
    /// - `event` came from [`event_create`](Self::event_create), is destroyed once, and is not used
    ///   any more.
    unsafe fn event_destroy(&self, event: NativeEvent) -> Result<()>;

    /// Records an event after the stream's earlier work: `cuEventRecord`. Does not block.
    ///
    /// # Safety
    /// - `event` and `stream` are this driver's and were not destroyed.
    unsafe fn event_record(&self, event: NativeEvent, stream: NativeStream) -> Result<()>;

    /// Whether the last record is over: `cuEventQuery`. An event without a record is complete. Does
    /// not block.
    ///
    /// # Safety
    /// - `event` is an event of this driver that was not destroyed.
    unsafe fn event_query(&self, event: NativeEvent) -> Result<Progress>;

    /// Waits for the last record: `cuEventSynchronize`.
    ///
    /// # Safety
    /// - `event` is an event of this driver that was not destroyed.
    unsafe fn event_synchronize(&self, event: NativeEvent) -> Result<()>;

    /// Nanoseconds between two records that are over, at the driver's resolution (about 0.5 µs):
    /// `cuEventElapsedTime`. Does not block.
    ///
    /// # Errors
    /// `InvalidState` if an event is pending. The driver's code 400 for events that were never
    /// recorded, have no timing or belong to two contexts.
    ///
    /// # Safety
    /// - Both events are this driver's and were not destroyed.
    unsafe fn event_elapsed(&self, start: NativeEvent, end: NativeEvent) -> Result<i64>;
}
