//! Methods and types that are the same in every backend over a driver: of a device's state, of a
//! device manager, and of handles of the driver's objects.
//!
//! This module must not know what a device is made of.

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
