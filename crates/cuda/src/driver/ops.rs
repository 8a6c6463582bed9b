//! [`CudaSlowOps`]: the one door to the driver. Two things implement it: the real driver (`real`) and the simulated one (`sim`).
//!
//! # Rules for all methods
//! * **Context.** What is created belongs to the context that is current on the calling thread ([`ContextOps::set_current`]); the managers
//!   see to it. Methods that take an object need its context to be current, unless they say otherwise.
//! * **Errors.** `OutOfMemory` for the driver's 2; `DeviceLost` with the first cause for codes after which the context is dead, from then on for
//!   every call; else `Driver` with the function, the code and its name. An error creates nothing.
//! * **Blocking.** Each method says whether it may wait for the device. "Does not block" still takes the driver's own locks.
//! * **Threads.** Any thread, several at once. Calls on one stream are made under that stream's submission lock.
//! * **Order of arguments.** As in the driver's API.
//!
//! Handles are plain words: they own nothing, anybody can make one up, and the managers make sure that they are destroyed once. So every
//! method that takes a handle or an address is unsafe, and says what its caller vouches for.
//!
//! This module must not know managers.

use leasehold_core::{Error, Result};
use leasehold_hal::Binding;

/// Makes a word that names one of the driver's objects.
macro_rules! native {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// Names nothing.
            pub const NULL: Self = Self(0);

            /// Whether it names nothing.
            #[must_use]
            pub fn is_null(self) -> bool {
                self.0 == 0
            }
        }
    )*};
}

native! {
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

/// What a device is, as the driver tells it.
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
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of second-level cache.
    pub l2: u64,
    /// The NUMA node of the host that it hangs on, where known.
    pub numa_node: Option<u32>,
    /// Threads of a block at most.
    pub block_threads: u32,
    /// Threads of a block in each direction.
    pub block: [u32; 3],
    /// Blocks of a grid in each direction.
    pub grid: [u32; 3],
    /// Bytes of shared memory of a block without asking for more.
    pub shared: u32,
    /// Bytes of shared memory of a block for a function that asked.
    pub shared_optin: u32,
    /// Threads of a warp.
    pub warp: u32,
    /// Kernels that are resident at a time are possible.
    pub concurrent_kernels: bool,
    /// Virtual memory management.
    pub vmm: bool,
    /// Stream-ordered memory pools.
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
    /// The most bytes of memory that are believed.
    const MEMORY_MAX: u64 = 1 << 50;

    /// Refuses what no device can be: what follows from it would be as absurd.
    ///
    /// # Errors
    /// `Unavailable`, saying what.
    pub(crate) fn check(&self, ordinal: u32) -> Result<()> {
        let refuse =
            |what: String| Err(Error::Unavailable(format!("CUDA: the driver says of device {ordinal} {what}").into()));
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

/// Free and total bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NativeMemoryInfo {
    /// Free.
    pub free: u64,
    /// In all.
    pub total: u64,
}

/// What a function needs and takes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Threads of a block at most.
    pub block_threads: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of shared memory that the code itself declares.
    pub shared: u32,
    /// Bytes of local memory of a thread.
    pub local: u32,
    /// Offset and size of each parameter, in bytes; `None` where the driver cannot tell (before 12.4).
    pub params: Option<Vec<(u32, u32)>>,
    /// Compute capability of the code that was chosen, times ten.
    pub binary: u32,
}

/// One kernel launch, as the driver takes it.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The function.
    pub function: NativeFunction,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
    /// The argument buffer: the addresses of all bindings, 8 bytes each, then the parameters. Read before the call returns.
    pub args: &'a [u8],
    /// What the addresses in `args` refer to. The driver is not told; the simulated one checks it.
    pub bindings: &'a [Binding],
}

/// A 1-D or 2-D copy between any two places: addresses tell device, peer and host memory apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeCopy {
    /// Where it reads.
    pub src: u64,
    /// Bytes from row to row there.
    pub src_pitch: u64,
    /// Where it writes.
    pub dst: u64,
    /// Bytes from row to row there.
    pub dst_pitch: u64,
    /// Bytes of a row.
    pub width: u64,
    /// Rows; 1 for a plain copy.
    pub rows: u64,
    /// What the two places are.
    pub kind: CopyKind,
}

impl NativeCopy {
    /// A plain copy.
    #[must_use]
    pub fn linear(kind: CopyKind, dst: u64, src: u64, bytes: u64) -> Self {
        Self { src, src_pitch: bytes, dst, dst_pitch: bytes, width: bytes, rows: 1, kind }
    }
}

/// Between what a copy runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopyKind {
    /// Host to device. From pageable memory the driver stages it: the source may be changed once the call returned, which may wait for
    /// earlier work of the stream.
    HostToDevice,
    /// Device to host. The backend only uses pinned memory here: with pageable memory the call waits for the copy.
    DeviceToHost,
    /// Within a device, or between devices of one unified address space.
    DeviceToDevice,
}

/// A fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeFill {
    /// Where.
    pub dst: u64,
    /// The pattern.
    pub value: u32,
    /// Bytes of the pattern: 1, 2 or 4.
    pub width: u8,
    /// How many patterns.
    pub count: u64,
}

/// How an event behaves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct EventFlags {
    /// It keeps the time.
    pub timing: bool,
    /// A thread that waits for it sleeps instead of spinning.
    pub blocking: bool,
}

/// How pinned host memory behaves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct HostFlags {
    /// Write-combined: faster for the device to read, very slow for the host to read.
    pub write_combined: bool,
}

/// Whether work is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All of it.
    Complete,
    /// Not yet (the driver's 600).
    Pending,
}

/// What became of an update of an executable graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Updated {
    /// In place.
    InPlace,
    /// The driver refuses this change; the executable must be made again.
    Refused,
}

/// A function that the driver calls when a stream gets there. It must not call the driver and must not wait.
pub type HostFunction = Box<dyn FnOnce() + Send>;

/// The driver itself and its devices.
pub trait DeviceOps {
    /// Starts the driver: `cuInit`. Once is enough, more do no harm. May block on the driver's start.
    ///
    /// # Errors
    /// `Unavailable`, with the reason, when the library is missing, too old, or finds no device or no permission.
    fn init(&self) -> Result<()>;

    /// The driver's version, as in 13000: `cuDriverGetVersion`. Does not block.
    fn driver_version(&self) -> Result<i32>;

    /// How many devices: `cuDeviceGetCount`. Does not block.
    fn device_count(&self) -> Result<u32>;

    /// What a device is: `cuDeviceGetName`, `cuDeviceGetUuid_v2`, `cuDeviceTotalMem`, `cuDeviceGetAttribute` (some twenty), `cuDeviceGetPCIBusId`. Does not block.
    fn device_properties(&self, ordinal: u32) -> Result<DeviceProperties>;

    /// Whether `device` can reach the memory of `peer`: `cuDeviceCanAccessPeer`. Does not block.
    fn can_access_peer(&self, device: u32, peer: u32) -> Result<bool>;
}

/// Contexts.
pub trait ContextOps {
    /// The device's primary context, counted: `cuDevicePrimaryCtxRetain`. May block while it is made (some 100 ms). Does not make it current.
    fn primary_retain(&self, ordinal: u32) -> Result<NativeContext>;

    /// Gives one count back: `cuDevicePrimaryCtxRelease`. The last one ends the context and may block.
    ///
    /// # Safety
    /// - The count came from [`primary_retain`](Self::primary_retain), once; after the last one
    ///   nothing that was made in the context is used.
    unsafe fn primary_release(&self, ordinal: u32) -> Result<()>;

    /// A context of one's own, not current afterwards: `cuCtxCreate`, `cuCtxPopCurrent`. May block.
    fn context_create(&self, ordinal: u32) -> Result<NativeContext>;

    /// Ends an owned context: `cuCtxDestroy`. Waits for its work.
    ///
    /// # Safety
    /// - `context` came from [`context_create`](Self::context_create), once; nothing that was made
    ///   in it is used any more.
    unsafe fn context_destroy(&self, context: NativeContext) -> Result<()>;

    /// The context that is current on this thread, or null: `cuCtxGetCurrent`. Does not block.
    fn current(&self) -> Result<NativeContext>;

    /// Makes a context (or, with null, none) current on this thread: `cuCtxSetCurrent`. Does not block.
    ///
    /// # Safety
    /// - `context` is null, or a context of this driver that was not given back.
    unsafe fn set_current(&self, context: NativeContext) -> Result<()>;

    /// Lets the current context reach memory of `peer`: `cuCtxEnablePeerAccess`. Already enabled (704) is `Ok`. May block.
    ///
    /// # Safety
    /// - `peer` is a context of this driver that was not given back.
    unsafe fn enable_peer(&self, peer: NativeContext) -> Result<()>;

    /// Takes that back: `cuCtxDisablePeerAccess`. Not enabled (705) is `Ok`. May block.
    ///
    /// # Safety
    /// - `peer` is a context of this driver that was not given back.
    unsafe fn disable_peer(&self, peer: NativeContext) -> Result<()>;

    /// Waits for all work of the current context: `cuCtxSynchronize`.
    fn context_synchronize(&self) -> Result<()>;

    /// Lowest and highest stream priority (the lower number is the more urgent): `cuCtxGetStreamPriorityRange`. Does not block.
    fn priority_range(&self) -> Result<(i32, i32)>;
}

/// Device memory and its addresses, pinned host memory.
pub trait MemoryOps {
    /// Free and total memory of the current context's device: `cuMemGetInfo`. May take a while; does not wait for work.
    fn memory_info(&self) -> Result<NativeMemoryInfo>;

    /// Memory with an address: `cuMemAlloc`. May wait for the device.
    fn alloc(&self, bytes: u64) -> Result<u64>;

    /// Gives it back: `cuMemFree`. Waits for the device.
    ///
    /// # Safety
    /// - `addr` came from [`alloc`](Self::alloc), once, and no work uses the memory any more.
    unsafe fn free(&self, addr: u64) -> Result<()>;

    /// Memory in stream order from the device's default pool: `cuMemAllocAsync`. Does not block.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not given up.
    unsafe fn alloc_async(&self, bytes: u64, stream: NativeStream) -> Result<u64>;

    /// Gives it back in stream order: `cuMemFreeAsync`. Does not block.
    ///
    /// # Safety
    /// - `addr` came from [`alloc_async`](Self::alloc_async), once; only earlier work of this
    ///   stream, or work that it waits for, uses the memory. `stream` was not given up.
    unsafe fn free_async(&self, addr: u64, stream: NativeStream) -> Result<()>;

    /// How many bytes of the device's default pool stay when nobody uses them: `cuDeviceGetDefaultMemPool`, `cuMemPoolSetAttribute`. Does not block.
    fn pool_set_threshold(&self, ordinal: u32, bytes: u64) -> Result<()>;

    /// Gives unused memory of the default pool back down to `keep` bytes: `cuMemPoolTrimTo`. May block.
    fn pool_trim(&self, ordinal: u32, keep: u64) -> Result<()>;

    /// The size of which reservations, pieces and mappings are multiples: `cuMemGetAllocationGranularity`. Does not block.
    fn granularity(&self, ordinal: u32) -> Result<u64>;

    /// Addresses without memory: `cuMemAddressReserve`. Does not block.
    fn address_reserve(&self, bytes: u64, align: u64) -> Result<u64>;

    /// Gives addresses back: `cuMemAddressFree`. Nothing is mapped there. Does not block.
    ///
    /// # Safety
    /// - The range came from [`address_reserve`](Self::address_reserve), once, and is used by
    ///   nobody any more.
    unsafe fn address_free(&self, addr: u64, bytes: u64) -> Result<()>;

    /// Physical memory of a device: `cuMemCreate`. May block.
    fn memory_create(&self, ordinal: u32, bytes: u64) -> Result<NativeMemory>;

    /// Gives it back: `cuMemRelease`. The memory goes when its last mapping goes. May block.
    ///
    /// # Safety
    /// - `memory` came from [`memory_create`](Self::memory_create), once.
    unsafe fn memory_release(&self, memory: NativeMemory) -> Result<()>;

    /// Maps a piece: `cuMemMap`. Nobody may touch it before [`set_access`](Self::set_access). Does not block.
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

    /// Pinned host memory, reachable from every device at the same address: `cuMemHostAlloc` with PORTABLE and DEVICEMAP. May block.
    fn host_alloc(&self, bytes: u64, flags: HostFlags) -> Result<u64>;

    /// Gives it back: `cuMemFreeHost`. May wait for the device.
    ///
    /// # Safety
    /// - `addr` came from [`host_alloc`](Self::host_alloc), once; neither work nor the host uses
    ///   the memory any more.
    unsafe fn host_free(&self, addr: u64) -> Result<()>;

    /// Pins memory that somebody else allocated: `cuMemHostRegister` with PORTABLE and DEVICEMAP. May block. Registered twice (712) is an error.
    ///
    /// # Safety
    /// - The range is memory of this process and stays so until it is unregistered.
    unsafe fn host_register(&self, addr: u64, bytes: u64) -> Result<()>;

    /// Takes that back: `cuMemHostUnregister`. May wait for the device.
    ///
    /// # Safety
    /// - `addr` was registered by the caller, and no work uses the memory any more.
    unsafe fn host_unregister(&self, addr: u64) -> Result<()>;

    /// Reads a completion word in pinned memory: no driver call, one load with acquire order. The simulated driver steps first.
    ///
    /// # Safety
    /// - `addr` is an aligned word in pinned memory that lives.
    unsafe fn load_word(&self, addr: u64) -> u64;

    /// Writes a word in pinned memory while no work uses it: no driver call.
    ///
    /// # Safety
    /// - As [`load_word`](Self::load_word).
    unsafe fn store_word(&self, addr: u64, value: u64);

    /// Tells the simulated driver's detector that the host reads (or writes) memory that the device may use too. The real driver does nothing.
    fn host_access(&self, addr: u64, bytes: u64, write: bool) {
        let _ = (addr, bytes, write);
    }
}

/// Streams and what runs on them. None of these waits for the device unless it says so.
pub trait StreamOps {
    /// A non-blocking stream: `cuStreamCreateWithPriority`. May block.
    fn stream_create(&self, priority: i32) -> Result<NativeStream>;

    /// Gives a stream up; its work runs to the end: `cuStreamDestroy`. Does not block.
    ///
    /// # Safety
    /// - `stream` came from [`stream_create`](Self::stream_create), once, and is not used any
    ///   more.
    unsafe fn stream_destroy(&self, stream: NativeStream) -> Result<()>;

    /// Whether all its work is over: `cuStreamQuery`. Does not block. Reports asynchronous failures.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not given up.
    unsafe fn stream_query(&self, stream: NativeStream) -> Result<Progress>;

    /// Waits for all its work: `cuStreamSynchronize`.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not given up.
    unsafe fn stream_synchronize(&self, stream: NativeStream) -> Result<()>;

    /// Later work waits for the event's last record: `cuStreamWaitEvent`.
    ///
    /// # Safety
    /// - `stream` and `event` are this driver's and were not given up.
    unsafe fn stream_wait_event(&self, stream: NativeStream, event: NativeEvent) -> Result<()>;

    /// Writes a word when the stream gets there, after all earlier work, visible to the host: `cuStreamWriteValue64`.
    ///
    /// # Safety
    /// - `stream` was not given up; the word is aligned device or pinned memory that lives until
    ///   it is written, and nobody reads it as anything but an atomic word.
    unsafe fn stream_write_word(&self, stream: NativeStream, addr: u64, value: u64) -> Result<()>;

    /// Later work waits until the word is at least `value`: `cuStreamWaitValue64`.
    ///
    /// # Safety
    /// - `stream` was not given up; the word is aligned device or pinned memory that lives until
    ///   the wait is over.
    unsafe fn stream_wait_word(&self, stream: NativeStream, addr: u64, value: u64) -> Result<()>;

    /// Calls a host function when the stream gets there; later work waits for its return: `cuLaunchHostFunc`. A context that failed calls
    /// none any more; what the function held is leaked then. Not while the stream is captured: a node could call it twice.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not given up.
    unsafe fn host_function(&self, stream: NativeStream, call: HostFunction) -> Result<()>;

    /// A launch: `cuLaunchKernel` with an argument buffer.
    ///
    /// # Safety
    /// - The arguments are what the function declares; the memory that it touches lives until it is over.
    unsafe fn launch(&self, stream: NativeStream, launch: &Launch<'_>) -> Result<()>;

    /// A copy: `cuMemcpy{HtoD,DtoH,DtoD}Async` or `cuMemcpy2DAsync`.
    ///
    /// # Safety
    /// - Both ranges live until it is over. `kind` is true.
    unsafe fn copy(&self, stream: NativeStream, copy: &NativeCopy) -> Result<()>;

    /// A copy between devices that cannot reach each other: `cuMemcpyPeerAsync`.
    ///
    /// # Safety
    /// - As [`copy`](Self::copy); each range lies in the memory of its context's device.
    unsafe fn copy_peer(
        &self,
        stream: NativeStream,
        dst: (u64, NativeContext),
        src: (u64, NativeContext),
        bytes: u64,
    ) -> Result<()>;

    /// A fill: `cuMemsetD{8,16,32}Async`.
    ///
    /// # Safety
    /// - The range lives until it is over.
    unsafe fn fill(&self, stream: NativeStream, fill: &NativeFill) -> Result<()>;
}

/// Events.
pub trait EventOps {
    /// An event: `cuEventCreate`. Does not block.
    fn event_create(&self, flags: EventFlags) -> Result<NativeEvent>;

    /// Gives it up: `cuEventDestroy`. Does not block, also while it is pending.
    ///
    /// # Safety
    /// - `event` came from [`event_create`](Self::event_create), once, and is not used any more.
    unsafe fn event_destroy(&self, event: NativeEvent) -> Result<()>;

    /// Marks what the stream was given so far: `cuEventRecord`. Does not block.
    ///
    /// # Safety
    /// - `event` and `stream` are this driver's and were not given up.
    unsafe fn event_record(&self, event: NativeEvent, stream: NativeStream) -> Result<()>;

    /// Whether the last record is over; complete if there was none: `cuEventQuery`. Does not block.
    ///
    /// # Safety
    /// - `event` is an event of this driver that was not given up.
    unsafe fn event_query(&self, event: NativeEvent) -> Result<Progress>;

    /// Waits for the last record: `cuEventSynchronize`.
    ///
    /// # Safety
    /// - `event` is an event of this driver that was not given up.
    unsafe fn event_synchronize(&self, event: NativeEvent) -> Result<()>;

    /// Nanoseconds between two records that are over, at the driver's resolution (about 0.5 µs): `cuEventElapsedTime`. Does not block.
    ///
    /// # Errors
    /// `InvalidState` when one is pending; the driver's 400 for events that were never recorded, keep no time or are of two contexts.
    ///
    /// # Safety
    /// - Both events are this driver's and were not given up.
    unsafe fn event_elapsed(&self, start: NativeEvent, end: NativeEvent) -> Result<i64>;
}

/// Modules and functions.
pub trait ModuleOps {
    /// Loads PTX text: `cuModuleLoadDataEx`. Blocks while the driver compiles.
    ///
    /// # Errors
    /// `Compile` with the driver's log; `Compile` for machine code, of which a driver reads as many bytes as the code itself claims.
    fn module_load(&self, image: &[u8]) -> Result<NativeModule>;

    /// Gives it up: `cuModuleUnload`. May wait for the device.
    ///
    /// # Safety
    /// - `module` came from [`module_load`](Self::module_load), once; no work runs its functions,
    ///   and nobody will launch them.
    unsafe fn module_unload(&self, module: NativeModule) -> Result<()>;

    /// A function of it, loaded at once (`CUDA_MODULE_LOADING` does not matter): `cuModuleGetFunction`, `cuFuncLoad`. May block.
    ///
    /// # Errors
    /// `NotFound`, naming the function.
    ///
    /// # Safety
    /// - `module` is a module of this driver that was not given up.
    unsafe fn module_function(&self, module: NativeModule, name: &str) -> Result<NativeFunction>;

    /// What it needs: `cuFuncGetAttribute` (six), `cuFuncGetParamInfo`. Does not block.
    ///
    /// # Safety
    /// - `function` is a function of a module that was not given up.
    unsafe fn function_info(&self, function: NativeFunction) -> Result<FunctionInfo>;

    /// Lets its launches ask for this many bytes of dynamic shared memory: `cuFuncSetAttribute`. Does not block.
    ///
    /// # Safety
    /// - `function` is a function of a module that was not given up.
    unsafe fn function_allow_shared(&self, function: NativeFunction, bytes: u32) -> Result<()>;
}

/// Graphs. Building one is not thread-safe per graph; the graph manager owns each alone.
pub trait GraphOps {
    /// An empty graph: `cuGraphCreate`. Does not block.
    fn graph_create(&self) -> Result<NativeGraph>;

    /// Gives it up: `cuGraphDestroy`. Executables made of it live on. Does not block.
    ///
    /// # Safety
    /// - `graph` is this driver's and was not given up; nobody else uses it at the same time.
    unsafe fn graph_destroy(&self, graph: NativeGraph) -> Result<()>;

    /// A kernel: `cuGraphAddKernelNode`.
    ///
    /// # Safety
    /// - As [`StreamOps::launch`], whenever the graph runs.
    unsafe fn graph_add_kernel(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        launch: &Launch<'_>,
    ) -> Result<NativeNode>;

    /// A copy: `cuGraphAddMemcpyNode`.
    ///
    /// # Safety
    /// - As [`StreamOps::copy`], whenever the graph runs.
    unsafe fn graph_add_copy(&self, graph: NativeGraph, after: &[NativeNode], copy: &NativeCopy) -> Result<NativeNode>;

    /// A fill: `cuGraphAddMemsetNode`.
    ///
    /// # Safety
    /// - As [`StreamOps::fill`], whenever the graph runs.
    unsafe fn graph_add_fill(&self, graph: NativeGraph, after: &[NativeNode], fill: &NativeFill) -> Result<NativeNode>;

    /// Another graph, copied in: `cuGraphAddChildGraphNode`.
    ///
    /// # Safety
    /// - `graph`, `child` and the nodes are this driver's and were not given up.
    unsafe fn graph_add_child(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        child: NativeGraph,
    ) -> Result<NativeNode>;

    /// Records an event: `cuGraphAddEventRecordNode`.
    ///
    /// # Safety
    /// - `graph`, `event` and the nodes are this driver's; the event is not given up while the
    ///   graph, or what is made of it, may run.
    unsafe fn graph_add_event(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        event: NativeEvent,
    ) -> Result<NativeNode>;

    /// A host function that may run many times: `cuGraphAddHostNode`. It must not call the driver and must not wait.
    ///
    /// # Safety
    /// - `graph` and the nodes are this driver's and were not given up; nobody else uses them at
    ///   the same time.
    unsafe fn graph_add_host(
        &self,
        graph: NativeGraph,
        after: &[NativeNode],
        call: std::sync::Arc<dyn Fn() + Send + Sync>,
    ) -> Result<NativeNode>;

    /// Nothing, to join what comes before: `cuGraphAddEmptyNode`.
    ///
    /// # Safety
    /// - `graph` and the nodes are this driver's and were not given up; nobody else uses them at
    ///   the same time.
    unsafe fn graph_add_empty(&self, graph: NativeGraph, after: &[NativeNode]) -> Result<NativeNode>;

    /// How many nodes: `cuGraphGetNodes`.
    ///
    /// # Safety
    /// - `graph` is this driver's and was not given up; nobody else uses it at the same time.
    unsafe fn graph_nodes(&self, graph: NativeGraph) -> Result<usize>;

    /// Makes it executable: `cuGraphInstantiate`. May allocate; may block.
    ///
    /// # Safety
    /// - `graph` is this driver's and was not given up; nobody else uses it at the same time.
    unsafe fn graph_instantiate(&self, graph: NativeGraph) -> Result<NativeGraphExec>;

    /// Gives an executable up: `cuGraphExecDestroy`. Runs in flight end undisturbed. Does not block.
    ///
    /// # Safety
    /// - `exec` came from [`graph_instantiate`](Self::graph_instantiate), once, and is not used
    ///   any more.
    unsafe fn exec_destroy(&self, exec: NativeGraphExec) -> Result<()>;

    /// Brings its resources to the device, so that launches allocate nothing: `cuGraphUpload`. Does not block.
    ///
    /// # Safety
    /// - `exec` and `stream` are this driver's and were not given up.
    unsafe fn exec_upload(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()>;

    /// Runs it: `cuGraphLaunch`. Runs of one executable follow one another. Does not block.
    ///
    /// # Safety
    /// - All memory that its nodes touch lives until it is over.
    unsafe fn exec_launch(&self, exec: NativeGraphExec, stream: NativeStream) -> Result<()>;

    /// Another launch for a kernel node, in later runs: `cuGraphExecKernelNodeSetParams`. Does not block.
    ///
    /// # Safety
    /// - As [`graph_add_kernel`](Self::graph_add_kernel).
    unsafe fn exec_set_kernel(&self, exec: NativeGraphExec, node: NativeNode, launch: &Launch<'_>) -> Result<Updated>;

    /// Another copy for a copy node: `cuGraphExecMemcpyNodeSetParams`. Does not block.
    ///
    /// # Safety
    /// - As [`graph_add_copy`](Self::graph_add_copy).
    unsafe fn exec_set_copy(&self, exec: NativeGraphExec, node: NativeNode, copy: &NativeCopy) -> Result<Updated>;

    /// Another fill for a fill node: `cuGraphExecMemsetNodeSetParams`. Does not block.
    ///
    /// # Safety
    /// - As [`graph_add_fill`](Self::graph_add_fill).
    unsafe fn exec_set_fill(&self, exec: NativeGraphExec, node: NativeNode, fill: &NativeFill) -> Result<Updated>;

    /// Begins to take what this stream is given into a graph, in this thread's mode: `cuStreamBeginCapture` with THREAD_LOCAL. For calls of
    /// foreign libraries only.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not given up.
    unsafe fn capture_begin(&self, stream: NativeStream) -> Result<()>;

    /// Ends it, also after a failure: `cuStreamEndCapture`.
    ///
    /// # Errors
    /// The driver's 900–908; the stream is usable again.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not given up.
    unsafe fn capture_end(&self, stream: NativeStream) -> Result<NativeGraph>;

    /// Whether the stream is being captured: `cuStreamIsCapturing`. Does not block.
    ///
    /// # Safety
    /// - `stream` is a stream of this driver that was not given up.
    unsafe fn is_capturing(&self, stream: NativeStream) -> Result<bool>;
}

/// Everything that managers, allocators, streams and graphs need of the driver.
///
/// What it costs to go through it is one virtual call: the driver's own calls take from 0.1 µs (`cuCtxGetCurrent`) over 2 µs (a launch) to
/// milliseconds.
///
/// # Safety
/// - What an implementation says that it did is so: memory that it gives is there, is of the size that was asked for and is nobody
///   else's until it is given back; work that it says is over touches nothing any more; a word of a stream is written after
///   the work before it. The backend lends memory to safe code on its word.
pub unsafe trait CudaSlowOps:
    DeviceOps + ContextOps + MemoryOps + StreamOps + EventOps + ModuleOps + GraphOps + Send + Sync + 'static
{
    /// How many calls to the driver were made so far through this object.
    fn driver_calls(&self) -> u64;

    /// Between looks at a word or a stream, how long a thread that waits may sleep. Zero for the simulated driver, whose time only passes
    /// when somebody looks.
    fn poll_interval(&self) -> std::time::Duration;

    /// CUDA C++ to PTX for a compute capability, if a compiler is there: NVRTC. Blocks while it compiles.
    ///
    /// # Errors
    /// `Unavailable` without NVRTC (saying where it was looked for), `Compile` with the log.
    fn compile(&self, source: &str, name: &str, options: &[String], compute_capability: (u32, u32)) -> Result<Vec<u8>>;

    /// What compiles, for the key of a cache: `nvrtc 13.0`.
    fn compiler(&self) -> String;
}
