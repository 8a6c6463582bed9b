//! Functions: kernels as pipelines. Each name, entry and image has one function, which keeps its
//! module loaded.
//!
//! A function is loaded when it is made, so that no launch is delayed by loading. The function may
//! use all the shared memory that a block can have. Where the driver reports a function's
//! parameters, they are checked against the kernel's declaration.
//!
//! This module must not know which kernels exist.

use super::module::{Image, ModuleManager, ModuleState};
use crate::encoder::check_function;
use crate::engine::core::Streams;
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result, Tagged,
    tags,
};
use leasehold_hal::{KernelDesc, Pipeline};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    name: Box<str>,
    entry: Box<str>,
    image: Arc<Image>,
}

/// A function and its module.
#[derive(Debug)]
pub(crate) struct FunctionState {
    pipeline: Pipeline,
    _module: Lease<ModuleState>,
}

impl Tagged for FunctionState {
    type Tag = tags::Pipeline;
}

struct Functions {
    core: Arc<Streams>,
}

/// A kernel's description, and the means to load its module.
struct Wanted<'a> {
    desc: &'a KernelDesc<'a>,
    image: &'a Image,
    modules: &'a ModuleManager,
}

impl Resource for Functions {
    type Payload = FunctionState;
    type Request<'a> = Wanted<'a>;
    const NAME: &'static str = "pipeline";

    fn create(&self, _: Handle<tags::Pipeline>, wanted: &Wanted<'_>) -> Result<FunctionState> {
        let desc = wanted.desc;
        let module = wanted.modules.get_or_create(wanted.image, &desc.name)?;
        let context = &self.core.context;
        let (function, info) = context.within(|ops| {
            // SAFETY: the module is leased.
            let function = unsafe { ops.module_function(module.native, &desc.entry) }?;
            // SAFETY: the function is of a module that is leased.
            Ok((function, unsafe { ops.function_info(function) }?))
        })?;
        check_function(&desc.name, desc.bindings.len(), desc.params, &info)?;
        let device = self.core.properties();
        let dynamic = device.shared_optin.saturating_sub(info.shared);
        if dynamic > device.shared.saturating_sub(info.shared) {
            // SAFETY: the function is of a module that is leased.
            context.within(|ops| unsafe { ops.function_allow_shared(function, dynamic) })?;
        }
        self.core.shared.name_function(function.0, &desc.name);
        let pipeline =
            Pipeline::new(desc, function.0, info.block_threads.min(device.block_threads).max(1));
        Ok(FunctionState { pipeline, _module: module })
    }

    fn recycle(&self, _: &mut FunctionState) -> Recycle {
        Recycle::Destroy
    }

    fn destroy(&self, function: FunctionState) {
        self.core.shared.forget_function(function.pipeline.native);
    }
}

/// Owns the kernels of a context.
#[doc(alias = "CudaFunctionManager")]
#[derive(Debug)]
pub struct FunctionManager {
    manager: PoolManager<Functions, Key>,
    core: Arc<Streams>,
}

impl FunctionManager {
    pub(crate) fn new(core: &Arc<Streams>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(
            Functions { core: core.clone() },
            PoolConfig { block: 64, ..PoolConfig::default() },
        )?;
        Ok(Self { manager, core: core.clone() })
    }

    /// The kernel's pipeline. Blocks while the kernel is compiled.
    ///
    /// # Errors
    /// - `InvalidArgument` beyond the limits, or for modules of another context.
    /// - `InvalidArgument` for a declaration that differs from the one of the same key, or from the
    ///   function's parameters.
    /// - `Unsupported` for a source that is neither CUDA C++ nor PTX.
    /// - `Compile`, `NotFound`, or a driver error.
    pub fn get_or_create(
        &self,
        modules: &ModuleManager,
        desc: &KernelDesc<'_>,
    ) -> Result<Lease<Pipeline>> {
        desc.validate()?;
        if !modules.is_of(&self.core) {
            return Err(Error::invalid(format!(
                "kernel {}: the modules are another context's",
                desc.name
            )));
        }
        let image = Arc::new(Image::of(desc)?);
        let key = Key {
            name: desc.name.as_ref().into(),
            entry: desc.entry.as_ref().into(),
            image: image.clone(),
        };
        let function =
            self.manager.get_or_create(&key, &Wanted { desc, image: &image, modules })?;
        let pipeline = &function.pipeline;
        if *pipeline.bindings != *desc.bindings || pipeline.params != desc.params {
            return Err(Error::invalid(format!(
                "kernel {}: it was made ready before with other bindings or parameters",
                desc.name
            )));
        }
        Ok(Lease::map(function, |f| &f.pipeline))
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
