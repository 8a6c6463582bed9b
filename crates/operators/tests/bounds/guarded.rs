//! Memory between pages that nobody may touch.

use leasehold_hal::Access;
use leasehold_hal::kernel::Binding;

const PAGE: usize = 4096;

/// Bytes that end where a page without rights begins, or begin where one ends.
pub struct Guarded {
    map: *mut u8,
    mapped: usize,
    at: *mut u8,
    len: usize,
}

impl Guarded {
    pub fn new(len: usize, at_end: bool) -> Self {
        let room = len.next_multiple_of(PAGE);
        let mapped = room + 2 * PAGE;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, which touches no other.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), mapped, libc::PROT_NONE, anonymous, -1, 0) };
        assert!(map != libc::MAP_FAILED, "no memory");
        let map = map.cast::<u8>();
        // SAFETY: the pages between the first and the last one of this mapping.
        let inner = unsafe { map.add(PAGE) };
        if room > 0 {
            // SAFETY: as before.
            let opened = unsafe { libc::mprotect(inner.cast(), room, libc::PROT_READ | libc::PROT_WRITE) };
            assert_eq!(opened, 0, "no rights");
        }
        // SAFETY: within these pages.
        let at = if at_end { unsafe { inner.add(room - len) } } else { inner };
        Self { map, mapped, at, len }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for reading, zeroed by the system, and lent to kernels only while nobody looks.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped for writing, and nobody else's.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }

    pub fn binding(&self, access: Access) -> Binding {
        let addr = if self.len == 0 { 0 } else { self.at.expose_provenance() as u64 };
        Binding { addr, len: self.len as u64, native: 0, access }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping; nothing borrows from it any more.
        unsafe { libc::munmap(self.map.cast(), self.mapped) };
    }
}
