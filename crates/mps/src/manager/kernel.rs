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
use leasehold_hal::engine::pipelines::{PipelineLoader, PipelinePool};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};

/// The version of the language that kernels are compiled as: the first with `bfloat`.
const LANGUAGE: (u8, u8) = (3, 1);

/// The kernels of a device, as the pool of pipelines loads them.
#[derive(Debug)]
pub struct Kernels {
    device: Arc<OpenedDevice>,
}

impl PipelineLoader for Kernels {
    type Source = Arc<str>;
    type Means = LibraryManager;
    type Kept = Lease<ComputePipelineState>;

    fn source(&self, desc: &KernelDesc<'_>, _: &LibraryManager) -> Result<Arc<str>> {
        match &desc.source {
            KernelSource::Msl(source) => Ok(source.as_ref().into()),
            other => Err(Error::Unsupported(
                format!("kernel {}: Metal compiles MSL, not {}", desc.name, other.kind()).into(),
            )),
        }
    }

    fn load(
        &self,
        desc: &KernelDesc<'_>,
        source: &Arc<str>,
        libraries: &LibraryManager,
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

/// Owns the kernels of a device. A request comes with the device's libraries. A source that is not
/// in the Metal shading language is `Unsupported`.
pub type KernelManager = PipelinePool<Kernels>;

/// A manager without kernels.
pub(crate) fn manager(device: &Arc<OpenedDevice>) -> Result<KernelManager> {
    PipelinePool::new(Kernels { device: device.clone() })
}
