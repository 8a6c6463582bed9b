//! Large pages for large tables.
//!
//! The allocator's tables are visited at random: with 100,000 live blocks they are some tens of megabytes, and most of a visit's cost is
//! the translation of its address. Where the kernel gives large pages to those who ask, this asks.
//!
//! Must not know what is in the tables.

/// Tables smaller than this stay as they are.
const LEAST: usize = 2 << 20;

/// Tells the kernel that `bytes` from `at`, just reserved and not yet written, will be visited at random. A hint: nothing depends on it.
#[cold]
pub(crate) fn prefer_large(at: *const u8, bytes: usize) {
    if bytes >= LEAST {
        advise(at, bytes);
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
fn advise(at: *const u8, bytes: usize) {
    use std::ffi::{c_int, c_void};

    unsafe extern "C" {
        fn madvise(addr: *mut c_void, length: usize, advice: c_int) -> c_int;
    }
    const PAGE: usize = 4 << 10;
    const HUGEPAGE: c_int = 14;
    let from = at.addr().next_multiple_of(PAGE);
    let to = (at.addr() + bytes) & !(PAGE - 1);
    if from < to {
        // SAFETY: the advice changes no contents and no mapping; a kernel that does not know it, or other page sizes, refuse it.
        let _ = unsafe { madvise(at.with_addr(from).cast_mut().cast(), to - from, HUGEPAGE) };
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise(_: *const u8, _: usize) {}
