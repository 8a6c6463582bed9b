//! The start of a backend's driver at its first use, and the backend over the driver.
//!
//! This module must not know a driver.

use leasehold_core::sync::{Arc, Mutex, OnceLock};
use leasehold_core::{Error, Result};
use leasehold_hal::DeviceId;
use std::fmt;

/// Finds and loads a driver.
pub type DriverSource<D> = Box<dyn Fn() -> Result<Arc<D>> + Send + Sync>;

/// A driver that starts once, with the backend's configuration.
pub struct DriverStart<D: ?Sized, C> {
    source: DriverSource<D>,
    config: C,
    outcome: OnceLock<Result<()>>,
    starting: Mutex<()>,
}

impl<D: ?Sized, C: Clone> DriverStart<D, C> {
    /// A driver that was not started. The call runs nothing of `source`.
    #[must_use]
    pub fn new(source: DriverSource<D>, config: C) -> Self {
        Self { source, config, outcome: OnceLock::new(), starting: Mutex::new(()) }
    }

    /// Finds the driver and runs `configure` with it, at the first call. Threads that call
    /// meanwhile wait. Later calls return the first outcome.
    ///
    /// # Errors
    /// The source's, or those of `configure`.
    pub fn start(&self, configure: impl FnOnce(Arc<D>, C) -> Result<()>) -> Result<()> {
        if let Some(outcome) = self.outcome.get() {
            return outcome.clone();
        }
        let _turn = self.starting.lock();
        if let Some(outcome) = self.outcome.get() {
            return outcome.clone();
        }
        let outcome = (self.source)().and_then(|driver| configure(driver, self.config.clone()));
        self.outcome.get_or_init(|| outcome).clone()
    }

    /// The configuration.
    pub fn config(&self) -> &C {
        &self.config
    }
}

impl<D: ?Sized, C: fmt::Debug> fmt::Debug for DriverStart<D, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverStart")
            .field("config", &self.config)
            .field("outcome", &self.outcome.get())
            .finish_non_exhaustive()
    }
}

/// Names the device in an error that says why the device cannot be opened.
#[must_use]
pub fn open_error(device: DeviceId, error: Error) -> Error {
    match error {
        Error::Unavailable(why) => Error::Unavailable(format!("{device}: {why}").into()),
        Error::NotFound(why) => Error::NotFound(format!("{device}: {why}").into()),
        other => other,
    }
}

/// Expands to the methods of [`hal::Backend`](leasehold_hal::Backend) of a backend over a driver.
/// The backend has a method `start`, and a field `manager` with an execution manager. Its devices
/// have the methods of [`device_manager_methods!`](crate::device_manager_methods).
///
/// The arguments are the backend's kind and its function from a `DeviceId` to an ordinal.
#[macro_export]
macro_rules! forward_backend {
    ($kind:ident, $ordinal_of:path) => {
        fn kind(&self) -> $crate::forwarded::BackendKind {
            $crate::forwarded::BackendKind::$kind
        }

        fn devices(&self) -> $crate::forwarded::Result<Vec<$crate::forwarded::DeviceInfo>> {
            self.start()?;
            self.manager.devices().describe()
        }

        fn open(
            &self,
            device: $crate::forwarded::DeviceId,
        ) -> $crate::forwarded::Result<$crate::forwarded::Lease<dyn $crate::forwarded::Device>> {
            $ordinal_of(device)?;
            let opened = self.start().and_then(|()| self.manager.devices().open(device));
            let lease = opened.map_err(|error| $crate::start::open_error(device, error))?;
            Ok($crate::forwarded::Lease::map(lease, |d| d as &dyn $crate::forwarded::Device))
        }

        fn shutdown(&self) -> $crate::forwarded::Result<()> {
            // Managers do not wait. The driver's work and host calls end by themselves. Work that a
            // host timeline or another backend holds back is not waited for, and makes the shutdown
            // fail.
            self.manager.devices().run_down();
            self.manager.shutdown()
        }

        fn pools(&self, report: &mut dyn FnMut(&'static str, $crate::forwarded::PoolStats)) {
            report("device", self.manager.devices().stats());
        }
    };
}

/// Expands to the methods that backends over a driver have alike, to their `Default` and to their
/// `Debug`. The backend has a field `manager` with an execution manager, a field `driver` with a
/// [`DriverStart`](crate::start::DriverStart), and a function `new`.
#[macro_export]
macro_rules! backend_methods {
    ($backend:ident of $manager:ident over $ops:ident with $config:ident) => {
        impl $backend {
            /// A backend over a driver that was found.
            ///
            /// # Errors
            #[doc = concat!("As [`", stringify!($manager), "::configure`].")]
            pub fn with_ops(
                ops: $crate::forwarded::Arc<dyn $ops>,
                config: $config,
            ) -> $crate::forwarded::Result<Self> {
                let backend = Self::over(Box::new(move || Ok(ops.clone())), config);
                backend.start()?;
                Ok(backend)
            }

            /// A backend over a driver that starts at its first use.
            pub(crate) fn over(
                source: $crate::start::DriverSource<dyn $ops>,
                config: $config,
            ) -> Self {
                let driver = $crate::start::DriverStart::new(source, config);
                Self { manager: $manager::new(), driver }
            }

            /// Starts the driver once. A failure is kept, and later calls return it.
            fn start(&self) -> $crate::forwarded::Result<()> {
                self.driver.start(|ops, config| self.manager.configure(ops, config))
            }

            /// The managers.
            pub fn manager(&self) -> &$manager {
                &self.manager
            }
        }

        impl Default for $backend {
            fn default() -> Self {
                Self::new()
            }
        }

        impl std::fmt::Debug for $backend {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($backend))
                    .field("manager", &self.manager)
                    .field("config", self.driver.config())
                    .finish_non_exhaustive()
            }
        }
    };
}
