//! The conditions of every launch of a kernel. The runtime checks them at the launch, at its
//! recording, and at each update of a graph.
//!
//! This module must not know sessions or graphs.

use crate::view::Operand;
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{
    Access, Binding, Device, KernelCheck, KernelDesc, LaunchInfo, Overlap, Pipeline, TensorMap,
};

/// The bindings that are written, one bit for each. There are 30 at most.
pub(crate) fn written(bindings: impl Iterator<Item = Access>) -> u32 {
    bindings.zip(0..u32::BITS).fold(0, |all, (access, i)| all | u32::from(access.writes()) << i)
}

/// A kernel's own conditions, the same for all of its sources.
pub(crate) struct Rules {
    name: Box<str>,
    check: KernelCheck,
    /// The alignment of each binding less one; empty where nothing is asked.
    align: Box<[u32]>,
    /// The strictest of them: addresses that satisfy it need no look at each.
    most: u64,
    overlap: Overlap,
    /// The bindings that may be reservations, each with the binding that has its limit.
    limits: Box<[(u32, u32)]>,
}

/// The kernel's check, after checks of its tensor maps, its clusters and its cooperative launch
/// where it has some.
pub(crate) fn with_more(
    desc: &KernelDesc<'_>,
    device: &Lease<dyn Device>,
    pipeline: &Lease<Pipeline>,
) -> KernelCheck {
    if desc.maps.is_empty() && !desc.has_attributes() {
        return desc.check.clone();
    }
    let (maps, check) = (desc.maps.clone().into_owned(), desc.check.clone());
    let on = desc.has_attributes().then(|| (device.clone(), pipeline.clone()));
    KernelCheck::new(move |launch| {
        for &(binding, offset) in &maps {
            TensorMap::from_params(launch.params_bytes(), offset)
                .validate_for(launch, binding as usize)?;
        }
        on.iter().try_for_each(|(device, pipeline)| check_attributes(launch, device, pipeline))?;
        check.run(launch)
    })
}

/// Checks that a grid is made of clusters, and that blocks of a cooperative launch run at a time.
fn check_attributes(
    launch: &LaunchInfo<'_>,
    device: &Lease<dyn Device>,
    pipeline: &Pipeline,
) -> Result<()> {
    let (grid, cluster) = (launch.grid, pipeline.cluster);
    if (0..3).any(|i| !grid[i].is_multiple_of(cluster[i])) {
        return Err(Error::invalid(format!(
            "a grid of {grid:?} blocks is not made of clusters of {cluster:?}; give a multiple in each dimension"
        )));
    }
    if pipeline.cooperative {
        let product = |of: [u32; 3]| of.iter().fold(1, |n: u64, &b| n.saturating_mul(b.into()));
        let (blocks, threads) = (product(grid), product(launch.block));
        let threads = u32::try_from(threads).unwrap_or(u32::MAX);
        let most = device.resident_blocks(pipeline, threads, launch.shared)?;
        if blocks > most {
            return Err(Error::invalid(format!(
                "a cooperative launch of {blocks} blocks, and {} runs {most} of {threads} threads and {} bytes of shared memory at the same time; give at most \
                 as many (resident_blocks)",
                device.info().id,
                launch.shared
            )));
        }
    }
    Ok(())
}

impl Rules {
    /// The conditions of a description, with a check that stands in for its own.
    pub(crate) fn of(desc: &KernelDesc<'_>, check: KernelCheck) -> Self {
        let plain = desc.alignment.iter().all(|&a| a == 1);
        let align = if plain { 0 } else { desc.bindings.len() };
        Self {
            name: desc.name.as_ref().into(),
            check,
            align: (0..align).map(|i| desc.alignment_of(i) - 1).collect(),
            most: (0..align).map(|i| u64::from(desc.alignment_of(i) - 1)).max().unwrap_or(0),
            overlap: desc.overlap,
            limits: desc.limits.as_ref().into(),
        }
    }

    /// Refuses the reservation of a growing buffer, unless the kernel keeps to the buffer's limit.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the binding.
    #[inline]
    pub(crate) fn check_limits(&self, operands: &[Operand<'_>]) -> Result<()> {
        if operands.iter().all(|o| o.limit.is_none()) { Ok(()) } else { self.check_each(operands) }
    }

    #[cold]
    fn check_each(&self, operands: &[Operand<'_>]) -> Result<()> {
        for (i, operand) in operands.iter().enumerate() {
            let Some(limit) = operand.limit else { continue };
            let declared = self.limits.iter().find(|(binding, _)| *binding as usize == i);
            let Some(&(_, by)) = declared else {
                return Err(Error::invalid(format!(
                    "kernel {}: binding {i} is the reservation of a growing buffer, and the kernel declares no limit for it (KernelDesc::limited_by); bind the part that has memory",
                    self.name
                )));
            };
            let given = operands.get(by as usize).map(|o| o.view);
            if !given.is_some_and(|v| v.lease.same(limit) && v.offset == 0 && v.len == limit.len())
            {
                return Err(Error::invalid(format!(
                    "kernel {}: binding {by} is not the limit of the growing buffer in binding {i}; bind Growing::limit of the same buffer",
                    self.name
                )));
            }
        }
        Ok(())
    }

    /// Alignment and overlap of the bindings.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the binding, or both.
    pub(crate) fn check_bindings(&self, bindings: &[Binding]) -> Result<()> {
        let addresses = bindings.iter().fold(0, |all, b| all | b.addr);
        self.check_at(bindings, addresses, written(bindings.iter().map(|b| b.access)))
    }

    /// As [`check_bindings`](Self::check_bindings), for the caller that knows two things of them:
    /// all bits of their addresses, and which are [`written`].
    #[inline]
    pub(crate) fn check_at(
        &self,
        bindings: &[Binding],
        addresses: u64,
        mut written: u32,
    ) -> Result<()> {
        if addresses & self.most != 0 {
            self.check_alignment(bindings)?;
        }
        if self.overlap == Overlap::Any {
            return Ok(());
        }
        while written != 0 {
            let w = &bindings[written.trailing_zeros() as usize];
            written &= written - 1;
            for b in bindings {
                // One begins within the other: so do all that overlap, and a few empty ones.
                let near =
                    b.addr.wrapping_sub(w.addr) < w.len || w.addr.wrapping_sub(b.addr) < b.len;
                if near && !std::ptr::eq(b, w) {
                    return self.check_overlap(bindings);
                }
            }
        }
        Ok(())
    }

    #[cold]
    fn check_alignment(&self, bindings: &[Binding]) -> Result<()> {
        match std::iter::zip(bindings, &self.align).position(|(b, &a)| b.addr & u64::from(a) != 0) {
            Some(i) => Err(self.misaligned(i, &bindings[i])),
            None => Ok(()),
        }
    }

    #[cold]
    fn check_overlap(&self, bindings: &[Binding]) -> Result<()> {
        for (j, b) in bindings.iter().enumerate() {
            for (i, a) in bindings[..j].iter().enumerate() {
                if (a.access.writes() | b.access.writes()) && a.overlaps(b) {
                    self.check_shared(i, a, j, b)?;
                }
            }
        }
        Ok(())
    }

    /// The kernel's own check of a launch whose bindings were checked; not of one that runs
    /// nothing.
    ///
    /// # Errors
    /// The error of the kernel's own check.
    #[inline]
    pub(crate) fn check_launch(&self, launch: &LaunchInfo<'_>) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        self.check.run(launch).map_err(|e| self.refused(e))
    }

    #[cold]
    fn misaligned(&self, i: usize, b: &Binding) -> Error {
        let align = self.align[i] + 1;
        Error::invalid(format!(
            "kernel {}: binding {i} ({}, {} bytes) is not aligned to {align} bytes; begin it at a multiple of {align}",
            self.name, b.access, b.len
        ))
    }

    #[cold]
    fn check_shared(&self, i: usize, a: &Binding, j: usize, b: &Binding) -> Result<()> {
        if self.overlap == Overlap::InPlace && (a.addr, a.len) == (b.addr, b.len) {
            return Ok(());
        }
        let rule = if self.overlap == Overlap::InPlace {
            "only whole bindings may be the same: give it parts that are apart, or one twice"
        } else {
            "they may not: give it memory of its own"
        };
        Err(Error::invalid(format!(
            "kernel {}: binding {i} ({}) and binding {j} ({}) overlap; {rule}",
            self.name, a.access, b.access
        )))
    }

    #[cold]
    fn refused(&self, e: Error) -> Error {
        match e {
            Error::InvalidArgument(why) => Error::invalid(format!("kernel {}: {why}", self.name)),
            other => other,
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/rules.rs"]
mod tests;
