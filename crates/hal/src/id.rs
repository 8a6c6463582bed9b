//! Names of devices before they are opened.
//!
//! This module must not know which devices exist.

use leasehold_core::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The kind of a backend.
#[doc(alias = "Device::Type")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum BackendKind {
    /// The host's processors.
    Cpu,
    /// NVIDIA's CUDA driver.
    Cuda,
    /// Apple's Metal.
    Mps,
    /// The simulated device.
    Sim,
    /// The backend that supports nothing.
    Null,
    /// An external backend, by its name.
    Other(&'static str),
}

impl BackendKind {
    /// The name in device ids: `cpu`, `cuda`, `mps`, `sim`, `null`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            BackendKind::Cpu => "cpu",
            BackendKind::Cuda => "cuda",
            BackendKind::Mps => "mps",
            BackendKind::Sim => "sim",
            BackendKind::Null => "null",
            BackendKind::Other(name) => name,
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The name of a device before it is opened: a backend and an ordinal, written `cuda:0`.
///
/// ```
/// use leasehold_hal::{BackendKind, DeviceId};
/// let id: DeviceId = "cpu:0".parse()?;
/// assert_eq!(id, DeviceId::new(BackendKind::Cpu, 0));
/// assert_eq!(id.to_string(), "cpu:0");
/// assert!("gpu:0".parse::<DeviceId>().is_err());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[doc(alias = "Device")]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId {
    /// The backend.
    pub backend: BackendKind,
    /// The ordinal among the backend's devices.
    pub ordinal: u32,
}

impl DeviceId {
    /// Names device `ordinal` of `backend`.
    #[must_use]
    pub const fn new(backend: BackendKind, ordinal: u32) -> Self {
        Self { backend, ordinal }
    }

    /// `cpu:n`.
    #[must_use]
    pub const fn cpu(ordinal: u32) -> Self {
        Self::new(BackendKind::Cpu, ordinal)
    }

    /// `cuda:n`.
    #[must_use]
    pub const fn cuda(ordinal: u32) -> Self {
        Self::new(BackendKind::Cuda, ordinal)
    }
}

impl DeviceId {
    /// The ordinal, for the backend of this kind.
    ///
    /// # Errors
    /// `NotFound` for a device of another backend.
    pub fn ordinal_on(self, backend: BackendKind) -> Result<u32> {
        if self.backend == backend {
            return Ok(self.ordinal);
        }
        Err(Error::NotFound(format!("{self}: this is the backend {backend}").into()))
    }

    /// Parses the form that [`Display`](fmt::Display) writes, for a device of one of these
    /// backends. The ordinal may be left out.
    ///
    /// ```
    /// use leasehold_hal::{BackendKind, DeviceId};
    /// let id = DeviceId::new(BackendKind::Other("mydev"), 3);
    /// let kinds = [BackendKind::Cpu, BackendKind::Other("mydev")];
    /// assert_eq!(DeviceId::parse_among("mydev:3", &kinds)?, id);
    /// # Ok::<(), leasehold_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` for a backend that is not among them, or an ordinal that is no number.
    pub fn parse_among(s: &str, backends: &[BackendKind]) -> Result<Self> {
        // A name may contain colons, so the full form is tried before the form without ordinal.
        if let Some((name, ordinal)) = s.rsplit_once(':')
            && let Some(&backend) = backends.iter().find(|b| b.name() == name)
        {
            // Digits only: `parse` alone would accept a sign.
            let digits = ordinal.bytes().all(|b| b.is_ascii_digit());
            let number = ordinal.parse().ok().filter(|_| digits);
            let ordinal = number.ok_or_else(|| {
                Error::invalid(format!("device {s:?}: {ordinal:?} is not a device number"))
            })?;
            return Ok(Self { backend, ordinal });
        }
        if let Some(&backend) = backends.iter().find(|b| b.name() == s) {
            return Ok(Self { backend, ordinal: 0 });
        }
        let mut names: Vec<String> = Vec::new();
        // The null backend computes nothing, so it is not offered.
        for name in backends.iter().filter(|b| **b != BackendKind::Null).map(|b| format!("{b}:0")) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        Err(Error::invalid(format!(
            "device {s:?}: unknown backend; write one of {}",
            names.join(", ")
        )))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.backend, self.ordinal)
    }
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    /// `cpu:0`, `cuda:1`, …; the ordinal may be left out (`cpu` is `cpu:0`). Only the context
    /// knows the names of external backends; [`parse_among`](DeviceId::parse_among) accepts such
    /// names.
    fn from_str(s: &str) -> Result<Self> {
        use BackendKind::{Cpu, Cuda, Mps, Null, Sim};
        Self::parse_among(s, &[Cpu, Cuda, Mps, Sim, Null])
    }
}
