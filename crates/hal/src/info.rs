//! Description of a device: identity, capabilities and limits.
//!
//! This module must not know how a backend finds them out.

use crate::id::DeviceId;
use leasehold_core::{Error, Size, Text};
use std::fmt;

/// Kinds of memory of a device, by the processors that can access it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The device's own memory.
    Device,
    /// Host memory that the device reaches by DMA; on a backend without pinning, pageable host
    /// memory.
    #[doc(alias = "DevicePinnedHostAllocator")]
    Pinned,
}

/// A device's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes in all.
    pub total: u64,
    /// Bytes that were free at the time of the query.
    pub free: u64,
}

/// The description of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The device's name before opening.
    pub id: DeviceId,
    /// The product's name.
    pub name: String,
    /// A stable identity across processes, if the vendor has one; empty otherwise.
    pub uuid: String,
    /// The architectures whose kernels it runs, the most specific first, the most generic last
    /// (`cpu/x86-64-v4`, …, `cpu`).
    pub arch: Vec<String>,
    /// The number of parallel units: processors that this process may use, multiprocessors.
    pub units: u32,
    /// Memory.
    pub memory: MemoryInfo,
    /// Everything else that the backend knows, as label and value, for human readers.
    pub details: Vec<(String, String)>,
}

impl DeviceInfo {
    /// A description with only the name known.
    #[must_use]
    pub fn new(id: DeviceId, name: impl Into<String>) -> Self {
        Self {
            id,
            name: name.into(),
            uuid: String::new(),
            arch: vec![id.backend.name().to_owned()],
            units: 1,
            memory: MemoryInfo::default(),
            details: Vec::new(),
        }
    }

    /// The note on a size that the device could not even have if all of its memory were free.
    #[must_use]
    pub fn too_large(&self, bytes: u64) -> Option<Text> {
        let (id, total) = (self.id, self.memory.total);
        let text = || format!("{id} has {} in all: split it, or use a larger device", Size(total));
        (total != 0 && bytes > total).then(|| text().into())
    }

    /// Adds [that note](Self::too_large) to a report of missing memory.
    #[must_use]
    pub fn advised(&self, mut error: Error, bytes: u64) -> Error {
        if let Error::OutOfMemory(report) = &mut error {
            report.notes.extend(self.too_large(bytes));
        }
        error
    }
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.id, self.name)
    }
}

/// The capabilities of a device. Each is `false` unless the backend sets it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Caps {
    /// The host may read and write device memory at its address while no submission uses it.
    pub host_visible: bool,
    /// The device's copies reach all memory of the process at its address, so that memory of other
    /// backends needs no staging.
    pub pageable_memory_access: bool,
    /// Host memory can be pinned for DMA; without it `Pinned` memory is pageable.
    pub pinned: bool,
    /// Host timelines ([`HostTimeline`](crate::HostTimeline)), with waits before the signal.
    pub host_timelines: bool,
    /// Timestamps.
    pub timestamps: bool,
    /// Graphs.
    pub graphs: bool,
    /// Several streams can make progress at a time.
    pub concurrent_streams: bool,
    /// Host calls in streams.
    pub host_calls: bool,
    /// Library calls that take the native stream.
    pub foreign_calls: bool,
    /// The vendor's libraries can use the device's native objects. Not so over a simulated driver.
    pub vendor_libraries: bool,
    /// A stream can wait for a timeline of another backend.
    pub waits_for_any_timeline: bool,
    /// Within a stream operations may overlap unless barriers are derived from their accesses.
    pub unordered_streams: bool,
    /// Stream priorities.
    pub priorities: bool,
    /// Memory that other processes may map ([`Sharing`](crate::Sharing)).
    pub shareable: bool,
    /// A growing buffer has memory for its length. Without it, the memory of its maximum is taken
    /// at once.
    pub growing: bool,
    /// Growing buffers can be forked: memory may have several addresses.
    pub forks: bool,
    /// Multiprocessors can be divided among streams
    /// ([`Device::partition`](crate::Device::partition)).
    pub partitions: bool,
    /// Loops and branches in plans ([`Conditional`](crate::Conditional)).
    pub conditionals: bool,
}

/// The limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bindings of a dispatch.
    pub bindings: u32,
    /// Bytes of parameters of a dispatch.
    pub params: u32,
    /// The largest grid in each direction.
    pub grid: [u32; 3],
    /// Threads of a block in each direction.
    pub block: [u32; 3],
    /// Threads of a block in all.
    pub block_threads: u32,
    /// Bytes of shared memory of a block.
    pub shared: u32,
    /// Bytes of the largest buffer.
    pub buffer: u64,
    /// Streams at a time.
    pub streams: u32,
    /// The alignment that every buffer has at least.
    pub alignment: u64,
    /// The alignment that the address of a binding must have; 1 if any address is allowed.
    pub binding_alignment: u64,
}

impl Limits {
    /// Bindings that every backend takes.
    pub const BINDINGS: u32 = 30;
    /// Bytes of parameters that every backend takes.
    pub const PARAMS: u32 = 4096;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bindings: Self::BINDINGS,
            params: Self::PARAMS,
            grid: [u32::MAX, 65_535, 65_535],
            block: [1024, 1024, 64],
            block_threads: 1024,
            shared: 48 << 10,
            buffer: 1 << 47,
            streams: 1024,
            alignment: 256,
            binding_alignment: 1,
        }
    }
}

/// The constant facts of an open device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Description {
    /// The device's identity, and its memory when the device was opened.
    pub info: DeviceInfo,
    /// The device's capabilities. A capability that is `false` is `Unsupported` in every method.
    pub caps: Caps,
    /// The device's limits.
    pub limits: Limits,
}

impl Description {
    /// A device without capabilities, with the default limits.
    #[must_use]
    pub fn new(info: DeviceInfo) -> Self {
        Self { info, caps: Caps::default(), limits: Limits::default() }
    }
}
