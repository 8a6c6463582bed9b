//! The manager of a backend's devices, over a driver.
//!
//! This module must not know what a device is made of.

use crate::engine::retired::{LeftBehind, Others, Retired, Retiring, StreamOwner};
use crate::{BackendKind, DeviceId, DeviceInfo};
#[cfg(feature = "test-hooks")]
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::sync::{Arc, OnceLock};
use leasehold_core::{
    DeviceHandle, Error, FixedSlotStore, Index, Lease, PoolStats, Resource, Result, Tagged, tags,
};
use std::fmt;

/// A backend's part of a [`DeviceManager`]: it finds the driver, enumerates the devices and makes
/// their states.
///
/// The request of a state is the device's ordinal.
pub trait DeviceSource:
    for<'a> Resource<Request<'a> = u32, Payload: StreamOwner + Tagged<Tag = tags::Device>>
{
    /// The driver.
    type Driver: ?Sized + Send + Sync;
    /// The backend's configuration.
    type Config: fmt::Debug + Clone + Default + Send + Sync;
    /// The payload that ends in the background: a device, or a context of a device.
    type Retiring: Retiring;
    /// The backend's kind, which its devices' names have.
    const KIND: BackendKind;

    /// Finds and loads the system's driver. May block.
    ///
    /// # Errors
    /// `Unavailable` without a driver.
    fn load() -> Result<Arc<Self::Driver>>;

    /// Starts a driver and enumerates its devices, and opens none. May block on the driver. The
    /// call checks the configuration before it calls the driver.
    ///
    /// # Errors
    /// `InvalidArgument` for the configuration; `Unavailable` for a driver whose answers are not
    /// plausible; a driver error.
    ///
    /// # Safety
    /// - The caller is a [`DeviceManager`]. A state that it makes belongs to its store, and ends as
    ///   [`destroy`](Resource::destroy) does it.
    unsafe fn enumerate(driver: Arc<Self::Driver>, config: Self::Config) -> Result<Self>
    where
        Self: Sized;

    /// The number of devices.
    fn count(&self) -> u32;

    /// Describes the devices without opening them. May ask the driver.
    fn describe(&self) -> Vec<DeviceInfo>;

    /// The payloads without a lease that have not ended.
    fn retired(&self) -> &Arc<Retired<Self::Retiring>>;

    /// Gives back what the enumeration holds. Called at a shutdown, after the end of all devices.
    fn close(&self) {}
}

/// Enumerates the devices of a driver and owns their states. A device is not exclusive.
pub struct DeviceManager<D: DeviceSource> {
    store: OnceLock<FixedSlotStore<D>>,
    #[cfg(feature = "test-hooks")]
    for_test: AtomicBool,
}

impl<D: DeviceSource> Default for DeviceManager<D> {
    fn default() -> Self {
        Self {
            store: OnceLock::new(),
            #[cfg(feature = "test-hooks")]
            for_test: AtomicBool::new(false),
        }
    }
}

impl<D: DeviceSource> DeviceManager<D> {
    /// Makes a manager without devices.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts the driver and enumerates the devices, and opens none. Blocks on the driver.
    ///
    /// # Errors
    /// - `InvalidArgument` for a configuration that its `validate` refuses.
    /// - `Unavailable` for a driver whose answers are not plausible.
    /// - `InvalidState` at the second call.
    /// - A driver error.
    #[doc(alias = "initializeDevices")]
    pub fn initialize_devices(&self, driver: Arc<D::Driver>, config: D::Config) -> Result<()> {
        // SAFETY: the store below makes the states, and no one else reaches `devices`.
        let devices = unsafe { D::enumerate(driver, config) }?;
        let count = devices.count();
        self.store
            .set(FixedSlotStore::new(devices, count)?)
            .map_err(|_| Error::state("the device manager is configured already"))
    }

    /// As [`initialize_devices`](Self::initialize_devices), over a driver that a test supplies.
    ///
    /// # Errors
    /// As [`initialize_devices`](Self::initialize_devices).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "configureForTest")]
    pub fn configure_for_test(&self, driver: Arc<D::Driver>) -> Result<()> {
        self.initialize_devices(driver, D::Config::default())?;
        self.for_test.store(true, Ordering::Release);
        Ok(())
    }

    /// Whether the manager was [configured for a test](Self::configure_for_test).
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "isConfiguredForTest")]
    pub fn is_configured_for_test(&self) -> bool {
        self.for_test.load(Ordering::Acquire)
    }

    fn store(&self) -> Result<&FixedSlotStore<D>> {
        let unknown = || Error::state("the device manager is not configured");
        self.store.get().ok_or_else(unknown)
    }

    /// The number of devices. The number is 0 before
    /// [`initialize_devices`](Self::initialize_devices).
    pub fn device_count(&self) -> u32 {
        self.store.get().map_or(0, FixedSlotStore::len)
    }

    /// Describes the devices without opening them. The amount of free memory is known of open
    /// devices only.
    ///
    /// # Errors
    /// `InvalidState` before [`initialize_devices`](Self::initialize_devices).
    pub fn describe(&self) -> Result<Vec<DeviceInfo>> {
        Ok(self.store()?.resource()?.describe())
    }

    /// Opens the device unless it is open. May block on the driver.
    ///
    /// # Errors
    /// As [`ensure_alive`](Self::ensure_alive).
    pub fn open(&self, device: DeviceId) -> Result<Lease<D::Payload>> {
        let ordinal = device.ordinal_on(D::KIND)?;
        let store = self.store()?;
        store.resource()?.retired().reclaim();
        store.get(Index::new(ordinal), &ordinal)
    }

    /// Opens the device unless it is open, and returns its handle. The manager keeps the device
    /// until its [release](Self::release).
    ///
    /// # Errors
    /// `NotFound`; `InvalidState` before [`initialize_devices`](Self::initialize_devices) and after
    /// a shutdown; a driver error.
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, device: DeviceId) -> Result<DeviceHandle> {
        self.open(device).map(|device| device.handle())
    }

    /// A lease on the state of an open device.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "getState")]
    pub fn get_state(&self, device: DeviceHandle) -> Result<Lease<D::Payload>> {
        self.store()?.lease(device)
    }

    /// Whether the handle's device is open: one load.
    pub fn is_alive(&self, device: DeviceHandle) -> bool {
        self.store.get().is_some_and(|store| store.is_alive(device))
    }

    /// Drops the manager's own lease. Other holders keep theirs.
    ///
    /// # Errors
    /// `StaleHandle`.
    pub fn release(&self, device: DeviceHandle) -> Result<()> {
        self.store()?.release(device)
    }

    /// The store's statistics.
    pub fn stats(&self) -> PoolStats {
        self.store.get().map(FixedSlotStore::stats).unwrap_or_default()
    }

    /// The open devices. The caller drops the leases before the store decides.
    fn opened(store: &FixedSlotStore<D>) -> impl Iterator<Item = Lease<D::Payload>> {
        (0..store.len()).filter_map(|ordinal| store.existing(Index::new(ordinal)))
    }

    /// Runs down the streams of devices whose streams have no holder: the work that dropped streams
    /// left behind. Blocks on that work, unless the host holds it back.
    pub(crate) fn run_down(&self) {
        let Some(store) = self.store.get() else { return };
        let Ok(devices) = store.resource() else { return };
        let mut left: Vec<_> = Self::opened(store).map(|device| device.left_behind()).collect();
        devices.retired().each(|payload| left.push(payload.left_behind()));
        // No lock is held, and no lease on a device.
        left.into_iter().for_each(LeftBehind::run_down);
    }

    /// Ends the manager, its devices and all their resources. Blocks on the driver. The call waits
    /// for work of other libraries' streams on devices without a lease, and for no other work:
    /// [`Backend::shutdown`](crate::Backend) does. A second call is `Ok`, and so is one
    /// before [`initialize_devices`](Self::initialize_devices).
    ///
    /// # Errors
    /// `LeasesOutstanding` while one of these is true:
    /// - A lease on a device is held, or on a resource of a device.
    /// - A lease on a resource of a device or context without a lease is held.
    /// - A dropped stream has work pending.
    ///
    /// After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        let Some(store) = self.store.get() else { return Ok(()) };
        Self::opened(store).try_for_each(|device| device.outstanding())?;
        let devices = store.resource()?;
        devices.retired().settle(Others::Await)?;
        devices.retired().settling(Others::Await, || store.shutdown())?;
        devices.close();
        Ok(())
    }
}

impl<D: DeviceSource> Drop for DeviceManager<D> {
    fn drop(&mut self) {
        let Some(store) = self.store.take() else { return };
        let Ok(retired) = store.resource().map(|devices| devices.retired().clone()) else { return };
        let ended = retired.settling(Others::Leave, || {
            drop(store);
            Ok(())
        });
        if let Err(error) = ended {
            // The devices that are left end in the background, after their last holder.
            tracing::debug!(%error, "devices of the backend {} are in use", D::KIND);
        }
    }
}

impl<D: DeviceSource> fmt::Debug for DeviceManager<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceManager").field("devices", &self.device_count()).finish()
    }
}
