//! A full memory barrier on every thread of the process, for protocols whose hot side cannot afford one.
//!
//! A Dekker pair (each side stores, fences, loads what the other stored) needs a full fence on both sides. Where one side is hot and the
//! other rare, the hot side does with [`light`], which stops the compiler only, and the rare side calls [`heavy`], which makes every running
//! thread of the process pass a full fence. [`available`] says once and for all whether this process may build on it; where it says no,
//! both sides fence.
//!
//! # What `heavy` does
//! It asks the kernel's `membarrier`. That call can fail after it has worked: a sandbox that the process entered later refuses it, or the kernel
//! has no memory for it. Then the calling thread visits every processor that it may use: to make room for it the kernel switches
//! whichever thread runs there, and a switch is a full fence. A thread that does not run has passed one already. If the sandbox refuses that
//! too, the thread sleeps for [`DRAIN`]: no processor holds a store back for so long, since each timer interrupt drains it. The last resort is
//! thus a bound on time and not a promise of the kernel's; it is taken where the other two are forbidden, and nowhere else.
//!
//! From the first failure on [`holds`] says no. Who hands out rights that are taken back with [`heavy`] should hand out no new ones then.
//!
//! This module must not know what it orders.

use crate::sync::atomic::{Ordering, fence};

/// How long a thread sleeps where the kernel refuses every other barrier. Timer interrupts come at least every 10 ms.
#[cfg(all(target_os = "linux", not(miri), not(loom)))]
const DRAIN: std::time::Duration = std::time::Duration::from_millis(50);

/// Whether [`heavy`] reaches every thread of this process, so that their side needs [`light`] only. The same for the life of the process.
#[inline]
#[must_use]
pub fn available() -> bool {
    imp::available()
}

/// Whether the cheap way still works. No longer true once the kernel has refused it.
#[inline]
#[must_use]
pub fn holds() -> bool {
    imp::holds()
}

/// The hot side's fence, where [`available`] says yes, and in models.
#[inline(always)]
pub fn light() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
    #[cfg(not(loom))]
    crate::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// The rare side's fence: a full one on every running thread of the process if [`available`], and on this one in any case. Some microseconds;
/// after the kernel has refused the cheap way, milliseconds.
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

    /// What is known of the kernel's call. (No lock: a child of a fork may find another thread's first call half done.)
    static STATE: AtomicU8 = AtomicU8::new(UNASKED);

    fn membarrier(command: libc::c_long) -> bool {
        // SAFETY: the call takes three integers, touches no memory of ours and reports an unknown command as an error.
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

    /// Who asks first decides for all, so that nobody gets another answer.
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

    /// Runs on one processor after the other, then where it may run again as before. False if the kernel does not let it.
    fn visit_every_processor() -> bool {
        // Eight thousand processors.
        let mut before = [0u64; 128];
        let room = size_of_val(&before);
        // SAFETY: the kernel writes at most `room` bytes, and says how many.
        let size = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, room, before.as_mut_ptr()) };
        let Ok(size) = usize::try_from(size) else { return false };
        let go = |mask: &[u64; 128]| {
            // SAFETY: the kernel reads `size` bytes, which is at most `room`.
            unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size, mask.as_ptr()) == 0 }
        };
        // Asked first, so that a refusal leaves nothing changed.
        if size > room || !go(&before) {
            return false;
        }
        let mut visited = true;
        // Threads may be pinned where this one is not: every processor is tried, and one that does not exist is refused.
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
                unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&mask), mask.as_mut_ptr()) };
                mask
            };
            let before = mask();
            assert!(visit_every_processor());
            assert_eq!(mask(), before);
        }
    }
}

#[cfg(any(not(target_os = "linux"), miri, loom))]
mod imp {
    //! No such call here. Loom has no asymmetric barriers: in models both sides fence, and the protocols are explored as if they had one.
    pub(super) fn available() -> bool {
        cfg!(loom)
    }
    pub(super) fn holds() -> bool {
        cfg!(loom)
    }
    pub(super) fn everywhere() {}
}
