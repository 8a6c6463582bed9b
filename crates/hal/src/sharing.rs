//! Memory that other processes and the vendor's libraries may map.
//!
//! Such memory comes in segments. A segment has one native handle, which spans all of it, and
//! neither moves nor goes while somebody holds it. Libraries that map memory of other processes
//! (NCCL, RDMA) want exactly this; ordinary memory consists of many pieces, which move.
//!
//! This module must not know who maps the memory.

use leasehold_core::Result;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A device's source of shareable memory.
///
/// # Safety
/// The author vouches:
/// - [`create`](Self::create) gives memory that nobody else in this process has, as long as asked
///   for at least, which the device reaches at its address.
/// - [`import`](Self::import) refuses a descriptor whose memory could vanish while it is mapped.
pub unsafe trait Sharing: Send + Sync {
    /// The size in bytes, a power of two, of which the sizes of segments are multiples. Constant.
    fn granule(&self) -> u64;

    /// A new segment of `bytes`, a multiple of the granule. May block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory`; `DeviceLost`; the driver's.
    fn create(&self, bytes: u64) -> Result<Arc<dyn SharedSegment>>;

    /// Maps a segment of `bytes` that another process, or this one, made on the same device. May
    /// block on the driver.
    ///
    /// # Errors
    /// `InvalidArgument` for a descriptor that is no shareable memory of this device, or that has
    /// fewer bytes; `OutOfMemory` for addresses; `DeviceLost`; the driver's.
    fn import(&self, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn SharedSegment>>;
}

/// Memory with one native handle, mapped for its device. It ends with its last reference, which may
/// block on the driver. Other processes that have mapped the memory keep theirs.
///
/// # Safety
/// - [`addr`](Self::addr) and [`bytes`](Self::bytes) are constant. The device may read and write
///   the range until the last reference is dropped.
pub unsafe trait SharedSegment: Send + Sync {
    /// The address.
    fn addr(&self) -> u64;

    /// The length in bytes.
    fn bytes(&self) -> u64;

    /// A new descriptor of the memory, which keeps the memory alive without this object.
    ///
    /// # Errors
    /// The system's, such as too many open files; the driver's.
    ///
    /// # Safety
    /// - Whoever gets the descriptor reads and writes the memory only in an order with the device's
    ///   and the host's own uses of it.
    unsafe fn descriptor(&self) -> Result<OwnedFd>;

    /// The same memory at another address of the same device. May block on the driver.
    ///
    /// Work that a stream orders sees the same bytes through both.
    ///
    /// # Errors
    /// `OutOfMemory` for addresses; `DeviceLost`; the driver's.
    fn alias(&self) -> Result<Arc<dyn SharedSegment>>;
}
