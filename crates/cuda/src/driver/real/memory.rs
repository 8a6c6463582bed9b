//! Device memory, its addresses, and pinned host memory.
//!
//! This module must not know allocators.

use super::{RealDriver, drive, plausible};
use crate::conv;
use crate::driver::ops::{HostFlags, MemoryOps, NativeMemory, NativeMemoryInfo, NativeStream};
use cudarc::driver::sys::{
    self, CUdevice_attribute_enum as Attribute, CUdeviceptr, CUmemAccess_flags_enum as Access,
    CUmemAccessDesc, CUmemAllocationGranularity_flags_enum as Granularity,
    CUmemAllocationHandleType, CUmemAllocationHandleType_enum as Handles, CUmemAllocationProp,
    CUmemAllocationType_enum as AllocationType, CUmemLocation,
    CUmemLocationType_enum as LocationType, CUmemPool_attribute_enum as PoolAttribute,
    CUmemoryPool, CUstream,
};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Result};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

/// The properties of plain device memory: on one device, not shared with other processes.
fn plain(ordinal: u32) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: AllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: Handles::CU_MEM_HANDLE_TYPE_NONE,
        location: on(ordinal),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// The descriptor of the system that other processes import.
const DESCRIPTOR: Handles = Handles::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The properties of memory that other processes may map; `fabric`: on other hosts too.
fn shareable(ordinal: u32, fabric: bool, rdma: bool) -> CUmemAllocationProp {
    let mut properties = plain(ordinal);
    // The driver takes a set of bits.
    let fabric = if fabric { Handles::CU_MEM_HANDLE_TYPE_FABRIC.0 } else { 0 };
    properties.requestedHandleTypes = CUmemAllocationHandleType(DESCRIPTOR.0 | fabric);
    properties.allocFlags.gpuDirectRDMACapable = rdma.into();
    properties
}

fn on(ordinal: u32) -> CUmemLocation {
    CUmemLocation { type_: LocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal as c_int }
}

impl RealDriver {
    /// Whether shareable memory of a device may be for its fabric, and for network devices.
    fn shareable_by(&self, ordinal: u32) -> Result<[bool; 2]> {
        let device = self.device(ordinal)?;
        Ok([
            Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
            Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        ]
        .map(|attribute| self.flag(device, attribute)))
    }

    fn default_pool(&self, ordinal: u32) -> Result<CUmemoryPool> {
        let device = self.device(ordinal)?;
        let mut pool: CUmemoryPool = ptr::null_mut();
        drive!(self, cuDeviceGetDefaultMemPool(&raw mut pool, device))?;
        Ok(pool)
    }
}

impl MemoryOps for RealDriver {
    fn memory_info(&self) -> Result<NativeMemoryInfo> {
        let (mut free, mut total) = (0_usize, 0_usize);
        drive!(self, cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok(NativeMemoryInfo { free: free as u64, total: total as u64 })
    }

    fn alloc(&self, bytes: u64) -> Result<u64> {
        let mut addr: CUdeviceptr = 0;
        drive!(self, for bytes, cuMemAlloc_v2(&raw mut addr, bytes as usize))?;
        plausible::address("cuMemAlloc", addr, bytes, 256)
    }

    unsafe fn free(&self, addr: u64) -> Result<()> {
        drive!(self, cuMemFree_v2(addr))
    }

    unsafe fn alloc_async(&self, bytes: u64, stream: NativeStream) -> Result<u64> {
        let mut addr: CUdeviceptr = 0;
        drive!(self, for bytes, cuMemAllocAsync(&raw mut addr, bytes as usize, stream.0 as CUstream))?;
        plausible::address("cuMemAllocAsync", addr, bytes, 256)
    }

    unsafe fn free_async(&self, addr: u64, stream: NativeStream) -> Result<()> {
        drive!(self, cuMemFreeAsync(addr, stream.0 as CUstream))
    }

    fn pool_set_threshold(&self, ordinal: u32, bytes: u64) -> Result<()> {
        let pool = self.default_pool(ordinal)?;
        let mut bytes = bytes;
        drive!(
            self,
            cuMemPoolSetAttribute(
                pool,
                PoolAttribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut bytes).cast::<c_void>()
            )
        )
    }

    fn pool_trim(&self, ordinal: u32, keep: u64) -> Result<()> {
        let pool = self.default_pool(ordinal)?;
        drive!(self, cuMemPoolTrimTo(pool, keep as usize))
    }

    fn granularity(&self, ordinal: u32) -> Result<u64> {
        let mut bytes = 0_usize;
        let properties = plain(ordinal);
        drive!(
            self,
            cuMemGetAllocationGranularity(
                &raw mut bytes,
                &raw const properties,
                Granularity::CU_MEM_ALLOC_GRANULARITY_MINIMUM
            )
        )?;
        plausible::granularity("cuMemGetAllocationGranularity", bytes as u64)
    }

    fn address_reserve(&self, bytes: u64, align: u64) -> Result<u64> {
        let mut addr: CUdeviceptr = 0;
        drive!(self, for bytes, cuMemAddressReserve(&raw mut addr, bytes as usize, align as usize, 0, 0))?;
        plausible::address("cuMemAddressReserve", addr, bytes, align)
    }

    unsafe fn address_free(&self, addr: u64, bytes: u64) -> Result<()> {
        drive!(self, cuMemAddressFree(addr, bytes as usize))
    }

    fn memory_create(&self, ordinal: u32, bytes: u64) -> Result<NativeMemory> {
        let mut memory = 0;
        let properties = plain(ordinal);
        drive!(self, for bytes, cuMemCreate(&raw mut memory, bytes as usize, &raw const properties, 0))?;
        Ok(NativeMemory(memory))
    }

    unsafe fn memory_release(&self, memory: NativeMemory) -> Result<()> {
        drive!(self, cuMemRelease(memory.0))
    }

    fn shared_granularity(&self, ordinal: u32) -> Result<u64> {
        let mut bytes = 0_usize;
        let [fabric, rdma] = self.shareable_by(ordinal)?;
        let properties = shareable(ordinal, fabric, rdma);
        drive!(
            self,
            cuMemGetAllocationGranularity(
                &raw mut bytes,
                &raw const properties,
                Granularity::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
            )
        )?;
        plausible::granularity("cuMemGetAllocationGranularity", bytes as u64)
    }

    fn shared_memory_create(&self, ordinal: u32, bytes: u64) -> Result<NativeMemory> {
        let [fabric, rdma] = self.shareable_by(ordinal)?;
        let create = |fabric| {
            let mut memory = 0;
            let properties = shareable(ordinal, fabric, rdma);
            drive!(self, for bytes, cuMemCreate(&raw mut memory, bytes as usize, &raw const properties, 0))?;
            Ok(NativeMemory(memory))
        };
        match create(fabric) {
            // The device has a fabric, and this process no permission to use it.
            Err(Error::Driver { .. }) if fabric => create(false),
            created => created,
        }
    }

    unsafe fn memory_export(&self, memory: NativeMemory) -> Result<OwnedFd> {
        let mut descriptor: c_int = -1;
        drive!(
            self,
            cuMemExportToShareableHandle(
                (&raw mut descriptor).cast::<c_void>(),
                memory.0,
                DESCRIPTOR,
                0
            )
        )?;
        if descriptor < 0 {
            return Err(Error::Unavailable(
                "CUDA: the driver exported memory and gave no descriptor".into(),
            ));
        }
        // SAFETY: the driver opened the descriptor for this call, and nobody else closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    fn memory_import(&self, descriptor: OwnedFd) -> Result<NativeMemory> {
        let mut memory = 0;
        // The driver takes the number itself in the place of a pointer, and keeps no descriptor.
        let number = descriptor.as_raw_fd() as usize as *mut c_void;
        drive!(self, cuMemImportFromShareableHandle(&raw mut memory, number, DESCRIPTOR))?;
        Ok(NativeMemory(memory))
    }

    unsafe fn map(&self, addr: u64, bytes: u64, memory: NativeMemory) -> Result<()> {
        drive!(self, for bytes, cuMemMap(addr, bytes as usize, 0, memory.0, 0))
    }

    unsafe fn unmap(&self, addr: u64, bytes: u64) -> Result<()> {
        drive!(self, cuMemUnmap(addr, bytes as usize))
    }

    unsafe fn set_access(&self, addr: u64, bytes: u64, ordinals: &[u32]) -> Result<()> {
        let access: Vec<CUmemAccessDesc> = ordinals
            .iter()
            .map(|&ordinal| CUmemAccessDesc {
                location: on(ordinal),
                flags: Access::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        drive!(self, cuMemSetAccess(addr, bytes as usize, access.as_ptr(), access.len()))
    }

    fn host_alloc(&self, bytes: u64, flags: HostFlags) -> Result<u64> {
        let mut addr: *mut c_void = ptr::null_mut();
        drive!(self, for bytes, cuMemHostAlloc(&raw mut addr, bytes as usize, conv::host_flags(flags)))?;
        plausible::address("cuMemHostAlloc", addr as u64, bytes, 256)
    }

    unsafe fn host_free(&self, addr: u64) -> Result<()> {
        drive!(self, cuMemFreeHost(addr as *mut c_void))
    }

    unsafe fn host_register(&self, addr: u64, bytes: u64) -> Result<()> {
        drive!(self, for bytes, cuMemHostRegister_v2(addr as *mut c_void, bytes as usize, conv::REGISTER_FLAGS))
    }

    unsafe fn host_unregister(&self, addr: u64) -> Result<()> {
        drive!(self, cuMemHostUnregister(addr as *mut c_void))
    }

    #[inline]
    unsafe fn load_word(&self, addr: u64) -> u64 {
        // SAFETY: by the contract an aligned word that lives. The device writes whole words.
        unsafe { AtomicU64::from_ptr(addr as *mut u64) }.load(Ordering::Acquire)
    }

    #[inline]
    unsafe fn store_word(&self, addr: u64, value: u64) {
        // SAFETY: by the contract an aligned word that lives and that no work writes.
        unsafe { AtomicU64::from_ptr(addr as *mut u64) }.store(value, Ordering::Release);
    }
}
