//! `SIGUSR1`: somebody asks what the ranks do. The answer goes to standard error.
//!
//! The signal's handler only notes the request, for threads that look.
//!
//! This module must not know how the ranks run.

use leasehold::backend::sync::Arc;
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
use leasehold_collective::Reporter;
use std::io::Write;
use std::process::Command;
use std::time::Duration;

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// How long a report waits for a rank that does not answer.
const ANSWER: Duration = Duration::from_secs(2);

static ASKED: AtomicBool = AtomicBool::new(false);

/// Makes the signal a request from now on. Before, it ends the process, unless that was
/// [spared](spare).
pub(super) fn listen() {
    #[cfg(unix)]
    {
        extern "C" fn note(_: libc::c_int) {
            ASKED.store(true, Ordering::Relaxed);
        }
        // SAFETY: an action of zeros is one without flags. The handler only writes an atomic, which
        // a handler may do, and lives as long as the program.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note as extern "C" fn(libc::c_int) as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART;
            // An error would be about a signal that does not exist.
            libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
        }
    }
}

/// Lets a process that is to be started ignore the signal until it listens. So a request that comes
/// while it starts is lost, and does not end it.
pub(super) fn spare(command: &mut Command) {
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        let ignore = || {
            // SAFETY: a child of a fork may call it; the action has no handler.
            match unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) } {
                libc::SIG_ERR => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            }
        };
        // SAFETY: the function makes one call, which is safe between fork and exec.
        unsafe { command.pre_exec(ignore) };
    }
    #[cfg(not(unix))]
    let _ = command;
}

/// Returns whether somebody has asked since the last time.
pub(super) fn take() -> bool {
    ASKED.load(Ordering::Relaxed) && ASKED.swap(false, Ordering::Relaxed)
}

/// Asks a process in turn, which has not been waited for.
pub(super) fn pass_on(process: &std::process::Child) {
    #[cfg(unix)]
    if let Ok(id) = libc::pid_t::try_from(process.id()) {
        // SAFETY: the call touches no memory of this process.
        unsafe { libc::kill(id, libc::SIGUSR1) };
    }
    #[cfg(not(unix))]
    let _ = process;
}

/// Answers requests, until it is dropped.
pub(super) struct Answers(Arc<AtomicBool>);

impl Answers {
    /// Answers for the ranks of one world, of which those here have these reporters.
    pub(super) fn of(reporters: Vec<Reporter>) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        // Without the thread nobody answers, and nothing else is missing.
        let spawned = std::thread::Builder::new().name("lh-asked".to_owned()).spawn(move || {
            while !seen.load(Ordering::Acquire) {
                if take() {
                    answer(&reporters);
                }
                std::thread::sleep(LOOK);
            }
        });
        drop(spawned);
        Self(over)
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Writes the report of the first rank here that has not ended.
fn answer(reporters: &[Reporter]) {
    let text = match reporters.iter().find_map(|reporter| reporter.report(ANSWER)) {
        Some(Ok(report)) => report,
        Some(Err(error)) => format!("no report: {error}\n"),
        None => return,
    };
    // Without standard error, nobody wants to know.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_request_ends_no_process_that_does_not_listen_yet() {
        let ends = |spared: bool| {
            let mut command = Command::new("sleep");
            command.arg("0.5");
            if spared {
                spare(&mut command);
            }
            let mut process = command.spawn().unwrap();
            pass_on(&process);
            process.wait().unwrap().code()
        };
        assert_eq!([ends(true), ends(false)], [Some(0), None]);
    }
}
