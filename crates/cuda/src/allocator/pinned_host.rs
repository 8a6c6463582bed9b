//! The backing of pinned host memory: segments from `cuMemHostAlloc`, which is far too slow for a
//! call per buffer. A large segment is memory of this process that `cuMemHostRegister` pins, which
//! is several times faster. Every device reaches the memory at the host's address.
//!
//! This module must not know how blocks are placed.

use crate::driver::ops::HostFlags;
use crate::driver::pages::Pages;
use crate::engine::driver_context::DriverContext;
use crate::engine::shared::{Place, Shared};
use leasehold_alloc::{Backing, BackingCaps, Chunk};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result};

/// Sizes of segments are multiples of `GRANULE` and at least `SEGMENT`.
const GRANULE: u64 = 64 << 10;
const SEGMENT: u64 = 2 << 20;
/// Segments of this size and larger are mapped and registered.
const LARGE: u64 = 64 << 20;

/// The backing of host memory that devices reach by DMA.
#[doc(alias = "DevicePinnedHostAllocator")]
#[derive(Debug)]
pub struct PinnedBacking {
    context: Arc<DriverContext>,
    shared: Arc<Shared>,
    calls: AtomicU64,
    /// The registered segments.
    pages: Mutex<Vec<Pages>>,
}

impl PinnedBacking {
    /// Makes a backing in a context.
    #[must_use]
    pub fn new(context: Arc<DriverContext>, shared: Arc<Shared>) -> Self {
        Self { context, shared, calls: AtomicU64::new(0), pages: Mutex::default() }
    }

    /// Maps and registers a large segment. `None` if the system or the driver refuses.
    fn register(&self, bytes: u64) -> Option<u64> {
        let pages = Pages::new(bytes)?;
        let addr = pages.addr();
        // SAFETY: the range is a mapping of this process, which `decommit` unmaps once the driver
        // has let go of it.
        self.context.within(|ops| unsafe { ops.host_register(addr, bytes) }).ok()?;
        self.pages.lock().push(pages);
        Some(addr)
    }

    /// Takes the pages of a registered segment.
    fn take_pages(&self, addr: u64) -> Option<Pages> {
        let mut pages = self.pages.lock();
        let found = pages.iter().position(|p| p.addr() == addr)?;
        Some(pages.swap_remove(found))
    }
}

// SAFETY: each segment is pinned memory that the driver allocated for this call.
unsafe impl Backing for PinnedBacking {
    fn caps(&self) -> BackingCaps {
        BackingCaps {
            vmm: false,
            reserve: false,
            granule: GRANULE,
            segment: SEGMENT,
            ..BackingCaps::default()
        }
    }

    fn reserve(&self, _: u64) -> Result<u64> {
        Err(Error::Unsupported("pinned memory comes in segments".into()))
    }

    unsafe fn commit(&self, _: Option<u64>, bytes: u64) -> Result<Chunk> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let large = if bytes >= LARGE { self.register(bytes) } else { None };
        let addr = match large {
            Some(addr) => addr,
            None => self.context.within(|ops| ops.host_alloc(bytes, HostFlags::default()))?,
        };
        self.shared.add_range(addr, bytes, Place::Pinned);
        Ok(Chunk { addr, bytes, native: 0 })
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.shared.remove_range(chunk.addr);
        let pages = self.take_pages(chunk.addr);
        let freed = self.context.release(|ops| {
            if pages.is_some() {
                // SAFETY: `register` registered the segment. The allocator gives it back once, when
                // nothing uses it.
                unsafe { ops.host_unregister(chunk.addr) }
            } else {
                // SAFETY: the segment came from `host_alloc`. The allocator gives it back once,
                // when nothing uses it.
                unsafe { ops.host_free(chunk.addr) }
            }
        });
        if freed.is_err() {
            // The driver may still reach the pages.
            self.pages.lock().extend(pages);
            self.shared.add_range(chunk.addr, chunk.bytes, Place::Pinned);
        }
        freed
    }

    unsafe fn release(&self, _: u64, _: u64) {}

    unsafe fn fill(&self, at: u64, bytes: u64, byte: u8) -> Result<()> {
        if bytes > 0 {
            self.context.ops().host_access(at, bytes, true);
            // SAFETY: the caller names committed memory of this backing. The host may write this
            // memory, and nothing else uses it.
            unsafe { std::ptr::write_bytes(at as *mut u8, byte, bytes as usize) };
        }
        Ok(())
    }

    unsafe fn verify(&self, at: u64, bytes: u64, byte: u8) -> Result<Option<u64>> {
        if bytes == 0 {
            return Ok(None);
        }
        self.context.ops().host_access(at, bytes, false);
        // SAFETY: the caller names committed memory of this backing that was filled, so it is
        // initialised. Nothing writes it meanwhile. A program that does write it has a defect,
        // which this check is to find.
        let memory = unsafe { std::slice::from_raw_parts(at as *const u8, bytes as usize) };
        Ok(memory.iter().position(|&b| b != byte).map(|i| i as u64))
    }

    fn driver_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}
