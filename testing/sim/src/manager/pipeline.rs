//! Pipelines: kernels of the machine by name, or Rust functions that run over all tiles.
//!
//! A pipeline's native word is its number in a table. Commands hold the kernels that they run.
//!
//! This module must not know which kernels exist.

use crate::machine::{Kernel, KernelBody, KernelSpec, Machine};
use leasehold_core::sync::{Arc, RwLock};
use leasehold_core::{Error, Lease, Result};
use leasehold_engine::pipelines::{PipelineLoader, PipelinePool};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};
use std::collections::HashMap;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Source {
    Registered(Box<str>),
    Function(usize),
}

/// The kernels that pipelines name.
#[derive(Default)]
struct Table {
    kernels: HashMap<u64, Arc<Kernel>>,
    /// The last number. Numbers do not come again.
    last: u64,
}

/// The table of the kernels that pipelines name.
#[derive(Clone, Default)]
pub(crate) struct Kernels(Arc<RwLock<Table>>);

impl Kernels {
    fn add(&self, kernel: Arc<Kernel>) -> u64 {
        let mut table = self.0.write();
        table.last += 1;
        let number = table.last;
        table.kernels.insert(number, kernel);
        number
    }

    fn remove(&self, number: u64) {
        let removed = self.0.write().kernels.remove(&number);
        drop(removed);
    }

    /// The kernel of a pipeline.
    pub(crate) fn of(&self, pipeline: &Pipeline) -> Result<Arc<Kernel>> {
        let found = self.0.read().kernels.get(&pipeline.native).cloned();
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

    fn forget(&self, pipeline: &Pipeline) {
        self.kernels.remove(pipeline.native);
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

    /// The kernel's pipeline, which lives as long as it has a holder.
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

    leasehold_engine::pipeline_methods!(pipelines);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::MachineConfig;
    use leasehold_hal::{CpuArgs, KernelCheck};

    unsafe fn nothing(_: &CpuArgs<'_>) {}

    #[test]
    fn a_kernel_leaves_the_table_with_its_last_holder() {
        let machine = Machine::new(MachineConfig::seed(1)).unwrap();
        let kernels = Kernels::default();
        let manager = PipelineManager::new(&machine, 0, kernels.clone()).unwrap();
        let source = KernelSource::Cpu(nothing);
        let desc = KernelDesc::new("k", source, &[], KernelCheck::any());
        let (first, second) =
            (manager.get_or_create(&desc).unwrap(), manager.get_or_create(&desc).unwrap());
        assert_eq!((first.native, kernels.0.read().kernels.len()), (second.native, 1));
        drop(first);
        assert!(kernels.of(&second).is_ok());
        drop(second);
        assert_eq!((manager.stats().live, kernels.0.read().kernels.len()), (0, 0));
    }
}
