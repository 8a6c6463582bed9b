//! NCCL's functions for windows, which versions from 2.27 on have.
//!
//! This module must not know the lives of communicators.

use libloading::Library;
use std::ffi::{c_int, c_void};

/// `ncclComm_t`.
type RawComm = *mut c_void;

/// `NCCL_WIN_COLL_SYMMETRIC`: the memory has the same offsets on all ranks.
const SYMMETRIC: c_int = 1;

type Register = unsafe extern "C" fn(RawComm, *mut c_void, usize, *mut *mut c_void, c_int) -> c_int;
type Deregister = unsafe extern "C" fn(RawComm, *mut c_void) -> c_int;

/// The functions.
pub(super) struct WindowFunctions {
    register: Register,
    deregister: Deregister,
}

impl WindowFunctions {
    /// # Safety
    /// - The library is NCCL.
    pub(super) unsafe fn of(library: &Library) -> Option<Self> {
        // SAFETY: the types are those of the library's header.
        unsafe {
            Some(Self {
                register: *library.get::<Register>(b"ncclCommWindowRegister\0").ok()?,
                deregister: *library.get::<Deregister>(b"ncclCommWindowDeregister\0").ok()?,
            })
        }
    }

    /// The library's code, and the window: 0 where it makes none.
    ///
    /// # Safety
    /// - The communicator lives. The range is one segment of shareable memory of its device, which
    ///   stays until the window is given back.
    pub(super) unsafe fn register(&self, comm: RawComm, addr: u64, bytes: u64) -> (c_int, u64) {
        let mut window: *mut c_void = std::ptr::null_mut();
        let at = addr as usize as *mut c_void;
        // SAFETY: the caller's; the place is for a window.
        let code = unsafe { (self.register)(comm, at, bytes as usize, &raw mut window, SYMMETRIC) };
        (code, window as u64)
    }

    /// The library's code.
    ///
    /// # Safety
    /// - The communicator lives, and made this window, which is given back once.
    pub(super) unsafe fn deregister(&self, comm: RawComm, window: u64) -> c_int {
        // SAFETY: the caller's.
        unsafe { (self.deregister)(comm, window as usize as *mut c_void) }
    }
}
