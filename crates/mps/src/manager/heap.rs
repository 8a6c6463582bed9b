//! Heaps: large ranges of memory that buffers are placed in. A device has any number of them.
//!
//! This module must not know who places the buffers.

use super::opened::{OpenedDevice, Owned};
use super::pool::{DeviceResource, PoolOf};
use crate::config::MpsConfig;
use crate::driver::ops::{HeapDesc, NativeHeap};
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, HeapHandle, Index, Lease, PoolConfig, Resource, Result, Tagged, tags,
};
use std::marker::PhantomPinned;

/// A heap.
#[derive(Debug)]
pub struct HeapState {
    pub(super) owned: Owned<NativeHeap>,
    desc: HeapDesc,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl HeapState {
    /// The driver's heap.
    pub fn native(&self) -> NativeHeap {
        self.owned.native
    }

    /// Its size and options.
    pub fn desc(&self) -> &HeapDesc {
        &self.desc
    }

    /// Bytes that its buffers use. Does not block.
    ///
    /// # Errors
    /// A driver error.
    pub fn used(&self) -> Result<u64> {
        // SAFETY: this value keeps the heap live.
        unsafe { self.owned.device.ops.heap_used(self.owned.native) }
    }
}

impl Tagged for HeapState {
    type Tag = tags::Heap;
}

/// The heaps of a device, as their pool makes them.
#[derive(Debug)]
pub struct Heaps {
    device: Arc<OpenedDevice>,
}

impl Resource for Heaps {
    type Payload = HeapState;
    type Request<'a> = HeapDesc;
    const NAME: &'static str = "heap";

    fn create(&self, _: Handle<tags::Heap>, desc: &HeapDesc) -> Result<HeapState> {
        // SAFETY: the device is open as long as this value holds it.
        let native = unsafe { self.device.ops.heap_create(self.device.native, desc)? };
        let owned = Owned::new(&self.device, native);
        Ok(HeapState { owned, desc: *desc, _place: PhantomPinned })
    }

    /// An idle heap has no buffers, because each buffer holds its heap.
    fn fits(&self, idle: &mut HeapState, desc: &HeapDesc) -> bool {
        idle.desc == *desc
    }
}

fn check(desc: &HeapDesc) -> Result<()> {
    if desc.size == 0 {
        return Err(Error::invalid("a heap of no bytes"));
    }
    Ok(())
}

impl DeviceResource for Heaps {
    fn on(device: &Arc<OpenedDevice>, _: &MpsConfig) -> (Self, PoolConfig) {
        (Self { device: device.clone() }, PoolConfig::default())
    }
}

/// Owns the heaps of a device.
#[doc(alias = "MpsHeapManager")]
pub type HeapManager = PoolOf<Heaps, (Index<tags::Heap>, HeapDesc)>;

impl HeapManager {
    /// Acquires a heap: an idle one of the same size and options, or a new one. A new one may block
    /// on the system.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes; `OutOfMemory`; a driver error.
    pub fn acquire(&self, desc: &HeapDesc) -> Result<Lease<HeapState>> {
        check(desc)?;
        self.manager.acquire(desc)
    }

    /// The manager's own heap number `index` of this size and these options. The call makes the
    /// heap unless it is alive. The manager keeps the heap until its [release](Self::release).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, index: Index<tags::Heap>, desc: &HeapDesc) -> Result<HeapHandle> {
        check(desc)?;
        self.manager.get_or_create(&(index, *desc), desc).map(|heap| heap.handle())
    }
}
