//! Memory of the host that other processes may map: an anonymous file that cannot shrink.
//!
//! The file is sealed, so that no process can take pages away from under another one's mapping. An
//! import refuses a file without this seal.
//!
//! This module must not know how the memory is used.

use leasehold_core::{Error, OutOfMemory, Result};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr;

/// A sealed anonymous file.
#[derive(Debug)]
pub struct SharedFile(File);

#[cfg(any(target_os = "linux", target_os = "android"))]
fn failed(api: &'static str) -> Error {
    let error = io::Error::last_os_error();
    Error::Driver {
        api,
        code: error.raw_os_error().unwrap_or(0),
        name: error.to_string().into_boxed_str(),
    }
}

impl SharedFile {
    /// Whether this system has such files: Linux.
    pub const SUPPORTED: bool = cfg!(any(target_os = "linux", target_os = "android"));

    /// A file of `bytes` zeros, without pages.
    ///
    /// # Errors
    /// `Unsupported` on a system without sealed files; `Driver`: the system's error.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub fn new(bytes: u64) -> Result<Self> {
        use std::os::fd::FromRawFd;
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a literal; the result is a new descriptor.
        let fd = unsafe { libc::memfd_create(c"leasehold".as_ptr(), flags) };
        if fd < 0 {
            return Err(failed("memfd_create"));
        }
        // SAFETY: the descriptor is new, and nobody else closes it.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(bytes).map_err(|e| {
            Error::from(OutOfMemory::new("shareable memory", bytes).note(format!("{e}")))
        })?;
        // SAFETY: the call changes the seals of this file only.
        if unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, FIXED | libc::F_SEAL_SEAL) } != 0 {
            return Err(failed("fcntl(F_ADD_SEALS)"));
        }
        Ok(Self(file))
    }

    /// A file of `bytes` zeros, without pages.
    ///
    /// # Errors
    /// `Unsupported` on a system without sealed files; `Driver`: the system's error.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    pub fn new(_: u64) -> Result<Self> {
        Err(Error::Unsupported("this system has no sealed files to share memory by".into()))
    }

    /// The file of a descriptor from elsewhere.
    ///
    /// # Errors
    /// `InvalidArgument` for a descriptor that is no sealed file.
    pub fn open(descriptor: OwnedFd) -> Result<Self> {
        if is_sealed(&descriptor) {
            return Ok(Self(File::from(descriptor)));
        }
        Err(Error::invalid(
            "the descriptor is no shareable memory of the host: it can shrink, or is no memory; \
             send the one that the owner exported",
        ))
    }

    /// The length in bytes. It never changes.
    pub fn bytes(&self) -> u64 {
        self.0.metadata().map_or(0, |m| m.len())
    }

    /// The identity of this file among all of the system.
    pub fn identity(&self) -> Option<(u64, u64)> {
        self.0.metadata().ok().map(|m| (m.dev(), m.ino()))
    }

    /// The descriptor's number, for a mapping of one's own.
    #[must_use]
    pub fn raw(&self) -> libc::c_int {
        self.0.as_raw_fd()
    }

    /// Another descriptor of the file.
    ///
    /// # Errors
    /// `Driver`: the system's error.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        self.0.try_clone().map(OwnedFd::from).map_err(|e| Error::Driver {
            api: "dup",
            code: e.raw_os_error().unwrap_or(0),
            name: e.to_string().into_boxed_str(),
        })
    }

    /// Maps the whole file for reading and writing.
    ///
    /// # Errors
    /// `OutOfMemory` for addresses.
    pub fn map(&self, bytes: u64) -> Result<SharedMapping> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED;
        // SAFETY: a new mapping at an address of the system's choice touches no other memory.
        let at = unsafe {
            libc::mmap(ptr::null_mut(), bytes as usize, protection, flags, self.raw(), 0)
        };
        if at == libc::MAP_FAILED {
            let note = format!("mmap: {}", io::Error::last_os_error());
            return Err(OutOfMemory::new("addresses of shareable memory", bytes).note(note).into());
        }
        Ok(SharedMapping { addr: at.expose_provenance() as u64, bytes })
    }
}

/// The file keeps its length.
#[cfg(any(target_os = "linux", target_os = "android"))]
const FIXED: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

#[cfg(any(target_os = "linux", target_os = "android"))]
fn is_sealed(descriptor: &OwnedFd) -> bool {
    // SAFETY: the call reads the seals of an open descriptor. Other kinds of files refuse it.
    let seals = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & FIXED == FIXED && seals & libc::F_SEAL_WRITE == 0
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn is_sealed(_: &OwnedFd) -> bool {
    false
}

/// A mapping of a [`SharedFile`], unmapped with this value.
#[derive(Debug)]
pub struct SharedMapping {
    addr: u64,
    bytes: u64,
}

impl SharedMapping {
    /// The address, a multiple of a page.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// The length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        let at = ptr::with_exposed_provenance_mut(self.addr as usize);
        // SAFETY: the mapping is this value's own, unmapped once.
        unsafe { libc::munmap(at, self.bytes as usize) };
    }
}
