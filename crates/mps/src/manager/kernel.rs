//! Kernels: compute pipelines with the declaration of their launches. Each name, entry and source
//! has one kernel, which keeps its pipeline and library alive.
//!
//! This module must not know which kernels exist.

use super::compute_pipeline_state::ComputePipelineState;
use super::library::LibraryManager;
use super::opened::OpenedDevice;
use crate::driver::ops::{CompileOptions, PipelineDesc};
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result, Tagged,
    tags,
};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};

/// The version of the language that kernels are compiled as: the first with `bfloat`.
const LANGUAGE: (u8, u8) = (3, 1);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    name: Box<str>,
    entry: Box<str>,
    source: Arc<str>,
}

/// A kernel and its compute pipeline.
#[derive(Debug)]
pub(crate) struct KernelState {
    pipeline: Pipeline,
    _state: Lease<ComputePipelineState>,
}

impl Tagged for KernelState {
    type Tag = tags::Pipeline;
}

#[derive(Debug)]
struct Kernels {
    device: Arc<OpenedDevice>,
}

/// A kernel's description, and the managers of its library and pipeline.
struct Wanted<'a> {
    desc: &'a KernelDesc<'a>,
    source: &'a str,
    libraries: &'a LibraryManager,
}

impl Resource for Kernels {
    type Payload = KernelState;
    type Request<'a> = Wanted<'a>;
    const NAME: &'static str = "pipeline";

    fn create(&self, _: Handle<tags::Pipeline>, wanted: &Wanted<'_>) -> Result<KernelState> {
        let Wanted { desc, source, libraries } = *wanted;
        let options =
            CompileOptions { fast_math: false, language: Some(LANGUAGE), macros: Vec::new() };
        let library = libraries.acquire(source, &options)?;
        let properties = &self.device.properties;
        let pipeline = PipelineDesc {
            label: desc.name.to_string(),
            indirect: properties.has_safe_indirect(),
            max_threads: 0,
        };
        let state = libraries.pipeline(&library, &desc.entry, &pipeline)?;
        let native = state.native().0;
        self.device.shared.name_function(native, &desc.name);
        let pipeline = Pipeline::new(desc, native, state.info().max_threads.max(1));
        Ok(KernelState { pipeline, _state: state })
    }

    fn recycle(&self, _: &mut KernelState) -> Recycle {
        Recycle::Destroy
    }

    fn destroy(&self, kernel: KernelState) {
        self.device.shared.forget_function(kernel.pipeline.native);
    }
}

/// Owns the kernels of a device.
#[doc(alias = "MpsKernelBase")]
#[derive(Debug)]
pub struct KernelManager {
    manager: PoolManager<Kernels, Key>,
}

impl KernelManager {
    pub(crate) fn new(device: &Arc<OpenedDevice>) -> Result<Self> {
        let manager = PoolManager::new();
        let config = PoolConfig { block: 64, ..PoolConfig::default() };
        manager.configure(Kernels { device: device.clone() }, config)?;
        Ok(Self { manager })
    }

    /// The kernel's pipeline. Blocks while the kernel is compiled.
    ///
    /// # Errors
    /// - `InvalidArgument` beyond the limits, and for a declaration that differs from the one of
    ///   the same key.
    /// - `Unsupported` for a source that is not in the Metal shading language.
    /// - `Compile`, `NotFound`, or a driver error.
    pub fn get_or_create(
        &self,
        libraries: &LibraryManager,
        desc: &KernelDesc<'_>,
    ) -> Result<Lease<Pipeline>> {
        desc.validate()?;
        let source: Arc<str> = match &desc.source {
            KernelSource::Msl(source) => source.as_ref().into(),
            other => {
                return Err(Error::Unsupported(
                    format!("kernel {}: Metal compiles MSL, not {}", desc.name, other.kind())
                        .into(),
                ));
            }
        };
        let key = Key {
            name: desc.name.as_ref().into(),
            entry: desc.entry.as_ref().into(),
            source: source.clone(),
        };
        let wanted = Wanted { desc, source: &source, libraries };
        let kernel = self.manager.get_or_create(&key, &wanted)?;
        let pipeline = &kernel.pipeline;
        if *pipeline.bindings != *desc.bindings || pipeline.params != desc.params {
            return Err(Error::invalid(format!(
                "kernel {}: it was made ready before with other bindings or parameters",
                desc.name
            )));
        }
        Ok(Lease::map(kernel, |k| &k.pipeline))
    }

    /// The number of kernels.
    pub fn live(&self) -> u64 {
        self.manager.stats().live
    }

    /// The number of kernels with a holder beside this manager (a snapshot).
    pub fn in_use(&self) -> u64 {
        self.manager.in_use()
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the manager down.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}
