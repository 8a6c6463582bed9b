//! Calls for partitions: the driver's green contexts, each a primary context with some of the
//! device's multiprocessors.

use super::{NativePartition, NativeStream};
use leasehold_core::{Error, Result};
use leasehold_hal::PartitionSize;

/// Calls for partitions. Modules, memory and events of the device's primary context serve the
/// streams of all its partitions, and that context is current during all calls.
pub trait PartitionOps {
    /// Makes a partition for each size, and says how many multiprocessors it has:
    /// `cuDeviceGetDevResource`, `cuDevSmResourceSplitByCount`, `cuDevResourceGenerateDesc`,
    /// `cuGreenCtxCreate`. No two have a multiprocessor in common. May block.
    ///
    /// # Errors
    /// `Unsupported` for a driver without such calls (before 12.5); `InvalidArgument` for sizes
    /// that the device has not once they are rounded up.
    fn partitions_create(
        &self,
        ordinal: u32,
        sizes: &[PartitionSize],
    ) -> Result<Vec<(NativePartition, u32)>>;

    /// Destroys a partition: `cuGreenCtxDestroy`. May block.
    ///
    /// # Safety
    /// - `partition` came from [`partitions_create`](Self::partitions_create), and is destroyed
    ///   once. Its streams were destroyed, and their work is over. No graph has a node of it.
    unsafe fn partition_destroy(&self, partition: NativePartition) -> Result<()>;

    /// Creates a non-blocking stream on a partition: `cuGreenCtxStreamCreate`. May block.
    ///
    /// # Safety
    /// - `partition` is this driver's and outlives the stream.
    unsafe fn partition_stream(
        &self,
        partition: NativePartition,
        priority: i32,
    ) -> Result<NativeStream>;
}

/// The error of a driver without partitions.
#[cold]
#[must_use]
pub fn no_partitions(version: i32) -> Error {
    Error::Unsupported(
        format!(
            "CUDA: the driver supports {}.{}; partitions (green contexts) need 12.5: use a newer driver, or streams of several priorities",
            version / 1000,
            version % 1000 / 10
        )
        .into(),
    )
}

/// The error for sizes that a device has not in whole groups of multiprocessors.
#[cold]
#[must_use]
pub fn too_small(sizes: &[PartitionSize], units: u32, group: u32) -> Error {
    Error::invalid(format!(
        "{sizes:?} of {units} multiprocessors, in whole groups of {group}; ask for fewer"
    ))
}
