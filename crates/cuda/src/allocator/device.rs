//! The backing of device memory: virtual memory management if the device has it, else segments.
//!
//! | source | reserve | commit | create, map and enable |
//! |---|---|---|---|
//! | [`MemorySource::Vmm`] | `cuMemAddressReserve` | – | `cuMemCreate`, `Map`, `SetAccess` |
//! | [`MemorySource::Pool`] | – | `cuMemAllocAsync` on a stream of its own, awaited | – |
//! | [`MemorySource::Plain`] | – | `cuMemAlloc` | – |
//!
//! One `cuMemSetAccess` enables all pieces of a range. If a reservation fails, the first source
//! works with plain segments too.
//!
//! This module must not know how blocks are placed.

use crate::config::MemorySource;
use crate::driver::ops::{DeviceProperties, NativeMemory, NativeStream};
use crate::engine::driver_context::DriverContext;
use crate::engine::shared::{Place, Shared};
use leasehold_alloc::{Backing, BackingCaps, Chunk};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result};
use std::fmt;

/// The least bytes of a segment.
const SEGMENT: u64 = 32 << 20;
/// Sizes of segments are multiples of this size.
const SEGMENT_GRANULE: u64 = 2 << 20;

/// The backing of a device's memory.
pub struct DeviceBacking {
    context: Arc<DriverContext>,
    shared: Arc<Shared>,
    source: MemorySource,
    granule: u64,
    physical: u64,
    /// For `MemorySource::Pool`: the stream that orders the pool's allocations and frees.
    stream: Mutex<Option<NativeStream>>,
    calls: AtomicU64,
}

impl DeviceBacking {
    /// Makes a backing with the configured source, or the best one.
    ///
    /// # Errors
    /// `Unsupported` for a source that the device does not have, or a driver error.
    pub fn new(
        context: Arc<DriverContext>,
        shared: Arc<Shared>,
        properties: &DeviceProperties,
    ) -> Result<Self> {
        let best = if properties.vmm {
            MemorySource::Vmm
        } else if properties.memory_pools {
            MemorySource::Pool
        } else {
            MemorySource::Plain
        };
        let source = match shared.config.memory {
            MemorySource::Auto => best,
            MemorySource::Vmm if !properties.vmm => {
                return Err(Error::Unsupported(
                    format!("{} has no virtual memory management", context.id()).into(),
                ));
            }
            MemorySource::Pool if !properties.memory_pools => {
                return Err(Error::Unsupported(
                    format!("{} has no memory pools", context.id()).into(),
                ));
            }
            other => other,
        };
        let granule = match source {
            MemorySource::Vmm => context.within(|ops| ops.granularity(context.ordinal()))?,
            _ => SEGMENT_GRANULE,
        };
        let physical = if properties.memory == 0 {
            BackingCaps::default().physical
        } else {
            properties.memory
        };
        Ok(Self {
            context,
            shared,
            source,
            granule,
            physical,
            stream: Mutex::new(None),
            calls: AtomicU64::new(0),
        })
    }

    fn calls(&self, n: u64) {
        self.calls.fetch_add(n, Ordering::Relaxed);
    }

    fn place(&self) -> Place {
        Place::Device(self.context.ordinal())
    }

    /// Makes calls with the pool's stream. One caller at a time uses the stream.
    fn with_stream<R>(&self, calls: impl FnOnce(NativeStream) -> Result<R>) -> Result<R> {
        let taken = self.stream.lock().take();
        let stream = match taken {
            Some(stream) => stream,
            None => self.context.within(|ops| ops.stream_create(0))?,
        };
        let result = calls(stream);
        let extra = self.stream.lock().replace(stream);
        if let Some(extra) = extra {
            // SAFETY: the pool's own stream was taken out of its place, so no other thread has it.
            self.context.release_or_log(|ops| unsafe { ops.stream_destroy(extra) });
        }
        result
    }
}

// SAFETY: the driver gives each piece and each range of addresses to one caller.
unsafe impl Backing for DeviceBacking {
    fn caps(&self) -> BackingCaps {
        let vmm = self.source == MemorySource::Vmm;
        BackingCaps {
            vmm,
            granule: self.granule,
            physical: self.physical,
            reserve: vmm,
            segment: SEGMENT.max(self.granule),
            // Device operations that a stream orders see the same bytes through each mapping, as
            // CUDA's guide says of virtual aliases.
            aliases: vmm,
        }
    }

    fn reserve(&self, bytes: u64) -> Result<u64> {
        self.calls(1);
        let addr = self.context.relaxed(|ops| ops.address_reserve(bytes, self.granule))?;
        self.shared.add_range(addr, bytes, self.place());
        Ok(addr)
    }

    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        if at.is_some() {
            return Err(Error::Unsupported("memory comes in pieces inside a reservation".into()));
        }
        self.calls(1);
        let addr = match self.source {
            MemorySource::Pool => self.with_stream(|stream| {
                self.context.relaxed(|ops| {
                    // SAFETY: the pool's own stream, which only this call uses meanwhile.
                    let addr = unsafe { ops.alloc_async(bytes, stream) }?;
                    // Other streams may use the memory from now on.
                    // SAFETY: the pool's own stream, which only this call uses meanwhile.
                    if let Err(e) = unsafe { ops.stream_synchronize(stream) } {
                        // SAFETY: the memory came from this pool and was not given to any caller.
                        let _ = unsafe { ops.free_async(addr, stream) };
                        return Err(e);
                    }
                    Ok(addr)
                })
            })?,
            _ => self.context.relaxed(|ops| ops.alloc(bytes))?,
        };
        self.shared.add_range(addr, bytes, self.place());
        Ok(Chunk { addr, bytes, native: 0 })
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        self.calls(1);
        // The range goes first: once the driver has the memory, another thread may get its address.
        self.shared.remove_range(chunk.addr);
        let freed = match self.source {
            MemorySource::Pool => self.with_stream(|stream| {
                self.context.release(|ops| {
                    // SAFETY: the memory came from this pool. The allocator gives it back once,
                    // when no work uses it.
                    unsafe { ops.free_async(chunk.addr, stream) }?;
                    // SAFETY: the pool's own stream, which only this call uses meanwhile.
                    unsafe { ops.stream_synchronize(stream) }
                })
            }),
            // SAFETY: the memory came from `alloc`. The allocator gives it back once, when no work
            // uses it.
            _ => self.context.release(|ops| unsafe { ops.free(chunk.addr) }),
        };
        if freed.is_err() {
            self.shared.add_range(chunk.addr, chunk.bytes, self.place());
        }
        freed
    }

    unsafe fn release(&self, addr: u64, bytes: u64) {
        self.calls(1);
        self.shared.remove_range(addr);
        // SAFETY: the reservation is this backing's. The allocator gives it back once, with nothing
        // mapped in it.
        self.context.release_or_log(|ops| unsafe { ops.address_free(addr, bytes) });
    }

    fn create(&self, bytes: u64) -> Result<u64> {
        self.calls(1);
        self.context.relaxed(|ops| ops.memory_create(self.context.ordinal(), bytes)).map(|m| m.0)
    }

    unsafe fn destroy(&self, handle: u64, _: u64) -> Result<()> {
        self.calls(1);
        // SAFETY: the handle came from `create`. The allocator gives it back once.
        self.context.release(|ops| unsafe { ops.memory_release(NativeMemory(handle)) })
    }

    unsafe fn map(&self, at: u64, handle: u64, bytes: u64) -> Result<()> {
        self.calls(1);
        // SAFETY: the allocator maps handles of this backing into reservations of this backing.
        self.context.relaxed(|ops| unsafe { ops.map(at, bytes, NativeMemory(handle)) })?;
        self.shared.mapped(self.context.ordinal(), at, bytes);
        Ok(())
    }

    unsafe fn enable(&self, at: u64, bytes: u64) -> Result<()> {
        self.calls(1);
        // SAFETY: the range was mapped by this backing (the allocator's promise).
        unsafe { self.shared.open_to_peers(&self.context, self.context.ordinal(), at, bytes) }
    }

    unsafe fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        self.calls(1);
        // SAFETY: the range was mapped by this backing, and no work uses it any more (the
        // allocator's promise).
        self.context.release(|ops| unsafe { ops.unmap(at, bytes) })?;
        self.shared.unmapped(self.context.ordinal(), at);
        Ok(())
    }

    /// Allocates with `cuMemAlloc` for every source, because the vendor's memory checkers know the
    /// bounds of such allocations.
    fn exact(&self, bytes: u64, align: u64) -> Result<Chunk> {
        self.calls(1);
        let addr = self.context.relaxed(|ops| {
            let addr = ops.alloc(bytes.max(1))?;
            if addr.is_multiple_of(align.max(1)) {
                return Ok(addr);
            }
            // SAFETY: the memory came from `alloc` and was not given to any caller.
            unsafe { ops.free(addr) }?;
            Err(Error::Unsupported(
                format!("an alignment of {align}: the driver gave {addr:#x}").into(),
            ))
        })?;
        self.shared.add_range(addr, bytes, self.place());
        Ok(Chunk { addr, bytes, native: 0 })
    }

    unsafe fn exact_free(&self, chunk: Chunk, _: u64) -> Result<()> {
        self.calls(1);
        // The range goes first: once the driver has the memory, another thread may get its address.
        self.shared.remove_range(chunk.addr);
        // SAFETY: the memory came from `alloc`. The allocator gives it back once, when no work uses
        // it.
        let freed = self.context.release(|ops| unsafe { ops.free(chunk.addr) });
        if freed.is_err() {
            self.shared.add_range(chunk.addr, chunk.bytes, self.place());
        }
        freed
    }

    fn driver_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Drop for DeviceBacking {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.get_mut().take() {
            // SAFETY: the pool's own stream was taken out of its place, so no other thread has it.
            self.context.release_or_log(|ops| unsafe { ops.stream_destroy(stream) });
        }
    }
}

impl fmt::Debug for DeviceBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBacking")
            .field("driver", &self.context)
            .field("source", &self.source)
            .field("granule", &self.granule)
            .finish_non_exhaustive()
    }
}
