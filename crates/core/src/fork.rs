//! Detection of forks: whether the calling process is the one in which an object was made.
//!
//! Threads and most of a driver's state stay with the parent process. In a forked child, a call
//! that needs them would hang or corrupt the parent's work. Such a call asks this module first. An
//! `atfork` handler counts forks in each child, so the check is one load.
//!
//! This module must not know which objects ask.

use crate::error::{Error, Result, Text};
use crate::sync::atomic::{AtomicU32, Ordering};

/// The number of forks between the first process that asked and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process in which an object was made. If the system cannot fork, the process is always the
/// same.
///
/// ```
/// use leasehold_core::ForkGuard;
/// let fork_guard = ForkGuard::here();
/// assert!(!fork_guard.is_forked_child());
/// assert_eq!(fork_guard.process(), std::process::id());
/// fork_guard.check(|_| "not after a fork".into())?;
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkGuard {
    forks: u32,
    process: u32,
}

impl ForkGuard {
    /// The calling process.
    #[must_use]
    pub fn here() -> Self {
        watch();
        Self { forks: FORKS.load(Ordering::Relaxed), process: std::process::id() }
    }

    /// Returns whether the calling process is a direct or indirect fork of that process. One load.
    /// Valid from the child's first instruction.
    #[inline]
    #[must_use]
    pub fn is_forked_child(self) -> bool {
        FORKS.load(Ordering::Relaxed) != self.forks
    }

    /// The process's number.
    #[must_use]
    pub fn process(self) -> u32 {
        self.process
    }

    /// Returns an error in a fork of that process.
    ///
    /// # Errors
    /// `InvalidState` with the text that `why` returns.
    #[inline]
    pub fn check(self, why: impl FnOnce(Self) -> Text) -> Result<()> {
        if self.is_forked_child() { self.refused(why) } else { Ok(()) }
    }

    #[cold]
    fn refused(self, why: impl FnOnce(Self) -> Text) -> Result<()> {
        Err(Error::state(why(self)))
    }
}

#[cfg(unix)]
fn watch() {
    use crate::sync::OnceLock;
    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    static WATCHING: OnceLock<()> = OnceLock::new();
    WATCHING.get_or_init(|| {
        // SAFETY: the handler does nothing but an atomic addition, which is allowed in a forked
        // child. If the C library has no memory for the handler, children do not notice the fork.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

#[cfg(not(unix))]
fn watch() {}

#[cfg(all(test, unix))]
#[path = "../tests/unit/fork.rs"]
mod tests;
