//! What the machine has of the system: a sparse file that holds device memory, a window of addresses through which the host reaches
//! it, and pages for pinned host memory.
//!
//! The window is reserved once without access. A piece of device memory is a part of the file; mapping it makes that part visible in the
//! window, possibly in several places. A device address is not an address of the window, so that a host that dereferences one faults.
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
    // SAFETY: asks a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|s| s.is_power_of_two()).unwrap_or(4096)
}

fn failed(api: &'static str) -> Error {
    let error = io::Error::last_os_error();
    Error::Driver { api, code: error.raw_os_error().unwrap_or(0), name: error.to_string().into_boxed_str() }
}

/// A sparse file without a name: the physical memory.
#[derive(Debug)]
pub(crate) struct Store {
    file: libc::c_int,
}

impl Store {
    /// A file of `bytes` bytes, none of which is there yet.
    ///
    /// # Errors
    /// `Driver`: the system's.
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        let store = Self { file: Self::open()? };
        // SAFETY: our own file.
        if unsafe { libc::ftruncate(store.file, bytes as libc::off_t) } != 0 {
            return Err(failed("ftruncate"));
        }
        Ok(store)
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn open() -> Result<libc::c_int> {
        // SAFETY: a literal name; a new descriptor.
        let file = unsafe { libc::memfd_create(c"leasehold-sim".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 { Err(failed("memfd_create")) } else { Ok(file) }
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn open() -> Result<libc::c_int> {
        use leasehold_core::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("/lh{}.{}\0", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // SAFETY: a name with its end; it is taken away again at once, so that only the descriptor is left.
        unsafe {
            let file = libc::shm_open(name.as_ptr().cast(), libc::O_RDWR | libc::O_CREAT | libc::O_EXCL, 0o600);
            if file < 0 {
                return Err(failed("shm_open"));
            }
            libc::shm_unlink(name.as_ptr().cast());
            Ok(file)
        }
    }

    /// Gives the pages of a part back; it reads as zero then.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub(crate) fn discard(&self, at: u64, bytes: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: our own file. A file system that refuses keeps the pages, which costs memory and nothing else.
        unsafe { libc::fallocate(self.file, mode, at as libc::off_t, bytes as libc::off_t) };
    }

    /// Elsewhere the pages stay until the machine ends.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    pub(crate) fn discard(&self, _: u64, _: u64) {}
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: our own descriptor, closed once.
        unsafe { libc::close(self.file) };
    }
}

/// Addresses of the host through which device memory is reached.
#[derive(Debug)]
pub(crate) struct Window {
    base: usize,
    bytes: u64,
}

impl Window {
    /// Reserves `bytes` of addresses without access.
    ///
    /// # Errors
    /// `OutOfMemory` when the system refuses.
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        // SAFETY: a new mapping at an address of the system's choice touches nobody's memory.
        let at = unsafe { libc::mmap(ptr::null_mut(), bytes as usize, libc::PROT_NONE, RESERVE_FLAGS, -1, 0) };
        if at == libc::MAP_FAILED {
            let note = format!("mmap: {}", io::Error::last_os_error());
            return Err(OutOfMemory::new("the window of the simulated device", bytes).note(note).into());
        }
        Ok(Self { base: at as usize, bytes })
    }

    /// The host address of an offset.
    pub(crate) fn host(&self, at: u64) -> *mut u8 {
        debug_assert!(at <= self.bytes);
        (self.base + at as usize) as *mut u8
    }

    /// Shows part `from..` of the file at an offset of the window.
    ///
    /// # Errors
    /// `Driver`: the system's; nothing has changed then.
    pub(crate) fn map(&self, at: u64, store: &Store, from: u64, bytes: u64) -> Result<()> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: replaces a part of our own window, which nobody uses while the machine's lock is held.
        let now = unsafe {
            libc::mmap(self.host(at).cast(), bytes as usize, protection, flags, store.file, from as libc::off_t)
        };
        if now == libc::MAP_FAILED { Err(failed("mmap")) } else { Ok(()) }
    }

    /// Takes access away again.
    ///
    /// # Errors
    /// `Driver`: the system's; nothing has changed then.
    pub(crate) fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        let flags = RESERVE_FLAGS | libc::MAP_FIXED;
        // SAFETY: the range lies in this window, which is this store's own; nobody uses its bytes.
        let now = unsafe { libc::mmap(self.host(at).cast(), bytes as usize, libc::PROT_NONE, flags, -1, 0) };
        if now == libc::MAP_FAILED { Err(failed("mmap")) } else { Ok(()) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: our own mapping, given up once; the machine that used it is gone.
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
    /// `OutOfMemory` when the system refuses.
    pub(crate) fn new(bytes: u64, align: u64) -> Result<Self> {
        let refused = || OutOfMemory::new("pinned host memory", bytes);
        let align = align.max(page_size());
        let span = bytes.checked_add(align).filter(|&s| s < 1 << 48).ok_or_else(|| Error::from(refused()))?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the system's choice touches nobody's memory.
        let at = unsafe { libc::mmap(ptr::null_mut(), span as usize, protection, RESERVE_FLAGS, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(refused().note(format!("mmap: {}", io::Error::last_os_error())).into());
        }
        Ok(Self { map: at as usize, map_bytes: span as usize, at: (at as u64).next_multiple_of(align) })
    }

    /// Where they begin.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own mapping, given up once.
        unsafe { libc::munmap(self.map as *mut libc::c_void, self.map_bytes) };
    }
}
