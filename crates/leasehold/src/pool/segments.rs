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

#[derive(Default)]
struct Table {
    made: u64,
    /// By address, with their numbers in the order in which they were made.
    segments: BTreeMap<u64, (u64, Arc<dyn SharedSegment>)>,
}

/// Whole segments of a device's shareable memory. Clones are one: an allocator gets one, the other
/// finds its segments.
#[derive(Clone)]
pub(super) struct Segments {
    sharing: Arc<dyn Sharing>,
    table: Arc<Mutex<Table>>,
    calls: Arc<AtomicU64>,
}

impl Segments {
    /// Segments of the runtime's device.
    ///
    /// # Errors
    /// `Unsupported` on a device whose memory other processes cannot map; the driver's own.
    pub(super) fn new(runtime: &Runtime) -> Result<Self> {
        let sharing = runtime.raw_device().sharing()?;
        Ok(Self { sharing, table: Arc::default(), calls: Arc::default() })
    }

    /// In the order in which they were made.
    pub(super) fn all(&self) -> Vec<Arc<dyn SharedSegment>> {
        let mut all: Vec<_> = self.table.lock().segments.values().cloned().collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        all.into_iter().map(|(_, segment)| segment).collect()
    }

    /// The segment that holds all of a range.
    pub(super) fn holding(&self, addr: u64, bytes: u64) -> Option<Arc<dyn SharedSegment>> {
        let end = addr.checked_add(bytes)?;
        let table = self.table.lock();
        let (_, (_, segment)) = table.segments.range(..=addr).next_back()?;
        (end <= segment.addr() + segment.bytes()).then(|| segment.clone())
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segments({})", self.table.lock().segments.len())
    }
}

// SAFETY: each segment is new memory of its own, and is mapped while the table has it.
unsafe impl Backing for Segments {
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
        let mut table = self.table.lock();
        table.made += 1;
        let numbered = (table.made, segment);
        table.segments.insert(chunk.addr, numbered);
        Ok(chunk)
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let segment = self.table.lock().segments.remove(&chunk.addr);
        // Without the lock: this may be the last reference, whose end asks the driver.
        drop(segment);
        Ok(())
    }

    unsafe fn release(&self, _: u64, _: u64) {}

    fn driver_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}
