//! Libraries: compiled code. Each source has one library, which is made once and reused. Pipelines
//! belong to their library. The manager keeps what its public methods make, until a release. The
//! libraries of kernels end with the kernels.
//!
//! This module must not know which kernels exist.

use super::compute_pipeline_state::{ComputePipelineState, ComputePipelineStateManager, Key};
pub use super::library_state::{Libraries, LibrarySource, LibraryState};
use super::opened::OpenedDevice;
use super::pool::PoolOf;
use crate::config::MpsConfig;
use crate::driver::ops::{CompileOptions, PipelineDesc};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, LibraryHandle, PipelineHandle, PoolConfig, Result};
use std::collections::HashSet;
use std::ops::Deref;
use std::path::PathBuf;

/// Owns the libraries of a device, and their pipelines.
#[doc(alias = "MpsLibraryManager")]
#[derive(Debug)]
pub struct LibraryManager {
    /// Declared before the libraries, so that pipelines end first.
    pipelines: ComputePipelineStateManager,
    libraries: PoolOf<Libraries, LibrarySource>,
    /// Libraries that may be alive. For the decision of a shutdown.
    made: Mutex<HashSet<LibraryHandle>>,
}

impl LibraryManager {
    pub(crate) fn new(device: &Arc<OpenedDevice>, config: &MpsConfig) -> Result<Self> {
        let libraries = Libraries { device: device.clone() };
        Ok(Self {
            pipelines: ComputePipelineStateManager::new(device, config)?,
            libraries: PoolOf::over(libraries, PoolConfig::default())?,
            made: Mutex::default(),
        })
    }

    /// A manager of the libraries of a device, over a driver that a test supplies.
    ///
    /// # Errors
    /// `NotFound`; a driver error.
    #[cfg(feature = "test-hooks")]
    #[doc(alias = "configureForTest")]
    pub fn configure_for_test(
        ops: Arc<dyn crate::driver::ops::MpsSlowOps>,
        device: leasehold_hal::DeviceId,
    ) -> Result<Self> {
        let device = OpenedDevice::one(ops, device)?;
        let mut manager = Self::new(&device, &MpsConfig::default())?;
        manager.libraries.for_test = true;
        Ok(manager)
    }

    /// Records a library that may be new.
    fn made(&self, library: Lease<LibraryState>) -> Lease<LibraryState> {
        let mut made = self.made.lock();
        if !made.contains(&library.handle()) {
            made.retain(|old| self.is_alive(*old));
            made.insert(library.handle());
        }
        library
    }

    fn get_or_create(&self, source: &LibrarySource) -> Result<Lease<LibraryState>> {
        self.libraries.manager.get_or_create(source, &source).map(|library| self.made(library))
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
        let library = self.libraries.manager.find_or_create(&source, &&source)?;
        let library = self.made(library);
        let key = Key::of(&library, function, desc);
        self.pipelines.manager.find_or_create(&key, &(&library, function, desc))
    }

    /// The library of a source. The first call compiles it, which may take seconds; concurrent
    /// calls compile it once. The manager keeps the library until its [release](PoolOf::release).
    ///
    /// # Errors
    /// `Compile`, with the log; a driver error.
    pub fn acquire(&self, source: &str, options: &CompileOptions) -> Result<Lease<LibraryState>> {
        self.get_or_create(&LibrarySource::Msl(source.into(), options.clone()))
    }

    /// The library of a file with compiled code. The first call loads it. The manager keeps the
    /// library until its [release](PoolOf::release).
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
    /// [release](PoolOf::release).
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
        if !self.get_state(library.handle()).is_ok_and(|own| own.same(library)) {
            return Err(Error::invalid("the library belongs to another manager"));
        }
        let key = Key::of(library, function, desc);
        self.pipelines.manager.get_or_create(&key, &(library, function, desc))
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

    /// Refuses while a holder outside of the backend has a lease. Leases of pipelines on libraries
    /// do not count. The device's kernels hold `own` pipelines.
    pub(crate) fn outstanding_beyond(&self, own: u64) -> Result<()> {
        self.pipelines.outstanding_beyond(own)?;
        let made = self.made.lock().clone();
        let others = |handle| {
            let library = self.get_state(handle).ok()?;
            // This lease, those of pipelines, and the manager's own.
            let kept = self.libraries.manager.keeps(handle);
            let own = 1 + library.pipelines.load(Ordering::Relaxed) + u32::from(kept);
            Some(u64::from(library.strong_count() > own))
        };
        let strong: u64 = made.into_iter().filter_map(others).sum();
        let weak = self.stats().weak;
        if strong != 0 || weak != 0 {
            return Err(Error::LeasesOutstanding { resource: "library", strong, weak });
        }
        Ok(())
    }

    /// Shuts the manager and its pipelines down. A second call is `Ok`.
    ///
    /// # Errors
    /// `LeasesOutstanding` while another holder has a lease. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.outstanding_beyond(0)?;
        self.pipelines.shutdown()?;
        self.libraries.shutdown()
    }
}

impl Deref for LibraryManager {
    type Target = PoolOf<Libraries, LibrarySource>;

    fn deref(&self) -> &Self::Target {
        &self.libraries
    }
}
