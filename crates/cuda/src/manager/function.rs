//! Functions: kernels as pipelines. Each name, entry and image has one function while it has a
//! holder. The function keeps its module loaded until its last launch is over.
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
use leasehold_core::{Error, Lease, Result, Timepoint};
use leasehold_hal::engine::pipelines::{PipelineLoader, PipelinePool};
use leasehold_hal::{KernelDesc, Pipeline};

/// The compute capability, times ten, from which on code can wait for the kernels in front of it.
const DEPENDENT_LAUNCH: u32 = 90;

/// The major compute capability from which on a device has tensor maps.
const TENSOR_MAPS: u32 = 9;

/// The functions of a context's modules, as the pool of pipelines loads them.
pub struct Functions {
    core: Arc<Streams>,
}

impl PipelineLoader for Functions {
    type Source = Arc<Image>;
    type Means = ModuleManager;
    type Kept = Lease<ModuleState>;

    fn source(&self, desc: &KernelDesc<'_>, modules: &ModuleManager) -> Result<Arc<Image>> {
        if !modules.is_of(&self.core) {
            return Err(Error::invalid(format!(
                "kernel {}: the modules are another context's",
                desc.name
            )));
        }
        Image::of(desc, self.core.properties().compute_capability).map(Arc::new)
    }

    fn load(
        &self,
        desc: &KernelDesc<'_>,
        image: &Arc<Image>,
        modules: &ModuleManager,
    ) -> Result<(Pipeline, Self::Kept)> {
        let (major, minor) = self.core.properties().compute_capability;
        let device = self.core.properties();
        // The device lacks it, and the text says where it begins.
        let lacking = if !desc.maps.is_empty() && major < TENSOR_MAPS {
            Some("no tensor maps, which begin with compute capability 9.0")
        } else if desc.cluster != [1; 3] && !device.clusters {
            Some("no clusters of blocks, which begin with compute capability 9.0")
        } else if desc.cooperative && !device.cooperative_launch {
            Some("no cooperative launch")
        } else {
            None
        };
        if let Some(lacking) = lacking {
            let (name, id) = (&desc.name, self.core.context.id());
            return Err(Error::Unsupported(
                format!(
                    "kernel {name}: {id} (sm_{major}{minor}) has {lacking}; give it another kernel"
                )
                .into(),
            ));
        }
        let module = modules.get_or_create(image, &desc.name)?;
        let context = &self.core.context;
        let (function, info) = context.within(|ops| {
            // SAFETY: the module is leased.
            let function =
                unsafe { ops.module_function(module.native, &desc.entry, &desc.limits) }?;
            // SAFETY: the function is of a module that is leased.
            Ok((function, unsafe { ops.function_info(function) }?))
        })?;
        let params_at = check_function(desc, &info)?;
        let dynamic = device.shared_optin.saturating_sub(info.shared);
        if dynamic > device.shared.saturating_sub(info.shared) {
            // SAFETY: the function is of a module that is leased.
            context.within(|ops| unsafe { ops.function_allow_shared(function, dynamic) })?;
        }
        if desc.cluster.iter().product::<u32>() > KernelDesc::PORTABLE_CLUSTER {
            // SAFETY: the function is of a module that is leased.
            context.within(|ops| unsafe { ops.function_allow_clusters(function) })?;
        }
        self.core.shared.name_function(function.0, &desc.name);
        let threads = info.block_threads.min(device.block_threads).max(1);
        let mut pipeline = Pipeline::new(desc, function.0, threads);
        pipeline.params_at = params_at;
        pipeline.dependent_launch =
            desc.dependent_launch && !desc.cooperative && info.source >= DEPENDENT_LAUNCH;
        Ok((pipeline, module))
    }

    fn forget(&self, pipeline: &Pipeline) {
        self.core.shared.forget_function(pipeline.native);
    }

    /// A launch holds no lease, and the driver may block as it unloads a module.
    fn pending(&self) -> Option<Vec<Timepoint>> {
        Some(self.core.pending())
    }
}

/// Owns the kernels of a context. A request comes with the modules of this context; those of
/// another one are an `InvalidArgument`. A declaration that differs from the function's parameters
/// is an `InvalidArgument` too.
#[doc(alias = "CudaFunctionManager")]
pub type FunctionManager = PipelinePool<Functions>;

/// A manager without kernels.
pub(crate) fn manager(core: &Arc<Streams>) -> Result<FunctionManager> {
    PipelinePool::new(Functions { core: core.clone() })
}
