//! Methods and types that are the same in every backend over a driver: of a device's state, of a
//! device manager, and of handles of the driver's objects.
//!
//! This module must not know what a device is made of.

/// Expands to the methods of [`hal::Device`](leasehold_hal::Device) that only expose what a
/// device's state has: `info`, `caps`, `limits`, `state` and `pools`. The state has inherent
/// methods `info`, `caps`, `limits` and `pools`.
#[macro_export]
macro_rules! forward_device {
    () => {
        fn info(&self) -> &$crate::forwarded::DeviceInfo {
            Self::info(self)
        }

        fn caps(&self) -> $crate::forwarded::Caps {
            Self::caps(self)
        }

        fn limits(&self) -> &$crate::forwarded::Limits {
            Self::limits(self)
        }

        fn state(&self) -> Option<&(dyn std::any::Any + Send + Sync)> {
            Some(self)
        }

        fn pools(&self, report: &mut dyn FnMut(&'static str, $crate::forwarded::PoolStats)) {
            Self::pools(self, report);
        }
    };
}

/// Expands to the methods that device managers over a driver have alike, and to their `Debug`.
///
/// The manager has a method `open` of its own, and a field `known`: a `OnceLock` of a value with a
/// `FixedSlotStore` named `store` and a [`Retired`](crate::retired::Retired) named `retired`. With
/// the feature `test-hooks` the manager has a field `for_test`. Devices have a method
/// `outstanding`. Devices and retired payloads have a method `left_behind`, as
/// [`Engine::left_behind`](crate::Engine::left_behind).
#[macro_export]
macro_rules! device_manager_methods {
    ($manager:ident with $known:ident of $state:ident) => {
        impl $manager {
            /// Makes a manager without devices.
            #[must_use]
            pub fn new() -> Self {
                Self::default()
            }

            /// Whether the manager was [configured for a test](Self::configure_for_test).
            #[cfg(feature = "test-hooks")]
            #[doc(alias = "isConfiguredForTest")]
            pub fn is_configured_for_test(&self) -> bool {
                self.for_test.load($crate::forwarded::Ordering::Acquire)
            }

            fn known(&self) -> $crate::forwarded::Result<&$known> {
                let unknown =
                    || $crate::forwarded::Error::state("the device manager is not configured");
                self.known.get().ok_or_else(unknown)
            }

            /// The number of devices. The number is 0 before
            /// [`initialize_devices`](Self::initialize_devices).
            pub fn device_count(&self) -> u32 {
                self.known.get().map_or(0, |known| known.store.len())
            }

            /// Opens the device unless it is open, and returns its handle. The manager keeps the
            /// device until its [release](Self::release).
            ///
            /// # Errors
            /// `NotFound`; `InvalidState` before [`initialize_devices`](Self::initialize_devices)
            /// and after a shutdown; a driver error.
            #[doc(alias = "ensureAlive")]
            pub fn ensure_alive(
                &self,
                device: $crate::forwarded::DeviceId,
            ) -> $crate::forwarded::Result<$crate::forwarded::DeviceHandle> {
                self.open(device).map(|device| device.handle())
            }

            /// A lease on the state of an open device.
            ///
            /// # Errors
            /// `StaleHandle`, `Occupied`.
            #[doc(alias = "getState")]
            pub fn get_state(
                &self,
                device: $crate::forwarded::DeviceHandle,
            ) -> $crate::forwarded::Result<$crate::forwarded::Lease<$state>> {
                self.known()?.store.lease(device)
            }

            /// Whether the handle's device is open: one load.
            pub fn is_alive(&self, device: $crate::forwarded::DeviceHandle) -> bool {
                self.known.get().is_some_and(|known| known.store.is_alive(device))
            }

            /// Drops the manager's own lease. Other holders keep theirs.
            ///
            /// # Errors
            /// `StaleHandle`.
            pub fn release(
                &self,
                device: $crate::forwarded::DeviceHandle,
            ) -> $crate::forwarded::Result<()> {
                self.known()?.store.release(device)
            }

            /// The store's statistics.
            pub fn stats(&self) -> $crate::forwarded::PoolStats {
                self.known.get().map(|known| known.store.stats()).unwrap_or_default()
            }

            /// Runs down the streams of devices whose streams have no holder: the work that dropped
            /// streams left behind. Blocks on that work, unless the host holds it back.
            pub(crate) fn run_down(&self) {
                let Some(known) = self.known.get() else { return };
                let mut left = Vec::new();
                for ordinal in 0..known.store.len() {
                    let index = $crate::forwarded::Index::new(ordinal);
                    if let Some(device) = known.store.existing(index) {
                        left.append(&mut device.left_behind());
                    }
                }
                known.retired.each(|retired| left.append(&mut retired.left_behind()));
                // No lock is held.
                for stream in left {
                    stream.run_down();
                }
            }

            /// Refuses while a lease on a device, or on a resource of a device, is held.
            fn refuse_outstanding(known: &$known) -> $crate::forwarded::Result<()> {
                for ordinal in 0..known.store.len() {
                    // The lease is dropped before the store decides.
                    let index = $crate::forwarded::Index::new(ordinal);
                    if let Some(device) = known.store.existing(index) {
                        device.outstanding()?;
                    }
                }
                Ok(())
            }
        }

        impl std::fmt::Debug for $manager {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($manager)).field("devices", &self.device_count()).finish()
            }
        }
    };
}

/// Expands to the methods that managers over a pool have alike: `in_use`, `stats` and `shutdown`.
/// The arguments are the field with the pool, and the name of its resources in the documentation.
#[macro_export]
macro_rules! pool_methods {
    ($pool:ident: $resources:literal) => {
        #[doc = concat!("The number of ", $resources)]
        /// with a holder beside this manager (a snapshot).
        pub fn in_use(&self) -> u64 {
            self.$pool.in_use()
        }

        /// The pool's statistics.
        pub fn stats(&self) -> $crate::forwarded::PoolStats {
            self.$pool.stats()
        }

        /// Shuts the manager down.
        ///
        /// # Errors
        /// `LeasesOutstanding`. After the error nothing has changed.
        pub fn shutdown(&self) -> $crate::forwarded::Result<()> {
            self.$pool.shutdown()
        }
    };
}

/// Expands to the methods of a manager over a [`PipelinePool`](crate::pipelines::PipelinePool).
#[macro_export]
macro_rules! pipeline_methods {
    ($pool:ident) => {
        /// Ends the kernels without a holder whose last launch is over. Returns the number of those
        /// whose launches are not over. May block on the driver.
        pub fn trim(&self) -> usize {
            self.$pool.trim()
        }

        $crate::pool_methods!($pool: "kernels");
    };
}

/// Defines a handle type for each kind of a driver's objects: a number that owns nothing.
#[macro_export]
macro_rules! native_handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The handle of no object.
            pub const NULL: Self = Self(0);

            /// Whether the handle is null.
            #[must_use]
            pub fn is_null(self) -> bool {
                self.0 == 0
            }
        }
    )*};
}

/// Expands to the setters of the named settings, which several backends' configurations have alike.
#[macro_export]
macro_rules! config_setters {
    ($($setting:ident)*) => {
        $($crate::config_setters!(@ $setting);)*
    };
    (@ streams) => {
        /// Sets the most streams of a device.
        #[must_use]
        pub fn streams(mut self, streams: u32) -> Self {
            self.streams = streams;
            self
        }
    };
    (@ inline) => {
        /// Enables or disables threads of the backend's own.
        #[must_use]
        pub fn inline(mut self, inline: bool) -> Self {
            self.inline = inline;
            self
        }
    };
    (@ debug) => {
        /// Sets the debug aids for memory.
        #[must_use]
        pub fn debug(mut self, aids: $crate::forwarded::DebugAids) -> Self {
            self.debug = aids;
            self
        }
    };
    (@ trace_events) => {
        /// Sets the entries of the trace ring of each kind of memory.
        #[must_use]
        pub fn trace_events(mut self, events: usize) -> Self {
            self.trace_events = events;
            self
        }
    };
    (@ defect) => {
        /// Plants a defect that tests must find.
        #[cfg(feature = "planted-defects")]
        #[must_use]
        pub fn defect(mut self, defect: $crate::defects::Defect) -> Self {
            self.defect = Some(defect);
            self
        }

        /// Whether this defect was planted.
        #[cfg(feature = "planted-defects")]
        #[inline]
        pub(crate) fn has(&self, defect: $crate::defects::Defect) -> bool {
            self.defect == Some(defect)
        }
    };
}

/// Expands to the methods that stream managers over a driver have alike: those of their pool, and
/// their `Debug`. The manager has a field `streams`, a
/// [`StreamPool`](crate::stream_pool::StreamPool) of the named state, and with the feature
/// `test-hooks` a field `for_test`.
#[macro_export]
macro_rules! stream_manager_methods {
    ($manager:ident of $state:ident) => {
        impl $manager {
            /// Whether the manager was [configured for a test](Self::configure_for_test).
            #[cfg(feature = "test-hooks")]
            #[doc(alias = "isConfiguredForTest")]
            pub fn is_configured_for_test(&self) -> bool {
                self.for_test
            }
        }

        impl std::ops::Deref for $manager {
            type Target = $crate::stream_pool::StreamPool<$state>;

            fn deref(&self) -> &Self::Target {
                &self.streams
            }
        }

        impl std::fmt::Debug for $manager {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_tuple(stringify!($manager)).field(&self.streams).finish()
            }
        }
    };
}
