//! A device as its resources hold it, and the reference that a resource has of its native object.
//!
//! # Residency
//! A device has one residency set, which all its queues have. The members are the heaps of the
//! allocators. One thread at a time may use a set, so the set has a lock. The lock is a leaf, and
//! the calls under it wait for no work. Without sets, the driver makes a buffer resident that an
//! encoder binds.
//!
//! This module must not know which resources exist.

use crate::driver::ops::{
    Allocation, DeviceProperties, MpsSlowOps, NativeBuffer, NativeDevice, NativeHeap, NativeObject,
    NativeQueue, NativeResidencySet, Storage,
};
use crate::shared::Shared;
use crate::spans::Alias;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result};
use leasehold_hal::{BackendKind, DeviceId};
use std::fmt;

/// The members that a residency set has space for at first.
const MEMBERS: u32 = 64;

/// A device's native reference and properties. The drop releases the reference.
pub struct OpenedDevice {
    pub(crate) ops: Arc<dyn MpsSlowOps>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) native: NativeDevice,
    pub(crate) id: DeviceId,
    pub(crate) properties: DeviceProperties,
    /// The residency set, made at its first use.
    residency: Mutex<Option<NativeResidencySet>>,
}

impl OpenedDevice {
    /// All devices of a driver.
    ///
    /// # Errors
    /// `Unavailable` without a device or with implausible properties; a driver error.
    pub(crate) fn all(shared: &Arc<Shared>) -> Result<Vec<Arc<Self>>> {
        let ops = &shared.ops;
        // Each reference has an owner before the next call can fail.
        let natives = ops.devices()?;
        let owned = natives.into_iter().map(|n| Reference { ops: &**ops, native: Some(n) });
        let owned: Vec<_> = owned.collect();
        let open = |(ordinal, mut reference): (u32, Reference<'_>)| {
            let native = reference.native.unwrap_or_default();
            // SAFETY: the driver made the handle, and `reference` keeps it live.
            let properties = unsafe { ops.device_properties(native)? };
            properties.check(ordinal)?;
            let id = DeviceId::new(BackendKind::Mps, ordinal);
            reference.native = None;
            Ok(Arc::new(Self {
                ops: ops.clone(),
                shared: shared.clone(),
                native,
                id,
                properties,
                residency: Mutex::new(None),
            }))
        };
        let all: Vec<Arc<Self>> = (0..).zip(owned).map(open).collect::<Result<_>>()?;
        shared.set_devices(all.len() as u32);
        Ok(all)
    }

    /// One device of a driver, for the managers' test hooks.
    #[cfg(feature = "test-hooks")]
    pub(crate) fn one(ops: Arc<dyn MpsSlowOps>, device: DeviceId) -> Result<Arc<Self>> {
        let all = Self::all(&Arc::new(Shared::new(ops, crate::MpsConfig::default())))?;
        let found = all.into_iter().find(|opened| opened.id == device);
        found.ok_or_else(|| leasehold_core::Error::NotFound(device.to_string().into()))
    }

    /// Makes calls with the residency set, if the system has such sets. The first call makes it.
    fn with_set(&self, calls: impl FnOnce(NativeResidencySet) -> Result<()>) -> Result<()> {
        if !self.properties.residency_sets {
            return Ok(());
        }
        let mut residency = self.residency.lock();
        let set = match *residency {
            Some(set) => set,
            // SAFETY: this value keeps the device live.
            None => *residency.insert(unsafe { self.ops.residency_create(self.native, MEMBERS)? }),
        };
        calls(set)
    }

    /// Makes a heap resident for all later work of the device's queues. May block on the system.
    ///
    /// # Errors
    /// A driver error. Nothing has changed.
    ///
    /// # Safety
    /// - The heap is live and of this device. [`evict`](Self::evict) is called before its release.
    pub(crate) unsafe fn make_resident(&self, heap: NativeHeap) -> Result<()> {
        let (ops, member) = (&self.ops, Allocation::Heap(heap));
        self.with_set(|set| {
            // SAFETY: the set lives as long as this value, and its lock is held. The caller vouches
            // for the heap.
            unsafe {
                ops.residency_add(set, member)?;
                ops.residency_commit(set).inspect_err(|_| {
                    // The first error is reported.
                    let _ = ops.residency_remove(set, member);
                })
            }
        })
    }

    /// Reverts [`make_resident`](Self::make_resident). May block on the system.
    ///
    /// # Errors
    /// A driver error. Nothing has changed.
    ///
    /// # Safety
    /// - The heap is live and of this device.
    pub(crate) unsafe fn evict(&self, heap: NativeHeap) -> Result<()> {
        let (ops, member) = (&self.ops, Allocation::Heap(heap));
        self.with_set(|set| {
            // SAFETY: the set lives as long as this value, and its lock is held. The caller vouches
            // for the heap.
            unsafe {
                ops.residency_remove(set, member)?;
                ops.residency_commit(set).inspect_err(|_| {
                    // The first error is reported.
                    let _ = ops.residency_add(set, member);
                })
            }
        })
    }

    /// The buffer and the offset by which this device reaches memory of the backend. `native` is
    /// the number of the spanning buffer, as bindings have it, or 0 for an address of shared
    /// storage. Another device's segment gets an alias at its first use. Does not block.
    ///
    /// # Errors
    /// `Unsupported` for memory that is not the backend's, or is another device's and private; a
    /// driver error.
    pub(crate) fn reach(
        self: &Arc<Self>,
        native: u64,
        addr: u64,
        bytes: u64,
    ) -> Result<(NativeBuffer, u64)> {
        let (spans, own) = (&self.shared.spans, self.id.ordinal);
        let Some(place) = spans.of(native, addr, bytes) else {
            let text =
                format!("{bytes} bytes at {addr:#x} are not Metal's; {} reaches no other", self.id);
            return Err(Error::Unsupported(text.into()));
        };
        if place.device == own {
            return Ok((place.native, place.offset));
        }
        if let Some(alias) = spans.alias(place.native, own) {
            return Ok((alias, place.offset));
        }
        let segment = spans.segment(place.native).filter(|s| s.storage == Storage::Shared);
        let Some(segment) = segment else {
            let text =
                format!("{} does not reach private storage of device {}", self.id, place.device);
            return Err(Error::Unsupported(text.into()));
        };
        // SAFETY: the device is open. The segment is memory of this process in whole pages, and its
        // aliases end before it.
        let alias = unsafe { self.ops.buffer_wrap(self.native, segment.addr, segment.bytes)? };
        let keep = Box::new(Owned::new(self, alias));
        let alias = spans.add_alias(place.native, own, Alias { native: alias, keep });
        Ok((alias, place.offset))
    }

    /// Makes the set's members resident for a queue's work.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Safety
    /// - The queue is live and of this device, and is released before this value is dropped.
    pub(crate) unsafe fn attach(&self, queue: NativeQueue) -> Result<()> {
        // SAFETY: the set lives as long as this value. The caller vouches for the queue.
        self.with_set(|set| unsafe { self.ops.queue_add_set(queue, set) })
    }
}

impl Drop for OpenedDevice {
    fn drop(&mut self) {
        if let Some(set) = self.residency.get_mut().take() {
            // SAFETY: this value owns the reference. All queues of the device are gone, because
            // each holds the device.
            unsafe { self.ops.release(set.into()) };
        }
        // SAFETY: this value owns the reference, and all objects of the device are gone, because
        // each holds the device.
        unsafe { self.ops.release(self.native.into()) };
    }
}

impl fmt::Debug for OpenedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.id, self.properties.name)
    }
}

/// The reference of a device that is not open yet. The drop releases it, unless it was taken.
struct Reference<'a> {
    ops: &'a dyn MpsSlowOps,
    native: Option<NativeDevice>,
}

impl Drop for Reference<'_> {
    fn drop(&mut self) {
        if let Some(native) = self.native.take() {
            // SAFETY: this value owns the reference, and nothing else uses the handle.
            unsafe { self.ops.release(native.into()) };
        }
    }
}

/// The number of resources of a kind that a part of the backend holds.
#[derive(Debug, Default)]
pub(crate) struct Holdings(Arc<AtomicU64>);

/// One resource of [`Holdings`]. It is dropped after the lease.
#[derive(Debug)]
pub(crate) struct Held(Arc<AtomicU64>);

impl Holdings {
    /// Counts one more.
    pub(crate) fn hold(&self) -> Held {
        self.0.fetch_add(1, Ordering::AcqRel);
        Held(self.0.clone())
    }

    /// The number (a snapshot).
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A native object of a device. The drop releases it.
pub(crate) struct Owned<T: Copy + Into<NativeObject>> {
    pub(crate) device: Arc<OpenedDevice>,
    pub(crate) native: T,
}

impl<T: Copy + Into<NativeObject>> Owned<T> {
    /// Takes the reference that the driver has just returned.
    pub(crate) fn new(device: &Arc<OpenedDevice>, native: T) -> Self {
        Self { device: device.clone(), native }
    }
}

impl<T: Copy + Into<NativeObject>> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: this value owns the reference. Uncompleted work does not use the object, because
        // the work's submitter holds a lease (a rule of the managers).
        unsafe { self.device.ops.release(self.native.into()) };
    }
}

impl<T: Copy + Into<NativeObject>> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let object: NativeObject = self.native.into();
        write!(f, "{object:?} of {}", self.device.id)
    }
}
