//! The partitions of a device: a pool that divides the device once at a time.
//!
//! # The end of a partition
//! The streams on a partition hold it, and so do the graphs with nodes of it. A stream that was
//! dropped with work pending holds it until the work is over. A partition whose last holder is gone
//! goes to a retire list, because its end may block on the driver. The next request for a partition
//! or a stream ends it.
//!
//! This module must not know how a driver divides a device.

use crate::{DeviceId, Partition, PartitionSize, StreamDesc, partition};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolStats, Recycle, Resource, Result, RetireList, SlotPool,
    tags,
};
use std::cell::Cell;
use std::fmt;
use std::hash::{Hash, Hasher};

/// The properties of a stream that its pool compares.
#[derive(Debug, Clone, Default)]
pub struct StreamKey {
    /// The priority, in the driver's numbers.
    pub priority: i32,
    /// The partition, which the stream keeps.
    pub partition: Option<Lease<Partition>>,
}

impl StreamKey {
    /// A stream of this priority on all of the device.
    #[must_use]
    pub fn new(priority: i32) -> Self {
        Self { priority, partition: None }
    }
}

impl PartialEq for StreamKey {
    fn eq(&self, other: &Self) -> bool {
        self.priority == other.priority
            && partition::is_same(self.partition.as_ref(), other.partition.as_ref())
    }
}

impl Eq for StreamKey {}

impl Hash for StreamKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.priority.hash(state);
    }
}

struct Payloads(Arc<RetireList<Partition>>);

impl Resource for Payloads {
    type Payload = Partition;
    type Request<'a> = Cell<Option<Partition>>;
    const NAME: &'static str = "partition";

    fn create(
        &self,
        _: Handle<tags::Partition>,
        made: &Cell<Option<Partition>>,
    ) -> Result<Partition> {
        made.take().ok_or_else(|| Error::state("a partition is entered once"))
    }

    fn recycle(&self, _: &mut Partition) -> Recycle {
        Recycle::Destroy
    }

    fn destroy(&self, partition: Partition) {
        self.0.push(partition);
    }
}

/// The turn to divide a device, given back by the drop.
struct Turn<'a>(&'a AtomicBool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Owns the partitions of a device.
pub struct Partitions {
    device: DeviceId,
    pool: SlotPool<Payloads>,
    retired: Arc<RetireList<Partition>>,
    /// A thread divides the device.
    dividing: AtomicBool,
}

impl Partitions {
    /// A device that is not divided.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(device: DeviceId) -> Result<Self> {
        let retired = Arc::new(RetireList::new());
        let pool = SlotPool::new(Payloads(retired.clone()), PoolConfig::default())?;
        Ok(Self { device, pool, retired, dividing: AtomicBool::new(false) })
    }

    /// Divides the device of `units` multiprocessors by `divide`, which makes a partition for each
    /// size. The caller has collected the streams that are over.
    ///
    /// # Errors
    /// As `hal::Device::partition`.
    pub fn divide(
        &self,
        sizes: &[PartitionSize],
        units: u32,
        divide: impl FnOnce() -> Result<Vec<Partition>>,
    ) -> Result<Vec<Lease<Partition>>> {
        PartitionSize::check(sizes, units)?;
        if self.dividing.swap(true, Ordering::Acquire) {
            return Err(Error::state(format!(
                "{}: another thread divides the device now; try again",
                self.device
            )));
        }
        let _turn = Turn(&self.dividing);
        self.collect();
        let live = self.pool.stats().live;
        if live > 0 {
            return Err(Error::state(format!(
                "{}: {live} partitions of a former division are there; drop them, their streams and graphs, and let their work end",
                self.device
            )));
        }
        let made = divide()?;
        made.into_iter().map(|one| self.pool.acquire(&Cell::new(Some(one)))).collect()
    }

    /// Checks that a stream can be made as described.
    ///
    /// # Errors
    /// `InvalidArgument` for a partition that another device or another backend made, and for one
    /// that was closed.
    pub fn check(&self, desc: &StreamDesc) -> Result<()> {
        self.collect();
        let Some(partition) = &desc.partition else { return Ok(()) };
        let own = self.pool.lease(partition.handle()).is_ok_and(|own| own.same(partition));
        if !own {
            return Err(foreign(self.device, partition));
        }
        if partition.is_closed() {
            return Err(Error::invalid(format!(
                "{partition:?} takes no new streams; divide {} again, or make the stream on another partition",
                self.device
            )));
        }
        Ok(())
    }

    /// Ends the partitions that have no holder. May block on the driver. If there are none, the
    /// call is one load.
    pub fn collect(&self) {
        self.retired.drain(|_| true, drop);
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// Shuts the pool down.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.collect();
        self.pool.shutdown()
    }
}

/// The error for a partition that a device did not make.
#[cold]
fn foreign(device: DeviceId, partition: &Lease<Partition>) -> Error {
    Error::invalid(format!(
        "{partition:?} is not of this runtime's {device}; make the stream by the runtime that made the partition"
    ))
}

/// Refuses a stream on a partition of another device, for a device that has none itself.
///
/// # Errors
/// `InvalidArgument`.
pub fn refuse(device: DeviceId, desc: &StreamDesc) -> Result<()> {
    desc.partition.as_ref().map_or(Ok(()), |partition| Err(foreign(device, partition)))
}

impl Drop for Partitions {
    fn drop(&mut self) {
        self.collect();
    }
}

impl fmt::Debug for Partitions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Partitions").field(&self.pool.stats()).finish()
    }
}
