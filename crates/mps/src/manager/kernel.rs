//! Kernels: compute pipelines with the declaration of their launches. Each name, entry and source
//! has one kernel while it has a holder. The kernel keeps its pipeline and library alive. A command
//! buffer holds the kernels of its launches until it is over.
//!
//! This module must not know which kernels exist.

use super::compute_pipeline_state::ComputePipelineState;
use super::library::LibraryManager;
use super::opened::OpenedDevice;
use crate::driver::ops::{CompileOptions, PipelineDesc};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result};
use leasehold_engine::pipelines::{PipelineLoader, PipelinePool};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};

/// The version of the language that kernels are compiled as: the first with `bfloat`.
const LANGUAGE: (u8, u8) = (3, 1);

#[derive(Debug)]
struct Kernels {
    device: Arc<OpenedDevice>,
}

impl PipelineLoader for Kernels {
    type Source = Arc<str>;
    type Means<'a> = &'a LibraryManager;
    type Kept = Lease<ComputePipelineState>;

    fn load(
        &self,
        desc: &KernelDesc<'_>,
        source: &Arc<str>,
        libraries: &&LibraryManager,
    ) -> Result<(Pipeline, Self::Kept)> {
        let options =
            CompileOptions { fast_math: false, language: Some(LANGUAGE), macros: Vec::new() };
        let properties = &self.device.properties;
        let pipeline = PipelineDesc {
            label: desc.name.to_string(),
            indirect: properties.has_safe_indirect(),
            max_threads: 0,
        };
        let state = libraries.find_pipeline(source, &options, &desc.entry, &pipeline)?;
        let native = state.native().0;
        self.device.shared.name_function(native, &desc.name);
        Ok((Pipeline::new(desc, native, state.info().max_threads.max(1)), state))
    }

    fn forget(&self, pipeline: &Pipeline) {
        self.device.shared.forget_function(pipeline.native);
    }
}

/// Owns the kernels of a device.
#[doc(alias = "MpsKernelBase")]
#[derive(Debug)]
pub struct KernelManager {
    pipelines: PipelinePool<Kernels>,
}

impl KernelManager {
    pub(crate) fn new(device: &Arc<OpenedDevice>) -> Result<Self> {
        Ok(Self { pipelines: PipelinePool::new(Kernels { device: device.clone() })? })
    }

    /// The kernel's pipeline. Blocks while the kernel is compiled. The pipeline lives as long as it
    /// has a holder.
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
        self.pipelines.get_or_create(desc, &source, &libraries)
    }

    /// The number of kernels.
    pub fn live(&self) -> u64 {
        self.pipelines.stats().live
    }

    leasehold_engine::pipeline_methods!(pipelines);
}
