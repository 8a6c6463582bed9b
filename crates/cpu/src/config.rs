//! The configuration of the backend.
//!
//! This module must not know how any of it is used.

use leasehold_alloc::DebugOptions;
use leasehold_core::{Error, Result};
use std::time::Duration;

/// The most threads of a configuration.
pub const THREADS_MAX: usize = 1024;

/// Whether committed memory asks for huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// The backend advises the system to use huge pages.
    #[default]
    Advise,
    /// The backend does not ask for huge pages.
    Never,
}

/// The configuration of the backend.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuConfig {
    /// The most threads of one kernel, including the stream's own worker. 1 to 1,024. `None`, the
    /// default, stands for the number of processors that the process may keep busy.
    pub threads: Option<usize>,
    /// The time that threads stay awake after their last work. At most a second; 150 µs by
    /// default.
    pub spin: Duration,
    /// The time that a waiting thread of the application stays awake, if the device's own threads
    /// leave a processor free. At most a second; 1 ms by default.
    pub host_spin: Duration,
    /// The most streams at a time; 256 by default.
    pub streams: u32,
    /// Whether large blocks use huge pages. By default they do, if the system has huge pages.
    pub huge_pages: HugePages,
    /// Debug checks that detect wrong uses of memory; all off by default.
    pub debug: DebugOptions,
    /// The entries of the memory's trace ring. 0, the default, disables the ring.
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
            debug: DebugOptions::default(),
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

    /// Sets the time that threads stay awake.
    #[must_use]
    pub fn spin(mut self, spin: Duration) -> Self {
        self.spin = spin;
        self
    }

    /// Sets the time that waiting threads of the application stay awake.
    #[must_use]
    pub fn host_spin(mut self, spin: Duration) -> Self {
        self.host_spin = spin;
        self
    }

    leasehold_hal::config_setters!(streams debug trace_events);

    /// Sets the use of huge pages.
    #[must_use]
    pub fn huge_pages(mut self, huge_pages: HugePages) -> Self {
        self.huge_pages = huge_pages;
        self
    }

    /// Checks the values.
    ///
    /// # Errors
    /// `InvalidArgument` for 0 or more than 1,024 threads, for 0 streams, and for a spin of more
    /// than a second.
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
            return Err(Error::invalid(format!(
                "threads that stay awake for {longest:?}: want at most a second"
            )));
        }
        Ok(())
    }
}
