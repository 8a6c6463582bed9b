//! Calls for the driver itself, its devices and their contexts.

use super::NativeContext;
use leasehold_core::{Error, Result};

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
    /// One call copies several ranges (12.8 and newer).
    pub copy_batch: bool,
    /// Nodes of a graph can be under a condition that the device decides (12.4 and newer).
    pub conditional_nodes: bool,
    /// Device and host share one address space.
    pub unified_addressing: bool,
    /// Memory can be shared with other processes by file descriptor.
    pub fd_handles: bool,
    /// Memory can be shared with other hosts of one fabric.
    pub fabric_handles: bool,
    /// Network devices can read and write mapped pieces of memory directly.
    pub rdma: bool,
    /// Blocks can be in clusters (compute capability 9.0 and newer).
    pub clusters: bool,
    /// All blocks of a launch can be made to run at the same time.
    pub cooperative_launch: bool,
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
