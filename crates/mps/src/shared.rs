//! The state that all devices of the backend share: the driver, the settings, the table of
//! segments, and the kernels' names.
//!
//! All locks here are leaves and are held for a few instructions.
//!
//! This module must not know devices or streams.

use crate::config::MpsConfig;
use crate::driver::ops::MpsSlowOps;
use crate::spans::Spans;
use leasehold_core::sync::{Arc, OnceLock, RwLock};
use std::collections::HashMap;
use std::fmt;

/// The state that all devices of a backend share.
pub struct Shared {
    /// The driver.
    pub ops: Arc<dyn MpsSlowOps>,
    /// The settings.
    pub config: MpsConfig,
    /// The segments of all devices' memory.
    pub spans: Spans,
    /// The number of devices, once they were enumerated.
    devices: OnceLock<u32>,
    /// The kernels' names by pipeline, for reports.
    functions: RwLock<HashMap<u64, Box<str>>>,
}

impl Shared {
    /// Makes empty tables.
    #[must_use]
    pub fn new(ops: Arc<dyn MpsSlowOps>, config: MpsConfig) -> Self {
        Self {
            ops,
            config,
            spans: Spans::default(),
            devices: OnceLock::new(),
            functions: RwLock::new(HashMap::new()),
        }
    }

    /// Records the number of devices. Only the first call has an effect.
    pub(crate) fn set_devices(&self, count: u32) {
        self.devices.get_or_init(|| count);
    }

    /// The number of devices; 0 before their enumeration.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.devices.get().copied().unwrap_or(0)
    }

    /// Records the name of a pipeline's kernel.
    pub fn name_function(&self, pipeline: u64, name: &str) {
        self.functions.write().insert(pipeline, name.into());
    }

    /// The name of a pipeline's kernel.
    #[must_use]
    pub fn function_name(&self, pipeline: u64) -> Option<String> {
        self.functions.read().get(&pipeline).map(|name| name.to_string())
    }

    /// Removes the name of a pipeline's kernel.
    pub fn forget_function(&self, pipeline: u64) {
        self.functions.write().remove(&pipeline);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("config", &self.config)
            .field("spans", &self.spans)
            .finish_non_exhaustive()
    }
}
