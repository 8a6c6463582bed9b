//! [`MpsSlowOps`]: the interface to the driver. Two types implement it: the real driver (`real`, on
//! Apple's systems) and the simulated one (`sim`).
//!
//! # Rules for all methods
//! * **Ownership.** A method that returns a handle gives the caller one reference, which
//!   [`ObjectOps::release`] gives back. No returned object depends on an autorelease pool.
//! * **Errors.** A call that fails creates nothing. `OutOfMemory` stands for a buffer or heap that
//!   is nil. `Compile` stands for an error of the compiler, with its log. Every other nil or
//!   `NSError` is `Driver`, with the method's selector, the error's code and its text. **Metal
//!   reports errors of work at completion only**: see [`CommandBufferOps::status`].
//! * **Blocking.** Each method says whether it may wait for the device. A method that "does not
//!   block" still takes the driver's own locks.
//! * **Threads.** Any thread may call, several at once. One command buffer, with its encoders, and
//!   one residency set are used by one thread at a time.
//! * **Hazards.** The driver orders work on untracked memory only by fences, barriers and events.
//!   The order of commits is no order of accesses.
//!
//! Handles are plain integers: they own nothing, and any program can make one up. The managers
//! ensure that each object is released once. So every method that takes a handle is unsafe, and
//! states what its caller vouches for. A handle is *live* if this driver returned it and it was not
//! released.
//!
//! This module must not know managers.

pub use super::types::*;

use leasehold_core::Result;

/// Calls for all objects.
pub trait ObjectOps {
    /// Gives back one reference: `release`. The last one ends the object. Does not block, except
    /// that a library or pipeline may take milliseconds.
    ///
    /// # Safety
    /// - The handle is live, and nothing uses it afterwards.
    /// - An encoder has [ended](EncoderOps::end_encoding); otherwise Metal ends the process.
    /// - No uncompleted command buffer without retained references uses the object.
    unsafe fn release(&self, object: NativeObject);
}

/// Calls for devices.
pub trait DeviceOps {
    /// All devices, in the driver's order: `MTLCopyAllDevices`, with `MTLCreateSystemDefaultDevice`
    /// where that list is empty. The first call may take 100 ms.
    ///
    /// # Errors
    /// `Unavailable` if the system has no device.
    fn devices(&self) -> Result<Vec<NativeDevice>>;

    /// A device's properties: `name`, `registryID`, `architecture`, `supportsFamily`, and about ten
    /// more. Does not block.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn device_properties(&self, device: NativeDevice) -> Result<DeviceProperties>;

    /// Bytes of all memory that this process has allocated of the device: `currentAllocatedSize`.
    /// Does not block.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn allocated_size(&self, device: NativeDevice) -> Result<u64>;

    /// Host time and device time at one moment, in nanoseconds and in the device's ticks:
    /// `sampleTimestamps:gpuTimestamp:`. Does not block.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn sample_timestamps(&self, device: NativeDevice) -> Result<(u64, u64)>;
}

/// Calls for command queues.
pub trait QueueOps {
    /// Creates a queue with at most `buffers` uncompleted command buffers:
    /// `newCommandQueueWithMaxCommandBufferCount:`. Does not block. A process can have some hundred
    /// queues at most.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn queue_create(
        &self,
        device: NativeDevice,
        buffers: u32,
        label: &str,
    ) -> Result<NativeQueue>;

    /// Makes a set's members resident for all later work of the queue: `addResidencySet:`. A queue
    /// has at most 32 sets. Does not block.
    ///
    /// # Safety
    /// - Both handles are live and of one device. The set outlives the queue or is removed first.
    unsafe fn queue_add_set(&self, queue: NativeQueue, set: NativeResidencySet) -> Result<()>;

    /// Reverts [`queue_add_set`](Self::queue_add_set) for later work: `removeResidencySet:`. Does
    /// not block.
    ///
    /// # Safety
    /// - Both handles are live.
    unsafe fn queue_remove_set(&self, queue: NativeQueue, set: NativeResidencySet) -> Result<()>;
}

/// Calls for command buffers. No call but those for its encoder is allowed while an encoder of the
/// command buffer is open.
pub trait CommandBufferOps {
    /// Makes a command buffer: `commandBufferWithDescriptor:`. **Blocks** while the queue has its
    /// maximum of uncompleted command buffers; this is a dead-lock if their completion depends on
    /// the caller.
    ///
    /// # Safety
    /// - `queue` is live.
    unsafe fn command_buffer(
        &self,
        queue: NativeQueue,
        desc: CommandBufferDesc,
    ) -> Result<NativeCommandBuffer>;

    /// Names a command buffer in captures and errors: `setLabel:`. Does not block.
    ///
    /// # Safety
    /// - `buffer` is live.
    unsafe fn buffer_set_label(&self, buffer: NativeCommandBuffer, label: &str) -> Result<()>;

    /// Adds a function that the driver calls at completion, also after an error:
    /// `addCompletedHandler:`. Does not block.
    ///
    /// # Safety
    /// - `buffer` is live and not committed.
    unsafe fn on_completed(
        &self,
        buffer: NativeCommandBuffer,
        handler: CompletedHandler,
    ) -> Result<()>;

    /// Makes later work of the queue wait for a value: `encodeWaitForEvent:value:`. Does not block.
    ///
    /// # Safety
    /// - Both handles are live. `buffer` is not committed and has no open encoder. The event lives
    ///   until the command buffer is over.
    unsafe fn encode_wait(
        &self,
        buffer: NativeCommandBuffer,
        event: AnyEvent,
        value: u64,
    ) -> Result<()>;

    /// Signals a value after all earlier work of the queue: `encodeSignalEvent:value:`. **If the
    /// command buffer fails, the signal does not happen.** Does not block.
    ///
    /// # Safety
    /// - As [`encode_wait`](Self::encode_wait).
    unsafe fn encode_signal(
        &self,
        buffer: NativeCommandBuffer,
        event: AnyEvent,
        value: u64,
    ) -> Result<()>;

    /// Submits a command buffer: `commit`. Command buffers of a queue start in the order of their
    /// commits, and complete in it. Does not block.
    ///
    /// # Safety
    /// - `buffer` is live and has no open encoder. Without retained references everything that it
    ///   uses lives until it is over.
    /// - The memory that the work touches lives until the command buffer is over, and no other code
    ///   touches it without an order.
    unsafe fn commit(&self, buffer: NativeCommandBuffer) -> Result<()>;

    /// The state: `status`. Does not block.
    ///
    /// # Safety
    /// - `buffer` is live.
    unsafe fn status(&self, buffer: NativeCommandBuffer) -> Result<Status>;

    /// The outcome of a command buffer that is over: `error`, `GPUStartTime`, `GPUEndTime`. Does
    /// not block.
    ///
    /// # Errors
    /// `InvalidState` if the command buffer is not over.
    ///
    /// # Safety
    /// - `buffer` is live.
    unsafe fn completion(&self, buffer: NativeCommandBuffer) -> Result<Completion>;

    /// Waits until a command buffer is over and its handlers were called: `waitUntilCompleted`.
    /// Costs up to 2 ms beyond the work. The work's own error is no error of this call.
    ///
    /// # Safety
    /// - `buffer` is live and committed. The calling thread is no handler.
    unsafe fn wait_completed(&self, buffer: NativeCommandBuffer) -> Result<()>;
}

/// Calls for encoders of both kinds.
pub trait EncoderOps {
    /// Ends the encoder: `endEncoding`. Does not block.
    ///
    /// # Safety
    /// - `encoder` is live and open.
    unsafe fn end_encoding(&self, encoder: NativeEncoder) -> Result<()>;

    /// Makes the encoder's work wait for the last update of a fence that was committed before:
    /// `waitForFence:`. Only updates in the same queue count. Does not block.
    ///
    /// # Safety
    /// - Both handles are live and the encoder is open. The fence lives until the command buffer is
    ///   over.
    unsafe fn wait_fence(&self, encoder: NativeEncoder, fence: NativeFence) -> Result<()>;

    /// Updates a fence after the encoder's work: `updateFence:`. Does not block.
    ///
    /// # Safety
    /// - As [`wait_fence`](Self::wait_fence).
    unsafe fn update_fence(&self, encoder: NativeEncoder, fence: NativeFence) -> Result<()>;

    /// Opens a named group in captures: `pushDebugGroup:`. Does not block.
    ///
    /// # Safety
    /// - `encoder` is live and open.
    unsafe fn push_group(&self, encoder: NativeEncoder, name: &str) -> Result<()>;

    /// Closes the innermost group: `popDebugGroup`. Does not block.
    ///
    /// # Safety
    /// - `encoder` is live and open, with an open group.
    unsafe fn pop_group(&self, encoder: NativeEncoder) -> Result<()>;
}

/// Calls for compute encoders. None blocks.
pub trait ComputeOps {
    /// Opens a compute encoder: `computeCommandEncoderWithDescriptor:`.
    ///
    /// # Safety
    /// - `buffer` is live, not committed, and has no open encoder.
    unsafe fn compute_encoder(
        &self,
        buffer: NativeCommandBuffer,
        desc: &ComputeDesc,
    ) -> Result<NativeComputeEncoder>;

    /// Sets the pipeline of later dispatches: `setComputePipelineState:`.
    ///
    /// # Safety
    /// - Both handles are live and the encoder is open. The pipeline lives until the command buffer
    ///   is over.
    unsafe fn set_pipeline(
        &self,
        encoder: NativeComputeEncoder,
        pipeline: NativePipeline,
    ) -> Result<()>;

    /// Binds a buffer at a byte offset: `setBuffer:offset:atIndex:`.
    ///
    /// # Safety
    /// - Both handles are live and the encoder is open. The offset lies in the buffer, and the
    ///   index is at most 30. The buffer lives until the command buffer is over.
    unsafe fn set_buffer(
        &self,
        encoder: NativeComputeEncoder,
        buffer: NativeBuffer,
        offset: u64,
        index: u32,
    ) -> Result<()>;

    /// Copies bytes for later dispatches: `setBytes:length:atIndex:`.
    ///
    /// # Errors
    /// `InvalidArgument` for more than 4,096 bytes or none.
    ///
    /// # Safety
    /// - `encoder` is live and open. The index is at most 30.
    unsafe fn set_bytes(
        &self,
        encoder: NativeComputeEncoder,
        bytes: &[u8],
        index: u32,
    ) -> Result<()>;

    /// Sets the bytes of threadgroup memory of later dispatches, a multiple of 16:
    /// `setThreadgroupMemoryLength:atIndex:`.
    ///
    /// # Safety
    /// - `encoder` is live and open. The size and the index are within the device's limits.
    unsafe fn set_threadgroup_memory(
        &self,
        encoder: NativeComputeEncoder,
        bytes: u32,
        index: u32,
    ) -> Result<()>;

    /// Runs the pipeline's kernel: `dispatchThreadgroups:threadsPerThreadgroup:`.
    ///
    /// # Safety
    /// - `encoder` is live and open, with a pipeline. The bound buffers and bytes agree with the
    ///   kernel's parameters, and the kernel stays within them. The threads are within the
    ///   pipeline's limits, and no size is zero.
    unsafe fn dispatch(&self, encoder: NativeComputeEncoder, dispatch: &Dispatch<'_>)
    -> Result<()>;

    /// Makes later dispatches of the encoder wait for the earlier ones:
    /// `memoryBarrierWithScope:` with `MTLBarrierScopeBuffers`.
    ///
    /// # Safety
    /// - `encoder` is live and open.
    unsafe fn barrier(&self, encoder: NativeComputeEncoder) -> Result<()>;

    /// Makes a buffer resident that no index binds: `useResource:usage:`.
    ///
    /// # Safety
    /// - Both handles are live and the encoder is open. The buffer lives until the command buffer
    ///   is over.
    unsafe fn use_buffer(
        &self,
        encoder: NativeComputeEncoder,
        buffer: NativeBuffer,
        usage: Usage,
    ) -> Result<()>;

    /// Makes all buffers of a heap resident, for reads: `useHeap:`.
    ///
    /// # Safety
    /// - Both handles are live and the encoder is open. The heap lives until the command buffer is
    ///   over.
    unsafe fn use_heap(&self, encoder: NativeComputeEncoder, heap: NativeHeap) -> Result<()>;

    /// Runs commands of an indirect command buffer: `executeCommandsInBuffer:withRange:`.
    ///
    /// # Safety
    /// - Both handles are live and the encoder is open. The commands in the range were set, and
    ///   stay unchanged until the command buffer is over. All buffers of the commands are resident,
    ///   and each command meets the rules of [`dispatch`](Self::dispatch).
    unsafe fn execute_indirect(
        &self,
        encoder: NativeComputeEncoder,
        indirect: NativeIndirect,
        range: std::ops::Range<u32>,
    ) -> Result<()>;
}

/// Calls for blit encoders. None blocks. The driver does not order the commands of one encoder on
/// untracked memory.
pub trait BlitOps {
    /// Opens a blit encoder: `blitCommandEncoder`.
    ///
    /// # Safety
    /// - `buffer` is live, not committed, and has no open encoder.
    unsafe fn blit_encoder(&self, buffer: NativeCommandBuffer) -> Result<NativeBlitEncoder>;

    /// Copies bytes between buffers. Each place is a buffer and a byte offset:
    /// `copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:`.
    ///
    /// # Safety
    /// - All handles are live and the encoder is open. Both ranges lie in their buffers and do not
    ///   overlap. On macOS, offsets and size are multiples of 4.
    unsafe fn copy(
        &self,
        encoder: NativeBlitEncoder,
        from: (NativeBuffer, u64),
        to: (NativeBuffer, u64),
        bytes: u64,
    ) -> Result<()>;

    /// Fills bytes of a buffer with one value: `fillBuffer:range:value:`.
    ///
    /// # Safety
    /// - Both handles are live and the encoder is open. The range lies in the buffer and is not
    ///   empty. On macOS, offset and size are multiples of 4.
    unsafe fn fill(
        &self,
        encoder: NativeBlitEncoder,
        at: (NativeBuffer, u64),
        bytes: u64,
        value: u8,
    ) -> Result<()>;
}

/// Calls for libraries, functions and pipelines.
pub trait LibraryOps {
    /// Compiles source: `newLibraryWithSource:options:error:`. Blocks on the compiler, for seconds
    /// at worst.
    ///
    /// # Errors
    /// `Compile`, with the log.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn library_from_source(
        &self,
        device: NativeDevice,
        source: &str,
        options: &CompileOptions,
    ) -> Result<NativeLibrary>;

    /// Loads a compiled library from a file: `newLibraryWithURL:error:`. Blocks on the file.
    ///
    /// # Safety
    /// - `device` is live. The file holds code of Apple's compiler.
    unsafe fn library_from_file(
        &self,
        device: NativeDevice,
        path: &std::path::Path,
    ) -> Result<NativeLibrary>;

    /// The names of a library's functions: `functionNames`. Does not block.
    ///
    /// # Safety
    /// - `library` is live.
    unsafe fn function_names(&self, library: NativeLibrary) -> Result<Vec<String>>;

    /// Finds a function: `newFunctionWithName:`. Does not block.
    ///
    /// # Errors
    /// `NotFound`, with the name.
    ///
    /// # Safety
    /// - `library` is live.
    unsafe fn function(&self, library: NativeLibrary, name: &str) -> Result<NativeFunction>;

    /// Makes a compute pipeline:
    /// `newComputePipelineStateWithDescriptor:options:reflection:error:`. Blocks on the compiler.
    ///
    /// # Errors
    /// `Compile`, with the log.
    ///
    /// # Safety
    /// - Both handles are live and of one device.
    unsafe fn pipeline_create(
        &self,
        device: NativeDevice,
        function: NativeFunction,
        desc: &PipelineDesc,
    ) -> Result<NativePipeline>;

    /// The limits of a pipeline. Does not block.
    ///
    /// # Safety
    /// - `pipeline` is live.
    unsafe fn pipeline_info(&self, pipeline: NativePipeline) -> Result<PipelineInfo>;
}

/// Calls for heaps and buffers. **Memory that is missing shows only at completion**, as
/// [`code::OUT_OF_MEMORY`]: an allocation beyond the physical memory succeeds.
pub trait MemoryOps {
    /// Creates a heap: `newHeapWithDescriptor:`. May block on the system.
    ///
    /// # Errors
    /// `OutOfMemory` for nil.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn heap_create(&self, device: NativeDevice, desc: &HeapDesc) -> Result<NativeHeap>;

    /// Bytes that a heap's buffers use: `usedSize`. Does not block.
    ///
    /// # Safety
    /// - `heap` is live.
    unsafe fn heap_used(&self, heap: NativeHeap) -> Result<u64>;

    /// Bytes of the largest buffer that a heap without placement can still take:
    /// `maxAvailableSizeWithAlignment:`. Does not block.
    ///
    /// # Safety
    /// - `heap` is live. `align` is a power of two.
    unsafe fn heap_available(&self, heap: NativeHeap, align: u64) -> Result<u64>;

    /// Bytes and alignment of a buffer in a heap: `heapBufferSizeAndAlignWithLength:options:`. Does
    /// not block.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn heap_buffer_size(
        &self,
        device: NativeDevice,
        bytes: u64,
        options: MemoryOptions,
    ) -> Result<SizeAlign>;

    /// Creates a buffer in a heap, at an offset if the heap has placement:
    /// `newBufferWithLength:options:offset:`, `newBufferWithLength:options:`. Does not block. Two
    /// buffers at overlapping offsets share their bytes.
    ///
    /// # Errors
    /// `OutOfMemory` for nil, as for no bytes or a range outside of the heap.
    ///
    /// # Safety
    /// - `heap` is live, with these options. With an offset the heap has placement, the offset is
    ///   aligned, and the range lies in the heap.
    unsafe fn heap_buffer(
        &self,
        heap: NativeHeap,
        bytes: u64,
        options: MemoryOptions,
        offset: Option<u64>,
    ) -> Result<NativeBuffer>;

    /// Creates a buffer of its own: `newBufferWithLength:options:`. May block on the system.
    ///
    /// # Errors
    /// `OutOfMemory` for nil, as for no bytes or more than the device's maximum.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn buffer_create(
        &self,
        device: NativeDevice,
        bytes: u64,
        options: MemoryOptions,
    ) -> Result<NativeBuffer>;

    /// Wraps host memory as a shared buffer:
    /// `newBufferWithBytesNoCopy:length:options:deallocator:`. Does not block.
    ///
    /// # Errors
    /// `InvalidArgument` for an address or size that is no multiple of a page; `OutOfMemory` for
    /// nil.
    ///
    /// # Safety
    /// - `device` is live. The range is memory of this process that may be read and written. It
    ///   stays so until the buffer is released and no work uses it.
    unsafe fn buffer_wrap(
        &self,
        device: NativeDevice,
        addr: u64,
        bytes: u64,
    ) -> Result<NativeBuffer>;

    /// The host address of a shared buffer; `None` for private memory: `contents`. Does not block.
    ///
    /// # Safety
    /// - `buffer` is live.
    unsafe fn buffer_contents(&self, buffer: NativeBuffer) -> Result<Option<u64>>;

    /// The device address of a buffer: `gpuAddress`. Does not block.
    ///
    /// # Safety
    /// - `buffer` is live.
    unsafe fn buffer_address(&self, buffer: NativeBuffer) -> Result<u64>;

    /// Bytes of a buffer: `length`. Does not block.
    ///
    /// # Safety
    /// - `buffer` is live.
    unsafe fn buffer_length(&self, buffer: NativeBuffer) -> Result<u64>;

    /// Tells the simulated driver's race detector that the host reads (or writes) shared memory
    /// that the device may use too. The real driver does nothing.
    fn host_access(&self, addr: u64, bytes: u64, write: bool) {
        let _ = (addr, bytes, write);
    }
}

/// Calls for events and fences.
pub trait SyncOps {
    /// Creates an event of value 0 for queues of one device: `newEvent`. Does not block.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn event_create(&self, device: NativeDevice) -> Result<NativeEvent>;

    /// Creates an event of value 0 for queues of all devices and the host: `newSharedEvent`. Does
    /// not block.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn shared_event_create(&self, device: NativeDevice) -> Result<NativeSharedEvent>;

    /// The value of a shared event: `signaledValue`. Does not block.
    ///
    /// # Safety
    /// - `event` is live.
    unsafe fn signaled_value(&self, event: NativeSharedEvent) -> Result<u64>;

    /// Sets the value of a shared event, which may only rise: `setSignaledValue:`. Does not block.
    ///
    /// # Safety
    /// - `event` is live. The work that waits for the value may run now.
    unsafe fn set_signaled_value(&self, event: NativeSharedEvent, value: u64) -> Result<()>;

    /// Waits until a shared event has reached a value, and returns whether it has:
    /// `waitUntilSignaledValue:timeoutMS:`.
    ///
    /// # Safety
    /// - `event` is live.
    unsafe fn wait_signaled(
        &self,
        event: NativeSharedEvent,
        value: u64,
        timeout: std::time::Duration,
    ) -> Result<bool>;

    /// Calls a function once a shared event has reached a value: `notifyListener:atValue:block:`.
    /// Does not block. If the value is never reached, the function is never called.
    ///
    /// # Safety
    /// - `event` is live.
    unsafe fn on_signaled(
        &self,
        event: NativeSharedEvent,
        value: u64,
        handler: SignaledHandler,
    ) -> Result<()>;

    /// Creates a fence: `newFence`. Does not block.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn fence_create(&self, device: NativeDevice) -> Result<NativeFence>;
}

/// Calls for residency sets (macOS 15).
pub trait ResidencyOps {
    /// Creates a set: `newResidencySetWithDescriptor:error:`. Does not block.
    ///
    /// # Errors
    /// `Unsupported` on a system without residency sets.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn residency_create(
        &self,
        device: NativeDevice,
        capacity: u32,
    ) -> Result<NativeResidencySet>;

    /// Adds a member, effective with the next [`residency_commit`](Self::residency_commit):
    /// `addAllocation:`. Does not block.
    ///
    /// # Safety
    /// - Both handles are live. The member is removed before it is released. No other thread uses
    ///   the set.
    unsafe fn residency_add(&self, set: NativeResidencySet, member: Allocation) -> Result<()>;

    /// Removes a member, effective with the next commit: `removeAllocation:`. Does not block.
    ///
    /// # Safety
    /// - Both handles are live. No other thread uses the set.
    unsafe fn residency_remove(&self, set: NativeResidencySet, member: Allocation) -> Result<()>;

    /// Applies the changes: `commit`. May block on the system if the set is resident.
    ///
    /// # Safety
    /// - `set` is live. No other thread uses the set.
    unsafe fn residency_commit(&self, set: NativeResidencySet) -> Result<()>;

    /// Makes the members resident ahead of work: `requestResidency`. May block on the system.
    ///
    /// # Safety
    /// - `set` is live. No other thread uses the set.
    unsafe fn residency_request(&self, set: NativeResidencySet) -> Result<()>;

    /// Lets the system evict the members: `endResidency`. Does not block.
    ///
    /// # Safety
    /// - `set` is live. No other thread uses the set.
    unsafe fn residency_end(&self, set: NativeResidencySet) -> Result<()>;
}

/// Calls for counter sampling.
pub trait CounterOps {
    /// Creates a buffer for timestamps, shared with the host:
    /// `newCounterSampleBufferWithDescriptor:error:`. Does not block.
    ///
    /// # Errors
    /// `Unsupported` on a device without timestamps at the boundaries of a pass.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn samples_create(&self, device: NativeDevice, count: u32)
    -> Result<NativeSampleBuffer>;

    /// Timestamps of work that is over, in the device's ticks (nanoseconds on Apple's devices):
    /// `resolveCounterRange:`. `u64::MAX` stands for a sample that failed. Does not block.
    ///
    /// # Safety
    /// - `samples` is live, and the range lies in it. The work that writes the samples is over.
    unsafe fn samples_resolve(
        &self,
        samples: NativeSampleBuffer,
        range: std::ops::Range<u32>,
    ) -> Result<Vec<u64>>;
}

/// Calls for indirect command buffers.
pub trait IndirectOps {
    /// Creates a buffer for concurrent dispatches with own pipelines and up to `buffers` bindings:
    /// `newIndirectCommandBufferWithDescriptor:maxCommandCount:options:`. Does not block.
    ///
    /// # Errors
    /// `InvalidArgument` for more than 16,384 commands or more than 31 bindings.
    ///
    /// # Safety
    /// - `device` is live.
    unsafe fn indirect_create(
        &self,
        device: NativeDevice,
        commands: u32,
        buffers: u32,
    ) -> Result<NativeIndirect>;

    /// Sets one command: `indirectComputeCommandAtIndex:` and its setters. Does not block.
    ///
    /// # Safety
    /// - All handles are live, and the pipeline was made for indirect use. The index lies in the
    ///   buffer. No uncompleted command buffer executes the command.
    unsafe fn indirect_set(
        &self,
        indirect: NativeIndirect,
        index: u32,
        command: &IndirectCommand<'_>,
    ) -> Result<()>;

    /// Empties commands: `resetWithRange:`. Does not block.
    ///
    /// # Safety
    /// - `indirect` is live, and the range lies in it. No uncompleted command buffer executes the
    ///   commands.
    unsafe fn indirect_reset(
        &self,
        indirect: NativeIndirect,
        range: std::ops::Range<u32>,
    ) -> Result<()>;
}

/// Calls for capture scopes, which a debugger shows.
pub trait CaptureOps {
    /// Creates a scope over a queue: `newCaptureScopeWithCommandQueue:`. Does not block.
    ///
    /// # Safety
    /// - `queue` is live.
    unsafe fn scope_create(&self, queue: NativeQueue, label: &str) -> Result<NativeCaptureScope>;

    /// Begins a scope: `beginScope`. Does not block.
    ///
    /// # Safety
    /// - `scope` is live and has ended.
    unsafe fn scope_begin(&self, scope: NativeCaptureScope) -> Result<()>;

    /// Ends a scope: `endScope`. Does not block.
    ///
    /// # Safety
    /// - `scope` is live and has begun.
    unsafe fn scope_end(&self, scope: NativeCaptureScope) -> Result<()>;
}

/// The driver calls that managers, allocators, streams and graphs need.
///
/// A call through the trait costs one virtual call. The driver's own calls take from 0.1 µs (a
/// setter of an encoder) over 10 µs (a commit) to seconds (a compilation).
///
/// # Safety
/// An implementation reports the truth, because the backend lends memory to safe code on its word:
/// - Memory that it allocates exists, has the requested size, and belongs to no other caller until
///   it is released.
/// - Work that it reports as over touches nothing any more.
/// - A value of an event is signalled after the work before it.
pub unsafe trait MpsSlowOps:
    ObjectOps
    + DeviceOps
    + QueueOps
    + CommandBufferOps
    + EncoderOps
    + ComputeOps
    + BlitOps
    + LibraryOps
    + MemoryOps
    + SyncOps
    + ResidencyOps
    + CounterOps
    + IndirectOps
    + CaptureOps
    + Send
    + Sync
    + 'static
{
    /// The number of driver calls so far through this object.
    fn driver_calls(&self) -> u64;

    /// The longest sleep of a waiting thread between two queries. Zero for the simulated driver,
    /// whose time advances only with queries.
    fn poll_interval(&self) -> std::time::Duration;
}
