//! Device memory that other processes and the vendor's libraries may map: one handle for each
//! segment, with a descriptor of the system.
//!
//! Libraries that map a segment take it for one handle. A segment of several handles would be
//! accepted, and an access beyond the first one would end the context.
//!
//! This module must not know how blocks are placed.

use crate::allocator::Memory;
use crate::driver::ops::NativeMemory;
use crate::engine::driver_context::DriverContext;
use crate::engine::shared::{Place, Shared};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use leasehold_hal::{SharedSegment, Sharing};
use std::os::fd::OwnedFd;

/// The source of a device's shareable memory.
#[derive(Clone)]
pub(crate) struct DeviceSharing {
    context: Arc<DriverContext>,
    shared: Arc<Shared>,
    granule: u64,
}

impl DeviceSharing {
    /// # Errors
    /// `Unsupported` for a device whose memory has no descriptors; a driver error.
    pub(crate) fn new(memory: &Memory) -> Result<Self> {
        let (context, properties) = (memory.context.clone(), &memory.properties);
        if !properties.vmm || !properties.fd_handles {
            return Err(Error::Unsupported(
                format!("{}: the driver gives no descriptors of its memory", context.id()).into(),
            ));
        }
        let granule = context.within(|ops| ops.shared_granularity(context.ordinal()))?;
        Ok(Self { context, shared: memory.shared.clone(), granule })
    }

    /// The owner of a handle.
    fn own(&self, native: NativeMemory) -> Arc<Handle> {
        Arc::new(Handle { context: self.context.clone(), native })
    }

    /// Maps a handle for the device and its peers.
    fn map(&self, handle: Arc<Handle>, bytes: u64) -> Result<Arc<dyn SharedSegment>> {
        let (source, native) = (self.clone(), handle.native);
        let mut segment = DeviceSegment { source, handle, addr: 0, bytes, mapped: false };
        let addr = self.context.relaxed(|ops| ops.address_reserve(bytes, self.granule))?;
        segment.addr = addr;
        // SAFETY: the range was reserved just now, and the handle is the segment's own.
        self.context.relaxed(|ops| unsafe { ops.map(addr, bytes, native) })?;
        segment.mapped = true;
        let ordinal = self.context.ordinal();
        self.shared.mapped(ordinal, addr, bytes);
        self.shared.add_range(addr, bytes, Place::Device(ordinal));
        // SAFETY: the range was mapped just now.
        unsafe { self.shared.open_to_peers(&self.context, ordinal, addr, bytes) }?;
        Ok(Arc::new(segment))
    }
}

// SAFETY: the driver gives each handle and each range of addresses to one caller. It keeps memory
// of another process that is mapped here.
unsafe impl Sharing for DeviceSharing {
    fn granule(&self) -> u64 {
        self.granule
    }

    fn create(&self, bytes: u64) -> Result<Arc<dyn SharedSegment>> {
        let ordinal = self.context.ordinal();
        let handle = self.context.relaxed(|ops| ops.shared_memory_create(ordinal, bytes))?;
        self.map(self.own(handle), bytes)
    }

    fn import(&self, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn SharedSegment>> {
        if bytes == 0 || !bytes.is_multiple_of(self.granule) {
            return Err(Error::invalid(format!(
                "a shared segment of {bytes} bytes: segments of {} are multiples of {}",
                self.context.id(),
                self.granule
            )));
        }
        let refused = |what: &str, e: Error| match e {
            Error::Driver { api, code, name } => Error::invalid(format!(
                "{what} of {}: {api} says {code} ({name}); send the descriptor that the owner \
                 exported, on the same device",
                self.context.id()
            )),
            other => other,
        };
        let handle = self
            .context
            .relaxed(|ops| ops.memory_import(descriptor))
            .map_err(|e| refused("the descriptor is no shareable memory", e))?;
        self.map(self.own(handle), bytes)
            .map_err(|e| refused("the shared memory has another size", e))
    }
}

/// A handle of physical memory, released with this value.
struct Handle {
    context: Arc<DriverContext>,
    native: NativeMemory,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the value's own handle, released once.
        self.context.release_or_log(|ops| unsafe { ops.memory_release(self.native) });
    }
}

/// A segment: one handle, mapped at the segment's own addresses.
struct DeviceSegment {
    source: DeviceSharing,
    handle: Arc<Handle>,
    /// 0: none are reserved yet.
    addr: u64,
    bytes: u64,
    mapped: bool,
}

// SAFETY: the range is mapped for the device until the segment is dropped.
unsafe impl SharedSegment for DeviceSegment {
    fn addr(&self) -> u64 {
        self.addr
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    unsafe fn descriptor(&self) -> Result<OwnedFd> {
        // SAFETY: the segment has its handle until it is dropped.
        self.source.context.relaxed(|ops| unsafe { ops.memory_export(self.handle.native) })
    }

    fn alias(&self) -> Result<Arc<dyn SharedSegment>> {
        self.source.map(self.handle.clone(), self.bytes)
    }
}

impl Drop for DeviceSegment {
    fn drop(&mut self) {
        let DeviceSharing { context, shared, .. } = &self.source;
        let (addr, bytes) = (self.addr, self.bytes);
        if self.mapped {
            // The range goes first: once the driver has the addresses, another thread may get them.
            shared.remove_range(addr);
            // SAFETY: the segment's own mapping. Whoever holds the last reference says that no work
            // uses it.
            let gone = context.release(|ops| unsafe { ops.unmap(addr, bytes) });
            shared.unmapped(context.ordinal(), addr);
            if let Err(error) = gone {
                // Addresses that are mapped cannot be used again.
                tracing::warn!(%error, device = %context.id(), "a shared segment stays mapped");
                return;
            }
        }
        if addr != 0 {
            // SAFETY: the segment's own reservation, in which nothing is mapped.
            context.release_or_log(|ops| unsafe { ops.address_free(addr, bytes) });
        }
    }
}
