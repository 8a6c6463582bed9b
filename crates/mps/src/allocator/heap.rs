//! The backing of memory: segments, each a placement heap with one buffer over all of it.
//!
//! A block of the allocator is a range of the segment's buffer. So a binding is the buffer and an
//! offset, and no block needs an object of its own. The allocator places the blocks: the driver
//! makes a segment and ends it, and knows nothing between.
//!
//! This module must not know how blocks are placed.

use crate::driver::ops::{HeapDesc, MemoryOptions, Storage};
use crate::manager::buffer::{BufferManager, BufferState};
use crate::manager::heap::HeapManager;
use crate::manager::opened::OpenedDevice;
use crate::spans::Span;
use leasehold_alloc::{Backing, BackingCaps, Chunk};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, OutOfMemory, Result};
use std::collections::HashMap;
use std::fmt;

/// The least bytes of a segment.
const SEGMENT: u64 = 32 << 20;
/// Sizes of segments are multiples of this size: a few pages of 16 KiB.
const GRANULE: u64 = 64 << 10;

/// The backing of a kind of memory.
pub struct HeapBacking {
    opened: Arc<OpenedDevice>,
    heaps: Arc<HeapManager>,
    buffers: Arc<BufferManager>,
    storage: Storage,
    /// The segments that all backings of an owner hold.
    count: Arc<AtomicU64>,
    /// The buffers of the segments, by address. A buffer holds its heap.
    segments: Mutex<HashMap<u64, Lease<BufferState>>>,
    calls: AtomicU64,
}

impl HeapBacking {
    pub(crate) fn new(
        opened: Arc<OpenedDevice>,
        heaps: Arc<HeapManager>,
        buffers: Arc<BufferManager>,
        storage: Storage,
        count: Arc<AtomicU64>,
    ) -> Self {
        let (segments, calls) = (Mutex::default(), AtomicU64::new(0));
        Self { opened, heaps, buffers, storage, count, segments, calls }
    }

    fn calls(&self, n: u64) {
        self.calls.fetch_add(n, Ordering::Relaxed);
    }

    /// Makes a heap and its buffer.
    fn segment(&self, bytes: u64) -> Result<Lease<BufferState>> {
        let most = self.opened.properties.max_buffer;
        if bytes == 0 || bytes > most {
            let why = "a segment is one Metal buffer, and the device has no larger one";
            return Err(OutOfMemory::new("a Metal heap", bytes).note(why).into());
        }
        let options = MemoryOptions { storage: self.storage, ..MemoryOptions::default() };
        // SAFETY: the device is open as long as this value holds it.
        let fit = unsafe { self.opened.ops.heap_buffer_size(self.opened.native, bytes, options)? };
        let heap = self.heaps.acquire(&HeapDesc {
            size: fit.size.max(bytes),
            options,
            placement: true,
        })?;
        self.buffers.place(&heap, bytes, Some(0))
    }

    /// Gives a segment's heap back to the driver instead of the pool of heaps.
    fn end(&self, buffer: Lease<BufferState>) {
        drop(buffer);
        self.heaps.trim(0);
    }
}

// SAFETY: each segment is a heap of its own, whose memory belongs to its buffer alone.
unsafe impl Backing for HeapBacking {
    fn caps(&self) -> BackingCaps {
        let properties = &self.opened.properties;
        BackingCaps {
            vmm: false,
            reserve: false,
            granule: GRANULE,
            physical: match properties.recommended_working_set {
                0 => BackingCaps::default().physical,
                bytes => bytes,
            },
            segment: SEGMENT.min(properties.max_buffer / GRANULE * GRANULE).max(GRANULE),
            aliases: false,
        }
    }

    fn reserve(&self, _: u64) -> Result<u64> {
        Err(Error::Unsupported("Metal's memory comes in segments".into()))
    }

    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        if at.is_some() {
            return Err(Error::Unsupported("Metal's memory comes in segments".into()));
        }
        self.calls(3);
        let buffer = self.segment(bytes)?;
        let Some(heap) = buffer.heap().map(|heap| heap.native()) else {
            return Err(Error::state("a segment's buffer has no heap"));
        };
        let addr = match (self.storage, buffer.contents()) {
            (Storage::Private, _) => buffer.addr(),
            (Storage::Shared, Some(contents)) => contents,
            (Storage::Shared, None) => {
                self.end(buffer);
                return Err(Error::state("a buffer in shared storage has no host address"));
            }
        };
        // SAFETY: the buffer keeps the heap live, and `decommit` and the drop evict it.
        if let Err(error) = unsafe { self.opened.make_resident(heap) } {
            self.end(buffer);
            return Err(error);
        }
        self.opened.shared.spans.add(Span {
            native: buffer.native(),
            heap,
            addr,
            bytes,
            storage: self.storage,
            device: self.opened.id.ordinal,
        });
        let native = buffer.native().0;
        self.segments.lock().insert(addr, buffer);
        self.count.fetch_add(1, Ordering::AcqRel);
        Ok(Chunk { addr, bytes, native })
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        self.calls(3);
        let heap = {
            let segments = self.segments.lock();
            segments.get(&chunk.addr).and_then(|b| Some(b.heap()?.native()))
        };
        let Some(heap) = heap else {
            return Err(Error::invalid(format!("no segment begins at {:#x}", chunk.addr)));
        };
        // SAFETY: the segment keeps the heap live. The allocator gives it back once.
        unsafe { self.opened.evict(heap)? };
        let buffer = self.segments.lock().remove(&chunk.addr);
        if let Some(buffer) = buffer {
            self.opened.shared.spans.remove(buffer.native());
            self.count.fetch_sub(1, Ordering::AcqRel);
            self.end(buffer);
        }
        Ok(())
    }

    unsafe fn release(&self, _: u64, _: u64) {}

    unsafe fn fill(&self, at: u64, bytes: u64, byte: u8) -> Result<()> {
        self.host()?;
        if bytes > 0 {
            self.opened.ops.host_access(at, bytes, true);
            // SAFETY: the caller names memory of this backing, which has host addresses. Nothing
            // else uses it.
            unsafe { std::ptr::write_bytes(at as *mut u8, byte, bytes as usize) };
        }
        Ok(())
    }

    unsafe fn verify(&self, at: u64, bytes: u64, byte: u8) -> Result<Option<u64>> {
        self.host()?;
        if bytes == 0 {
            return Ok(None);
        }
        self.opened.ops.host_access(at, bytes, false);
        // SAFETY: the caller names memory of this backing that was filled, so it is initialised and
        // has host addresses. Nothing writes it meanwhile. A program that does write it has a
        // defect, which this check is to find.
        let memory = unsafe { std::slice::from_raw_parts(at as *const u8, bytes as usize) };
        Ok(memory.iter().position(|&b| b != byte).map(|i| i as u64))
    }

    fn driver_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

impl HeapBacking {
    /// Refuses memory that the host does not reach.
    fn host(&self) -> Result<()> {
        match self.storage {
            Storage::Shared => Ok(()),
            Storage::Private => {
                Err(Error::Unsupported("the host does not reach private storage".into()))
            }
        }
    }
}

impl Drop for HeapBacking {
    /// Gives back the segments that the allocator could not give back.
    fn drop(&mut self) {
        for (_, buffer) in std::mem::take(self.segments.get_mut()) {
            if let Some(heap) = buffer.heap() {
                // SAFETY: the buffer keeps the heap live.
                if let Err(error) = unsafe { self.opened.evict(heap.native()) } {
                    tracing::debug!(%error, "a heap stays in the residency set");
                }
            }
            self.opened.shared.spans.remove(buffer.native());
            self.count.fetch_sub(1, Ordering::AcqRel);
            drop(buffer);
        }
        self.heaps.trim(0);
    }
}

impl fmt::Debug for HeapBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapBacking")
            .field("device", &self.opened)
            .field("storage", &self.storage)
            .finish_non_exhaustive()
    }
}
