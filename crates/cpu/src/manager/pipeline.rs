//! Pipelines: kernels that are ready to launch. On this device a pipeline is the address of a
//! function of Rust or C.
//!
//! This module must not know which kernels exist.

use crate::driver::work::C_FUNCTION;
use leasehold_core::{Error, Result};
use leasehold_hal::engine::pipelines::{PipelineLoader, PipelinePool};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};

/// The most threads of a block in a kernel's declaration. A tile runs on one thread.
const BLOCK_THREADS: u32 = 1024;

/// Kernels that are functions of this process.
#[derive(Debug)]
pub struct Functions;

impl PipelineLoader for Functions {
    /// The function's address, marked if it is one of C.
    type Source = usize;
    type Means = ();
    type Kept = ();

    fn source(&self, desc: &KernelDesc<'_>, (): &()) -> Result<usize> {
        let (function, mark) = match desc.source {
            KernelSource::Cpu(function) => (function as usize, 0),
            KernelSource::CpuC(function) => (function as usize, C_FUNCTION),
            ref other => {
                let (name, kind) = (&desc.name, other.kind());
                return Err(Error::Unsupported(
                    format!("kernel {name}: the CPU runs Rust and C functions, not {kind}").into(),
                ));
            }
        };
        if function & C_FUNCTION != 0 {
            return Err(Error::Unsupported(
                format!("kernel {}: its function lies at {function:#x}", desc.name).into(),
            ));
        }
        Ok(function | mark)
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
/// not a function is `Unsupported`.
#[doc(alias = "ModuleManager")]
pub type PipelineManager = PipelinePool<Functions>;
