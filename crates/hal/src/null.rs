//! A backend without support for any operation: the conformance suite must skip all its cases, and
//! say so.

use crate::backend::{Backend, Device};
use crate::id::{BackendKind, DeviceId};
use crate::info::DeviceInfo;
use leasehold_core::{Error, Lease, Result};

/// A backend without devices.
#[derive(Debug, Clone, Copy, Default)]
pub struct NullBackend;

// SAFETY: this backend opens no device.
unsafe impl Backend for NullBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Null
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(Vec::new())
    }

    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        Err(Error::Unavailable(format!("{device}: the null backend has no devices").into()))
    }

    fn shutdown(&self) -> Result<()> {
        Ok(())
    }
}
