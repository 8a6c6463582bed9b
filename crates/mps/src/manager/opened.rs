//! A device as its resources hold it, and the reference that a resource has of its native object.
//!
//! This module must not know which resources exist.

use crate::driver::ops::{DeviceProperties, MpsSlowOps, NativeDevice, NativeObject};
use leasehold_core::Result;
use leasehold_core::sync::Arc;
use leasehold_hal::{BackendKind, DeviceId};
use std::fmt;

/// A device's native reference and properties. The drop releases the reference.
pub(crate) struct OpenedDevice {
    pub(crate) ops: Arc<dyn MpsSlowOps>,
    pub(crate) native: NativeDevice,
    pub(crate) id: DeviceId,
    pub(crate) properties: DeviceProperties,
}

impl OpenedDevice {
    /// All devices of a driver.
    ///
    /// # Errors
    /// `Unavailable` without a device or with implausible properties; a driver error.
    pub(crate) fn all(ops: &Arc<dyn MpsSlowOps>) -> Result<Vec<Arc<Self>>> {
        // Each reference has an owner before the next call can fail.
        let natives = ops.devices()?;
        let owned = natives.into_iter().map(|n| Reference { ops: &**ops, native: Some(n) });
        let owned: Vec<_> = owned.collect();
        let open = |(ordinal, mut reference): (u32, Reference<'_>)| {
            let native = reference.native.unwrap_or_default();
            // SAFETY: the driver made the handle, and `reference` keeps it live.
            let properties = unsafe { ops.device_properties(native)? };
            properties.check(ordinal)?;
            let id = DeviceId::new(BackendKind::Mps, ordinal);
            reference.native = None;
            Ok(Arc::new(Self { ops: ops.clone(), native, id, properties }))
        };
        (0..).zip(owned).map(open).collect()
    }

    /// One device of a driver, for the managers' test hooks.
    #[cfg(feature = "test-hooks")]
    pub(crate) fn one(ops: Arc<dyn MpsSlowOps>, device: DeviceId) -> Result<Arc<Self>> {
        let all = Self::all(&ops)?;
        let found = all.into_iter().find(|opened| opened.id == device);
        found.ok_or_else(|| leasehold_core::Error::NotFound(device.to_string().into()))
    }
}

impl Drop for OpenedDevice {
    fn drop(&mut self) {
        // SAFETY: this value owns the reference, and all objects of the device are gone, because
        // each holds the device.
        unsafe { self.ops.release(self.native.into()) };
    }
}

impl fmt::Debug for OpenedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.id, self.properties.name)
    }
}

/// The reference of a device that is not open yet. The drop releases it, unless it was taken.
struct Reference<'a> {
    ops: &'a dyn MpsSlowOps,
    native: Option<NativeDevice>,
}

impl Drop for Reference<'_> {
    fn drop(&mut self) {
        if let Some(native) = self.native.take() {
            // SAFETY: this value owns the reference, and nothing else uses the handle.
            unsafe { self.ops.release(native.into()) };
        }
    }
}

/// A native object of a device. The drop releases it.
pub(crate) struct Owned<T: Copy + Into<NativeObject>> {
    pub(crate) device: Arc<OpenedDevice>,
    pub(crate) native: T,
}

impl<T: Copy + Into<NativeObject>> Owned<T> {
    /// Takes the reference that the driver has just returned.
    pub(crate) fn new(device: &Arc<OpenedDevice>, native: T) -> Self {
        Self { device: device.clone(), native }
    }
}

impl<T: Copy + Into<NativeObject>> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: this value owns the reference. Uncompleted work does not use the object, because
        // the work's submitter holds a lease (a rule of the managers).
        unsafe { self.device.ops.release(self.native.into()) };
    }
}

impl<T: Copy + Into<NativeObject>> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let object: NativeObject = self.native.into();
        write!(f, "{object:?} of {}", self.device.id)
    }
}
