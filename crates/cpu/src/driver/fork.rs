//! Whether this process is a forked child of the one that a device was opened in: the device's threads are not there then, and a call that
//! needs one would wait for ever. A handler that runs in every child counts, so that asking costs one load.
//!
//! This module must not know queues.

use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::{Error, Result};

/// How many forks lie between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process in which something was made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Home(u32);

impl Home {
    /// This process.
    pub(crate) fn here() -> Self {
        count_forks();
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this is another process by now.
    #[inline]
    pub(crate) fn left(self) -> bool {
        GENERATION.load(Ordering::Relaxed) != self.0
    }

    /// # Errors
    /// `InvalidState` in a forked child.
    #[inline]
    pub(crate) fn check(self) -> Result<()> {
        if self.left() { Err(forked()) } else { Ok(()) }
    }
}

#[cold]
fn forked() -> Error {
    Error::state(
        "this process was forked after the device was opened, and the device's threads stayed in the parent; open a backend of its own here, or \
         fork before",
    )
}

#[cfg(unix)]
fn count_forks() {
    use leasehold_core::sync::OnceLock;
    extern "C" fn in_child() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        // SAFETY: the handler does nothing but an atomic addition. Without room for the handler children are not told, as before.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

#[cfg(not(unix))]
fn count_forks() {}
