//! A manager of resources of a device: what all such managers have alike.
//!
//! A kind of resource adds the ways to acquire it, as methods of its own `PoolOf` in its own
//! module. No other way leads to the pool, so no caller passes their checks by.
//!
//! This module must not know which resources exist.

use super::opened::OpenedDevice;
use crate::config::MpsConfig;
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Resource, Result, TagOf,
};
use std::fmt;
use std::hash::Hash;

/// A kind of resource that needs nothing but its device.
pub trait DeviceResource: Resource + Sized {
    /// The kind on a device, and the configuration of its pool.
    fn on(device: &Arc<OpenedDevice>, config: &MpsConfig) -> (Self, PoolConfig);
}

/// Owns resources of one kind of a device. `K` is the key of resources that the manager keeps.
pub struct PoolOf<R: Resource, K = ()> {
    pub(super) manager: PoolManager<R, K>,
    #[cfg(feature = "test-hooks")]
    pub(super) for_test: bool,
}

impl<R: DeviceResource, K: Eq + Hash + Clone> PoolOf<R, K> {
    pub(crate) fn new(device: &Arc<OpenedDevice>, config: &MpsConfig) -> Result<Self> {
        let (resources, pool) = R::on(device, config);
        Self::over(resources, pool)
    }

    /// A manager of the resources of a device, over a driver that a test supplies.
    ///
    /// # Errors
    /// `NotFound`; a driver error.
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "configureForTest")]
    pub fn configure_for_test(
        ops: Arc<dyn crate::driver::ops::MpsSlowOps>,
        device: leasehold_hal::DeviceId,
    ) -> Result<Self> {
        let device = OpenedDevice::one(ops, device)?;
        Ok(Self { for_test: true, ..Self::new(&device, &MpsConfig::default())? })
    }
}

impl<R: Resource, K: Eq + Hash + Clone> PoolOf<R, K> {
    pub(super) fn over(resources: R, config: PoolConfig) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(resources, config)?;
        Ok(Self {
            manager,
            #[cfg(feature = "test-hooks")]
            for_test: false,
        })
    }

    /// The operations of the resources.
    pub(super) fn resources(&self) -> Result<&R> {
        self.manager.pool().map(|pool| pool.resource())
    }

    /// Whether the manager was configured for a test.
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.for_test
    }

    /// A lease on the handle's resource.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "getState")]
    pub fn get_state(&self, handle: Handle<TagOf<R>>) -> Result<Lease<R::Payload>> {
        self.manager.lease(handle)
    }

    /// Whether the handle's resource is alive: one load.
    pub fn is_alive(&self, handle: Handle<TagOf<R>>) -> bool {
        self.manager.is_alive(handle)
    }

    /// Drops the manager's own lease. Other holders keep theirs.
    ///
    /// # Errors
    /// `StaleHandle` for a resource that the manager does not keep.
    pub fn release(&self, handle: Handle<TagOf<R>>) -> Result<()> {
        self.manager.release(handle)
    }

    /// Gives idle resources back to the driver until `keep` are left. Returns the number given
    /// back.
    pub fn trim(&self, keep: u64) -> u64 {
        self.manager.trim(keep)
    }

    /// The number of resources with a holder beside this manager (a snapshot).
    pub fn in_use(&self) -> u64 {
        self.manager.in_use()
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Refuses while a holder outside of the backend has a lease. Other parts of the backend hold
    /// `own` resources.
    pub(crate) fn outstanding_beyond(&self, own: u64) -> Result<()> {
        let (strong, weak) = (self.in_use().saturating_sub(own), self.stats().weak);
        if strong != 0 || weak != 0 {
            return Err(Error::LeasesOutstanding { resource: R::NAME, strong, weak });
        }
        Ok(())
    }

    /// Shuts the manager down. A second call is `Ok`.
    ///
    /// # Errors
    /// `LeasesOutstanding` while another holder has a lease. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}

impl<R: Resource, K> fmt::Debug for PoolOf<R, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PoolOf").field(&self.manager).finish()
    }
}
