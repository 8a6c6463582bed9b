//! Partitions of the simulated driver.
//!
//! A driver's partition comes in whole groups of multiprocessors, as on the real device: a size is
//! rounded up. The rest may be of any size.
//!
//! This module must not know managers.

use super::SimDriver;
use super::tables::Partition;
use leasehold_core::{Error, Result};
use leasehold_cuda::driver::ops::{
    NativePartition, NativeStream, PartitionOps, no_partitions, too_small,
};
use leasehold_hal::PartitionSize;
use std::ops::Range;

/// The multiprocessors of a group, on devices of compute capability 9.0.
const GROUP: u32 = 8;

/// The multiprocessors of each size, one range after the other.
fn ranges(sizes: &[PartitionSize], units: u32) -> Result<Vec<Range<u32>>> {
    let mut from = 0;
    let mut ranges = Vec::with_capacity(sizes.len());
    for size in sizes {
        let count = match *size {
            // Multiprocessors beyond the whole groups go with the last group.
            PartitionSize::Sms(count) if from + count <= units => {
                count.next_multiple_of(GROUP).min(units - from)
            }
            PartitionSize::Sms(_) => 0,
            _ => units - from,
        };
        if count == 0 {
            return Err(too_small(sizes, units, GROUP));
        }
        ranges.push(from..from + count);
        from += count;
    }
    Ok(ranges)
}

impl PartitionOps for SimDriver {
    fn partitions_create(
        &self,
        ordinal: u32,
        sizes: &[PartitionSize],
    ) -> Result<Vec<(NativePartition, u32)>> {
        const API: &str = "cuGreenCtxCreate";
        if !self.has_partitions() {
            return Err(no_partitions(self.config.version));
        }
        self.enter("cuDeviceGetDevResource")?;
        self.check_ordinal("cuDeviceGetDevResource", ordinal)?;
        let ranges = ranges(sizes, self.config.machine.units)?;
        let mut made = Vec::with_capacity(ranges.len());
        for units in ranges {
            let count = units.end - units.start;
            let one = self.enter(API).and_then(|scope| {
                let id = self
                    .machine
                    .partition_create(ordinal, units)
                    .map_err(|e| self.told(API, ordinal, 0, e))?;
                let mut tables = self.lock();
                let handle = tables.handle();
                tables.partitions.insert(handle, Partition { context: scope.context, id });
                Ok((NativePartition(handle), count))
            });
            match one {
                Ok(one) => made.push(one),
                Err(e) => {
                    for (partition, _) in made {
                        self.end_partition(partition);
                    }
                    return Err(e);
                }
            }
        }
        Ok(made)
    }

    /// Streams that are left are lost: the driver refuses them from now on.
    unsafe fn partition_destroy(&self, partition: NativePartition) -> Result<()> {
        const API: &str = "cuGreenCtxDestroy";
        let (scope, told) = self.enter_teardown(API)?;
        self.lock().partition(API, scope, partition)?;
        let left = self.end_partition(partition);
        if left > 0 {
            self.lock().leaks.push(format!("{left} streams of a partition"));
        }
        told
    }

    unsafe fn partition_stream(
        &self,
        partition: NativePartition,
        _priority: i32,
    ) -> Result<NativeStream> {
        const API: &str = "cuGreenCtxStreamCreate";
        let scope = self.enter(API)?;
        let found = self.lock().partition(API, scope, partition)?;
        self.new_stream(API, scope, Some((partition, found.id)))
    }
}

impl SimDriver {
    /// Destroys a partition, and returns how many streams it had.
    fn end_partition(&self, partition: NativePartition) -> usize {
        let mut tables = self.lock();
        let gone = tables.partitions.remove(&partition.0);
        let left = tables.streams.values().filter(|s| s.partition == partition.0).count();
        drop(tables);
        if let Some(gone) = gone {
            // A lost device has no partitions.
            let _: std::result::Result<(), Error> = self.machine.partition_destroy(gone.id);
        }
        left
    }
}
