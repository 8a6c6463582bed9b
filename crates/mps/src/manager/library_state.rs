//! A library as its pipelines hold it, and the making of libraries.
//!
//! This module must not know which kernels exist.

use super::opened::{OpenedDevice, Owned};
use crate::driver::ops::{CompileOptions, NativeLibrary};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::{Handle, Recycle, Resource, Result, Tagged, tags};
use std::marker::PhantomPinned;
use std::path::PathBuf;

/// The code of a library; the key of its manager.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LibrarySource {
    /// Source in the Metal shading language, and its options.
    Msl(Box<str>, CompileOptions),
    /// A file with compiled code.
    File(PathBuf),
}

/// A library.
#[derive(Debug)]
pub struct LibraryState {
    owned: Owned<NativeLibrary>,
    /// Pipelines that hold a lease on this library.
    pub(super) pipelines: AtomicU32,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl LibraryState {
    /// The driver's library.
    pub fn native(&self) -> NativeLibrary {
        self.owned.native
    }

    /// The names of its functions. Does not block.
    ///
    /// # Errors
    /// A driver error.
    pub fn function_names(&self) -> Result<Vec<String>> {
        // SAFETY: this value keeps the library live.
        unsafe { self.owned.device.ops.function_names(self.owned.native) }
    }

    pub(super) fn pipeline_made(&self) {
        self.pipelines.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn pipeline_ended(&self) {
        self.pipelines.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Tagged for LibraryState {
    type Tag = tags::Library;
}

/// The libraries of a device, as their pool makes them.
#[derive(Debug)]
pub struct Libraries {
    pub(super) device: Arc<OpenedDevice>,
}

impl Resource for Libraries {
    type Payload = LibraryState;
    type Request<'a> = &'a LibrarySource;
    const NAME: &'static str = "library";

    fn create(&self, _: Handle<tags::Library>, source: &&LibrarySource) -> Result<LibraryState> {
        let (ops, device) = (&self.device.ops, self.device.native);
        let native = match source {
            // SAFETY: the device is open as long as this value holds it.
            LibrarySource::Msl(text, options) => unsafe {
                ops.library_from_source(device, text, options)?
            },
            // SAFETY: the device is open as long as this value holds it. The caller of
            // `acquire_file` vouches for the file.
            LibrarySource::File(path) => unsafe { ops.library_from_file(device, path)? },
        };
        let owned = Owned::new(&self.device, native);
        Ok(LibraryState { owned, pipelines: AtomicU32::new(0), _place: PhantomPinned })
    }

    fn recycle(&self, _: &mut LibraryState) -> Recycle {
        Recycle::Destroy
    }
}
