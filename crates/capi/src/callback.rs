//! Functions of the caller with their context.
//!
//! This module must not know when they are called.

use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use std::ffi::c_void;

/// Says that a context is not used any more.
pub type LeaseholdRelease = unsafe extern "C" fn(context: *mut c_void);

/// The caller's context of a function. Once it is [kept](Self::keep), its drop tells the caller.
pub(crate) struct Callback {
    context: *mut c_void,
    release: Option<LeaseholdRelease>,
    kept: AtomicBool,
}

// SAFETY: `Callback::new` says that any thread may use the context, and call the function.
unsafe impl Send for Callback {}
// SAFETY: `Callback::new` says that several threads may use the context at a time.
unsafe impl Sync for Callback {}

impl Callback {
    /// # Safety
    /// - Any threads may use `context`, until it is released.
    /// - `release` may be called with `context` once, by any thread. It returns.
    pub(crate) unsafe fn new(context: *mut c_void, release: Option<LeaseholdRelease>) -> Arc<Self> {
        Arc::new(Self { context, release, kept: AtomicBool::new(false) })
    }

    /// The context.
    #[inline]
    pub(crate) fn context(&self) -> *mut c_void {
        self.context
    }

    /// Makes the context the library's, after a call that succeeded: before, it is the caller's.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Release);
    }
}

impl Drop for Callback {
    fn drop(&mut self) {
        if let (Some(release), true) = (self.release, *self.kept.get_mut()) {
            // SAFETY: the caller of `new` vouches for the function and its context.
            unsafe { release(self.context) }
        }
    }
}
