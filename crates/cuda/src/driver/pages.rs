//! Host memory for large pinned segments: huge pages that several threads touch.
//!
//! `cuMemHostAlloc` makes and clears its pages on one thread, at 1.4 to 2.3 GiB/s on H100 and H200
//! hosts. Pages that several threads touched before are pinned by `cuMemHostRegister` about seven
//! times as fast, the touching counted in.
//!
//! This module must not call the vendor's driver.

use leasehold_hal::engine::host_memory;
use std::ptr;

/// The size and alignment of a huge page.
const HUGE: usize = 2 << 20;
/// The least distance of two pages.
const PAGE: usize = 4 << 10;
/// More threads gain little, since the kernel clears pages at the memory's rate.
const MOST_THREADS: usize = 8;
/// The least bytes of a thread.
const LEAST_PART: usize = 32 << 20;

/// Memory of this process, which is unmapped when the value is dropped. A child of `fork` does not
/// have it: a copy on write would take the pages that the device reads away from the parent.
#[derive(Debug)]
pub(crate) struct Pages {
    base: *mut libc::c_void,
    mapped: usize,
    at: u64,
}

// SAFETY: a mapping belongs to the process, and any thread may unmap it.
unsafe impl Send for Pages {}

impl Pages {
    /// Maps `bytes` and touches every page. Blocks until the system has cleared them. `None` if the
    /// system refuses the mapping, or has too little memory: touching more than there is would end
    /// the process.
    pub(crate) fn new(bytes: u64) -> Option<Self> {
        // An eighth stays for others.
        if host_memory::info().free < bytes.checked_add(bytes / 8)? {
            return None;
        }
        let length = usize::try_from(bytes).ok()?;
        let mapped = length.checked_add(HUGE)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping, at no address in particular.
        let base = unsafe { libc::mmap(ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let at = (base as usize).next_multiple_of(HUGE);
        let pages = Self { base, mapped, at: at as u64 };
        // Small pages work too, so a refusal of huge ones is no error.
        #[cfg(target_os = "linux")]
        // SAFETY: the range is this mapping's.
        unsafe {
            libc::madvise(at as *mut libc::c_void, length, libc::MADV_HUGEPAGE);
        }
        #[cfg(target_os = "linux")]
        // SAFETY: the range is this mapping's, and no child uses it.
        if unsafe { libc::madvise(base, mapped, libc::MADV_DONTFORK) } != 0 {
            return None;
        }
        touch(at, length);
        Some(pages)
    }

    /// The address, a multiple of 2 MiB.
    pub(crate) fn addr(&self) -> u64 {
        self.at
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        let _ = unsafe { libc::munmap(self.base, self.mapped) };
    }
}

/// Writes to each page of a new mapping, in several threads.
fn touch(at: usize, length: usize) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
    let part = length.div_ceil(threads).next_multiple_of(HUGE).max(LEAST_PART);
    let write = |from: usize| {
        for page in (from..at + length.min(from - at + part)).step_by(PAGE) {
            // SAFETY: the page is a part of the new mapping, which nobody else knows yet.
            unsafe { ptr::write_volatile(page as *mut u8, 0) };
        }
    };
    std::thread::scope(|scope| {
        for from in (at..at + length).step_by(part).skip(1) {
            if std::thread::Builder::new().spawn_scoped(scope, move || write(from)).is_err() {
                write(from);
            }
        }
        write(at);
    });
}

#[cfg(test)]
#[path = "../../tests/unit/pages.rs"]
mod tests;
