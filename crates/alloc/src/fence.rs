//! Fences that cost one side almost nothing, and the numbers of threads.
//!
//! A Dekker pair (each side stores, fences, loads what the other stored) needs a full fence on both sides. Where one side is hot and the
//! other rare, Linux' `membarrier` lets the hot side do with a compiler fence: the system call is a full fence on every running thread of
//! the process. Elsewhere both sides fence.

use leasehold_core::sync::atomic::{AtomicU8, Ordering, compiler_fence, fence};

/// How the two sides fence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fences {
    asymmetric: bool,
}

impl Fences {
    /// What this machine can do. The same for the whole life of the process.
    pub(crate) fn detect() -> Self {
        Self { asymmetric: barrier::available() }
    }

    /// Whether the hot side pays nothing.
    pub(crate) fn is_asymmetric(self) -> bool {
        self.asymmetric
    }

    /// The hot side's, for what is done only where these fences are asymmetric, and in models.
    #[inline(always)]
    pub(crate) fn light() {
        if cfg!(loom) {
            fence(Ordering::SeqCst);
        } else {
            compiler_fence(Ordering::SeqCst);
        }
    }

    /// The rare side's: a full fence on every thread of the process that runs, or on this one where the other side fences too.
    #[cold]
    pub(crate) fn heavy(self) {
        if self.asymmetric {
            // It succeeded when the process registered; it has no way to fail later.
            let done = barrier::everywhere();
            debug_assert!(done, "membarrier failed after it had worked");
        }
        fence(Ordering::SeqCst);
    }
}

/// The number of no thread: what everybody may enter.
const EVERYBODY: u32 = (1 << 26) - 1;

/// How many threads in turn may own a thing. Each has a flag of its own in which it says that it is inside: an owner that finds out late
/// that it is none any more takes its flag back late, and must not take back its successor's.
pub(crate) const OWNERS: usize = if cfg!(loom) { 3 } else { 16 };

/// The flags of a thing: a power of two, so that the number of an ownership needs no check. Only the first [`OWNERS`] are used.
pub(crate) type Inside = [AtomicU8; 32];

/// Who owns a thing, in one word: thread, which of the owners it is, one bit for the thing's own use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owned(pub(crate) u32);

impl Owned {
    /// No owner yet.
    pub(crate) const NEW: Owned = Owned(0);
    /// Nobody in particular, for good.
    pub(crate) const SHARED: Owned = Owned(EVERYBODY << 6);

    pub(crate) fn by(thread: u32, turn: usize) -> Owned {
        Owned(thread << 6 | (turn as u32) << 1)
    }

    /// Whether `thread` owns it, and the bit is not set.
    #[inline]
    pub(crate) fn is(self, thread: u32) -> bool {
        self.0 >> 6 == thread && self.0 & 1 == 0
    }

    /// Which flag `thread` uses, if it owns it and the bit is not set.
    #[inline(always)]
    pub(crate) fn turn_of(self, thread: u32) -> Option<usize> {
        // Zero but for the turn, then.
        let rest = self.0 ^ thread << 6;
        (rest & !(31 << 1) == 0).then_some((rest >> 1) as usize)
    }

    /// Which flag the owner uses.
    #[inline]
    pub(crate) fn turn(self) -> usize {
        (self.0 >> 1) as usize & 31
    }

    /// Whether a single thread owns it.
    pub(crate) fn is_owned(self) -> bool {
        !matches!(self.0 >> 6, 0 | EVERYBODY)
    }
}

#[cfg(all(target_os = "linux", not(loom), not(miri), any(target_arch = "x86_64", target_arch = "aarch64")))]
mod barrier {
    //! The kernel's `membarrier`.
    use leasehold_core::sync::OnceLock;
    use std::ffi::{c_int, c_long, c_uint};

    unsafe extern "C" {
        fn syscall(number: c_long, ...) -> c_long;
    }

    #[cfg(target_arch = "x86_64")]
    const MEMBARRIER: c_long = 324;
    #[cfg(target_arch = "aarch64")]
    const MEMBARRIER: c_long = 283;
    const PRIVATE_EXPEDITED: c_int = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: c_int = 1 << 4;

    fn call(command: c_int) -> bool {
        // SAFETY: membarrier takes a command, flags and a processor, and touches no memory of ours.
        unsafe { syscall(MEMBARRIER, command, 0 as c_uint, 0 as c_int) == 0 }
    }

    pub(super) fn available() -> bool {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        *AVAILABLE.get_or_init(|| call(REGISTER_PRIVATE_EXPEDITED) && call(PRIVATE_EXPEDITED))
    }

    pub(super) fn everywhere() -> bool {
        call(PRIVATE_EXPEDITED)
    }
}

#[cfg(not(all(target_os = "linux", not(loom), not(miri), any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod barrier {
    //! No `membarrier` here: full fences on both sides.
    pub(super) fn available() -> bool {
        false
    }
    pub(super) fn everywhere() -> bool {
        false
    }
}
