//! [`CudaSlowOps`]: the interface to the driver. Two types implement it: the real driver (`real`)
//! and the simulated one (`sim`).
//!
//! # Rules for all methods
//! * **Context.** New objects belong to the context that is current on the calling thread
//!   ([`ContextOps::set_current`]). The managers make the context current. Unless a method says
//!   otherwise, its objects' context must be current.
//! * **Errors.** `OutOfMemory` stands for the driver's code 2. `DeviceLost` stands for codes after
//!   which the current context is lost: from then on every call returns it with the first cause.
//!   Every other code is `Driver` with the function, the code and its name, and so is a failure
//!   because another context is lost. A call that fails creates nothing.
//! * **Blocking.** Each method says whether it may wait for the device. A method that "does not
//!   block" still takes the driver's own locks.
//! * **Threads.** Any thread may call, several at once. The caller makes calls on one stream under
//!   that stream's submission lock.
//! * **Order of arguments.** As in the driver's API.
//!
//! Handles are plain integers: they own nothing, and any program can make one up. The managers
//! ensure that each object is destroyed once. So every method that takes a handle or an address is
//! unsafe, and states what its caller vouches for.
//!
//! This module must not know managers.

use leasehold_core::{Error, Result};
use leasehold_hal::Binding;

leasehold_engine::native_handles! {
    /// A `CUcontext`.
    NativeContext;
    /// A `CUstream`.
    NativeStream;
    /// A `CUevent`.
    NativeEvent;
    /// A `CUmodule`.
    NativeModule;
    /// A `CUfunction`.
    NativeFunction;
    /// A `CUgraph`.
    NativeGraph;
    /// A `CUgraphNode`.
    NativeNode;
    /// A `CUgraphExec`.
    NativeGraphExec;
    /// A `CUmemGenericAllocationHandle`: physical memory without an address.
    NativeMemory;
}

/// The calls that a thread may make while streams are captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CaptureMode {
    /// No call that a capture of any thread forbids.
    #[default]
    Global,
    /// No call that a capture of this thread forbids.
    ThreadLocal,
    /// Any call.
    Relaxed,
}

/// A device's properties, as the driver reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceProperties {
    /// The product's name.
    pub name: String,
    /// 16 bytes that identify the device on every machine.
    pub uuid: [u8; 16],
    /// Domain, bus and device on PCI, as in `0000:1b:00.0`.
    pub pci: String,
    /// Major and minor compute capability.
    pub compute_capability: (u32, u32),
    /// The driver is the vendor's, so the vendor's libraries can use its objects.
    pub vendor: bool,
    /// The number of multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of second-level cache.
    pub l2: u64,
    /// The NUMA node of the host that the device is attached to, where known.
    pub numa_node: Option<u32>,
    /// The most threads of a block.
    pub block_threads: u32,
    /// The most threads of a block in each direction.
    pub block: [u32; 3],
    /// The most blocks of a grid in each direction.
    pub grid: [u32; 3],
    /// Bytes of shared memory of a block by default.
    pub shared: u32,
    /// Bytes of shared memory of a block for a function that requested more.
    pub shared_optin: u32,
    /// The number of threads of a warp.
    pub warp: u32,
    /// Several kernels can be resident at a time.
    pub concurrent_kernels: bool,
    /// The device supports virtual memory management.
    pub vmm: bool,
    /// The device supports stream-ordered memory pools.
    pub memory_pools: bool,
    /// Streams can write and await 64-bit words.
    pub stream_words: bool,
    /// Device and host share one address space.
    pub unified_addressing: bool,
    /// Memory can be shared with other processes by file descriptor.
    pub fd_handles: bool,
    /// Multiprocessors can be divided among contexts.
    pub green_contexts: bool,
}

impl DeviceProperties {
    /// The most bytes of memory that a plausible device has.
    const MEMORY_MAX: u64 = 1 << 50;

    /// Refuses properties that no device can have, because later computations rely on them.
    ///
    /// # Errors
    /// `Unavailable`, with the implausible property.
    pub(crate) fn check(&self, ordinal: u32) -> Result<()> {
        let refuse = |what: String| {
            Err(Error::Unavailable(
                format!("CUDA: the driver says of device {ordinal} {what}").into(),
            ))
        };
        let (major, minor) = self.compute_capability;
        if !(1..100).contains(&major) || minor >= 100 {
            return refuse(format!("that its compute capability is {major}.{minor}"));
        }
        if self.memory > Self::MEMORY_MAX {
            return refuse(format!("that it has {} bytes of memory", self.memory));
        }
        Ok(())
    }
}

/// Free and total bytes of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NativeMemoryInfo {
    /// Free bytes.
    pub free: u64,
    /// Total bytes.
    pub total: u64,
}

/// The resources and parameters of a function.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FunctionInfo {
    /// The most threads of a block.
    pub block_threads: u32,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of shared memory that the code itself declares.
    pub shared: u32,
    /// Bytes of local memory per thread.
    pub local: u32,
    /// Offset and size of each parameter, in bytes. `None` if the driver does not report them
    /// (before 12.4).
    pub params: Option<Vec<(u32, u32)>>,
    /// The compute capability of the chosen code, times ten.
    pub binary: u32,
    /// The compute capability that the source was compiled for, times ten: that of the PTX, if the
    /// driver translated it.
    pub source: u32,
}

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

/// The flags of pinned host memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct HostFlags {
    /// Write-combined: faster for the device to read, very slow for the host to read.
    pub write_combined: bool,
}

/// The state of submitted work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All work is over.
    Complete,
    /// Some work is not over (the driver's code 600).
    Pending,
}

/// The outcome of an update of an executable graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphExecUpdate {
    /// The node was changed in place.
    InPlace,
    /// The driver refuses this change. The executable must be instantiated again.
    Refused,
}

/// A function that the driver calls when a stream reaches it. The function must not call the driver
/// and must not wait.
pub type HostFunction = Box<dyn FnOnce() + Send>;

/// Calls for the driver itself and its devices.
pub trait DeviceOps {
    /// Starts the driver: `cuInit`. Further calls have no effect. May block on the driver's start.
    ///
    /// # Errors
    /// `Unavailable`, with the reason: the library is missing or too old, or the driver finds no
    /// device or no permission.
    fn init(&self) -> Result<()>;

    /// The driver's version, such as 13000: `cuDriverGetVersion`. Does not block.
    fn driver_version(&self) -> Result<i32>;

    /// The number of devices: `cuDeviceGetCount`. Does not block.
    fn device_count(&self) -> Result<u32>;

    /// A device's properties: `cuDeviceGetName`, `cuDeviceGetUuid_v2`, `cuDeviceTotalMem`,
    /// `cuDeviceGetAttribute` (about twenty), `cuDeviceGetPCIBusId`. Does not block.
    fn device_properties(&self, ordinal: u32) -> Result<DeviceProperties>;

    /// Whether `device` can reach the memory of `peer`: `cuDeviceCanAccessPeer`. Does not block.
    fn can_access_peer(&self, device: u32, peer: u32) -> Result<bool>;
}

/// Calls for contexts.
pub trait ContextOps {
    /// Retains the device's primary context: `cuDevicePrimaryCtxRetain`. The first call makes the
    /// context and may block (about 100 ms). The context does not become current.
    fn primary_retain(&self, ordinal: u32) -> Result<NativeContext>;

    /// Releases the primary context once: `cuDevicePrimaryCtxRelease`. The last release ends the
    /// context and may block.
    ///
    /// # Safety
    /// - The caller releases each [`primary_retain`](Self::primary_retain) once. After the last
    ///   release nothing that was made in the context is used.
    unsafe fn primary_release(&self, ordinal: u32) -> Result<()>;

    /// Creates an owned context, which does not stay current: `cuCtxCreate`, `cuCtxPopCurrent`. May
    /// block.
    fn context_create(&self, ordinal: u32) -> Result<NativeContext>;

    /// Ends an owned context: `cuCtxDestroy`. Waits for its work.
    ///
    /// # Safety
    /// - `context` came from [`context_create`](Self::context_create) and is destroyed once.
    ///   Nothing that was made in it is used any more.
    unsafe fn context_destroy(&self, context: NativeContext) -> Result<()>;

    /// The context that is current on this thread, or null: `cuCtxGetCurrent`. Does not block.
    fn current(&self) -> Result<NativeContext>;

    /// Makes a context current on this thread: `cuCtxSetCurrent`. With null no context is current.
    /// Does not block.
    ///
    /// # Safety
    /// - `context` is null, or a context of this driver that was not given back.
    unsafe fn set_current(&self, context: NativeContext) -> Result<()>;

    /// Lets the current context access memory of `peer`: `cuCtxEnablePeerAccess`. Already enabled
    /// (704) is `Ok`. May block.
    ///
    /// # Safety
    /// - `peer` is a context of this driver that was not given back.
    unsafe fn enable_peer(&self, peer: NativeContext) -> Result<()>;

    /// Revokes the access to `peer`: `cuCtxDisablePeerAccess`. Not enabled (705) is `Ok`. May
    /// block.
    ///
    /// # Safety
    /// - `peer` is a context of this driver that was not given back.
    unsafe fn disable_peer(&self, peer: NativeContext) -> Result<()>;

    /// Waits for all work of the current context: `cuCtxSynchronize`.
    fn context_synchronize(&self) -> Result<()>;

    /// Exchanges this thread's capture mode, and returns the former one:
    /// `cuThreadExchangeStreamCaptureMode`. Needs no context. Does not block. A relaxed thread may
    /// make calls that break a capture in other modes: allocations, queries of events, waits.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;

    /// The lowest and the highest stream priority: `cuCtxGetStreamPriorityRange`. A lower number is
    /// more urgent. Does not block.
    fn priority_range(&self) -> Result<(i32, i32)>;
}

/// Calls for device memory, its addresses, and pinned host memory.
pub trait MemoryOps {
    /// Free and total memory of the current context's device: `cuMemGetInfo`. May take a while;
    /// does not wait for work.
    fn memory_info(&self) -> Result<NativeMemoryInfo>;

    /// Allocates memory with an address: `cuMemAlloc`. May wait for the device.
    fn alloc(&self, bytes: u64) -> Result<u64>;

    /// Frees memory: `cuMemFree`. Waits for the device.
    ///
    /// # Safety
    /// - `addr` came from [`alloc`](Self::alloc) and is freed once. No work uses the memory any
    ///   more.
    unsafe fn free(&self, addr: u64) -> Result<()>;

    /// Allocates memory in stream order from the device's default pool: `cuMemAllocAsync`. Does not
    /// block.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not destroyed.
    unsafe fn alloc_async(&self, bytes: u64, stream: NativeStream) -> Result<u64>;

    /// Frees memory in stream order: `cuMemFreeAsync`. Does not block.
    ///
    /// # Safety
    /// - `addr` came from [`alloc_async`](Self::alloc_async) and is freed once. Only earlier work
    ///   of this stream, or work that it waits for, uses the memory. `stream` was not destroyed.
    unsafe fn free_async(&self, addr: u64, stream: NativeStream) -> Result<()>;

    /// Sets the bytes of unused memory that the device's default pool keeps:
    /// `cuDeviceGetDefaultMemPool`, `cuMemPoolSetAttribute`. Does not block.
    fn pool_set_threshold(&self, ordinal: u32, bytes: u64) -> Result<()>;

    /// Gives unused memory of the default pool back, down to `keep` bytes: `cuMemPoolTrimTo`. May
    /// block.
    fn pool_trim(&self, ordinal: u32, keep: u64) -> Result<()>;

    /// The granularity in bytes of reservations, pieces and mappings:
    /// `cuMemGetAllocationGranularity`. Does not block.
    fn granularity(&self, ordinal: u32) -> Result<u64>;

    /// Reserves addresses without memory: `cuMemAddressReserve`. Does not block.
    fn address_reserve(&self, bytes: u64, align: u64) -> Result<u64>;

    /// Frees reserved addresses: `cuMemAddressFree`. Nothing is mapped there. Does not block.
    ///
    /// # Safety
    /// - The range came from [`address_reserve`](Self::address_reserve) and is freed once. Nothing
    ///   uses the range any more.
    unsafe fn address_free(&self, addr: u64, bytes: u64) -> Result<()>;

    /// Creates physical memory of a device: `cuMemCreate`. May block.
    fn memory_create(&self, ordinal: u32, bytes: u64) -> Result<NativeMemory>;

    /// Releases physical memory: `cuMemRelease`. The driver frees the memory with its last mapping.
    /// May block.
    ///
    /// # Safety
    /// - `memory` came from [`memory_create`](Self::memory_create) and is released once.
    unsafe fn memory_release(&self, memory: NativeMemory) -> Result<()>;

    /// Maps a piece: `cuMemMap`. The piece is not accessible before
    /// [`set_access`](Self::set_access). Does not block.
    ///
    /// # Safety
    /// - The range lies in a reservation that is the caller's, and `memory` was not given back.
    unsafe fn map(&self, addr: u64, bytes: u64, memory: NativeMemory) -> Result<()>;

    /// Unmaps a range of whole pieces: `cuMemUnmap`. No work uses it. May wait for the device.
    ///
    /// # Safety
    /// - The range was mapped by the caller, and no work uses it any more.
    unsafe fn unmap(&self, addr: u64, bytes: u64) -> Result<()>;

    /// Lets these devices read and write the mapped range: `cuMemSetAccess`. May block.
    ///
    /// # Safety
    /// - The range was mapped by the caller.
    unsafe fn set_access(&self, addr: u64, bytes: u64, ordinals: &[u32]) -> Result<()>;

    /// Allocates pinned host memory at the same address for every device: `cuMemHostAlloc` with
    /// PORTABLE and DEVICEMAP. May block.
    fn host_alloc(&self, bytes: u64, flags: HostFlags) -> Result<u64>;

    /// Frees pinned host memory: `cuMemFreeHost`. May wait for the device.
    ///
    /// # Safety
    /// - `addr` came from [`host_alloc`](Self::host_alloc) and is freed once. Neither work nor the
    ///   host uses the memory any more.
    unsafe fn host_free(&self, addr: u64) -> Result<()>;

    /// Pins memory that the caller allocated: `cuMemHostRegister` with PORTABLE and DEVICEMAP. May
    /// block. Registering a range twice (712) is an error.
    ///
    /// # Safety
    /// - The range is memory of this process and stays so until it is unregistered.
    unsafe fn host_register(&self, addr: u64, bytes: u64) -> Result<()>;

    /// Unpins registered memory: `cuMemHostUnregister`. May wait for the device.
    ///
    /// # Safety
    /// - `addr` was registered by the caller, and no work uses the memory any more.
    unsafe fn host_unregister(&self, addr: u64) -> Result<()>;

    /// Reads a completion word in pinned memory: one load with acquire order, no driver call. The
    /// simulated driver steps first.
    ///
    /// # Safety
    /// - `addr` is an aligned word in live pinned memory.
    unsafe fn load_word(&self, addr: u64) -> u64;

    /// Writes a word in pinned memory while no work uses it: no driver call.
    ///
    /// # Safety
    /// - As [`load_word`](Self::load_word).
    unsafe fn store_word(&self, addr: u64, value: u64);

    /// Tells the simulated driver's race detector that the host reads (or writes) memory that the
    /// device may use too. The real driver does nothing.
    fn host_access(&self, addr: u64, bytes: u64, write: bool) {
        let _ = (addr, bytes, write);
    }
}

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

    /// Copies memory: `cuMemcpy{HtoD,DtoH,DtoD}Async` or `cuMemcpy2DAsync`.
    ///
    /// # Safety
    /// - Both ranges live until the copy is over. `kind` is true.
    unsafe fn copy(&self, stream: NativeStream, copy: &NativeCopy) -> Result<()>;

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

/// Calls for modules and functions.
pub trait ModuleOps {
    /// Loads PTX text: `cuModuleLoadDataEx`. Blocks while the driver compiles.
    ///
    /// # Errors
    /// - `Compile` with the driver's log.
    /// - `Compile` for machine code, because a driver reads as many bytes as the code itself
    ///   claims.
    fn module_load(&self, image: &[u8]) -> Result<NativeModule>;

    /// Loads machine code: `cuModuleLoadDataEx`. May block.
    ///
    /// # Errors
    /// `Compile` if the driver refuses the code: it is for other devices, or for newer drivers.
    ///
    /// # Safety
    /// - `image` is a whole cubin, as NVIDIA's compiler wrote it.
    unsafe fn module_load_cubin(&self, image: &[u8]) -> Result<NativeModule>;

    /// Unloads a module: `cuModuleUnload`. May wait for the device.
    ///
    /// # Safety
    /// - `module` came from [`module_load`](Self::module_load) or
    ///   [`module_load_cubin`](Self::module_load_cubin) and is unloaded once. No work runs its
    ///   functions, and no later work launches them.
    unsafe fn module_unload(&self, module: NativeModule) -> Result<()>;

    /// Finds and loads a function of a module, for any `CUDA_MODULE_LOADING`:
    /// `cuModuleGetFunction`, `cuFuncLoad`. May block.
    ///
    /// # Errors
    /// `NotFound`, with the function's name.
    ///
    /// # Safety
    /// - `module` is a module of this driver that was not unloaded.
    unsafe fn module_function(&self, module: NativeModule, name: &str) -> Result<NativeFunction>;

    /// The resources and parameters of a function: `cuFuncGetAttribute` (seven),
    /// `cuFuncGetParamInfo`. Does not block.
    ///
    /// # Safety
    /// - `function` is a function of a module that was not unloaded.
    unsafe fn function_info(&self, function: NativeFunction) -> Result<FunctionInfo>;

    /// Lets a function's launches request this many bytes of dynamic shared memory:
    /// `cuFuncSetAttribute`. Does not block.
    ///
    /// # Safety
    /// - `function` is a function of a module that was not unloaded.
    unsafe fn function_allow_shared(&self, function: NativeFunction, bytes: u32) -> Result<()>;
}

/// Calls for graphs. Two threads must not build one graph at the same time. The graph manager owns
/// each graph alone.
pub trait GraphOps {
    /// Creates an empty graph: `cuGraphCreate`. Does not block.
    fn graph_create(&self) -> Result<NativeGraph>;

    /// Destroys a graph: `cuGraphDestroy`. Executables made from it stay valid. Does not block.
    ///
    /// # Safety
    /// - `graph` is this driver's and was not destroyed. No other thread uses the graph at the same
    ///   time.
    unsafe fn graph_destroy(&self, graph: NativeGraph) -> Result<()>;

    /// Adds a kernel node: `cuGraphAddKernelNode`.
    ///
    /// # Safety
    /// - As [`StreamOps::launch`], whenever the graph runs.
    unsafe fn graph_add_kernel(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        launch: &Launch<'_>,
    ) -> Result<NativeNode>;

    /// Adds a kernel node whose blocks may begin while the kernel node `after` still runs:
    /// `cuGraphAddKernelNode`, `cuGraphAddDependencies_v2` with a programmatic edge. Drivers
    /// without such edges (before 12.3) run one after the other.
    ///
    /// # Safety
    /// - As [`graph_add_kernel`](Self::graph_add_kernel).
    /// - Every block of the kernel executes `griddepcontrol.wait`, and its threads access memory
    ///   only after this. The same holds for the kernel of `after`.
    unsafe fn graph_add_dependent_kernel(
        &self,
        graph: NativeGraph,
        after: NativeNode,
        launch: &Launch<'_>,
    ) -> Result<NativeNode>;

    /// Adds a copy node: `cuGraphAddMemcpyNode`.
    ///
    /// # Safety
    /// - As [`StreamOps::copy`], whenever the graph runs.
    unsafe fn graph_add_copy(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        copy: &NativeCopy,
    ) -> Result<NativeNode>;

    /// Adds a fill node: `cuGraphAddMemsetNode`.
    ///
    /// # Safety
    /// - As [`StreamOps::fill`], whenever the graph runs.
    unsafe fn graph_add_fill(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        fill: &NativeFill,
    ) -> Result<NativeNode>;

    /// Adds a copy of another graph as a node: `cuGraphAddChildGraphNode`.
    ///
    /// # Safety
    /// - `graph`, `child` and the nodes are this driver's and were not destroyed.
    unsafe fn graph_add_child(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        child: NativeGraph,
    ) -> Result<NativeNode>;

    /// Adds a node that records an event: `cuGraphAddEventRecordNode`.
    ///
    /// # Safety
    /// - `graph`, `event` and the nodes are this driver's. The event is not destroyed while the
    ///   graph, or an executable made from it, may run.
    unsafe fn graph_add_event(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        event: NativeEvent,
    ) -> Result<NativeNode>;

    /// Adds a node with a host function that may run many times: `cuGraphAddHostNode`. The function
    /// must not call the driver and must not wait.
    ///
    /// # Safety
    /// - `graph` and the nodes are this driver's and were not destroyed. No other thread uses them
    ///   at the same time.
    unsafe fn graph_add_host(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        call: std::sync::Arc<dyn Fn() + Send + Sync>,
    ) -> Result<NativeNode>;

    /// Adds an empty node, which joins its predecessors: `cuGraphAddEmptyNode`.
    ///
    /// # Safety
    /// - `graph` and the nodes are this driver's and were not destroyed. No other thread uses them
    ///   at the same time.
    unsafe fn graph_add_empty(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
    ) -> Result<NativeNode>;

    /// The number of nodes: `cuGraphGetNodes`.
    ///
    /// # Safety
    /// - `graph` is this driver's and was not destroyed. No other thread uses the graph at the same
    ///   time.
    unsafe fn graph_nodes(&self, graph: NativeGraph) -> Result<usize>;

    /// Instantiates a graph: `cuGraphInstantiate`. May allocate; may block.
    ///
    /// # Safety
    /// - `graph` is this driver's and was not destroyed. No other thread uses the graph at the same
    ///   time.
    unsafe fn graph_instantiate(&self, graph: NativeGraph) -> Result<NativeGraphExec>;

    /// Destroys an executable: `cuGraphExecDestroy`. Launches in flight run to the end. Does not
    /// block.
    ///
    /// # Safety
    /// - `exec` came from [`graph_instantiate`](Self::graph_instantiate), is destroyed once, and is
    ///   not used any more.
    unsafe fn exec_destroy(&self, exec: NativeGraphExec) -> Result<()>;

    /// Uploads an executable's resources to the device, so that launches allocate nothing:
    /// `cuGraphUpload`. Does not block.
    ///
    /// # Safety
    /// - `exec` and `stream` are this driver's and were not destroyed.
    unsafe fn exec_upload(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()>;

    /// Launches an executable: `cuGraphLaunch`. Launches of one executable run one after another.
    /// Does not block.
    ///
    /// # Safety
    /// - All memory that its nodes touch lives until the launch is over.
    unsafe fn exec_launch(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()>;

    /// Replaces the launch of a kernel node, for later launches of the graph:
    /// `cuGraphExecKernelNodeSetParams`. Does not block.
    ///
    /// # Safety
    /// - As [`graph_add_kernel`](Self::graph_add_kernel).
    unsafe fn exec_set_kernel(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        launch: &Launch<'_>,
    ) -> Result<GraphExecUpdate>;

    /// Replaces the copy of a copy node: `cuGraphExecMemcpyNodeSetParams`. Does not block.
    ///
    /// # Safety
    /// - As [`graph_add_copy`](Self::graph_add_copy).
    unsafe fn exec_set_copy(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        copy: &NativeCopy,
    ) -> Result<GraphExecUpdate>;

    /// Replaces the fill of a fill node: `cuGraphExecMemsetNodeSetParams`. Does not block.
    ///
    /// # Safety
    /// - As [`graph_add_fill`](Self::graph_add_fill).
    unsafe fn exec_set_fill(
        &self,
        exec: NativeGraphExec,
        node: NativeNode,
        fill: &NativeFill,
    ) -> Result<GraphExecUpdate>;

    /// Begins to capture this stream's work into a graph: `cuStreamBeginCapture` with THREAD_LOCAL.
    /// For calls of foreign libraries only.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not destroyed.
    unsafe fn capture_begin(&self, stream: NativeStream) -> Result<()>;

    /// Ends the capture, also after a failure: `cuStreamEndCapture`.
    ///
    /// # Errors
    /// The driver's codes 900–908. The stream is usable again after them.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not destroyed.
    unsafe fn capture_end(&self, stream: NativeStream) -> Result<NativeGraph>;

    /// Whether the stream is being captured: `cuStreamIsCapturing`. Does not block.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not destroyed.
    unsafe fn is_capturing(&self, stream: NativeStream) -> Result<bool>;
}

/// The driver calls that managers, allocators, streams and graphs need.
///
/// A call through the trait costs one virtual call. The driver's own calls take from 0.1 µs
/// (`cuCtxGetCurrent`) over 2 µs (a launch) to milliseconds.
///
/// # Safety
/// An implementation reports the truth, because the backend lends memory to safe code on its word:
/// - Memory that it allocates exists, has the requested size, and belongs to no other caller until
///   it is given back.
/// - Work that it reports as over touches nothing any more.
/// - A stream's word is written after the work before it.
pub unsafe trait CudaSlowOps:
    DeviceOps
    + ContextOps
    + MemoryOps
    + StreamOps
    + EventOps
    + ModuleOps
    + GraphOps
    + Send
    + Sync
    + 'static
{
    /// The longest sleep of a waiting thread between two queries of a word or a stream. Zero for
    /// the simulated driver, whose time advances only with queries.
    fn poll_interval(&self) -> std::time::Duration;

    /// Compiles CUDA C++ to PTX for a compute capability: NVRTC. Blocks while it compiles.
    ///
    /// # Errors
    /// - `Unavailable` without NVRTC, with the places that were searched.
    /// - `Compile` with the log.
    fn compile(
        &self,
        source: &str,
        name: &str,
        options: &[String],
        compute_capability: (u32, u32),
    ) -> Result<Vec<u8>>;

    /// The compiler's name and version, for the key of a cache: `nvrtc 13.0`.
    fn compiler(&self) -> String;
}
