//! Whether this process is a fork of the one in which a driver was started: CUDA's state does not survive a fork, and
//! calls in a child hang or corrupt the parent's work. A handler of `pthread_atfork` counts, so that asking costs one
//! load.
//!
//! This module must not know drivers.

use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::{Error, Result};

/// How many forks lie between the process that loaded this library and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Remembers the process in which it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Birth {
    forks: u32,
    process: u32,
}

impl Birth {
    /// Of this process.
    #[must_use]
    pub fn now() -> Self {
        watch();
        Self { forks: FORKS.load(Ordering::Relaxed), process: std::process::id() }
    }

    /// Fails in a child of that process.
    ///
    /// # Errors
    /// `InvalidState`, naming both processes.
    #[inline]
    pub fn check(self) -> Result<()> {
        if FORKS.load(Ordering::Relaxed) == self.forks { Ok(()) } else { Err(self.forked()) }
    }

    #[cold]
    fn forked(self) -> Error {
        Error::state(format!(
            "CUDA was started in process {} and this is its fork {}: a forked child cannot use CUDA; start it in the child instead, or make \
             children by spawning a program",
            self.process,
            std::process::id()
        ))
    }
}

#[cfg(unix)]
fn watch() {
    use leasehold_core::sync::OnceLock;
    extern "C" fn child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    static WATCHING: OnceLock<bool> = OnceLock::new();
    // SAFETY: the handler only touches an atomic, which is allowed in a forked child.
    WATCHING.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(child)) == 0 });
}

#[cfg(not(unix))]
fn watch() {}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_told() {
        let birth = Birth::now();
        assert!(birth.check().is_ok());
        // SAFETY: the child only loads an atomic and exits without running destructors.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let forked = FORKS.load(Ordering::Relaxed) != birth.forks;
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if forked { 7 } else { 0 }) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status));
        assert_eq!(libc::WEXITSTATUS(status), 7);
        assert!(birth.check().is_ok());
    }
}
