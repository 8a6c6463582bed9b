//! Pipelines: kernels that are ready to launch. On this device a pipeline is a function's address.
//!
//! This module must not know which kernels exist.

use leasehold_core::{Error, Lease, Result};
use leasehold_engine::pipelines::{PipelineLoader, PipelinePool};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};

/// The most threads of a block in a kernel's declaration. A tile runs on one thread.
const BLOCK_THREADS: u32 = 1024;

struct Functions;

impl PipelineLoader for Functions {
    /// The function's address.
    type Source = usize;
    type Means<'a> = ();
    type Kept = ();

    fn load(
        &self,
        desc: &KernelDesc<'_>,
        function: &usize,
        (): &(),
    ) -> Result<(Pipeline, Self::Kept)> {
        Ok((Pipeline::new(desc, *function as u64, BLOCK_THREADS), ()))
    }
}

/// Owns the kernels of a device, one for each name, entry and function.
#[doc(alias = "ModuleManager")]
#[derive(Debug)]
pub struct PipelineManager {
    pipelines: PipelinePool<Functions>,
}

impl PipelineManager {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { pipelines: PipelinePool::new(Functions)? })
    }

    /// The kernel's pipeline, which lives as long as it has a holder.
    ///
    /// # Errors
    /// - `InvalidArgument` beyond the limits, and for a declaration that differs from the one of
    ///   the same key.
    /// - `Unsupported` for a source that is not a Rust function.
    pub fn get_or_create(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        desc.validate()?;
        let KernelSource::Cpu(function) = desc.source else {
            return Err(Error::Unsupported(
                format!(
                    "kernel {}: the CPU runs Rust functions, not {}",
                    desc.name,
                    desc.source.kind()
                )
                .into(),
            ));
        };
        self.pipelines.get_or_create(desc, &(function as usize), &())
    }

    leasehold_engine::pipeline_methods!(pipelines);
}
