//! Pipelines: kernels of the machine by name, or Rust functions that run over all tiles.
//!
//! A pipeline's native word is its place in a table, which keeps the kernels as long as the device.
//!
//! This module must not know which kernels exist.

use crate::machine::{Kernel, KernelBody, KernelSpec, Machine};
use leasehold_core::sync::{Arc, RwLock};
use leasehold_core::{Error, Lease, Result};
use leasehold_engine::pipelines::{PipelineLoader, PipelinePool};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Source {
    Registered(Box<str>),
    Function(usize),
}

/// The kernels that pipelines name.
#[derive(Clone, Default)]
pub(crate) struct Kernels(Arc<RwLock<Vec<Arc<Kernel>>>>);

impl Kernels {
    fn add(&self, kernel: Arc<Kernel>) -> u64 {
        let mut all = self.0.write();
        let known = all.iter().position(|k| Arc::ptr_eq(k, &kernel));
        let at = known.unwrap_or(all.len());
        if known.is_none() {
            all.push(kernel);
        }
        at as u64 + 1
    }

    /// The kernel of a pipeline.
    pub(crate) fn of(&self, pipeline: &Pipeline) -> Result<Arc<Kernel>> {
        let at = (pipeline.native as usize).wrapping_sub(1);
        let found = self.0.read().get(at).cloned();
        found
            .ok_or_else(|| Error::invalid(format!("kernel {} is not this device's", pipeline.name)))
    }
}

struct Registered {
    machine: Machine,
    device: u32,
    kernels: Kernels,
}

impl PipelineLoader for Registered {
    type Source = Source;
    type Means<'a> = Arc<Kernel>;
    type Kept = ();

    fn load(
        &self,
        desc: &KernelDesc<'_>,
        _: &Source,
        kernel: &Arc<Kernel>,
    ) -> Result<(Pipeline, Self::Kept)> {
        self.machine.note(self.device, "pipeline_create")?;
        let native = self.kernels.add(kernel.clone());
        Ok((Pipeline::new(desc, native, kernel.spec.block_threads), ()))
    }
}

/// Owns the kernels of a device, one for each name, entry and source.
#[doc(alias = "ModuleManager")]
#[derive(Debug)]
pub struct PipelineManager {
    machine: Machine,
    pipelines: PipelinePool<Registered>,
}

impl PipelineManager {
    pub(crate) fn new(machine: &Machine, device: u32, kernels: Kernels) -> Result<Self> {
        let registered = Registered { machine: machine.clone(), device, kernels };
        Ok(Self { machine: machine.clone(), pipelines: PipelinePool::new(registered)? })
    }

    /// The kernel's pipeline.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the limits, and for a kernel whose declarations differ from the
    /// registered kernel or from the pipeline of the same key. `NotFound` for a name that is not
    /// registered; `Unsupported` for other sources.
    pub fn get_or_create(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        desc.validate()?;
        let (source, kernel) = self.find(desc)?;
        self.pipelines.get_or_create(desc, &source, &kernel)
    }

    fn find(&self, desc: &KernelDesc<'_>) -> Result<(Source, Arc<Kernel>)> {
        match &desc.source {
            KernelSource::Registered(name) => {
                let kernel = self.machine.kernels().get(name).ok_or_else(|| {
                    Error::NotFound(
                        format!("kernel {}: nobody registered {name:?}", desc.name).into(),
                    )
                })?;
                if *kernel.spec.bindings != *desc.bindings || kernel.spec.params != desc.params {
                    return Err(Error::invalid(format!(
                        "kernel {}: {name:?} is registered with bindings {:?} and {} bytes of parameters",
                        desc.name, kernel.spec.bindings, kernel.spec.params
                    )));
                }
                Ok((Source::Registered(name.as_ref().into()), kernel))
            }
            &KernelSource::Cpu(function) => {
                // SAFETY: the submitter of a launch of the pipeline vouches that the function
                // accepts it (`Stream::submit`).
                let body = unsafe { KernelBody::cpu(function) };
                let spec = KernelSpec::new(&desc.bindings, desc.params, body);
                let kernel = Arc::new(Kernel { name: desc.name.as_ref().into(), spec });
                Ok((Source::Function(function as usize), kernel))
            }
            other => Err(Error::Unsupported(
                format!(
                    "kernel {}: the simulated device runs registered functions, not {}",
                    desc.name,
                    other.kind()
                )
                .into(),
            )),
        }
    }

    leasehold_engine::pool_methods!(pipelines: "kernels");
}
