//! Memory: leases for CubeCL's pages, and plain host memory for its staging buffers.

use crate::errors;
use crate::lane::Lane;
use cubecl_environment::backtrace::BackTrace;
use cubecl_server::server::IoError;
use cubecl_server::storage::{
    ComputeStorage, PINNED_MEMORY_ALIGNMENT, PinnedMemoryResource, StorageHandle, StorageId,
    StorageUtilization,
};
use leasehold::{Buffer, BufferView, Lease, View};
use std::collections::HashMap;

/// A part of a page of device memory.
#[derive(Debug, Clone)]
pub struct DeviceMemory {
    page: Lease<Buffer>,
    offset: u64,
    size: u64,
}

impl DeviceMemory {
    /// The bytes.
    #[must_use]
    pub fn view(&self) -> BufferView<'_> {
        self.page.view().narrowed(self.offset, self.size)
    }
}

/// The pages of a stream: one lease each.
pub struct DevicePages {
    pages: HashMap<StorageId, (Lease<Buffer>, u64)>,
    lane: &'static Lane,
    allocated: u64,
}

impl DevicePages {
    pub(crate) fn new(lane: &'static Lane) -> Self {
        Self { pages: HashMap::new(), lane, allocated: 0 }
    }
}

impl std::fmt::Debug for DevicePages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DevicePages({} pages, {} bytes)", self.pages.len(), self.allocated)
    }
}

fn not_found(id: StorageId, of: &str) -> IoError {
    IoError::StorageHandleNotFound {
        reason: format!("{id} in the {of}").into(),
        backtrace: BackTrace::capture(),
    }
}

impl ComputeStorage for DevicePages {
    type Resource = DeviceMemory;

    fn alignment(&self) -> usize {
        crate::runtime::ALIGNMENT as usize
    }

    fn get(&mut self, handle: &StorageHandle) -> Result<DeviceMemory, IoError> {
        let (page, _) =
            self.pages.get(&handle.id).ok_or_else(|| not_found(handle.id, "device's pages"))?;
        Ok(DeviceMemory { page: page.clone(), offset: handle.offset(), size: handle.size() })
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        let made = self.lane.runtime().and_then(|runtime| {
            runtime.alloc_layout(leasehold::Layout::aligned(size, crate::runtime::ALIGNMENT))
        });
        let page = made.map_err(|error| errors::io(&error, size))?;
        let id = StorageId::new();
        self.pages.insert(id, (page, size));
        self.allocated += size;
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        // Work that still uses the page keeps its memory.
        if let Some((_, size)) = self.pages.remove(&id) {
            self.allocated -= size;
        }
    }

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        self.allocated
    }
}

/// A page of host memory, aligned as CubeCL asks.
const _: () = assert!(align_of::<u128>() == PINNED_MEMORY_ALIGNMENT);

/// Host memory in which CubeCL collects what it copies.
#[derive(Default)]
pub struct HostPages {
    pages: HashMap<StorageId, Vec<u128>>,
    allocated: u64,
}

impl ComputeStorage for HostPages {
    type Resource = PinnedMemoryResource;

    fn alignment(&self) -> usize {
        PINNED_MEMORY_ALIGNMENT
    }

    fn get(&mut self, handle: &StorageHandle) -> Result<PinnedMemoryResource, IoError> {
        let page =
            self.pages.get_mut(&handle.id).ok_or_else(|| not_found(handle.id, "host's pages"))?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(page);
        let (offset, size) = (handle.offset() as usize, handle.size() as usize);
        let part = bytes
            .get_mut(offset..offset + size)
            .ok_or_else(|| not_found(handle.id, "host's pages, with as many bytes"))?;
        Ok(PinnedMemoryResource { ptr: part.as_mut_ptr(), size })
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        let words = (size as usize).div_ceil(PINNED_MEMORY_ALIGNMENT);
        let mut page = Vec::new();
        page.try_reserve_exact(words)
            .map_err(|_| IoError::OutOfMemory { size, backtrace: BackTrace::capture() })?;
        page.resize(words, 0);
        self.allocated += size_of_val(&*page) as u64;
        let id = StorageId::new();
        self.pages.insert(id, page);
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        if let Some(page) = self.pages.remove(&id) {
            self.allocated -= size_of_val(&*page) as u64;
        }
    }

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        self.allocated
    }
}
