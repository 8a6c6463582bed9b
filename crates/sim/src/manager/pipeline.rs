//! Pipelines: kernels of the machine by name, or Rust functions that run over all tiles.
//!
//! A pipeline's native word is its place in a table, which keeps the kernels as long as the device.
//!
//! This module must not know which kernels exist.

use crate::machine::{Kernel, KernelBody, KernelSpec, Machine};
use leasehold_core::sync::{Arc, RwLock};
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result, tags,
};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};
use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Source {
    Registered(Box<str>),
    Function(usize),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    name: Box<str>,
    entry: Box<str>,
    source: Source,
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

struct Pipelines {
    machine: Machine,
    device: u32,
    kernels: Kernels,
}

impl Resource for Pipelines {
    type Payload = Pipeline;
    type Request<'a> = (&'a KernelDesc<'a>, Arc<Kernel>);
    const NAME: &'static str = "pipeline";

    fn create(
        &self,
        _: Handle<tags::Pipeline>,
        (desc, kernel): &(&KernelDesc<'_>, Arc<Kernel>),
    ) -> Result<Pipeline> {
        self.machine.note(self.device, "pipeline_create")?;
        Ok(Pipeline::new(desc, self.kernels.add(kernel.clone()), kernel.spec.block_threads))
    }

    fn recycle(&self, _: &mut Pipeline) -> Recycle {
        Recycle::Destroy
    }
}

/// Owns the kernels of a device, one for each name, entry and source.
#[doc(alias = "ModuleManager")]
pub struct PipelineManager {
    machine: Machine,
    manager: PoolManager<Pipelines, Key>,
}

impl PipelineManager {
    pub(crate) fn new(machine: &Machine, device: u32, kernels: Kernels) -> Result<Self> {
        let manager = PoolManager::new();
        let pipelines = Pipelines { machine: machine.clone(), device, kernels };
        manager.configure(pipelines, PoolConfig { block: 64, ..PoolConfig::default() })?;
        Ok(Self { machine: machine.clone(), manager })
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
        let key =
            Key { name: desc.name.as_ref().into(), entry: desc.entry.as_ref().into(), source };
        let pipeline = self.manager.get_or_create(&key, &(desc, kernel))?;
        if *pipeline.bindings != *desc.bindings || pipeline.params != desc.params {
            return Err(Error::invalid(format!(
                "kernel {}: it was made ready before with other bindings or parameters",
                desc.name
            )));
        }
        Ok(pipeline)
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

    /// The number of pipelines with a holder other than this manager (a snapshot).
    pub fn in_use(&self) -> u64 {
        self.manager.in_use()
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }
}

impl fmt::Debug for PipelineManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PipelineManager").field(&self.stats()).finish()
    }
}
