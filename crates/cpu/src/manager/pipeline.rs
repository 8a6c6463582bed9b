//! Pipelines: kernels that are ready to launch. On this device a pipeline is a function's address.
//!
//! This module must not know which kernels exist.

use leasehold_core::{Error, Result};
use leasehold_engine::pipelines::{PipelineLoader, PipelinePool};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};

/// The most threads of a block in a kernel's declaration. A tile runs on one thread.
const BLOCK_THREADS: u32 = 1024;

/// Kernels that are functions of this process.
#[derive(Debug)]
pub struct Functions;

impl PipelineLoader for Functions {
    /// The function's address.
    type Source = usize;
    type Means = ();
    type Kept = ();

    fn source(&self, desc: &KernelDesc<'_>, (): &()) -> Result<usize> {
        match desc.source {
            KernelSource::Cpu(function) => Ok(function as usize),
            ref other => Err(Error::Unsupported(
                format!("kernel {}: the CPU runs Rust functions, not {}", desc.name, other.kind())
                    .into(),
            )),
        }
    }

    fn load(
        &self,
        desc: &KernelDesc<'_>,
        function: &usize,
        (): &(),
    ) -> Result<(Pipeline, Self::Kept)> {
        Ok((Pipeline::new(desc, *function as u64, BLOCK_THREADS), ()))
    }
}

/// Owns the kernels of a device, one for each name, entry and function. A kernel whose source is
/// not a Rust function is `Unsupported`.
#[doc(alias = "ModuleManager")]
pub type PipelineManager = PipelinePool<Functions>;
