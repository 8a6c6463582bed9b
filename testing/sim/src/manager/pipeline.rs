//! Pipelines: kernels of the machine by name, or Rust functions that run over all tiles.
//!
//! A pipeline's native word is its number in a table. Commands hold the kernels that they run.
//!
//! This module must not know which kernels exist.

use crate::machine::{Kernel, KernelBody, KernelSpec, Machine};
use leasehold_core::sync::{Arc, RwLock};
use leasehold_core::{Error, Result};
use leasehold_hal::engine::pipelines::{PipelineLoader, PipelinePool};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};
use std::collections::HashMap;

/// The code of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Source {
    /// The name of a kernel that was registered with the machine.
    Registered(Box<str>),
    /// The address of a Rust function.
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

/// The machine's kernels, as the pool of pipelines loads them.
pub struct Registered {
    machine: Machine,
    device: u32,
    kernels: Kernels,
}

impl Registered {
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
}

impl PipelineLoader for Registered {
    type Source = Source;
    type Means = ();
    type Kept = ();

    fn source(&self, desc: &KernelDesc<'_>, (): &()) -> Result<Source> {
        self.find(desc).map(|(source, _)| source)
    }

    fn load(&self, desc: &KernelDesc<'_>, _: &Source, (): &()) -> Result<(Pipeline, Self::Kept)> {
        let (_, kernel) = self.find(desc)?;
        self.machine.note(self.device, "pipeline_create")?;
        let native = self.kernels.add(kernel.clone());
        Ok((Pipeline::new(desc, native, kernel.spec.block_threads), ()))
    }

    fn forget(&self, pipeline: &Pipeline) {
        self.kernels.remove(pipeline.native);
    }
}

/// Owns the kernels of a device, one for each name, entry and source. A name that is not registered
/// is `NotFound`; a source that is neither a name nor a Rust function is `Unsupported`.
#[doc(alias = "ModuleManager")]
pub type PipelineManager = PipelinePool<Registered>;

/// A manager without kernels.
pub(crate) fn manager(machine: &Machine, device: u32, kernels: Kernels) -> Result<PipelineManager> {
    PipelinePool::new(Registered { machine: machine.clone(), device, kernels })
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
        let manager = manager(&machine, 0, kernels.clone()).unwrap();
        let source = KernelSource::Cpu(nothing);
        let desc = KernelDesc::new("k", source, &[], KernelCheck::any());
        let (first, second) = (
            manager.get_or_create(&desc, &()).unwrap(),
            manager.get_or_create(&desc, &()).unwrap(),
        );
        assert_eq!((first.native, kernels.0.read().kernels.len()), (second.native, 1));
        drop(first);
        assert!(kernels.of(&second).is_ok());
        drop(second);
        assert_eq!((manager.stats().live, kernels.0.read().kernels.len()), (0, 0));
    }
}
