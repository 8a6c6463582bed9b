//! The managers: pools that own the device's resources and expose them. Managers do not wait,
//! signal, copy or launch.
//!
//! - [`execution`]. Owns: the driver and the device manager: the top. Kind of pool: –.
//! - [`device`]. Owns: devices, each with the managers below. Kind of pool: fixed slots, created
//!   lazily.
//! - [`command_queue`]. Owns: the command queues. Kind of pool: a few keyed singletons.
//! - [`library`]. Owns: libraries and their compute pipelines. Kind of pool: keyed singletons.
//! - [`compute_pipeline_state`]. Owns: compute pipelines. Kind of pool: keyed singletons.
//! - [`kernel`]. Owns: kernels, which hold compute pipelines. Kind of pool: keyed singletons.
//! - [`heap`]. Owns: heaps, any number for a device. Kind of pool: growable, recycled.
//! - [`buffer`]. Owns: buffers, with or without a heap. Kind of pool: growable, recycled.
//! - [`event`]. Owns: events and shared events. Kind of pool: growable, recycled.
//! - [`fence`]. Owns: fences. Kind of pool: growable, recycled.
//! - [`stream`]. Owns: streams, which share the queues. Kind of pool: growable, recycled.
//! - [`graph`]. Owns: instantiated plans. Kind of pool: growable.
//! - [`timestamp`]. Owns: timestamps, in slots of sample buffers. Kind of pool: growable, recycled.
//!
//! A resource holds its device open, and a buffer holds its heap. So the order of drops is never
//! wrong, although each manager only knows the manager below it.
//!
//! A lease says nothing about work. The holder of a lease keeps it until the work that uses the
//! resource is over, as Metal demands of command buffers without retained references.
//!
//! This module must not know the traits of `hal`'s devices.

pub(crate) mod opened;

pub mod buffer;
pub mod command_queue;
pub mod compute_pipeline_state;
pub mod device;
pub mod event;
pub mod execution;
pub mod fence;
pub mod graph;
pub mod heap;
pub mod kernel;
pub mod library;
pub mod stream;
pub mod timestamp;

/// The methods that all managers of a pool have alike.
macro_rules! pool_methods {
    ($manager:ident of $state:ident by $handle:ident) => {
        impl $manager {
            /// A lease on the handle's resource.
            ///
            /// # Errors
            /// `StaleHandle`, `Occupied`.
            #[doc(alias = "getState")]
            pub fn get_state(
                &self,
                handle: leasehold_core::$handle,
            ) -> leasehold_core::Result<leasehold_core::Lease<$state>> {
                self.manager.lease(handle)
            }

            /// Whether the handle's resource is alive: one load.
            pub fn is_alive(&self, handle: leasehold_core::$handle) -> bool {
                self.manager.is_alive(handle)
            }

            /// Drops the manager's own lease. Other holders keep theirs.
            ///
            /// # Errors
            /// `StaleHandle` for a resource that the manager does not keep.
            pub fn release(&self, handle: leasehold_core::$handle) -> leasehold_core::Result<()> {
                self.manager.release(handle)?;
                self.released(handle);
                Ok(())
            }

            /// Gives idle resources back to the driver until `keep` are left. Returns the number
            /// given back.
            pub fn trim(&self, keep: u64) -> u64 {
                self.manager.trim(keep)
            }

            /// The pool's statistics.
            pub fn stats(&self) -> leasehold_core::PoolStats {
                self.manager.stats()
            }

            /// Shuts the manager down. A second call is `Ok`.
            ///
            /// # Errors
            /// `LeasesOutstanding` while another holder has a lease. After the error nothing has
            /// changed.
            pub fn shutdown(&self) -> leasehold_core::Result<()> {
                self.outstanding()?;
                self.end()
            }

            /// Whether the manager was configured for a test.
            #[cfg(feature = "test-hooks")]
            #[doc(alias = "isConfiguredForTest")]
            pub fn is_configured_for_test(&self) -> bool {
                self.for_test
            }

            /// A manager of the resources of a device, over a driver that a test supplies.
            ///
            /// # Errors
            /// `NotFound`; a driver error.
            #[cfg(feature = "test-hooks")]
            #[doc(alias = "configureForTest")]
            pub fn configure_for_test(
                ops: leasehold_core::sync::Arc<dyn crate::driver::ops::MpsSlowOps>,
                device: leasehold_hal::DeviceId,
            ) -> leasehold_core::Result<Self> {
                let device = super::opened::OpenedDevice::one(ops, device)?;
                let config = crate::MpsConfig::default();
                Ok(Self { for_test: true, ..Self::new(&device, &config)? })
            }
        }
    };
}
use pool_methods;

/// The constructor of managers that hold nothing but a growable pool.
macro_rules! plain_new {
    ($manager:ident, $resources:ident) => {
        impl $manager {
            pub(crate) fn new(
                device: &leasehold_core::sync::Arc<super::opened::OpenedDevice>,
                _: &crate::MpsConfig,
            ) -> leasehold_core::Result<Self> {
                let manager = leasehold_core::PoolManager::new();
                let resources = $resources { device: device.clone() };
                manager.configure(resources, leasehold_core::PoolConfig::default())?;
                Ok(Self {
                    manager,
                    #[cfg(feature = "test-hooks")]
                    for_test: false,
                })
            }
        }
    };
}
use plain_new;

/// The shutdown of managers that are a pool and no more.
macro_rules! plain_shutdown {
    ($manager:ident, $resource:literal) => {
        impl $manager {
            fn released<T>(&self, _: leasehold_core::Handle<T>) {}

            /// Refuses while another holder has a lease.
            pub(crate) fn outstanding(&self) -> leasehold_core::Result<()> {
                self.outstanding_beyond(0)
            }

            /// Refuses while a holder outside of the backend has a lease. Other parts of the
            /// backend hold `own` resources.
            pub(crate) fn outstanding_beyond(&self, own: u64) -> leasehold_core::Result<()> {
                let strong = self.manager.in_use().saturating_sub(own);
                let weak = self.manager.stats().weak;
                if strong != 0 || weak != 0 {
                    return Err(leasehold_core::Error::LeasesOutstanding {
                        resource: $resource,
                        strong,
                        weak,
                    });
                }
                Ok(())
            }

            fn end(&self) -> leasehold_core::Result<()> {
                self.manager.shutdown()
            }
        }
    };
}
use plain_shutdown;
