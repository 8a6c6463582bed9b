//! Kernels by name and architecture.
//!
//! A device lists the architectures whose kernels it runs, the most specific first. A name resolves
//! to the kernel registered for the first of them that has one.

use crate::kernel::base::KernelBase;
use leasehold_core::sync::RwLock;
use leasehold_core::{Error, Result};
use leasehold_hal::{DeviceInfo, KernelDesc};
use std::collections::HashMap;
use std::fmt;

/// Kernels by name and architecture. Any thread; look-ups share a lock.
#[derive(Default)]
pub struct Registry {
    kernels: RwLock<HashMap<String, Vec<(String, KernelBase)>>>,
}

impl Registry {
    /// An empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers the kernel `desc.name` for an architecture: `cpu`, `cpu/x86-64-v4`, `cuda/sm_90`.
    ///
    /// # Errors
    /// As [`KernelBase::new`]; `InvalidArgument` when that name has a kernel of that architecture
    /// already.
    ///
    /// # Safety
    /// - As [`KernelBase::new`], on the devices that run this architecture.
    pub unsafe fn register(&self, arch: &str, desc: KernelDesc<'static>) -> Result<()> {
        let name = desc.name.to_string();
        // SAFETY: by the caller's contract.
        let base = unsafe { KernelBase::new(desc) }?;
        let mut kernels = self.kernels.write();
        let variants = kernels.entry(name).or_default();
        if variants.iter().any(|(a, _)| a == arch) {
            return Err(Error::invalid(format!(
                "kernel {} is registered for {arch} already; give one of the two another name",
                base.name()
            )));
        }
        variants.push((arch.to_owned(), base));
        Ok(())
    }

    /// The kernel of the most specific architecture that the device runs.
    ///
    /// # Errors
    /// `NotFound` for an unknown name; `Unsupported` when none of its variants fits, naming those
    /// there are.
    pub fn resolve(&self, name: &str, device: &DeviceInfo) -> Result<KernelBase> {
        let kernels = self.kernels.read();
        let variants = kernels.get(name).ok_or_else(|| {
            Error::NotFound(format!("no kernel is named {name:?}; register it first").into())
        })?;
        for arch in &device.arch {
            if let Some((_, base)) = variants.iter().find(|(a, _)| a == arch) {
                return Ok(base.clone());
            }
        }
        let have: Vec<_> = variants.iter().map(|(a, _)| a.as_str()).collect();
        Err(Error::Unsupported(
            format!(
                "kernel {name:?} has no variant for {} ({}); it has {}: register one for an architecture of the device",
                device.id,
                device.arch.join(", "),
                have.join(", ")
            )
            .into(),
        ))
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.kernels.read().keys()).finish()
    }
}
