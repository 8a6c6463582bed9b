//! Heaps and buffers of the simulated driver.
//!
//! Shared memory is host memory of the machine, whose host and device addresses are equal. Private
//! memory has device addresses only.
//!
//! This module must not know how work runs.

use super::tables::{BufferState, HeapState, Object};
use super::{Effect, Inner, SimDriver, broken, told};
use crate::Machine;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, OutOfMemory, Result};
use leasehold_mps::driver::ops::{
    HeapDesc, MemoryOps, MemoryOptions, NativeBuffer, NativeDevice, NativeHeap, SizeAlign, Storage,
};

/// Allocations succeed up to this multiple of the device's memory.
pub(super) const OVERCOMMIT: u64 = 4;
/// Bytes of threadgroup memory.
pub(super) const THREADGROUP_MEMORY: u32 = 32 << 10;
/// The alignment of buffers in a heap.
const ALIGN: u64 = 256;
/// The unit of wrapped host memory.
const PAGE: u64 = 4096;

/// Memory of the machine. The drop frees it.
pub(super) struct Memory {
    machine: Machine,
    pub(super) device: u32,
    pub(super) addr: u64,
    pub(super) bytes: u64,
    pub(super) storage: Storage,
    /// The memory belongs to the caller: `Some`, and whether it was registered with the machine.
    wrapped: Option<bool>,
}

impl Memory {
    fn new(inner: &Inner, device: u32, bytes: u64, storage: Storage) -> Result<Arc<Self>> {
        let machine = inner.machine.clone();
        let addr = match storage {
            Storage::Shared => machine.host_alloc(bytes)?,
            Storage::Private => machine.alloc(device, bytes)?,
        };
        Ok(Arc::new(Self { machine, device, addr, bytes, storage, wrapped: None }))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The memory was allocated by `new` or `buffer_wrap`. On a lost device it stays.
        let _ = match (self.wrapped, self.storage) {
            (Some(false), _) => Ok(()),
            (Some(true), _) => self.machine.host_unregister(self.addr),
            (None, Storage::Shared) => self.machine.host_free(self.addr),
            (None, Storage::Private) => self.machine.free(self.addr),
        };
    }
}

/// The error of a nil buffer or heap.
#[cold]
fn nil(what: &'static str, bytes: u64, why: &'static str) -> Error {
    OutOfMemory::new(what, bytes).note(why).into()
}

/// The error of memory that the machine does not have.
fn nil_for(what: &'static str, api: &'static str, bytes: u64, error: Error) -> Error {
    match error {
        Error::OutOfMemory(_) => nil(what, bytes, "the driver returned nil"),
        other => told(api, other),
    }
}

/// The first offset at which a heap has room.
fn first_fit(heap: &HeapState, bytes: u64) -> Option<u64> {
    let mut taken: Vec<(u64, u64)> = heap.buffers.values().copied().collect();
    taken.sort_unstable();
    let mut at = 0;
    for (from, len) in taken {
        if from.saturating_sub(at) >= bytes {
            break;
        }
        at = at.max((from + len).next_multiple_of(ALIGN));
    }
    (at.checked_add(bytes)? <= heap.memory.bytes).then_some(at)
}

impl MemoryOps for SimDriver {
    unsafe fn heap_create(&self, device: NativeDevice, desc: &HeapDesc) -> Result<NativeHeap> {
        const API: &str = "newHeapWithDescriptor";
        let ordinal = self.lock().device(device)?;
        self.enter(API, ordinal)?;
        if desc.size == 0 {
            return Err(nil("a Metal heap", 0, "a heap of no bytes is nil"));
        }
        let memory = Memory::new(&self.0, ordinal, desc.size, desc.options.storage)
            .map_err(|e| nil_for("a Metal heap", API, desc.size, e))?;
        let heap = HeapState { memory, placement: desc.placement, buffers: Default::default() };
        Ok(NativeHeap(self.lock().add(Object::Heap(heap))))
    }

    unsafe fn heap_used(&self, heap: NativeHeap) -> Result<u64> {
        self.enter("usedSize", self.device_of(heap))?;
        let tables = self.lock();
        let buffers = tables.heap(heap.0)?.buffers.values();
        Ok(buffers.map(|b| b.1.next_multiple_of(ALIGN)).sum())
    }

    unsafe fn heap_available(&self, heap: NativeHeap, align: u64) -> Result<u64> {
        self.enter("maxAvailableSizeWithAlignment", self.device_of(heap))?;
        let tables = self.lock();
        let heap = tables.heap(heap.0)?;
        let align = align.max(ALIGN);
        let mut taken: Vec<(u64, u64)> = heap.buffers.values().copied().collect();
        taken.sort_unstable();
        let (mut at, mut most) = (0_u64, 0);
        for (from, len) in taken.into_iter().chain([(heap.memory.bytes, 0)]) {
            most = most.max(from.saturating_sub(at));
            at = at.max((from + len).next_multiple_of(align));
        }
        Ok(most)
    }

    unsafe fn heap_buffer_size(
        &self,
        device: NativeDevice,
        bytes: u64,
        _: MemoryOptions,
    ) -> Result<SizeAlign> {
        let ordinal = self.lock().device(device)?;
        self.enter("heapBufferSizeAndAlignWithLength", ordinal)?;
        Ok(SizeAlign { size: bytes.max(1).next_multiple_of(ALIGN), align: ALIGN })
    }

    unsafe fn heap_buffer(
        &self,
        heap: NativeHeap,
        bytes: u64,
        options: MemoryOptions,
        offset: Option<u64>,
    ) -> Result<NativeBuffer> {
        const API: &str = "newBufferWithLength:options:offset";
        self.enter(API, self.device_of(heap))?;
        let mut tables = self.lock();
        let found = tables.heap(heap.0)?;
        if found.memory.storage != options.storage || found.placement != offset.is_some() {
            let text = format!("{API}: storage or placement differ from the heap's");
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        let end = |at: u64| at.checked_add(bytes).filter(|&end| end <= found.memory.bytes);
        let at = match offset {
            Some(at) if at.is_multiple_of(ALIGN) => end(at).map(|_| at),
            Some(at) => {
                let text = format!("{API}: offset {at} is no multiple of {ALIGN}");
                return Err(broken(&mut tables, Effect::Abort, text));
            }
            None => first_fit(found, bytes),
        };
        let at = at.filter(|_| bytes != 0).ok_or_else(|| {
            nil("a buffer of a Metal heap", bytes, "no bytes, or no room in the heap")
        })?;
        let memory = found.memory.clone();
        let addr = memory.addr + at;
        let buffer = BufferState { memory, heap: Some(heap.0), addr, bytes };
        let number = tables.add(Object::Buffer(buffer));
        tables.heap_mut(heap.0)?.buffers.insert(number, (at, bytes));
        Ok(NativeBuffer(number))
    }

    unsafe fn buffer_create(
        &self,
        device: NativeDevice,
        bytes: u64,
        options: MemoryOptions,
    ) -> Result<NativeBuffer> {
        const API: &str = "newBufferWithLength:options";
        let ordinal = self.lock().device(device)?;
        self.enter(API, ordinal)?;
        if bytes == 0 || bytes > self.0.physical {
            return Err(nil("a Metal buffer", bytes, "no bytes, or more than the maximum"));
        }
        let memory = Memory::new(&self.0, ordinal, bytes, options.storage)
            .map_err(|e| nil_for("a Metal buffer", API, bytes, e))?;
        let addr = memory.addr;
        let buffer = BufferState { memory, heap: None, addr, bytes };
        Ok(NativeBuffer(self.lock().add(Object::Buffer(buffer))))
    }

    unsafe fn buffer_wrap(
        &self,
        device: NativeDevice,
        addr: u64,
        bytes: u64,
    ) -> Result<NativeBuffer> {
        const API: &str = "newBufferWithBytesNoCopy";
        let ordinal = self.lock().device(device)?;
        self.enter(API, ordinal)?;
        if addr == 0 || bytes == 0 || !addr.is_multiple_of(PAGE) || !bytes.is_multiple_of(PAGE) {
            return Err(Error::invalid(format!(
                "{bytes} bytes at {addr:#x} for a Metal buffer: want whole pages of {PAGE} bytes"
            )));
        }
        // The machine knows the memory of its own shared buffers.
        let own = self.lock().is_shared(addr, bytes);
        if !own {
            // SAFETY: the range is memory of this process until the buffer is released (the
            // caller's promise), which unregisters it.
            unsafe { self.0.machine.host_register(addr, bytes) }.map_err(|e| told(API, e))?;
        }
        let memory = Arc::new(Memory {
            machine: self.0.machine.clone(),
            device: ordinal,
            addr,
            bytes,
            storage: Storage::Shared,
            wrapped: Some(!own),
        });
        let buffer = BufferState { memory, heap: None, addr, bytes };
        Ok(NativeBuffer(self.lock().add(Object::Buffer(buffer))))
    }

    unsafe fn buffer_contents(&self, buffer: NativeBuffer) -> Result<Option<u64>> {
        self.count("contents", self.device_of(buffer));
        let tables = self.lock();
        let buffer = tables.buffer(buffer.0)?;
        Ok((buffer.memory.storage == Storage::Shared).then_some(buffer.addr))
    }

    unsafe fn buffer_address(&self, buffer: NativeBuffer) -> Result<u64> {
        self.count("gpuAddress", self.device_of(buffer));
        Ok(self.lock().buffer(buffer.0)?.addr)
    }

    unsafe fn buffer_length(&self, buffer: NativeBuffer) -> Result<u64> {
        self.count("length", self.device_of(buffer));
        Ok(self.lock().buffer(buffer.0)?.bytes)
    }

    fn host_access(&self, addr: u64, bytes: u64, write: bool) {
        if write {
            self.0.machine.host_write(addr, bytes)
        } else {
            self.0.machine.host_read(addr, bytes)
        }
    }
}
