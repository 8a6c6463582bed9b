//! What is asked of every launch of a kernel, at the launch, at its recording, and at each update of a graph.
//!
//! This module must not know sessions or graphs.

use leasehold_core::{Error, Result};
use leasehold_hal::{Binding, KernelCheck, KernelDesc, LaunchInfo, Overlap};

/// A kernel's own conditions, the same for all of its sources.
pub(crate) struct Rules {
    name: Box<str>,
    check: KernelCheck,
    /// The alignment of each binding less one; empty where nothing is asked.
    align: Box<[u32]>,
    overlap: Overlap,
}

impl Rules {
    pub(crate) fn of(desc: &KernelDesc<'_>) -> Self {
        let plain = desc.alignment.iter().all(|&a| a == 1);
        let align = if plain { 0 } else { desc.bindings.len() };
        Self {
            name: desc.name.as_ref().into(),
            check: desc.check.clone(),
            align: (0..align).map(|i| desc.alignment_of(i) - 1).collect(),
            overlap: desc.overlap,
        }
    }

    /// Alignment and overlap of the bindings.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the binding, or both.
    #[inline]
    pub(crate) fn check_bindings(&self, bindings: &[Binding]) -> Result<()> {
        if let Some(i) = std::iter::zip(bindings, &self.align).position(|(b, &a)| b.addr & u64::from(a) != 0) {
            return Err(self.misaligned(i, &bindings[i]));
        }
        if self.overlap == Overlap::Any {
            return Ok(());
        }
        for (j, b) in bindings.iter().enumerate() {
            for (i, a) in bindings[..j].iter().enumerate() {
                if (a.access.writes() | b.access.writes()) && a.overlaps(b) {
                    self.check_shared(i, a, j, b)?;
                }
            }
        }
        Ok(())
    }

    /// The kernel's own check of a launch whose bindings were checked; not of one that runs nothing.
    ///
    /// # Errors
    /// What the kernel's author says.
    #[inline]
    pub(crate) fn check_launch(&self, launch: &LaunchInfo<'_>) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        self.check.run(launch).map_err(|e| self.refused(e))
    }

    #[cold]
    fn misaligned(&self, i: usize, b: &Binding) -> Error {
        Error::invalid(format!(
            "kernel {}: binding {i} at {:#x} is not aligned to {} bytes",
            self.name,
            b.addr,
            self.align[i] + 1
        ))
    }

    #[cold]
    fn check_shared(&self, i: usize, a: &Binding, j: usize, b: &Binding) -> Result<()> {
        if self.overlap == Overlap::InPlace && (a.addr, a.len) == (b.addr, b.len) {
            return Ok(());
        }
        let rule =
            if self.overlap == Overlap::InPlace { "only whole bindings may be the same" } else { "they may not" };
        Err(Error::invalid(format!(
            "kernel {}: binding {i} ({:?}) and binding {j} ({:?}) overlap; {rule}",
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
