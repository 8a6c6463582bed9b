//! Memory between inaccessible guard pages.

use leasehold::Access;
use leasehold::kernel::Binding;

const PAGE: usize = 4096;

/// Bytes that end at the start of an inaccessible page, or begin at its end.
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
        // SAFETY: a new mapping, which changes no other one.
        let map =
            unsafe { libc::mmap(std::ptr::null_mut(), mapped, libc::PROT_NONE, anonymous, -1, 0) };
        assert!(map != libc::MAP_FAILED, "no memory");
        let map = map.cast::<u8>();
        // SAFETY: the address lies between the first and the last page of this mapping.
        let inner = unsafe { map.add(PAGE) };
        if room > 0 {
            // SAFETY: the pages between the first and the last one of this mapping.
            let opened =
                unsafe { libc::mprotect(inner.cast(), room, libc::PROT_READ | libc::PROT_WRITE) };
            assert_eq!(opened, 0, "no rights");
        }
        // SAFETY: the address lies within these pages.
        let at = if at_end { unsafe { inner.add(room - len) } } else { inner };
        Self { map, mapped, at, len }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for reading and zeroed by the system. Kernels use it only while no
        // reference exists.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped for writing, and exclusively this value's.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }

    pub fn binding(&self, access: Access) -> Binding {
        let addr = if self.len == 0 { 0 } else { self.at.expose_provenance() as u64 };
        Binding { addr, len: self.len as u64, native: 0, access }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping; no borrow of it is left.
        unsafe { libc::munmap(self.map.cast(), self.mapped) };
    }
}
