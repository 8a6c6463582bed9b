//! Buffers: native objects over memory of a heap, or with memory of their own.
//!
//! A buffer in a heap holds a lease on the heap. The pool keeps idle buffers without a heap for
//! requests of the same size and options.
//!
//! This module must not know who writes the memory.

use super::heap::HeapState;
use super::opened::{OpenedDevice, Owned};
use super::pool::{DeviceResource, PoolOf};
use crate::config::MpsConfig;
use crate::driver::ops::{MemoryOptions, NativeBuffer};
use leasehold_core::sync::Arc;
use leasehold_core::{
    BufferHandle, Error, Handle, Lease, PoolConfig, Recycle, Resource, Result, Tagged, tags,
};
use std::marker::PhantomPinned;

/// A buffer.
#[derive(Debug)]
pub struct BufferState {
    owned: Owned<NativeBuffer>,
    addr: u64,
    contents: Option<u64>,
    bytes: u64,
    options: MemoryOptions,
    heap: Option<Lease<HeapState>>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl BufferState {
    /// The driver's buffer.
    pub fn native(&self) -> NativeBuffer {
        self.owned.native
    }

    /// The device address of the first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// The host address of the first byte; `None` for private memory.
    pub fn contents(&self) -> Option<u64> {
        self.contents
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Whether the buffer has no bytes, which is never so: Metal has no such buffers.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The options of its memory.
    pub fn options(&self) -> MemoryOptions {
        self.options
    }

    /// The heap of its memory, if it has no memory of its own.
    pub fn heap(&self) -> Option<&Lease<HeapState>> {
        self.heap.as_ref()
    }
}

impl Tagged for BufferState {
    type Tag = tags::Buffer;
}

/// A request: bytes, options, and a heap with an offset.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    bytes: u64,
    options: MemoryOptions,
    place: Option<(&'a Lease<HeapState>, Option<u64>)>,
}

/// The buffers of a device, as their pool makes them.
#[derive(Debug)]
pub struct Buffers {
    device: Arc<OpenedDevice>,
}

impl Resource for Buffers {
    type Payload = BufferState;
    type Request<'a> = Request<'a>;
    const NAME: &'static str = "buffer";

    fn create(&self, _: Handle<tags::Buffer>, request: &Request<'_>) -> Result<BufferState> {
        let Request { bytes, options, place } = *request;
        let ops = &self.device.ops;
        let native = match place {
            // SAFETY: the lease keeps the heap live. Options and range are those of the heap, as
            // `BufferManager::place` checks.
            Some((heap, offset)) => unsafe {
                ops.heap_buffer(heap.native(), bytes, options, offset)?
            },
            // SAFETY: the device is open as long as this value holds it.
            None => unsafe { ops.buffer_create(self.device.native, bytes, options)? },
        };
        let owned = Owned::new(&self.device, native);
        // SAFETY: `owned` keeps the buffer live.
        let (addr, contents) =
            unsafe { (ops.buffer_address(native)?, ops.buffer_contents(native)?) };
        let heap = place.map(|(heap, _)| heap.clone());
        Ok(BufferState { owned, addr, contents, bytes, options, heap, _place: PhantomPinned })
    }

    fn fits(&self, idle: &mut BufferState, request: &Request<'_>) -> bool {
        request.place.is_none()
            && idle.heap.is_none()
            && (idle.bytes, idle.options) == (request.bytes, request.options)
    }

    fn recycle(&self, buffer: &mut BufferState) -> Recycle {
        // A buffer in a heap ends at once, because it holds the heap.
        if buffer.heap.is_some() { Recycle::Destroy } else { Recycle::Keep }
    }
}

impl DeviceResource for Buffers {
    fn on(device: &Arc<OpenedDevice>, _: &MpsConfig) -> (Self, PoolConfig) {
        (Self { device: device.clone() }, PoolConfig::default())
    }
}

/// Owns the buffers of a device.
#[doc(alias = "MpsBufferManager")]
pub type BufferManager = PoolOf<Buffers, (u64, MemoryOptions)>;

impl BufferManager {
    fn check(&self, bytes: u64) -> Result<()> {
        let most = self.resources()?.device.properties.max_buffer;
        if bytes == 0 || bytes > most {
            return Err(Error::invalid(format!("a buffer of {bytes} bytes: want 1 to {most}")));
        }
        Ok(())
    }

    /// Acquires a buffer with memory of its own: an idle one of the same size and options, or a new
    /// one. A new one may block on the system. The content of the memory is not defined.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes or more than the device's maximum; `OutOfMemory`; a driver
    /// error.
    pub fn acquire(&self, bytes: u64, options: MemoryOptions) -> Result<Lease<BufferState>> {
        self.check(bytes)?;
        self.manager.acquire(&Request { bytes, options, place: None })
    }

    /// Makes a buffer in a heap: at an offset if the heap has placement, and only then. Does not
    /// block. Two buffers at overlapping offsets share their bytes.
    ///
    /// # Errors
    /// - `InvalidArgument` for a heap of another device, an offset that does not agree with the
    ///   heap's kind or with its alignment, and a range outside of the heap.
    /// - `OutOfMemory` for a heap without room.
    /// - A driver error.
    pub fn place(
        &self,
        heap: &Lease<HeapState>,
        bytes: u64,
        offset: Option<u64>,
    ) -> Result<Lease<BufferState>> {
        self.check(bytes)?;
        let desc = heap.desc();
        let device = &self.resources()?.device;
        let (ops, options) = (&device.ops, desc.options);
        if !Arc::ptr_eq(&heap.owned.device, device) {
            return Err(Error::invalid("the heap belongs to another device"));
        }
        if desc.placement != offset.is_some() {
            return Err(Error::invalid("an offset is for heaps with placement, and they need one"));
        }
        if let Some(at) = offset {
            // SAFETY: the device is open as long as this manager holds it.
            let fit = unsafe { ops.heap_buffer_size(device.native, bytes, options)? };
            let end = at.checked_add(bytes).filter(|&end| end <= desc.size);
            if !at.is_multiple_of(fit.align.max(1)) || end.is_none() {
                return Err(Error::invalid(format!(
                    "{bytes} bytes at {at} of a heap of {} bytes, whose offsets are multiples of {}",
                    desc.size, fit.align
                )));
            }
        }
        self.manager.acquire(&Request { bytes, options, place: Some((heap, offset)) })
    }

    /// The manager's own buffer of this size and these options. The call makes the buffer unless it
    /// is alive. The manager keeps the buffer until its [release](Self::release).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, bytes: u64, options: MemoryOptions) -> Result<BufferHandle> {
        self.check(bytes)?;
        let request = Request { bytes, options, place: None };
        self.manager.get_or_create(&(bytes, options), &request).map(|buffer| buffer.handle())
    }
}
