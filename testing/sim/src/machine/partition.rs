//! Units of devices, their partitions, and the virtual time at which units are free.
//!
//! # Time
//! A kernel occupies a unit for each of its blocks, of those that its partition or its device has.
//! It takes the units that are free first, and begins when they are. If a partition has fewer units
//! than the kernel would take of the device, the kernel takes as many times longer. Kernels take
//! their units in the order in which the machine runs them.
//!
//! This module must not know queues.

use super::ids::PartitionId;
use leasehold_core::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;

/// The most units of a device.
pub(super) const MOST_UNITS: u32 = 4096;

struct Partition {
    device: u32,
    units: Range<usize>,
}

/// The units of all devices.
pub(super) struct Units {
    /// For each device, the virtual time from which each unit is free.
    free: Vec<Vec<u64>>,
    partitions: BTreeMap<PartitionId, Partition>,
}

impl Units {
    pub(super) fn new(devices: u32, units: u32) -> Self {
        let free = vec![vec![0; units as usize]; devices as usize];
        Self { free, partitions: BTreeMap::new() }
    }

    /// The number of partitions.
    pub(super) fn count(&self) -> u64 {
        self.partitions.len() as u64
    }

    /// Adds a partition of these units.
    ///
    /// # Errors
    /// `InvalidArgument` for no units, or units that the device has not.
    pub(super) fn add(&mut self, id: PartitionId, device: u32, units: Range<u32>) -> Result<()> {
        let all = self.free[device as usize].len();
        if units.is_empty() || units.end as usize > all {
            return Err(Error::invalid(format!("units {units:?} of a device with {all}")));
        }
        let units = units.start as usize..units.end as usize;
        self.partitions.insert(id, Partition { device, units });
        Ok(())
    }

    /// Removes a partition.
    ///
    /// # Errors
    /// `NotFound`.
    pub(super) fn remove(&mut self, id: PartitionId) -> Result<()> {
        self.partitions.remove(&id).map(drop).ok_or_else(|| missing(id))
    }

    /// Refuses a kernel whose partition was destroyed.
    pub(super) fn check_alive(&self, partition: Option<PartitionId>) -> Result<()> {
        match partition {
            Some(id) if !self.partitions.contains_key(&id) => Err(ended()),
            _ => Ok(()),
        }
    }

    /// Refuses a partition that a device has not.
    pub(super) fn check(&self, device: u32, partition: PartitionId) -> Result<()> {
        match self.partitions.get(&partition) {
            Some(found) if found.device == device => Ok(()),
            _ => Err(missing(partition)),
        }
    }

    /// Occupies units for a kernel of so many blocks, which is ready at `ready` and would take
    /// `nanos` on the whole device. Returns the end.
    pub(super) fn occupy(
        &mut self,
        device: u32,
        partition: Option<PartitionId>,
        blocks: u64,
        (ready, nanos): (u64, u64),
    ) -> u64 {
        let all = &mut self.free[device as usize];
        let waves = |units: usize| blocks.div_ceil(units as u64).max(1);
        let on_all = waves(all.len());
        let range = partition.and_then(|p| self.partitions.get(&p)).map(|p| p.units.clone());
        let range = range.unwrap_or(0..all.len());
        let units = &mut all[range];
        // In full: a factor that was rounded would grow with the kernel.
        let nanos = nanos * waves(units.len()) / on_all;
        let count = blocks.clamp(1, units.len() as u64) as usize;
        let mut first: Vec<usize> = (0..units.len()).collect();
        first.sort_by_key(|&unit| units[unit]);
        first.truncate(count);
        let start = first.iter().fold(ready, |at, &unit| at.max(units[unit]));
        first.iter().for_each(|&unit| units[unit] = start + nanos);
        start + nanos
    }
}

fn missing(partition: PartitionId) -> Error {
    Error::NotFound(format!("partition {} does not exist", partition.0).into())
}

/// The failure of work whose partition was destroyed.
pub(super) fn ended() -> Error {
    Error::state("a partition was destroyed under its work")
}
