//! The top: configuration and life cycle of everything that the backend has.
//!
//! This module must not know streams, memory or kernels.

use super::device::DeviceManager;
use leasehold_alloc::DebugAids;
use leasehold_core::{Error, LifeCycle, Result};
use std::time::Duration;

/// The most threads that can be asked for.
pub const THREADS_MAX: usize = 1024;

/// Whether committed memory asks for huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Yes, where the system has them on advice.
    #[default]
    Advise,
    /// No.
    Never,
}

/// What can be chosen about the backend.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuConfig {
    /// Threads that one kernel can use, the stream's own worker included; `None`, the default: as many as the process may keep busy. 1 to 1,024.
    pub threads: Option<usize>,
    /// How long threads stay awake after their last work before they sleep. At most a second; 150 µs by default.
    pub spin: Duration,
    /// How long a thread of the application that waits for a stream stays awake, if there is a processor that the device's own threads do not
    /// use; 1 ms by default.
    pub host_spin: Duration,
    /// Streams at a time; 256 by default.
    pub streams: u32,
    /// Huge pages; by default the large blocks have them where the system gives them.
    pub huge_pages: HugePages,
    /// What looks for wrong uses of memory; all off by default.
    pub debug: DebugAids,
    /// Entries of the memory's trace ring; 0, the default, switches it off.
    pub trace_events: usize,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self {
            threads: None,
            spin: Duration::from_micros(150),
            host_spin: Duration::from_millis(1),
            streams: 256,
            huge_pages: HugePages::default(),
            debug: DebugAids::default(),
            trace_events: 0,
        }
    }
}

impl CpuConfig {
    /// The defaults with this many threads.
    #[must_use]
    pub fn threads(threads: usize) -> Self {
        Self { threads: Some(threads), ..Self::default() }
    }

    /// As before, with this time to stay awake.
    #[must_use]
    pub fn spin(mut self, spin: Duration) -> Self {
        self.spin = spin;
        self
    }

    /// As before, with this time for waiting threads of the application.
    #[must_use]
    pub fn host_spin(mut self, spin: Duration) -> Self {
        self.host_spin = spin;
        self
    }

    /// As before, with this many streams at most.
    #[must_use]
    pub fn streams(mut self, streams: u32) -> Self {
        self.streams = streams;
        self
    }

    /// As before, with this choice of huge pages.
    #[must_use]
    pub fn huge_pages(mut self, huge_pages: HugePages) -> Self {
        self.huge_pages = huge_pages;
        self
    }

    /// As before, with these debug aids for memory.
    #[must_use]
    pub fn debug(mut self, aids: DebugAids) -> Self {
        self.debug = aids;
        self
    }

    /// As before, with a trace ring of this many events for each kind of memory.
    #[must_use]
    pub fn trace_events(mut self, events: usize) -> Self {
        self.trace_events = events;
        self
    }

    /// Checks the values.
    ///
    /// # Errors
    /// `InvalidArgument` for no threads or more than 1,024, for no streams, and for a spin of more than a second.
    pub fn validate(&self) -> Result<()> {
        if let Some(threads) = self.threads
            && !(1..=THREADS_MAX).contains(&threads)
        {
            return Err(Error::invalid(format!("{threads} threads: want 1 to {THREADS_MAX}")));
        }
        if self.streams == 0 {
            return Err(Error::invalid("a device without streams can do nothing"));
        }
        let longest = self.spin.max(self.host_spin);
        if longest > Duration::from_secs(1) {
            return Err(Error::invalid(format!("threads that stay awake for {longest:?}: want at most a second")));
        }
        Ok(())
    }
}

/// Owns the managers of the backend: the first to be made and the last to go.
#[doc(alias = "RuntimeManager")]
#[doc(alias = "ExecutionManager")]
#[derive(Debug)]
pub struct CpuExecutionManager {
    devices: DeviceManager,
    life: LifeCycle,
}

impl Default for CpuExecutionManager {
    fn default() -> Self {
        Self::new()
    }
}

impl CpuExecutionManager {
    /// A manager that must be configured.
    #[must_use]
    pub fn new() -> Self {
        Self { devices: DeviceManager::new(), life: LifeCycle::new() }
    }

    /// Makes it ready. All-or-nothing. Finds out about the machine, which reads files; starts no thread.
    ///
    /// # Errors
    /// As [`CpuConfig::validate`]; `InvalidState` when it is configured already, and after a [`shutdown`](Self::shutdown): a new
    /// start needs a new manager, so that no handle of before names a thing of after.
    pub fn configure(&self, config: CpuConfig) -> Result<()> {
        config.validate()?;
        self.life.configure("CPU execution manager", || self.devices.initialize_devices(config))
    }

    /// Whether [`configure`](Self::configure) has succeeded, and the manager was not shut down.
    pub fn is_configured(&self) -> bool {
        self.life.is_configured()
    }

    /// The devices.
    pub fn devices(&self) -> &DeviceManager {
        &self.devices
    }

    /// Ends everything; a second call is `Ok`. Blocks while idle threads end, without a lock.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then.
    pub fn shutdown(&self) -> Result<()> {
        self.life.shutdown(|| self.devices.shutdown())
    }
}
