//! Tests of the guard against forks.

use super::*;

#[test]
fn a_child_is_told_and_what_it_makes_is_its_own() {
    let fork_guard = ForkGuard::here();
    // SAFETY: the child only loads atomics, asks for its number and exits without running
    // destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let own = ForkGuard::here();
        let right = fork_guard.is_forked_child()
            && !own.is_forked_child()
            && own.process() != fork_guard.process();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if right { 7 } else { 0 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status));
    assert_eq!(libc::WEXITSTATUS(status), 7);
    assert!(!fork_guard.is_forked_child() && fork_guard.check(|_| unreachable!()).is_ok());
}
