//! The backing of shareable pools: whole segments of a device's shareable memory.
//!
//! A segment is counted: by the pool while it has it, and by exports and registrations. The last
//! one unmaps it. So the allocator may give a segment back that a library still maps.
//!
//! This module must not know how blocks are placed.

use crate::runtime::Runtime;
use leasehold_alloc::{Backing, BackingCaps, Chunk};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result};
use leasehold_hal::{SharedSegment, Sharing};
use std::collections::BTreeMap;
use std::fmt;

/// The segments of a pool.
#[derive(Default)]
struct Segments(Mutex<Table>);

#[derive(Default)]
struct Table {
    made: u64,
    /// By address, with their numbers in the order in which they were made.
    segments: BTreeMap<u64, (u64, Arc<dyn SharedSegment>)>,
}

impl Segments {
    /// In the order in which they were made.
    fn all(&self) -> Vec<Arc<dyn SharedSegment>> {
        let mut all: Vec<_> = self.0.lock().segments.values().cloned().collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        all.into_iter().map(|(_, segment)| segment).collect()
    }

    /// The segment that holds all of a range.
    fn holding(&self, addr: u64, bytes: u64) -> Option<Arc<dyn SharedSegment>> {
        let end = addr.checked_add(bytes)?;
        let table = self.0.lock();
        let (_, (_, segment)) = table.segments.range(..=addr).next_back()?;
        (end <= segment.addr() + segment.bytes()).then(|| segment.clone())
    }
}

/// The memory of an allocator that other processes may map: whole segments of a device's shareable
/// memory. Clones are one: an allocator gets one, the other finds its segments.
///
/// For pools of one's own; [`ShareablePool`](super::ShareablePool) is one that safe programs use.
#[derive(Clone)]
pub struct ShareableMemory {
    sharing: Arc<dyn Sharing>,
    segments: Arc<Segments>,
    calls: Arc<AtomicU64>,
}

impl ShareableMemory {
    /// Memory of the runtime's device.
    ///
    /// # Errors
    /// `Unsupported` on a device whose memory other processes cannot map; the driver's own.
    pub fn new(runtime: &Runtime) -> Result<Self> {
        let sharing = runtime.raw_device().sharing()?;
        Ok(Self { sharing, segments: Arc::default(), calls: Arc::default() })
    }

    /// The segments that there are, in the order in which they were made.
    #[must_use]
    pub fn segments(&self) -> Vec<Arc<dyn SharedSegment>> {
        self.segments.all()
    }

    /// The segment that holds all of a range.
    #[must_use]
    pub fn holding(&self, addr: u64, bytes: u64) -> Option<Arc<dyn SharedSegment>> {
        self.segments.holding(addr, bytes)
    }
}

impl fmt::Debug for ShareableMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShareableMemory({} segments)", self.segments.all().len())
    }
}

// SAFETY: each segment is new memory of its own, and is mapped while the table has it.
unsafe impl Backing for ShareableMemory {
    fn caps(&self) -> BackingCaps {
        let granule = self.sharing.granule();
        let defaults = BackingCaps::default();
        BackingCaps { vmm: false, granule, segment: defaults.segment.max(granule), ..defaults }
    }

    fn reserve(&self, _: u64) -> Result<u64> {
        Err(Error::Unsupported("shareable memory comes in segments".into()))
    }

    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        if at.is_some() {
            return Err(Error::Unsupported("shareable memory comes in segments".into()));
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        let segment = self.sharing.create(bytes)?;
        let chunk = Chunk { addr: segment.addr(), bytes: segment.bytes(), native: 0 };
        let mut table = self.segments.0.lock();
        table.made += 1;
        let numbered = (table.made, segment);
        table.segments.insert(chunk.addr, numbered);
        Ok(chunk)
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let segment = self.segments.0.lock().segments.remove(&chunk.addr);
        // Without the lock: this may be the last reference, whose end asks the driver.
        drop(segment);
        Ok(())
    }

    unsafe fn release(&self, _: u64, _: u64) {}

    fn driver_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}
