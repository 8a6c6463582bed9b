//! Pipelines: kernels that are ready to launch. On this device a pipeline is a function's address.
//!
//! This module must not know which kernels exist.

use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result, tags,
};
use leasehold_hal::{KernelDesc, KernelSource, Pipeline};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    name: Box<str>,
    entry: Box<str>,
    function: usize,
}

struct Pipelines;

impl Resource for Pipelines {
    type Payload = Pipeline;
    type Request<'a> = (&'a KernelDesc<'a>, usize);
    const NAME: &'static str = "pipeline";

    fn create(
        &self,
        _: Handle<tags::Pipeline>,
        (desc, function): &(&KernelDesc<'_>, usize),
    ) -> Result<Pipeline> {
        Ok(Pipeline::new(desc, *function as u64, 1024))
    }

    fn recycle(&self, _: &mut Pipeline) -> Recycle {
        Recycle::Destroy
    }
}

/// Owns the kernels of a device, one for each name, entry and function.
#[doc(alias = "ModuleManager")]
#[derive(Debug)]
pub struct PipelineManager {
    manager: PoolManager<Pipelines, Key>,
}

impl PipelineManager {
    pub(crate) fn new() -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Pipelines, PoolConfig { block: 64, ..PoolConfig::default() })?;
        Ok(Self { manager })
    }

    /// The kernel's pipeline.
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
        let function = function as usize;
        let key =
            Key { name: desc.name.as_ref().into(), entry: desc.entry.as_ref().into(), function };
        let pipeline = self.manager.get_or_create(&key, &(desc, function))?;
        if *pipeline.bindings != *desc.bindings || pipeline.params != desc.params {
            return Err(Error::invalid(format!(
                "kernel {}: it was made ready before with other bindings or parameters",
                desc.name
            )));
        }
        Ok(pipeline)
    }

    /// The number of pipelines with a holder beside this manager (a snapshot).
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
