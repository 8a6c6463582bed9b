//! Partitions: multiprocessors of a device for some of its streams.
//!
//! This module must not know how a driver divides a device.

use crate::runtime::Runtime;
use leasehold_core::{Lease, Result};
use leasehold_hal::{Partition, PartitionSize};

/// The division of a device. Only [`Runtime`] has it.
pub trait Divide {
    /// Divides the device's multiprocessors into partitions, in the order of the sizes, for streams
    /// that shall not disturb each other. [`StreamDesc::on`](leasehold_hal::StreamDesc::on) makes a
    /// stream on one. Partitions of a call have no multiprocessor in common. All other streams go
    /// on using the whole device. May block on the driver.
    ///
    /// A driver rounds a size up: [`Partition::units`](leasehold_hal::Partition::units) is what it
    /// gave. A graph's kernels run on the partition of the stream that they were recorded on,
    /// wherever the graph is launched. A partition ends after its last lease, stream and graph, and
    /// never under work; the device can then be divided again.
    ///
    /// ```
    /// use leasehold::PartitionSize::{Rest, Sms};
    /// use leasehold::{DeviceId, Divide, Error, Runtime, StreamDesc};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// match runtime.partition(&[Sms(24), Rest]) {
    ///     Ok(partitions) => {
    ///         let decode = runtime.create_stream_with(&StreamDesc::on(&partitions[0]))?;
    ///         let prompts = runtime.create_stream_with(&StreamDesc::on(&partitions[1]))?;
    ///         assert!(!decode.same(&prompts));
    ///     }
    ///     Err(Error::Unsupported(why)) => println!("{why}"), // the CPU, Metal, CUDA before 12.5
    ///     Err(e) => return Err(e),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Unsupported` for a device or driver without partitions. `InvalidArgument` for no sizes, a
    /// size of 0, more multiprocessors than the device has, and a `Rest` that is not the last size
    /// or of which none are left. `InvalidState` while a former partition is there. The driver's
    /// own.
    fn partition(&self, sizes: &[PartitionSize]) -> Result<Vec<Lease<Partition>>>;
}

impl Divide for Runtime {
    fn partition(&self, sizes: &[PartitionSize]) -> Result<Vec<Lease<Partition>>> {
        self.raw_device().partition(sizes)
    }
}
