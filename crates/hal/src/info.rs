//! What a device is, what it can do, and how much of it there is.
//!
//! This module must not know how any of it is found out.

use crate::id::DeviceId;
use std::fmt;

/// Memory of a device, by who may touch it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The device's own memory.
    Device,
    /// Host memory that the device reaches by DMA; on a backend without pinning, pageable host memory.
    #[doc(alias = "DevicePinnedHostAllocator")]
    Pinned,
}

/// A device's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes in all.
    pub total: u64,
    /// Bytes that were free when asked.
    pub free: u64,
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its name before opening.
    pub id: DeviceId,
    /// The product's name.
    pub name: String,
    /// A stable identity across processes where the vendor has one; empty otherwise.
    pub uuid: String,
    /// The architectures whose kernels it runs, the most specific first, the most generic last (`cpu/x86-64-v4`, …, `cpu`).
    pub arch: Vec<String>,
    /// How many things it does at a time: processors that this process may use, multiprocessors.
    pub units: u32,
    /// Memory.
    pub memory: MemoryInfo,
    /// Everything else that the backend knows, as label and value, for people.
    pub details: Vec<(String, String)>,
}

impl DeviceInfo {
    /// A device with nothing known but its name.
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
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.id, self.name)
    }
}

/// What a device can do. Everything is `false` unless the backend says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Caps {
    /// Device memory may be read and written by the host at its address, while no submission uses it.
    pub host_visible: bool,
    /// Host memory can be pinned for DMA; without it `Pinned` memory is pageable.
    pub pinned: bool,
    /// Timelines that the host signals ([`Gate`](crate::Gate)), and waits before the signal.
    pub gates: bool,
    /// Time stamps.
    pub timestamps: bool,
    /// Graphs.
    pub graphs: bool,
    /// Several streams can make progress at a time.
    pub concurrent_streams: bool,
    /// Host calls in streams.
    pub host_calls: bool,
    /// Library calls that take the native stream.
    pub foreign_calls: bool,
    /// A stream can wait for a line of another backend.
    pub waits_for_any_line: bool,
    /// Within a stream operations may overlap unless barriers are derived from their accesses.
    pub unordered_streams: bool,
    /// Stream priorities.
    pub priorities: bool,
}

/// How much of everything.
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
    /// The alignment that the address of a binding must have; 1 where a binding may begin anywhere.
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
