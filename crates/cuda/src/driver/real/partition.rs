//! Partitions: green contexts over groups of multiprocessors.
//!
//! The device is split into the smallest groups that the driver makes, and a partition gets as many
//! of them as its size needs. What is left after whole groups goes to the rest.
//!
//! This module must not know managers.

use super::{RealDriver, drive, plausible};
use crate::driver::ops::{NativePartition, NativeStream, PartitionOps, no_partitions, too_small};
use cudarc::driver::sys::{self, CUcontext, CUgreenCtx, CUstream};
use leasehold_core::{Error, Result};
use leasehold_hal::PartitionSize;
use std::ffi::{c_int, c_uint};
use std::ptr;

/// `CU_GREEN_CTX_DEFAULT_STREAM`, which the driver demands.
const DEFAULT_STREAM: u32 = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
const SM: sys::CUdevResourceType = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;

/// Multiprocessors in the driver's form.
type Resource = sys::CUdevResource;

/// Nothing, for the driver to overwrite.
fn nothing() -> Resource {
    // SAFETY: integers and an enum that has the value 0.
    unsafe { std::mem::zeroed() }
}

/// The number of multiprocessors.
fn count(resource: &Resource) -> u32 {
    // SAFETY: all resources here are of multiprocessors, or zero.
    unsafe { resource.__bindgen_anon_1.sm.smCount }
}

/// Calls an optional function by its name, which older drivers have not.
macro_rules! optional {
    ($driver:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let driver = $driver;
        match driver.loaded()?.functions.$name {
            // SAFETY: the table holds the driver's function of this name and type. Pointers for
            // results are to locals of the caller of this macro. The caller of the trait's method
            // vouches for handles.
            Some(function) => driver.call(stringify!($name), 0, |_| unsafe { function($($arg),*) }),
            None => Err(no_partitions(driver.version()?)),
        }
    }};
}

impl RealDriver {
    fn version(&self) -> Result<i32> {
        use crate::driver::ops::DeviceOps;
        self.driver_version()
    }

    /// Splits multiprocessors into as many groups of the same size as `groups` has room for, each
    /// of `least` at least. Returns the number of groups, and what is left.
    fn split(
        &self,
        all: &Resource,
        groups: &mut [Resource],
        least: u32,
    ) -> Result<(u32, Resource)> {
        let (mut made, mut rest) = (groups.len() as c_uint, nothing());
        let to = groups.as_mut_ptr();
        optional!(
            self,
            cuDevSmResourceSplitByCount(
                to,
                &raw mut made,
                ptr::from_ref(all),
                &raw mut rest,
                0,
                least
            )
        )?;
        Ok((made.min(groups.len() as u32), rest))
    }

    /// A partition of these multiprocessors, and how many they are.
    fn partition_of(
        &self,
        device: c_int,
        groups: &mut [Resource],
    ) -> Result<(NativePartition, u32)> {
        let (mut desc, mut made): (sys::CUdevResourceDesc, CUgreenCtx) =
            (ptr::null_mut(), ptr::null_mut());
        let (from, number) = (groups.as_mut_ptr(), groups.len() as c_uint);
        optional!(self, cuDevResourceGenerateDesc(&raw mut desc, from, number))?;
        optional!(self, cuGreenCtxCreate(&raw mut made, desc, device, DEFAULT_STREAM))?;
        let partition = plausible::object("cuGreenCtxCreate", made).map(NativePartition)?;
        let mut got = nothing();
        let told = optional!(self, cuGreenCtxGetDevResource(made, &raw mut got, SM));
        match told {
            Ok(()) => Ok((partition, count(&got))),
            Err(e) => {
                self.give_up(partition);
                Err(e)
            }
        }
    }

    /// Destroys a partition that nobody has got.
    fn give_up(&self, partition: NativePartition) {
        let destroy = || optional!(self, cuGreenCtxDestroy(partition.0 as CUgreenCtx));
        if let Err(error) = destroy() {
            tracing::debug!(%error, "a partition could not be given back");
        }
    }

    /// Makes calls about a kernel node, with the partition's context current unless it is null. The
    /// driver makes a node for the current context, and an update must not change it.
    pub(super) fn on_partition<R>(
        &self,
        on: NativePartition,
        calls: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        if on.is_null() {
            return calls();
        }
        let (former, own) = (self.current_raw(), self.context_of(on)?);
        drive!(self, cuCtxSetCurrent(own))?;
        let result = calls();
        drive!(self, cuCtxSetCurrent(former))?;
        result
    }

    /// The context that stands for a partition.
    fn context_of(&self, partition: NativePartition) -> Result<CUcontext> {
        let mut context: CUcontext = ptr::null_mut();
        let from = partition.0 as CUgreenCtx;
        optional!(self, cuCtxFromGreenCtx(&raw mut context, from))?;
        plausible::object("cuCtxFromGreenCtx", context)?;
        Ok(context)
    }
}

impl PartitionOps for RealDriver {
    fn partitions_create(
        &self,
        ordinal: u32,
        sizes: &[PartitionSize],
    ) -> Result<Vec<(NativePartition, u32)>> {
        let (device, mut all) = (self.device(ordinal)?, nothing());
        optional!(self, cuDeviceGetDevResource(device, &raw mut all, SM))?;
        let units = count(&all);
        let mut one = [nothing()];
        self.split(&all, &mut one, 1)?;
        let group = count(&one[0]);
        if group == 0 {
            return Err(Error::state("the driver splits a device into groups of nothing"));
        }
        let mut groups = vec![nothing(); (units / group) as usize];
        let (made, rest) = self.split(&all, &mut groups, group)?;
        groups.truncate(made as usize);
        let (mut left, mut rest) = (groups, (count(&rest) > 0).then_some(rest));
        let mut parts: Vec<Vec<Resource>> = Vec::with_capacity(sizes.len());
        for size in sizes {
            let least = if let PartitionSize::Sms(least) = *size { least } else { u32::MAX };
            let number = left.len().min(least.div_ceil(group) as usize);
            let mut part: Vec<Resource> = left.drain(..number).collect();
            if part.len() < least.div_ceil(group) as usize {
                part.extend(rest.take());
            }
            let got: u32 = part.iter().map(count).sum();
            if got == 0 || *size != PartitionSize::Rest && got < least {
                return Err(too_small(sizes, units, group));
            }
            parts.push(part);
        }
        let mut partitions = Vec::with_capacity(parts.len());
        for mut part in parts {
            match self.partition_of(device, &mut part) {
                Ok(made) => partitions.push(made),
                Err(e) => {
                    partitions.into_iter().for_each(|(made, _)| self.give_up(made));
                    return Err(e);
                }
            }
        }
        Ok(partitions)
    }

    unsafe fn partition_destroy(&self, partition: NativePartition) -> Result<()> {
        optional!(self, cuGreenCtxDestroy(partition.0 as CUgreenCtx))
    }

    unsafe fn partition_stream(
        &self,
        partition: NativePartition,
        priority: i32,
    ) -> Result<NativeStream> {
        let mut stream: CUstream = ptr::null_mut();
        let of = partition.0 as CUgreenCtx;
        optional!(self, cuGreenCtxStreamCreate(&raw mut stream, of, NON_BLOCKING, priority))?;
        plausible::object("cuGreenCtxStreamCreate", stream).map(NativeStream)
    }
}
