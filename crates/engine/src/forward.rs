//! The methods of `hal::Device` that are the same for every device's state.
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
