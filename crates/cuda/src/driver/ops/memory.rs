//! Calls for device memory, its addresses, and pinned host memory.

use super::{NativeMemory, NativeStream};
use leasehold_core::Result;
use std::os::fd::OwnedFd;

/// Free and total bytes of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NativeMemoryInfo {
    /// Free bytes.
    pub free: u64,
    /// Total bytes.
    pub total: u64,
}

/// The flags of pinned host memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct HostFlags {
    /// Write-combined: faster for the device to read, very slow for the host to read.
    pub write_combined: bool,
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

    /// The granularity in bytes of memory that other processes may map:
    /// `cuMemGetAllocationGranularity`, the recommended one. Does not block.
    fn shared_granularity(&self, ordinal: u32) -> Result<u64>;

    /// Creates physical memory that other processes may map: `cuMemCreate` with a file descriptor,
    /// and for the device's fabric and its network devices where it can. May block.
    fn shared_memory_create(&self, ordinal: u32, bytes: u64) -> Result<NativeMemory>;

    /// A new descriptor of shareable memory: `cuMemExportToShareableHandle`. Does not block.
    ///
    /// # Safety
    /// - `memory` came from [`shared_memory_create`](Self::shared_memory_create) or
    ///   [`memory_import`](Self::memory_import) and was not released.
    unsafe fn memory_export(&self, memory: NativeMemory) -> Result<OwnedFd>;

    /// The memory of a descriptor, which a process exported: `cuMemImportFromShareableHandle`. To
    /// be released as other memory. May block.
    fn memory_import(&self, descriptor: OwnedFd) -> Result<NativeMemory>;

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
