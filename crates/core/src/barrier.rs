//! Asymmetric memory barriers: a full memory barrier on every thread of the process.
//!
//! A Dekker pair (each side stores, fences, and loads the other side's variable) needs a full fence
//! on both sides. If one side is hot and the other is rare, the hot side uses [`light`], which is
//! only a compiler fence. The rare side calls [`heavy`], which makes every running thread of the
//! process execute a full fence. [`available`] says, with one answer for the life of the process,
//! whether the process may rely on this. If not, both sides execute a full fence.
//!
//! # How `heavy` works
//! `heavy` calls the kernel's `membarrier`. This call can fail later even if it worked before: a
//! sandbox that the process enters may refuse it, or the kernel may have no memory for it. Then the
//! calling thread moves to each processor that it may use. The move makes the kernel switch the
//! thread that runs on this processor, and a switch is a full fence. A thread that does not run has
//! executed one already.
//!
//! If the sandbox refuses these moves too, the thread sleeps for `DRAIN`. No processor delays a
//! store for so long, because each timer interrupt drains the store buffer. This last resort is a
//! bound on time and not a guarantee of the kernel. `heavy` uses it only if the other two ways are
//! forbidden.
//!
//! After the first failure [`holds`] returns `false`. A protocol that grants rights and revokes
//! them with [`heavy`] should then grant no new ones.
//!
//! This module must not know which accesses it orders.

use crate::sync::atomic::{Ordering, fence};

/// How long a thread sleeps if the kernel refuses every other barrier. Timer interrupts occur at
/// least every 10 ms.
#[cfg(all(target_os = "linux", not(miri), not(loom)))]
const DRAIN: std::time::Duration = std::time::Duration::from_millis(50);

/// Returns whether [`heavy`] reaches every thread of this process, so that the hot side needs
/// [`light`] only. The answer is the same for the life of the process.
#[inline]
#[must_use]
pub fn available() -> bool {
    imp::available()
}

/// Returns whether the kernel's call still works. `false` from the kernel's first refusal on.
#[inline]
#[must_use]
pub fn holds() -> bool {
    imp::holds()
}

/// The fence of the hot side if [`available`] returns `true`, and in models.
#[inline(always)]
pub fn light() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
    #[cfg(not(loom))]
    crate::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// The fence of the rare side. If [`available`], the call is a full fence on every running thread
/// of the process; otherwise on the calling thread only. The call takes some microseconds, or
/// milliseconds after the kernel has refused `membarrier`.
#[cold]
pub fn heavy() {
    imp::everywhere();
    fence(Ordering::SeqCst);
}

#[cfg(all(target_os = "linux", not(miri), not(loom)))]
mod imp {
    use super::DRAIN;
    use crate::sync::atomic::{AtomicU8, Ordering};
    use crate::sync::thread;

    // From linux/membarrier.h.
    const PRIVATE_EXPEDITED: libc::c_long = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: libc::c_long = 1 << 4;

    const UNASKED: u8 = 0;
    const ABSENT: u8 = 1;
    const WORKS: u8 = 2;
    const REFUSED: u8 = 3;

    /// The known state of the kernel's call. The state has no lock, because a forked child may find
    /// another thread's first call half done.
    static STATE: AtomicU8 = AtomicU8::new(UNASKED);

    fn membarrier(command: libc::c_long) -> bool {
        // SAFETY: the call takes three integers, touches none of this process's memory and reports
        // an unknown command as an error.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }

    #[inline]
    pub(super) fn available() -> bool {
        match STATE.load(Ordering::Relaxed) {
            UNASKED => ask(),
            state => state != ABSENT,
        }
    }

    #[inline]
    pub(super) fn holds() -> bool {
        available() && STATE.load(Ordering::Relaxed) == WORKS
    }

    /// The first thread that asks decides for all threads, so that all get the same answer.
    #[cold]
    fn ask() -> bool {
        // The second call proves that the first took effect.
        let works = membarrier(REGISTER_PRIVATE_EXPEDITED) && membarrier(PRIVATE_EXPEDITED);
        let answer = if works { WORKS } else { ABSENT };
        let first = STATE.compare_exchange(UNASKED, answer, Ordering::Relaxed, Ordering::Relaxed);
        first.map_or_else(|before| before != ABSENT, |_| works)
    }

    pub(super) fn everywhere() {
        if !available() || membarrier(PRIVATE_EXPEDITED) {
            return;
        }
        STATE.store(REFUSED, Ordering::Relaxed);
        if !visit_every_processor() {
            thread::sleep(DRAIN);
        }
    }

    /// Runs the thread on each processor in order, then restores its former affinity. `false` if
    /// the kernel refuses.
    fn visit_every_processor() -> bool {
        // Room for 8192 processors.
        let mut before = [0u64; 128];
        let room = size_of_val(&before);
        // SAFETY: the kernel writes at most `room` bytes, and returns their number.
        let size =
            unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, room, before.as_mut_ptr()) };
        let Ok(size) = usize::try_from(size) else { return false };
        let go = |mask: &[u64; 128]| {
            // SAFETY: the kernel reads `size` bytes, which is at most `room`.
            unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size, mask.as_ptr()) == 0 }
        };
        // The first call checks the permission, so that a refusal changes nothing.
        if size > room || !go(&before) {
            return false;
        }
        let mut visited = true;
        // Other threads may run on processors outside this thread's affinity. So every processor is
        // tried, and the kernel refuses those that do not exist.
        for processor in 0..size * 8 {
            let mut mask = [0u64; 128];
            mask[processor / 64] = 1 << (processor % 64);
            let own = before[processor / 64] & mask[processor / 64] != 0;
            visited &= go(&mask) || !own;
        }
        go(&before) && visited
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn every_processor_is_visited_and_the_thread_may_run_where_it_could_before() {
            let mask = || {
                let mut mask = [0u64; 128];
                // SAFETY: the kernel writes at most the array.
                unsafe {
                    libc::syscall(
                        libc::SYS_sched_getaffinity,
                        0,
                        size_of_val(&mask),
                        mask.as_mut_ptr(),
                    )
                };
                mask
            };
            let before = mask();
            assert!(visit_every_processor());
            assert_eq!(mask(), before);
        }

        /// Forbids these system calls to the calling thread from now on. `false` if the system does
        /// not allow this.
        fn forbid(calls: [libc::c_long; 2]) -> bool {
            const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
            const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
            const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
            let step = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
            let mut filter = [
                // The call's number comes first.
                step(LOAD, 0, 0),
                step(EQUAL, 2, calls[0] as u32),
                step(EQUAL, 1, calls[1] as u32),
                step(RETURN, 0, libc::SECCOMP_RET_ALLOW),
                step(RETURN, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            ];
            let program =
                libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
            // SAFETY: the program and its steps live during the calls, which access nothing else.
            unsafe {
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                    && libc::prctl(
                        libc::PR_SET_SECCOMP,
                        libc::SECCOMP_MODE_FILTER,
                        &raw const program,
                    ) == 0
            }
        }

        fn switches() -> i64 {
            // SAFETY: plain numbers, of which zero is one.
            let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
            // SAFETY: the kernel writes a struct of this type.
            unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
            usage.ru_nvcsw + usage.ru_nivcsw
        }

        /// Forks a child in which the kernel refuses `membarrier`, and with `strict` also the
        /// affinity calls. Returns the results of three checks as bits.
        fn refused(strict: bool) -> i32 {
            // SAFETY: the child makes system calls, loads and stores, and exits without running
            // destructors.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let other = if strict { libc::SYS_sched_setaffinity } else { libc::SYS_membarrier };
                if !forbid([libc::SYS_membarrier, other]) {
                    // SAFETY: ends the child at once.
                    unsafe { libc::_exit(64) };
                }
                let (start, before) = (std::time::Instant::now(), switches());
                super::super::heavy();
                let waited = if strict { start.elapsed() >= DRAIN } else { switches() > before };
                let right =
                    i32::from(available()) | i32::from(!holds()) << 1 | i32::from(waited) << 2;
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(right) };
            }
            let mut status = 0;
            // SAFETY: waits for the child made above.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert!(libc::WIFEXITED(status), "{status:x}");
            libc::WEXITSTATUS(status)
        }

        #[test]
        fn where_the_kernel_refuses_its_barrier_another_takes_its_place() {
            if !available() {
                eprintln!("skipped: the system has no membarrier");
                return;
            }
            for strict in [false, true] {
                let right = refused(strict);
                let one = std::thread::available_parallelism().is_ok_and(|n| n.get() == 1);
                assert!(right == 7 || right == 64 || one && right == 3, "strict {strict}: {right}");
            }
        }
    }
}

#[cfg(any(not(target_os = "linux"), miri, loom))]
mod imp {
    //! This system has no such call. Loom has no asymmetric barriers: in models both sides execute
    //! a full fence, and the exploration treats the protocols as if the barrier existed.
    pub(super) fn available() -> bool {
        cfg!(loom)
    }
    pub(super) fn holds() -> bool {
        cfg!(loom)
    }
    pub(super) fn everywhere() {}
}
