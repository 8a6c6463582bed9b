//! Heaps and buffers.
//!
//! This module must not know managers.

use super::super::ops::{
    HeapDesc, MemoryOps, MemoryOptions, NativeBuffer, NativeDevice, NativeHeap, SizeAlign, Storage,
};
use super::{RealDriver, at, give};
use leasehold_core::{Error, OutOfMemory, Result};
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLBuffer, MTLCPUCacheMode, MTLDevice, MTLHazardTrackingMode, MTLHeap, MTLHeapDescriptor,
    MTLHeapType, MTLResource, MTLResourceOptions, MTLStorageMode,
};
use std::ptr::NonNull;

/// Bytes of the pages that `newBufferWithBytesNoCopy:` accepts.
fn page() -> u64 {
    // SAFETY: a query of a constant of the system, without arguments in memory.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(page).unwrap_or(16384)
}

fn options(of: MemoryOptions) -> MTLResourceOptions {
    let storage = match of.storage {
        Storage::Shared => MTLResourceOptions::StorageModeShared,
        Storage::Private => MTLResourceOptions::StorageModePrivate,
    };
    let hazards = if of.tracked {
        MTLResourceOptions::HazardTrackingModeTracked
    } else {
        MTLResourceOptions::HazardTrackingModeUntracked
    };
    let cache = if of.write_combined {
        MTLResourceOptions::CPUCacheModeWriteCombined
    } else {
        MTLResourceOptions::CPUCacheModeDefaultCache
    };
    storage | hazards | cache
}

/// The handle of a new buffer, which is nil without memory and for no bytes.
fn give_buffer(
    buffer: Option<Retained<ProtocolObject<dyn MTLBuffer>>>,
    bytes: u64,
) -> Result<NativeBuffer> {
    let missing =
        || OutOfMemory::new("a Metal buffer", bytes).note("the driver returned nil").into();
    buffer.map(|b| NativeBuffer(give(b))).ok_or_else(missing)
}

impl MemoryOps for RealDriver {
    unsafe fn heap_create(&self, device: NativeDevice, desc: &HeapDesc) -> Result<NativeHeap> {
        self.enter(|| {
            let description = MTLHeapDescriptor::new();
            description.setSize(desc.size as usize);
            description.setStorageMode(match desc.options.storage {
                Storage::Shared => MTLStorageMode::Shared,
                Storage::Private => MTLStorageMode::Private,
            });
            description.setHazardTrackingMode(if desc.options.tracked {
                MTLHazardTrackingMode::Tracked
            } else {
                MTLHazardTrackingMode::Untracked
            });
            if desc.options.write_combined {
                description.setCpuCacheMode(MTLCPUCacheMode::WriteCombined);
            }
            description.setType(if desc.placement {
                MTLHeapType::Placement
            } else {
                MTLHeapType::Automatic
            });
            let heap = at!(device => MTLDevice).newHeapWithDescriptor(&description);
            let missing = || {
                let why = OutOfMemory::new("a Metal heap", desc.size);
                Error::from(why.note("the driver returned nil"))
            };
            heap.map(|h| NativeHeap(give(h))).ok_or_else(missing)
        })
    }

    unsafe fn heap_used(&self, heap: NativeHeap) -> Result<u64> {
        self.enter(|| Ok(at!(heap => MTLHeap).usedSize() as u64))
    }

    unsafe fn heap_available(&self, heap: NativeHeap, align: u64) -> Result<u64> {
        self.enter(|| {
            let heap = at!(heap => MTLHeap);
            Ok(heap.maxAvailableSizeWithAlignment(align as usize) as u64)
        })
    }

    unsafe fn heap_buffer_size(
        &self,
        device: NativeDevice,
        bytes: u64,
        options: MemoryOptions,
    ) -> Result<SizeAlign> {
        self.enter(|| {
            let device = at!(device => MTLDevice);
            let options = self::options(options);
            let place = device.heapBufferSizeAndAlignWithLength_options(bytes as usize, options);
            Ok(SizeAlign { size: place.size as u64, align: place.align as u64 })
        })
    }

    unsafe fn heap_buffer(
        &self,
        heap: NativeHeap,
        bytes: u64,
        options: MemoryOptions,
        offset: Option<u64>,
    ) -> Result<NativeBuffer> {
        self.enter(|| {
            let heap = at!(heap => MTLHeap);
            let (length, options) = (bytes as usize, self::options(options));
            let buffer = match offset {
                // SAFETY: the heap has placement, and the range lies in it, aligned (the caller's
                // promise).
                Some(offset) => unsafe {
                    heap.newBufferWithLength_options_offset(length, options, offset as usize)
                },
                None => heap.newBufferWithLength_options(length, options),
            };
            give_buffer(buffer, bytes)
        })
    }

    unsafe fn buffer_create(
        &self,
        device: NativeDevice,
        bytes: u64,
        options: MemoryOptions,
    ) -> Result<NativeBuffer> {
        self.enter(|| {
            let device = at!(device => MTLDevice);
            let options = self::options(options);
            give_buffer(device.newBufferWithLength_options(bytes as usize, options), bytes)
        })
    }

    unsafe fn buffer_wrap(
        &self,
        device: NativeDevice,
        addr: u64,
        bytes: u64,
    ) -> Result<NativeBuffer> {
        let (page, at) = (page(), std::ptr::with_exposed_provenance_mut(addr as usize));
        let place = NonNull::new(at)
            .filter(|_| bytes != 0 && addr.is_multiple_of(page) && bytes.is_multiple_of(page));
        let Some(place) = place else {
            return Err(Error::invalid(format!(
                "{bytes} bytes at {addr:#x} for a Metal buffer: want whole pages of {page} bytes"
            )));
        };
        self.enter(|| {
            let device = at!(device => MTLDevice);
            let options = options(MemoryOptions::default());
            // SAFETY: the range is whole pages of memory that outlives the buffer (the caller's
            // promise). Without a deallocator Metal leaves the memory alone.
            let buffer = unsafe {
                device.newBufferWithBytesNoCopy_length_options_deallocator(
                    place,
                    bytes as usize,
                    options,
                    None,
                )
            };
            give_buffer(buffer, bytes)
        })
    }

    unsafe fn buffer_contents(&self, buffer: NativeBuffer) -> Result<Option<u64>> {
        self.enter(|| {
            let buffer = at!(buffer => MTLBuffer);
            // `contents` is null for private memory, where the typed getter would be wrong.
            if buffer.storageMode() == MTLStorageMode::Private {
                return Ok(None);
            }
            Ok(Some(buffer.contents().as_ptr().expose_provenance() as u64))
        })
    }

    unsafe fn buffer_address(&self, buffer: NativeBuffer) -> Result<u64> {
        self.enter(|| Ok(at!(buffer => MTLBuffer).gpuAddress()))
    }

    unsafe fn buffer_length(&self, buffer: NativeBuffer) -> Result<u64> {
        self.enter(|| Ok(at!(buffer => MTLBuffer).length() as u64))
    }
}
