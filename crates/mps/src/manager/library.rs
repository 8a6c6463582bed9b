//! Libraries: compiled code. Each source has one library, which is made once and reused. Pipelines
//! belong to their library. The manager keeps what its public methods make, until a release. The
//! libraries of kernels end with the kernels.
//!
//! This module must not know which kernels exist.

use super::compute_pipeline_state::{ComputePipelineState, ComputePipelineStateManager};
use super::opened::{OpenedDevice, Owned};
use super::pool_methods;
use crate::config::MpsConfig;
use crate::driver::ops::{CompileOptions, NativeLibrary, PipelineDesc};
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Handle, Lease, LibraryHandle, PipelineHandle, PoolConfig, PoolManager, Recycle,
    Resource, Result, Tagged, tags,
};
use std::collections::HashMap;
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
    pipelines: AtomicU32,
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

#[derive(Debug)]
struct Libraries {
    device: Arc<OpenedDevice>,
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

/// Owns the libraries of a device, and their pipelines.
#[doc(alias = "MpsLibraryManager")]
#[derive(Debug)]
pub struct LibraryManager {
    /// Declared before the libraries, so that pipelines end first.
    pipelines: ComputePipelineStateManager,
    manager: PoolManager<Libraries, LibrarySource>,
    /// Libraries that may be alive, and whether the manager keeps a lease of its own. For the
    /// decision of a shutdown.
    made: Mutex<HashMap<LibraryHandle, bool>>,
    #[cfg(feature = "test-hooks")]
    for_test: bool,
}

impl LibraryManager {
    pub(crate) fn new(device: &Arc<OpenedDevice>, config: &MpsConfig) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Libraries { device: device.clone() }, PoolConfig::default())?;
        Ok(Self {
            pipelines: ComputePipelineStateManager::new(device, config)?,
            manager,
            made: Mutex::new(HashMap::new()),
            #[cfg(feature = "test-hooks")]
            for_test: false,
        })
    }

    /// Records a library that may be new.
    fn made(&self, library: &Lease<LibraryState>, kept: bool) {
        let mut made = self.made.lock();
        if let Some(was) = made.get_mut(&library.handle()) {
            *was |= kept;
            return;
        }
        made.retain(|old, _| self.manager.is_alive(*old));
        made.insert(library.handle(), kept);
    }

    fn get_or_create(&self, source: &LibrarySource) -> Result<Lease<LibraryState>> {
        let library = self.manager.get_or_create(source, &source)?;
        self.made(&library, true);
        Ok(library)
    }

    /// The pipeline of a function of a source. As [`acquire`](Self::acquire) and
    /// [`pipeline`](Self::pipeline), but the managers keep no lease: pipeline and library end with
    /// their last holder.
    pub(super) fn find_pipeline(
        &self,
        source: &str,
        options: &CompileOptions,
        function: &str,
        desc: &PipelineDesc,
    ) -> Result<Lease<ComputePipelineState>> {
        let source = LibrarySource::Msl(source.into(), options.clone());
        let library = self.manager.find_or_create(&source, &&source)?;
        self.made(&library, false);
        self.pipelines.find_or_create(&library, function, desc)
    }

    /// The library of a source. The first call compiles it, which may take seconds; concurrent
    /// calls compile it once. The manager keeps the library until its [release](Self::release).
    ///
    /// # Errors
    /// `Compile`, with the log; a driver error.
    pub fn acquire(&self, source: &str, options: &CompileOptions) -> Result<Lease<LibraryState>> {
        self.get_or_create(&LibrarySource::Msl(source.into(), options.clone()))
    }

    /// The library of a file with compiled code. The first call loads it. The manager keeps the
    /// library until its [release](Self::release).
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Safety
    /// - The file holds code of Apple's compiler, and does not change while the library is alive.
    pub unsafe fn acquire_file(&self, path: impl Into<PathBuf>) -> Result<Lease<LibraryState>> {
        self.get_or_create(&LibrarySource::File(path.into()))
    }

    /// Compiles the library of a source unless it is alive. The manager keeps the library until its
    /// [release](Self::release).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, source: &str, options: &CompileOptions) -> Result<LibraryHandle> {
        self.acquire(source, options).map(|library| library.handle())
    }

    /// The pipelines.
    pub fn pipelines(&self) -> &ComputePipelineStateManager {
        &self.pipelines
    }

    /// The pipeline of a function of a library. The first call makes it, which blocks on the
    /// compiler; concurrent calls make it once. The manager of the pipelines keeps it until its
    /// release.
    ///
    /// # Errors
    /// `InvalidArgument` for a library of another manager; `NotFound` for a function that the
    /// library does not have; `Compile`, with the log; a driver error.
    pub fn pipeline(
        &self,
        library: &Lease<LibraryState>,
        function: &str,
        desc: &PipelineDesc,
    ) -> Result<Lease<ComputePipelineState>> {
        if !self.manager.is_alive(library.handle()) {
            return Err(Error::invalid("the library belongs to another manager"));
        }
        self.pipelines.get_or_create(library, function, desc)
    }

    /// Makes the pipeline of a function unless it is alive. The manager of the pipelines keeps it
    /// until its release.
    ///
    /// # Errors
    /// As [`pipeline`](Self::pipeline).
    pub fn ensure_pipeline_alive(
        &self,
        library: &Lease<LibraryState>,
        function: &str,
        desc: &PipelineDesc,
    ) -> Result<PipelineHandle> {
        self.pipeline(library, function, desc).map(|pipeline| pipeline.handle())
    }

    /// Refuses while another holder has a lease. Leases of pipelines do not count.
    pub(crate) fn outstanding(&self) -> Result<()> {
        self.outstanding_beyond(0)
    }

    /// As [`outstanding`](Self::outstanding). The device's kernels hold `own` pipelines.
    pub(crate) fn outstanding_beyond(&self, own: u64) -> Result<()> {
        self.pipelines.outstanding_beyond(own)?;
        let made = self.made.lock().clone();
        let others = |(handle, kept): (LibraryHandle, bool)| {
            let library = self.manager.lease(handle).ok()?;
            // This lease, those of pipelines, and the manager's own.
            let own = 1 + library.pipelines.load(Ordering::Relaxed) + u32::from(kept);
            Some(u64::from(library.strong_count() > own))
        };
        let strong: u64 = made.into_iter().filter_map(others).sum();
        let weak = self.manager.stats().weak;
        if strong != 0 || weak != 0 {
            return Err(Error::LeasesOutstanding { resource: "library", strong, weak });
        }
        Ok(())
    }

    fn released(&self, library: LibraryHandle) {
        if let Some(kept) = self.made.lock().get_mut(&library) {
            *kept = false;
        }
    }

    fn end(&self) -> Result<()> {
        self.pipelines.shutdown()?;
        self.manager.shutdown()
    }
}

pool_methods!(LibraryManager of LibraryState by LibraryHandle);
