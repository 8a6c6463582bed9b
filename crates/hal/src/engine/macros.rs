//! Macros that define data: handles of a driver's objects, and setters of settings.
//!
//! This module must not know a driver.

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
        /// Sets the debug checks for memory.
        #[must_use]
        pub fn debug(mut self, debug: $crate::alloc::DebugOptions) -> Self {
            self.debug = debug;
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
}
