//! The machine's system resources: a sparse file for device memory, a window of addresses for host
//! access to it, and pages for pinned host memory.
//!
//! The window is one reservation without access. A piece of device memory is a part of the file. A
//! mapping makes this part visible in the window, possibly at several places. A device address is
//! not an address of the window, so a host that dereferences it faults.
//!
//! This module must not know devices.

use leasehold_core::{Error, OutOfMemory, Result};
use std::io;
use std::ptr;

#[cfg(any(target_os = "linux", target_os = "android"))]
const RESERVE_FLAGS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const RESERVE_FLAGS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANON;

/// Bytes of a page.
pub(crate) fn page_size() -> u64 {
    // SAFETY: the call reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|s| s.is_power_of_two()).unwrap_or(4096)
}

fn failed(api: &'static str) -> Error {
    let error = io::Error::last_os_error();
    Error::Driver {
        api,
        code: error.raw_os_error().unwrap_or(0),
        name: error.to_string().into_boxed_str(),
    }
}

/// A sparse anonymous file: the physical memory.
#[derive(Debug)]
pub(crate) struct Store {
    file: libc::c_int,
}

impl Store {
    /// A file of `bytes` bytes without pages.
    ///
    /// # Errors
    /// `Driver`: the system's error.
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        let store = Self { file: Self::open()? };
        // SAFETY: the file is this store's own.
        if unsafe { libc::ftruncate(store.file, bytes as libc::off_t) } != 0 {
            return Err(failed("ftruncate"));
        }
        Ok(store)
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn open() -> Result<libc::c_int> {
        // SAFETY: the name is a literal; the result is a new descriptor.
        let file = unsafe { libc::memfd_create(c"leasehold-sim".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 { Err(failed("memfd_create")) } else { Ok(file) }
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn open() -> Result<libc::c_int> {
        use leasehold_core::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("/lh{}.{}\0", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // SAFETY: the name is terminated. The name is unlinked at once, so only the descriptor
        // remains.
        unsafe {
            let file = libc::shm_open(
                name.as_ptr().cast(),
                libc::O_RDWR | libc::O_CREAT | libc::O_EXCL,
                0o600,
            );
            if file < 0 {
                return Err(failed("shm_open"));
            }
            libc::shm_unlink(name.as_ptr().cast());
            Ok(file)
        }
    }

    /// The file, for [`Window::map`].
    pub(crate) fn file(&self) -> libc::c_int {
        self.file
    }

    /// Returns the pages of a part to the system. The part reads as zero afterwards.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub(crate) fn discard(&self, at: u64, bytes: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the file is this store's own. If the file system refuses, the pages stay, which
        // only costs memory.
        unsafe { libc::fallocate(self.file, mode, at as libc::off_t, bytes as libc::off_t) };
    }

    /// On other systems the pages stay until the machine ends.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    pub(crate) fn discard(&self, _: u64, _: u64) {}
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this store's own, closed once.
        unsafe { libc::close(self.file) };
    }
}

/// The window: host addresses of device memory.
#[derive(Debug)]
pub(crate) struct Window {
    base: usize,
    bytes: u64,
}

impl Window {
    /// Reserves `bytes` of addresses without access.
    ///
    /// # Errors
    /// `OutOfMemory` if the system refuses.
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        // SAFETY: a new mapping at an address of the system's choice touches no other memory.
        let at = unsafe {
            libc::mmap(ptr::null_mut(), bytes as usize, libc::PROT_NONE, RESERVE_FLAGS, -1, 0)
        };
        if at == libc::MAP_FAILED {
            let note = format!("mmap: {}", io::Error::last_os_error());
            return Err(OutOfMemory::new("the window of the simulated device", bytes)
                .note(note)
                .into());
        }
        Ok(Self { base: at as usize, bytes })
    }

    /// The host address of an offset. Outside of the window it is the address of no byte.
    pub(crate) fn host(&self, at: u64) -> *mut u8 {
        self.base.wrapping_add(at as usize) as *mut u8
    }

    /// Maps the part `from..` of a file at an offset of the window.
    ///
    /// # Errors
    /// `Driver`: the system's error; nothing has changed then.
    pub(crate) fn map(&self, at: u64, file: libc::c_int, from: u64, bytes: u64) -> Result<()> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: the call replaces a part of this window, which no code uses while the machine's
        // lock is held.
        let now = unsafe {
            libc::mmap(
                self.host(at).cast(),
                bytes as usize,
                protection,
                flags,
                file,
                from as libc::off_t,
            )
        };
        if now == libc::MAP_FAILED { Err(failed("mmap")) } else { Ok(()) }
    }

    /// Removes access.
    ///
    /// # Errors
    /// `Driver`: the system's error; nothing has changed then.
    pub(crate) fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        let flags = RESERVE_FLAGS | libc::MAP_FIXED;
        // SAFETY: the range lies in this window, which belongs to the machine. No code uses its
        // bytes.
        let now = unsafe {
            libc::mmap(self.host(at).cast(), bytes as usize, libc::PROT_NONE, flags, -1, 0)
        };
        if now == libc::MAP_FAILED { Err(failed("mmap")) } else { Ok(()) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping is this window's own, unmapped once. The machine that used it is
        // gone.
        unsafe { libc::munmap(self.base as *mut libc::c_void, self.bytes as usize) };
    }
}

/// Zeroed pages of the host, aligned to `align` (a power of two).
#[derive(Debug)]
pub(crate) struct Pages {
    map: usize,
    map_bytes: usize,
    at: u64,
}

impl Pages {
    /// Maps pages.
    ///
    /// # Errors
    /// `OutOfMemory` if the system refuses.
    pub(crate) fn new(bytes: u64, align: u64) -> Result<Self> {
        let refused = || OutOfMemory::new("pinned host memory", bytes);
        let align = align.max(page_size());
        let span = bytes
            .checked_add(align)
            .filter(|&s| s < 1 << 48)
            .ok_or_else(|| Error::from(refused()))?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the system's choice touches no other memory.
        let at =
            unsafe { libc::mmap(ptr::null_mut(), span as usize, protection, RESERVE_FLAGS, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(refused().note(format!("mmap: {}", io::Error::last_os_error())).into());
        }
        Ok(Self {
            map: at as usize,
            map_bytes: span as usize,
            at: (at as u64).next_multiple_of(align),
        })
    }

    /// The address of the first page.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, unmapped once.
        unsafe { libc::munmap(self.map as *mut libc::c_void, self.map_bytes) };
    }
}
