//! Partitions: multiprocessors of a device for some of its streams.
//!
//! This module must not know how a driver divides a device.

use crate::id::DeviceId;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{Error, Lease, Result, Tagged, tags};
use std::fmt;
use std::marker::PhantomPinned;

/// The size of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PartitionSize {
    /// At least this many multiprocessors, or what a device has in their place
    /// ([`DeviceInfo::units`](crate::DeviceInfo::units)). A driver may give more
    /// ([`Partition::units`]).
    Sms(u32),
    /// The multiprocessors that are left. Only the last size may be this one.
    Rest,
}

impl PartitionSize {
    /// Checks that a device of `units` multiprocessors has partitions of these sizes.
    ///
    /// # Errors
    /// `InvalidArgument` for no sizes, a size of 0, sizes behind `Rest`, more multiprocessors than
    /// the device has, and a `Rest` of none.
    pub fn check(sizes: &[Self], units: u32) -> Result<()> {
        if sizes.is_empty() {
            return Err(Error::invalid("a division without sizes; name one at least"));
        }
        let mut sum = 0u64;
        for (i, size) in sizes.iter().enumerate() {
            match *size {
                Self::Sms(0) => {
                    return Err(Error::invalid(format!(
                        "size {i} is of no multiprocessors; give it one at least"
                    )));
                }
                Self::Sms(count) => sum += u64::from(count),
                Self::Rest if i + 1 == sizes.len() => {}
                Self::Rest => {
                    return Err(Error::invalid(format!(
                        "size {i} is the rest, and other sizes follow; name the rest last"
                    )));
                }
            }
        }
        let rest = sizes.ends_with(&[Self::Rest]);
        if sum > units.into() || rest && sum == units.into() {
            let more = if rest { " and a rest" } else { "" };
            return Err(Error::invalid(format!(
                "sizes of {sum} multiprocessors{more}, and the device has {units}; ask for fewer"
            )));
        }
        Ok(())
    }
}

/// Some multiprocessors of a device, for streams of their own. Made by
/// [`Device::partition`](crate::Device::partition).
///
/// Streams are made on it by [`StreamDesc::on`](crate::StreamDesc::on). They, and graphs that were
/// recorded on them, hold the partition. It ends after its last holder, and after the work that its
/// streams left behind.
pub struct Partition {
    device: DeviceId,
    units: u32,
    native: u64,
    closed: AtomicBool,
    /// Gives the driver's object back.
    end: Option<Box<dyn FnOnce() + Send + Sync>>,
    /// A partition must not be moved out of its pool.
    _place: PhantomPinned,
}

impl Partition {
    /// A partition of `units` multiprocessors, for a backend. `native` is the backend's word for
    /// it. `end` is called as the partition ends.
    #[must_use]
    pub fn new(
        device: DeviceId,
        units: u32,
        native: u64,
        end: impl FnOnce() + Send + Sync + 'static,
    ) -> Self {
        Self {
            device,
            units,
            native,
            closed: AtomicBool::new(false),
            end: Some(Box::new(end)),
            _place: PhantomPinned,
        }
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// The multiprocessors that the driver gave, which may be more than were asked for.
    #[must_use]
    pub fn units(&self) -> u32 {
        self.units
    }

    /// The backend's word. Only unsafe calls look it up.
    #[must_use]
    pub fn native(&self) -> u64 {
        self.native
    }

    /// Refuses new streams from now on. Streams that exist go on. Does not block.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Returns whether new streams are refused.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

impl Tagged for Partition {
    type Tag = tags::Partition;
}

impl Drop for Partition {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end();
        }
    }
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let closed = if self.is_closed() { ", closed" } else { "" };
        write!(f, "Partition({}, {} units{closed})", self.device, self.units)
    }
}

/// Returns whether two streams or nodes have the same partition, or none both.
#[must_use]
pub fn is_same(a: Option<&Lease<Partition>>, b: Option<&Lease<Partition>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.same(b),
        (None, None) => true,
        _ => false,
    }
}
